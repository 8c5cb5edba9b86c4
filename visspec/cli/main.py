"""The command line: demo, caption, generate, bench, eval, report, train, list, doctor.

Exit code 2 for bad input or a target that can't be written, 1 when some files failed, 130 when interrupted, 141 when
the reader of the output has gone (`| head`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visspec import __version__
from visspec.cli.arguments import positive, temperature
from visspec.files import unwritable, write_json


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of files need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    arguments = parser().parse_args(argv)
    try:
        check_targets(arguments)
        code = arguments.run(arguments) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or python says so once more when it ends
        return 141
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None)  # of what the system refused
        where = getattr(error, "filename", None)
        print(f"visspec: {f'{where}: {reason}' if reason and where else reason or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("visspec: interrupted; what was written stays", file=sys.stderr)
        return 130


def check_targets(arguments) -> None:
    """Refuse, before any work, files and folders that can't be written."""
    for name in ("json", "grid", "out", "images"):
        path, folder = getattr(arguments, name, None), name in ("out", "images") and arguments.command != "report"
        if isinstance(path, Path) and (why := unwritable(path, folder)) is not None:
            raise ValueError(f"--{name}: {why}")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is behind --help."""

    def error(self, message: str):
        self.exit(2, f"visspec: {message.removeprefix('argument ')}\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="visspec", description="Several tokens per pass of the big model.")
    top.add_argument("--version", action="version", version=f"visspec {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    _demo(commands.add_parser("demo", help="caption rendered scenes with and without acceleration, side by side"))
    _caption(commands.add_parser("caption", help="caption image files"))
    _generate(commands.add_parser("generate", help="draw images from a prompt"))
    bench = commands.add_parser("bench", help="measure").add_subparsers(dest="what", required=True, metavar="what")
    _bench_caption(bench.add_parser("caption", help="captioning against transformers' generate and assisted modes"))
    _bench_image(bench.add_parser("image", help="methods of image generation against stock generate"))
    _bench_memory(bench.add_parser("memory", help="peak memory, plain and accelerated, each in its own process"))
    _bench_kernels(bench.add_parser("kernels", help="time and bandwidth of each kernel"))
    train = commands.add_parser("train", help="train").add_subparsers(dest="what", required=True, metavar="what")
    _train_drafter(train.add_parser("drafter", help="distil a feature drafter for a target, in process"))
    _eval(commands.add_parser("eval", help="judge images and texts: FID, GenEval, CLIPScore, captions, ..."))
    _report(commands.add_parser("report", help="one HTML page from the JSON of benches"))
    _add(commands.add_parser("list", help="names of drafters, rules, checkpoints"), run_list)
    _add(commands.add_parser("doctor", help="versions, device, what will run and what will not"), run_doctor)
    return top


def _add(sub: argparse.ArgumentParser, run: Callable) -> argparse.ArgumentParser:
    sub.set_defaults(run=run)
    return sub


def _hardware_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", default="cpu")
    sub.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    sub.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model (off)")


def _model_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", help="folder or hub id of a vision-language model (default: the embedded captioner)")
    sub.add_argument(
        "--drafter", help="name with options, or folder (default: vispec for the embedded model, else ngram)"
    )
    sub.add_argument("--acceptance", default="exact", help="rule and options, e.g. typical:epsilon=0.1")
    _hardware_options(sub)


def _decode_options(sub: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    sub.add_argument("--batch-size", type=positive, default=1)
    sub.add_argument("--max-new-tokens", type=positive, default=max_new_tokens)
    sub.add_argument("--temperature", type=temperature, default=0.0, help="0 is greedy")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--prompt", default=None, help="what to ask of each image")
    sub.add_argument("--json", type=Path, help="write the results to this file")


def _demo(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_demo)
    sub.add_argument("--images", type=positive, default=4, help="how many scenes")
    sub.add_argument("--out", type=Path, default=Path("out/demo"), help="where the pictures and the page go")


def _caption(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_caption)
    sub.add_argument("image", nargs="+", type=Path, help="PNG, JPEG or WEBP files")
    sub.add_argument("--max-pixels", type=positive, default=64_000_000)
    sub.add_argument("--top-k", type=int)
    sub.add_argument("--top-p", type=float)
    sub.add_argument("--stats", action="store_true", help="print rounds, tau and times of the last batch")
    _model_options(sub)
    _decode_options(sub)


def _generate(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_generate)
    sub.add_argument("prompt", nargs="+", help="what to draw")
    sub.add_argument("-n", type=positive, default=1, help="images of each prompt")
    sub.add_argument("-o", "--out", type=Path, default=Path("out/images"), help="folder of the PNG files")
    sub.add_argument("--grid", type=Path, help="also write one picture of all images")
    sub.add_argument("--maps", action="store_true", help="beside each image, where its tokens came from")
    sub.add_argument("--model", default="painter", help="shipped name, folder or hub id of an image model")
    _image_options(sub)
    sub.add_argument("--top-k", type=int, help="default: the model's own")
    sub.add_argument("--top-p", type=float, help="default: the model's own")
    sub.add_argument("--height", type=int, help="pixels; default: the model's own")
    sub.add_argument("--width", type=int, help="pixels; default: the model's own")
    sub.add_argument("--preset", help="a published method by name, see visspec list")
    sub.add_argument("--drafter", help="name with options, or folder (default: jacobi)")
    sub.add_argument("--order", help="order of decoding, with options: zipar:window=4 (default: raster)")
    sub.add_argument("--acceptance", help="rule and options, e.g. lantern:k=100,delta=0.1 (default: exact)")
    sub.add_argument("--batch-size", type=positive, default=8)
    sub.add_argument("--stats", action="store_true", help="print passes, tau and times of each batch")
    sub.add_argument("--json", type=Path, help="write seeds, passes, guarantee, drift and displacement to this file")


def _image_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--guidance-scale", type=float, help="default: the model's own")
    sub.add_argument("--temperature", type=temperature, help="0 is greedy; default: the model's own")
    sub.add_argument("--seed", type=int, default=0)
    _hardware_options(sub)


def _bench_image(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_bench_image)
    sub.add_argument("--prompts", type=positive, default=24, help="prompts of the shape world's suite")
    sub.add_argument("--model", default="painter")
    sub.add_argument("--method", action="append", help="preset or name=drafter/rule; repeat; default: all")
    sub.add_argument("--quality", type=int, default=0, help="images a method for GenEval and FD (0: none)")
    sub.add_argument("--batch-size", type=positive, default=1, help="images at a time in the speed part")
    sub.add_argument("--images", type=Path, help="keep the images of the quality part in this folder; it resumes")
    sub.add_argument("--threads", type=positive, help="torch threads")
    sub.add_argument("--json", type=Path)
    _image_options(sub)


def _bench_caption(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_bench_caption)
    sub.add_argument("--images", type=positive, default=64, help="how many held-out scenes")
    sub.add_argument("--threads", type=positive, help="torch threads")
    _model_options(sub)
    _decode_options(sub)


def _bench_memory(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_bench_memory)
    sub.add_argument("--images", type=positive, default=8)
    sub.add_argument("--batch-size", type=positive, default=1)
    sub.add_argument("--drafter", default="vispec")
    sub.add_argument("--json", type=Path)


def _bench_kernels(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_bench_kernels)
    sub.add_argument("--device", default="cpu")
    sub.add_argument("--quick", action="store_true", help="small shapes only")
    sub.add_argument("--json", type=Path)


def _train_drafter(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_train_drafter)
    sub.add_argument("--target", required=True, help="folder or hub id of the target")
    sub.add_argument("--data", required=True, type=Path, help="folder of images, or JSONL of {image, prompt}")
    sub.add_argument("--out", required=True, type=Path)
    sub.add_argument("--steps", type=positive, default=2000)
    sub.add_argument("--loss", default="tv", choices=["tv", "soft_ce", "kl"])
    sub.add_argument("--image-latents", type=positive, default=1, help="vectors that stand for an image (1)")
    sub.add_argument("--max-new-tokens", type=positive, default=256, help="of the target's own answers (256)")
    sub.add_argument("--seed", type=int, default=0)
    _hardware_options(sub)
    sub.add_argument("--resume", action="store_true")


def _eval(sub: argparse.ArgumentParser) -> None:
    from visspec.cli import eval

    eval.options(sub)


def _report(sub: argparse.ArgumentParser) -> None:
    _add(sub, run_report)
    sub.add_argument("result", nargs="+", type=Path, help="JSON files written by visspec bench")
    sub.add_argument("-o", "--out", type=Path, default=Path("report.html"))


def load(arguments) -> tuple[Any, Any, str]:
    """(model, processor, drafter name) from the command line's options."""
    from visspec.api import loading as targets

    model, processor = targets.load(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )
    return model, processor, arguments.drafter or ("ngram" if arguments.model else "vispec")


