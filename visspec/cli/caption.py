"""`visspec caption`: writes captions of images as they are finished, with a record of how each was made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from visspec.cli.arguments import ModelOptions, RayOptions, SamplingOptions, sampling
from visspec.io import included
from visspec.io.options import Count, Positive, number, option

TopK = Annotated[int, number(int, lambda value: value >= 0, "0 (off) or more")]
TopP = Annotated[float, number(float, lambda value: 0 < value <= 1, "a number in (0, 1]")]


@dataclass(kw_only=True)
class Options(RayOptions, SamplingOptions, ModelOptions):
    prompt: str | None = option("question about each image (default: Describe this image in detail.)", None)
    max_new_tokens: Positive | None = option("maximum number of tokens (default: 256; 128 for an included model)", None)  # type: ignore[assignment]
    image: list[Path] = option(
        "image (PNG, JPEG, WEBP, BMP, GIF, TIFF, AVIF) or video files; with --out also folders, globs, .jsonl or"
        " .parquet of {image, prompt, id}, .tar shards (webdataset), hf:NAME[:SPLIT] (datasets)",
        positional=True,
    )
    out: Path | None = option(
        "file of records, .jsonl or .parquet; an interrupted run is continued", None, writes="file"
    )
    slots: Positive = option("number of images captioned at once", 8)
    workers: Positive = option("number of threads that read images ahead, or with --ray of processes", 2)
    report: Path | None = option("write an HTML page of the records with thumbnails, with --out", None, writes="file")
    compare: Count = option("also time transformers' generate on this many images, and print the speed-up", 0)
    max_pixels: Positive = option("maximum number of pixels of an image", 64_000_000)
    frames: Positive = option("number of frames read from a video", 8)
    schema: Path | None = option("JSON schema of the captions (pip install 'visspec[grammar]')", None)
    top_k: TopK | None = option("sample from this many most likely tokens (default: all)", None)
    top_p: TopP | None = option("sample from the most likely tokens with this total probability (default: 1)", None)
    stats: bool = option("print the speed even without --out", False)


def run(arguments: Options) -> int:
    """Caption the images and return the exit code. Finished captions are kept if the run is interrupted."""
    options = decode_options(arguments)
    from visspec.cli.caption_records import run_records

    return run_records(arguments, options)


def model_of(arguments: Options) -> str:
    """Return the model by name or folder. Raises ValueError if none is given and none is included."""
    return arguments.model or included.text_model()


def read_schema(path: Path) -> Any:
    """Read the schema in a file. Raises ValueError if it can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--schema: got {path}, expected a file with a JSON schema ({error}).") from None


def decode_options(arguments: Options) -> dict[str, Any]:
    """Return generate's keyword arguments. Raises ValueError for sampling options at temperature 0."""
    sampled = arguments.temperature > 0
    for name, value in {"top-k": arguments.top_k, "top-p": arguments.top_p}.items():
        if value is not None and not sampled:
            raise ValueError(f"--{name}: got {value} at temperature 0, expected a temperature above 0.")
    cuts = arguments.top_k or 0, arguments.top_p or 1.0
    usual = 128 if included.is_included(model_of(arguments)) else 256
    options = sampling(arguments.max_new_tokens or usual, arguments.temperature, *cuts)
    return options | ({"seed": arguments.seed} if sampled else {})
