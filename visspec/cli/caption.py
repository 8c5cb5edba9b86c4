"""`visspec caption`: captions of image files as they are finished, and a record of how each was made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from visspec.cli.arguments import add_captioning, add_ray, load, positive
from visspec.io import included
from visspec.io.files import Results

LOOKS = 4  # files looked at, at most, to see whether the included model was made for such images


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "image", nargs="+", type=Path,
        help="PNG, JPEG or WEBP files; with --out also folders, globs, .jsonl and .parquet of {image, prompt, id},"
        " .tar shards (webdataset), hf:NAME[:SPLIT] (datasets)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="records as .jsonl or .parquet; a run goes on where the last one ended"
    )
    parser.add_argument("--slots", type=positive, default=8, help="captions written at once, with --out")
    parser.add_argument(
        "--workers", type=positive, default=2, help="threads that read images ahead, with --out; with --ray processes"
    )
    add_ray(parser)
    parser.add_argument("--report", type=Path, help="a page of the records with thumbnails, with --out")
    parser.add_argument("--max-pixels", type=positive, default=64_000_000)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--stats", action="store_true", help="print rounds, tau and times of the last batch")
    add_captioning(parser)


def run(arguments: argparse.Namespace) -> int:
    """Finished captions are kept whatever ends it. Returns the exit code."""
    options = decode_options(arguments)
    if arguments.ray:
        from visspec.cli.caption_ray import run_ray

        return run_ray(arguments, options)
    if arguments.out is not None or not all(map(is_plain, arguments.image)):
        from visspec.cli.caption_records import run_records

        return run_records(arguments, options)
    for name in ("report", "retry_failed"):
        if getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')}: got it without --out, expected both")

    from tqdm import tqdm

    from visspec.api.accelerate import accelerate
    from visspec.api.captions import PROMPT, caption_files

    model, processor, drafter = load(arguments)
    fast = accelerate(model, drafter, acceptance=arguments.acceptance, tokenizer=processor.tokenizer)
    request = arguments.prompt or PROMPT
    about = described(arguments, fast, request, options) | {"batch_size": arguments.batch_size}
    warn_of_foreign(arguments, arguments.image[:LOOKS])
    stream = caption_files(
        fast, processor, arguments.image, request=request, batch_size=arguments.batch_size,
        max_pixels=arguments.max_pixels, **options,
    )  # fmt: skip
    several, failed, newest = len(arguments.image) > 1, 0, None
    hidden = not several or not sys.stderr.isatty()
    with Results(arguments.json, about) as results:
        for found, stats in tqdm(stream, total=len(arguments.image), disable=hidden, leave=False):
            newest = stats or newest
            results.add(
                {"path": found.path, "caption": found.text, "tokens": found.tokens, "ended": found.ended,
                 "error": found.error}
            )  # fmt: skip
            if found.error:
                failed += 1
                print(f"visspec: {found.error}", file=sys.stderr)
            else:
                print(f"{found.path}: {found.text}" if several else found.text, flush=True)
    if arguments.stats and newest is not None:
        print(newest)
    return 0 if not failed else 1 if failed < len(results.found) else 2


def described(arguments: argparse.Namespace, fast: Any, request: str, options: dict[str, Any]) -> dict[str, Any]:
    """How captions are made, for their records."""
    from visspec.io.provenance import provenance

    return {
        "model": arguments.model or included.text_model(), "prompt": request, "drafter": fast.name,
        "acceptance": arguments.acceptance, "guarantee": fast.rule.traits.guarantee, "sampling": options,
        "provenance": provenance(fast.model),
    }  # fmt: skip


def is_plain(source: Path) -> bool:
    """Whether a source is one file that is taken for an image."""
    from visspec.api import sources

    return sources.is_plain(source)


def decode_options(arguments: argparse.Namespace) -> dict[str, Any]:
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
        cuts = {"top_k": arguments.top_k or 0, "top_p": arguments.top_p or 1.0}
        options |= {"temperature": arguments.temperature, **cuts, "seed": arguments.seed}
    return options


def warn_of_foreign(arguments: argparse.Namespace, files: Iterable[Path]) -> None:
    """Say so if the included model is asked about images that it was not made for."""
    check = included.table().foreign if arguments.model is None else ""
    if check and (why := included.load(check)(files, arguments.max_pixels)) is not None:
        print(f"visspec: {why}", file=sys.stderr)
