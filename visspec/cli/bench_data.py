"""Prompts of published benchmarks, as JSON lines: MMSpec, SPEED-Bench and vLLM's `custom_mm`."""

from pathlib import Path
from typing import Any

from visspec.api.sources import Record
from visspec.io.files import file_errors, loads


def read(file: Path, most: int) -> list[Record]:
    """Return the first `most` prompts of a file, with the paths of their images. Of a conversation, only the first turn
    is used. Raises ValueError with the line number if the format is unknown.
    """
    prompts: list[Record] = []
    with file_errors(file):
        lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip() and len(prompts) < most:
            try:
                prompts.append(parse(f"{file}:{number}", loads(line), file.parent))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                formats = "MMSpec, SPEED-Bench or vLLM's custom_mm"
                reason = f"no {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"data: line {number} of {file} is not a prompt of {formats} ({reason}).") from None
    if not prompts:
        raise ValueError(f"data: {file} is empty.")
    return prompts


def parse(id: str, fields: dict[str, Any], folder: Path) -> Record:
    """Return the prompt of a line, whose images are relative to `folder`."""
    if "prompt" in fields:  # vLLM
        category, text, images = "custom_mm", fields["prompt"], fields["image_files"]
    else:  # MMSpec has one image, SPEED-Bench none
        category, text = fields["category"], fields["turns"][0]
        images = [fields["image"]] if "image" in fields else []
    if not isinstance(text, str):
        raise ValueError(f"got a turn of {type(text).__name__}, expected text.")
    return Record(id, [folder / image for image in images], text, category=category)