def decode_options(arguments) -> dict[str, Any]:
    """generate's keyword arguments. Raises ValueError for sampling options that contradict greedy decoding."""
    sampled = arguments.temperature > 0
    for name in ("top_k", "top_p"):
        value = getattr(arguments, name)
        if value is not None and not sampled:
            raise ValueError(
                f"--{name.replace('_', '-')}: got {value} at temperature 0, expected a temperature above 0"
            )
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise ValueError(f"--top-p: got {arguments.top_p}, expected a number in (0, 1]")
    if arguments.top_k is not None and arguments.top_k < 0:
        raise ValueError(f"--top-k: got {arguments.top_k}, expected 0 (off) or more")
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": sampled}
    if sampled:
        options |= {
            "temperature": arguments.temperature,
            "top_k": arguments.top_k or 0,
            "top_p": arguments.top_p or 1.0,
        }
        options["seed"] = arguments.seed
    return options


def run_caption(arguments) -> int:
    from visspec.cli.caption import run

    return run(arguments, decode_options(arguments), load)


def run_generate(arguments) -> int:
    from visspec.cli.generate import run

    return run(arguments)


def run_bench_image(arguments) -> int:
    import torch
    from rich.console import Console

    from visspec.cli import bench_image

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    record = bench_image.run(arguments)
    console = Console()
    console.print(*bench_image.tables(record, console.width))
    write_json(arguments.json, record)
    return 0


