"""Prompts of published benchmarks, as JSON lines: MMSpec, SPEED-Bench and vLLM's `custom_mm`."""

from pathlib import Path
from typing import Any, NamedTuple

from visspec.io.files import loads, naming


class Prompt(NamedTuple):
    """A request about any number of pictures."""

    category: str
    text: str
    images: list[Path]
    later: int = 0  # number of later turns of the conversation, which are skipped


def read(file: Path, most: int) -> list[Prompt]:
    """Return the first `most` prompts of a file. Raises ValueError with the line number if the format is unknown."""
    found: list[Prompt] = []
    with naming(file):
        lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip() and len(found) < most:
            try:
                found.append(parse(loads(line), file.parent))
            except (ValueError, KeyError, TypeError) as error:
                formats = "MMSpec, SPEED-Bench or vLLM's custom_mm"
                reason = f"no {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"data: line {number} of {file} is not a prompt of {formats} ({reason}).") from None
    if not found:
        raise ValueError(f"data: {file} is empty.")
    return found


def parse(fields: dict[str, Any], folder: Path) -> Prompt:
    """Return the prompt of a line, whose images are relative to `folder`."""
    if "prompt" in fields:  # vLLM
        category, turns, images = "custom_mm", [fields["prompt"]], fields["image_files"]
    else:  # MMSpec has one image, SPEED-Bench none
        category, turns = fields["category"], fields["turns"]
        images = [fields["image"]] if "image" in fields else []
    first, *later = turns
    if not isinstance(first, str):
        raise ValueError(f"got a turn of {type(first).__name__}, expected text.")
    return Prompt(category, first, [folder / image for image in images], len(later))
