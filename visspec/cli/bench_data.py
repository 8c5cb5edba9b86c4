"""Prompts from files of benchmarks that others publish, as lines of JSON: a reader a format, known by its keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from visspec.io.files import loads, naming

Fields = dict[str, Any]
KINDS = {"a text": str, "a list": list}


class Prompt(NamedTuple):
    """One request about pictures, or about none. images: files, seen from the folder of the data."""

    id: str
    category: str
    text: str
    images: list[str] = []  # noqa: RUF012  # never written to
    later: int = 0  # turns behind the first one, which are not asked


def mmspec(line: Fields) -> Prompt:
    """MMSpec: `id`, `image`, `turns`, `category`."""
    first, *later = texts(line, "turns")
    return Prompt(str(line["id"]), field(line, "category"), first, [field(line, "image")], len(later))


def speed_bench(line: Fields) -> Prompt:
    """SPEED-Bench: `question_id`, `category`, `turns`; text alone."""
    first, *later = texts(line, "turns")
    return Prompt(str(line["question_id"]), field(line, "category"), first, later=len(later))


def custom_mm(line: Fields) -> Prompt:
    """vLLM's `custom_mm`: `prompt`, `image_files`."""
    return Prompt("", "custom_mm", field(line, "prompt"), texts(line, "image_files"))


READERS: dict[tuple[str, ...], Callable[[Fields], Prompt]] = {
    ("id", "image", "turns", "category"): mmspec,
    ("question_id", "turns", "category"): speed_bench,
    ("prompt", "image_files"): custom_mm,
}


def read(file: Path, most: int) -> list[Prompt]:
    """The first prompts of a file. Raises ValueError with the number of a line that is none, or whose image is not
    there.
    """
    found: list[Prompt] = []
    with naming(file):
        lines = file.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, start=1):
        if text.strip() and len(found) < most:
            try:
                prompt = parse(loads(text))
                paths = [str(file.parent / name) for name in prompt.images]
                if missing := [path for path in paths if not Path(path).is_file()]:
                    raise ValueError(f"got no file {missing[0]}, expected an image")
            except ValueError as error:
                raise ValueError(f"data: line {number} of {file}: {error}") from None
            found.append(prompt._replace(id=prompt.id or str(number), images=paths))
    if not found:
        raise ValueError(f"data: got {file} without a line, expected prompts")
    return found


def parse(line: object) -> Prompt:
    """A line's prompt. Raises ValueError for one of no format."""
    fields = line if isinstance(line, dict) else {}
    reader = next((READERS[keys] for keys in READERS if fields.keys() >= {*keys}), None)
    if reader is None:
        shown = ", ".join(sorted(map(str, fields))) or type(line).__name__
        raise ValueError(f"got {shown}, expected {' or '.join(', '.join(keys) for keys in READERS)}")
    return reader(fields)


def field(line: Fields, name: str, kind: str = "a text") -> Any:
    """A field's value. Raises ValueError for one of another kind, or an empty one."""
    value = line[name]
    if not isinstance(value, KINDS[kind]) or not value:
        raise ValueError(f"{name}: got {value!r:.40}, expected {kind}")
    return value


def texts(line: Fields, name: str) -> list[str]:
    """A list of texts, at least one."""
    values = field(line, name, "a list")
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name}: got {values!r:.40}, expected a list of texts")
    return values
