"""`visspec bench memory`: peak memory of plain and accelerated captioning, each in a process of its own."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from pathlib import Path
from typing import Any

from visspec.cli.arguments import positive
from visspec.io.files import write_json

ARMS = ("transformers_generate", "plain", "ours")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=positive, default=8)
    parser.add_argument("--batch-size", type=positive, default=1)
    parser.add_argument("--drafter", default="vispec")
    parser.add_argument("--json", type=Path)


def run(arguments: argparse.Namespace) -> None:
    record = bench_memory(arguments.images, arguments.drafter, batch_size=arguments.batch_size)
    for name, row in record["arms"].items():
        print(f"{name}: peak {row['peak_mb']:.1f} MB, of which decoding {row['working_mb']:.1f} MB")
    print(f"peak over transformers' generate: {record['peak_over_plain']:.3f}")
    write_json(arguments.json, record)


def bench_memory(images: int = 4, drafter: str = "vispec", max_new_tokens: int = 128, batch_size: int = 1) -> dict:
    """Peak resident memory of each arm on the same rendered scenes, in MB.

    `peak_over_plain` compares whole processes, drafter weights included; `working_over_plain` what decoding added to a
    process that had loaded model and drafter.
    """
    from visspec.io.provenance import provenance

    found = {arm: _in_a_process(arm, images, drafter, max_new_tokens, batch_size) for arm in ARMS}
    plain = found["transformers_generate"]
    return {
        "bench": "memory",
        "arms": found,
        "peak_over_plain": found["ours"]["peak_mb"] / plain["peak_mb"],
        "working_over_plain": found["ours"]["working_mb"] / max(plain["working_mb"], 1e-9),
        "provenance": provenance(images=images, max_new_tokens=max_new_tokens, batch_size=batch_size),
    }


def _in_a_process(*arguments: Any) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(send, *arguments))
    child.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        raise RuntimeError("the measuring process died; its message is above") from None
    finally:
        child.join()


def _measure(send, arm: str, images: int, drafter: str, max_new_tokens: int, batch_size: int) -> None:
    from visspec.api import loading
    from visspec.api.accelerate import accelerate
    from visspec.api.captions import PROMPT, prepare
    from visspec.toys.world.render import to_image
    from visspec.toys.world.scene import held_out_scenes

    model, processor = loading.load()
    generate = model.generate
    if arm != "transformers_generate":
        generate = accelerate(model, None if arm == "plain" else drafter).generate
    scenes = [to_image(scene) for scene in held_out_scenes(images)]
    before = _peak_mb()
    for start in range(0, images, batch_size):
        inputs = prepare(processor, scenes[start : start + batch_size], PROMPT, model)
        generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    send.send({"loaded_mb": before, "peak_mb": _peak_mb(), "working_mb": _peak_mb() - before})
    send.close()


def _peak_mb() -> float:
    """Peak resident memory of this process so far. Linux counts in kilobytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
