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

from visspec.cli.arguments import ModelOptions, RayOptions, SamplingOptions, sampling
from visspec.io import included
from visspec.io.options import Count, Positive, number, option

if TYPE_CHECKING:
    from visspec.api.captions import Caption
    from visspec.types import ConfiguredModel, Processor

TopK = Annotated[int, number(int, lambda value: value >= 0, "0 (off) or more")]
TopP = Annotated[float, number(float, lambda value: 0 < value <= 1, "a number in (0, 1]")]
LOOKS = 4  # files looked at, at most, to see whether the included model was made for such images


@dataclass(kw_only=True)
class Options(RayOptions, SamplingOptions, ModelOptions):
    prompt: str | None = option("what to ask of each image (default: Describe this image in detail.)", None)
    max_new_tokens: Positive | None = option("default: 256; of an included model 128", None)  # type: ignore[assignment]
    image: list[Path] = option(
        "image (PNG, JPEG, WEBP, BMP, GIF, TIFF, AVIF) or video files; with --out also folders, globs, .jsonl and"
        " .parquet of {image, prompt, id}, .tar shards (webdataset), hf:NAME[:SPLIT] (datasets)",
        positional=True,
    )
    out: Path | None = option(
        "records as .jsonl or .parquet; a run goes on where the last one ended", None, writes="file"
    )
    slots: Positive = option("captions written at once", 8)
    workers: Positive = option("threads that read images ahead; with --ray processes", 2)
    report: Path | None = option("a page of the records with thumbnails, with --out", None, writes="file")
    compare: Count = option("also time transformers' generate on so many of the images, and say how much faster", 0)
    max_pixels: Positive = option("larger images are refused", 64_000_000)
    frames: Positive = option("frames read of a video", 8)
    schema: Path | None = option(
        "a JSON schema: each caption is an object of it (pip install 'visspec[grammar]')", None
    )
    top_k: TopK | None = option("sample among the most likely tokens (default: all)", None)
    top_p: TopP | None = option("sample among the tokens of this probability together (default: 1)", None)
    stats: bool = option("print the speed, also without --out", False)


def run(arguments: Options) -> int:
    """Finished captions are kept whatever ends it. Returns the exit code."""
    options = decode_options(arguments)
    from visspec.cli.caption_records import run_records

    return run_records(arguments, options)


def model_of(arguments: Options) -> str:
    """The model by name or folder. Raises ValueError where none is named or included."""
    return arguments.model or included.text_model()


def settings(arguments: Options, request: str, options: dict[str, Any]) -> dict[str, Any]:
    """How captions are made, as asked for: the same whatever processes make them, so that any of them can go on."""
    from visspec import registry

    rule = arguments.acceptance
    about: dict[str, Any] = {
        "model": model_of(arguments),
        "prompt": request,
        "drafter": arguments.drafter,
        "acceptance": rule,
        "sampling": options,
        "frames": arguments.frames,
    }
    if arguments.schema is not None:
        about["schema"] = read_schema(arguments.schema)
    if arguments.batch_invariant:
        about["batch_invariant"] = True
    if arguments.preset is not None:
        about["preset"] = arguments.preset
        rule = registry.preset(arguments.preset, "text").acceptance if rule == "exact" else rule
    return about | {"guarantee": registry.rule(rule).traits.guarantee}


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
    usual = 128 if included.is_included(model_of(arguments)) else 256
    found = sampling(arguments.max_new_tokens or usual, arguments.temperature, *cuts)
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
