"""Arguments that several commands take, their types, the model they name, and what a run of records ends with. Imports
nothing heavy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """An argparse type. Raises ArgumentTypeError, which names the argument and exits with 2."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least 1")
    return value


def temperature(text: str) -> float:
    """An argparse type, as `positive`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 (greedy) or more")
    return value


def probability(text: str) -> float:
    """An argparse type, as `positive`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a probability")
    return value


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Where and in which dtype a model runs."""
    parser.add_argument(
        "--device", default="cpu", help="of torch; auto: layers over all devices; tp: over the processes of torchrun"
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model (off)")


def add_captioning(parser: argparse.ArgumentParser) -> None:
    """The model that captions, its drafter and rule, and how it decodes."""
    parser.add_argument("--model", help="folder or hub id of a vision-language model (default: an included one)")
    parser.add_argument("--drafter", help="name with options, or folder (default: the model's own, else ngram)")
    parser.add_argument("--acceptance", default="exact", help="rule and options, e.g. typical:epsilon=0.1")
    add_hardware(parser)
    parser.add_argument("--batch-size", type=positive, default=1)
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default=None, help="what to ask of each image")
    parser.add_argument("--json", type=Path, help="write the results to this file")


def add_drawing(parser: argparse.ArgumentParser) -> None:
    """How images are drawn."""
    parser.add_argument("--guidance-scale", type=float, help="default: the model's own")
    parser.add_argument("--temperature", type=temperature, help="0 is greedy; default: the model's own")
    parser.add_argument("--seed", type=int, default=0)
    add_hardware(parser)


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Work in several processes, with Ray Data."""
    parser.add_argument(
        "--ray", action="store_true",
        help="--workers processes, each with its own model, write parquet shards into the folder --out, on the machines"
        " of RAY_ADDRESS or on this one (pip install 'visspec[ray]')",
    )  # fmt: skip
    parser.add_argument("--threads", type=positive, default=1, help="of each process, with --ray")
    parser.add_argument("--shard", type=positive, default=64, help="records of a shard, with --ray")
    parser.add_argument(
        "--retry-failed", action="store_true", help="take the records that failed out of --out, to make them again"
    )


def exit_code(count: int, failed: int, twice: int = 0) -> int:
    """0 if all of so many records are good, 2 if all failed, else 1; also 1 for ids that came twice, as only the first
    record of each is made.
    """
    return 2 if count and failed == count else 1 if failed or twice else 0


def earlier(there: int, failed: int, twice: int) -> str:
    """What a run's last line says of records that were there, how many of these failed, and of ids that came twice."""
    found = f", {there} were there" if there else ""
    found += f" ({failed} of these failed, --retry-failed makes them again)" if failed else ""
    return found + (f", {twice} ids came twice" if twice else "")


def load(arguments: argparse.Namespace) -> tuple[Any, Any, str]:
    """(model, processor, drafter name) of the vision-language model that `arguments` name."""
    from visspec.api import loading
    from visspec.api.accelerate import default_drafter

    hardware = {name: getattr(arguments, name) for name in ("device", "dtype", "trust_remote_code")}
    model, processor = loading.load(arguments.model, **hardware)
    return model, processor, arguments.drafter or default_drafter(model)
