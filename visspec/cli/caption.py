"""`visspec caption`: captions of image files as they are finished, and a record of how each was made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from visspec.cli.arguments import (
    JsonOption,
    ModelOptions,
    Positive,
    RayOptions,
    SamplingOptions,
    exit_code,
    load,
    number,
    sampling,
)
from visspec.io import included
from visspec.io.files import Results
from visspec.io.options import option

if TYPE_CHECKING:
    from visspec.api.accelerate import Accelerated
    from visspec.api.captions import Caption
    from visspec.types import ConfiguredModel, Processor

TopK = Annotated[int, number(int, lambda value: value >= 0, "0 (off) or more")]
TopP = Annotated[float, number(float, lambda value: 0 < value <= 1, "a number in (0, 1]")]
LOOKS = 4  # files looked at, at most, to see whether the included model was made for such images


@dataclass(kw_only=True)
class Options(RayOptions, JsonOption, SamplingOptions, ModelOptions):
    batch_size: Positive = option("images captioned together", 1)
    prompt: str | None = option("what to ask of each image", None)
    image: list[Path] = option(
        "image (PNG, JPEG, WEBP, BMP, GIF, TIFF, AVIF) or video files; with --out also folders, globs, .jsonl and"
        " .parquet of {image, prompt, id}, .tar shards (webdataset), hf:NAME[:SPLIT] (datasets)",
        positional=True,
    )
    out: Path | None = option(
        "records as .jsonl or .parquet; a run goes on where the last one ended", None, writes="file"
    )
    slots: Positive = option("captions written at once, with --out", 8)
    workers: Positive = option("threads that read images ahead, with --out; with --ray processes", 2)
    report: Path | None = option("a page of the records with thumbnails, with --out", None, writes="file")
    max_pixels: Positive = option("larger images are refused", 64_000_000)
    frames: Positive = option("frames read of a video", 8)
    schema: Path | None = option(
        "a JSON schema: each caption is an object of it (pip install 'visspec[grammar]')", None
    )
    top_k: TopK | None = option("sample among the most likely tokens (default: all)", None)
    top_p: TopP | None = option("sample among the tokens of this probability together (default: 1)", None)
    stats: bool = option("print rounds, tau and times of the last batch", False)


def run(arguments: Options) -> int:
    """Finished captions are kept whatever ends it. Returns the exit code."""
    options = decode_options(arguments)
    from visspec.api import sources

    if arguments.out is not None or arguments.ray or not all(map(sources.is_plain, arguments.image)):
        from visspec.cli.caption_records import run_records

        return run_records(arguments, options)
    for name in ("report", "retry_failed"):
        if getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')}: got it without --out, expected both")

    from tqdm import tqdm

    from visspec.api.captions import PROMPT, caption_files

    fast, processor = load(arguments, needs_pictures=True)
    constraint, check = by_schema(arguments, fast.model, processor)
    request = arguments.prompt or PROMPT
    about = run_settings(arguments, fast, request, options) | {"batch_size": arguments.batch_size}
    warn_of_foreign(arguments)
    reading = {name: getattr(arguments, name) for name in ("batch_size", "max_pixels", "frames")}
    stream = caption_files(fast, processor, arguments.image, request=request, **reading, **options, **constraint)
    several, failed, newest = len(arguments.image) > 1, 0, None
    hidden = not several or not sys.stderr.isatty()
    with Results(arguments.json, about) as results:
        for found, stats in tqdm(stream, total=len(arguments.image), disable=hidden, leave=False):
            newest, found = stats or newest, check(found)
            row = {"path": found.path, "caption": found.text, "tokens": found.tokens, "ended": found.ended}
            results.add(row | {"error": found.error})
            if found.error:
                failed += 1
                print(f"visspec: {found.error}", file=sys.stderr)
            else:
                print(f"{found.path}: {found.text}" if several else found.text, flush=True)
    if arguments.stats and newest is not None:
        print(newest)
    return exit_code(len(results.found), failed)


def run_settings(arguments: Options, fast: Accelerated, request: str, options: dict[str, Any]) -> dict[str, Any]:
    """How captions are made, for their records."""
    from visspec.io.provenance import provenance

    about = settings(arguments, request, options) | {"drafter": fast.name, "guarantee": fast.rule.traits.guarantee}
    return about | {"provenance": provenance(fast.model)}


def settings(arguments: Options, request: str, options: dict[str, Any]) -> dict[str, Any]:
    """What captions are made with, as asked for."""
    about: dict[str, Any] = {
        "model": arguments.model or included.text_model(),
        "prompt": request,
        "drafter": arguments.drafter,
    }
    if arguments.schema is not None:
        about["schema"] = read_schema(arguments.schema)
    if arguments.batch_invariant:
        about["batch_invariant"] = True
    return about | {"acceptance": arguments.acceptance, "sampling": options, "frames": arguments.frames}


def by_schema(
    arguments: Options, model: ConfiguredModel, processor: Processor
) -> tuple[dict[str, Any], Callable[[Caption], Caption]]:
    """generate's arguments for --schema, and what checks a caption by it."""
    if arguments.schema is None:
        return {}, lambda found: found
    from visspec.api.schemas import JsonGrammars

    schema = read_schema(arguments.schema)
    grammars = JsonGrammars(processor.tokenizer, model, "--schema")
    return grammars.options(schema), partial(grammars.check, schema=schema)


def read_schema(path: Path) -> Any:
    """The schema of a file. Raises ValueError for one that can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--schema: got {path}, expected a file with a JSON schema ({error})") from None


def decode_options(arguments: Options) -> dict[str, Any]:
    """generate's keyword arguments. Raises ValueError for sampling options that contradict greedy decoding."""
    sampled = arguments.temperature > 0
    for name, value in {"top-k": arguments.top_k, "top-p": arguments.top_p}.items():
        if value is not None and not sampled:
            raise ValueError(f"--{name}: got {value} at temperature 0, expected a temperature above 0")
    cuts = arguments.top_k or 0, arguments.top_p or 1.0
    found = sampling(arguments.max_new_tokens, arguments.temperature, *cuts)
    return found | ({"seed": arguments.seed} if sampled else {})


def warn_of_foreign(arguments: Options) -> None:
    """Say so if the included model is asked about images that it was not made for, by the first of the sources that are
    files and folders.
    """
    from visspec.api import sources

    local = [source for source in arguments.image if source.is_dir() or sources.is_plain(source)]
    files = (record.image for record in islice(sources.records(local), LOOKS) if record.error is None)
    check = included.table().foreign if arguments.model is None else ""
    if check and (why := included.load(check)(files, arguments.max_pixels)) is not None:
        print(f"visspec: {why}", file=sys.stderr)