def run_demo(arguments) -> int:
    from visspec.cli.demo import run

    return run(arguments.images, arguments.out)


def run_bench_caption(arguments) -> int:
    import torch
    from rich.console import Console

    from visspec.api import loading as targets
    from visspec.api import zoo
    from visspec.api.captions import PROMPT
    from visspec.cli import bench_caption as bench
    from visspec.eval.world.render import to_image
    from visspec.eval.world.scene import HELD_OUT_SEED, scene_from_seed

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, processor, drafter = load(arguments)
    small = zoo.CHECKPOINTS / "captioner-small"
    assistant = targets.load(str(small))[0] if not arguments.model and small.is_dir() else None
    images = [to_image(scene_from_seed(HELD_OUT_SEED + i)) for i in range(arguments.images)]
    record = bench.bench_caption(
        model, processor, images, drafter=drafter, assistant=assistant, acceptance=arguments.acceptance,
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, seed=arguments.seed,
        request=arguments.prompt or PROMPT,
    )  # fmt: skip
    Console().print(bench.table(record))
    write_json(arguments.json, record)
    return 0


def run_bench_memory(arguments) -> int:
    from visspec.cli.bench_memory import bench_memory

    record = bench_memory(arguments.images, arguments.drafter, batch_size=arguments.batch_size)
    for name, row in record["arms"].items():
        print(f"{name}: peak {row['peak_mb']:.1f} MB, of which decoding {row['working_mb']:.1f} MB")
    print(f"peak over transformers' generate: {record['peak_over_plain']:.3f}")
    write_json(arguments.json, record)
    return 0


def run_bench_kernels(arguments) -> int:
    from visspec.eval.speed.kernels import run

    run(arguments.device, arguments.json, arguments.quick)
    return 0


def run_train_drafter(arguments) -> int:
    from visspec.recipes.train_drafter import run

    run(
        arguments.target, arguments.data, arguments.out, steps=arguments.steps, loss=arguments.loss,
        seed=arguments.seed, resume=arguments.resume, max_new_tokens=arguments.max_new_tokens,
        image_latents=arguments.image_latents, device=arguments.device, dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )  # fmt: skip
    return 0


def run_report(arguments) -> int:
    from visspec.eval.report.page import build

    print(build(arguments.result, arguments.out))
    return 0


def run_list(arguments) -> int:
    from rich.console import Console
    from rich.table import Column, Table

    from visspec.api import zoo

    view = Table("kind", "name", Column("what it is", overflow="fold"))
    for kind, entries in (("drafter", zoo.DRAFTERS), ("acceptance", zoo.ACCEPTANCE), ("order", zoo.ORDERS)):
        for name, (_, what) in entries.items():
            view.add_row(kind, name, what)
    for name, (kind, *_, what) in zoo.SHIPPED.items():
        view.add_row("drafter", name, f"{what} {kind}, shipped with the package")
    for name, preset in zoo.PRESETS.items():
        view.add_row("preset", name, f"{preset.source} ({preset})")
    for folder in sorted(p for p in zoo.CHECKPOINTS.iterdir() if (p / "config.json").is_file()):
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e6
        view.add_row("checkpoint", folder.name, f"{size:.1f} MB, shipped with the package")
    Console().print(view)
    return 0


def run_doctor(arguments) -> int:
    from visspec.cli.doctor import report

    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
