"""Files that appear whole or not at all, and results that are kept while they grow."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRIAL = 4096  # bytes written to see whether a disk has room


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name beside `path` to write to; it is moved over `path` when the block ends well.

    A kill leaves the former file, or none; an error leaves nothing behind. Folders above are made. A link stays one,
    and what is no file (a pipe, /dev/stdout) is written to as it is.
    """
    path = Path(path)
    if is_device(path):
        yield path
        return
    if path.is_symlink():
        path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_json(path: str | Path | None, value: Any) -> None:
    """Write a value as JSON; nothing where no file is asked for."""
    if path is None:
        return
    with replacing(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n")


def append_json(path: Path, value: Any) -> None:
    """Add a value as a line to a file of JSON lines. On return the system has it, which outlives this process."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def is_device(path: Path) -> bool:
    """Something to write to that is neither a file nor a folder; nothing can be moved over it."""
    return path.exists() and not path.is_file() and not path.is_dir()


def unwritable(path: Path, folder: bool = False) -> str | None:
    """Why a file can't be written, or no file into a folder; None where it can. Found by trying, before any work:
    what is there is not touched, nothing is left behind.
    """
    try:
        if path.exists() and path.is_dir() != folder:
            found, wanted = ("file", "folder") if folder else ("folder", "file")
            return f"{path} is a {found}, expected a {wanted}"
        if is_device(path):
            return None
        home = path if folder else path.resolve().parent
        while not home.exists():
            home = home.parent
        with tempfile.TemporaryFile(dir=home) as trial:
            trial.write(bytes(TRIAL))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        return f"{path} can't be written ({error.strerror}), expected another place"
    return None


class Results:
    """Results that grow into one JSON object, {"results": [...], "complete": ..., **about}; none of them is lost.

    A context. Each result is written to PATH.part as it is added, one JSON line below a line of `about`; at the end,
    also that by an error, the object is written to PATH and PATH.part goes. After a kill, or where PATH can't be
    written, PATH.part is there. Without a path nothing is kept. Raises ValueError where PATH.part is already there.
    """

    def __init__(self, path: str | Path | None, about: dict[str, Any]):
        self.path, self.about = None if path is None else Path(path), about
        self.found: list[Any] = []

    @property
    def part(self) -> Path | None:
        """Where the lines go; None for no path and for what is no file."""
        if self.path is None or is_device(self.path):
            return None
        return self.path.with_name(f"{self.path.name}.part")

    def __enter__(self) -> Results:
        if self.part is not None:
            self.part.parent.mkdir(parents=True, exist_ok=True)
            try:
                open(self.part, "x").close()
            except FileExistsError:
                raise ValueError(
                    f"{self.path}: got {self.part} beside it, expected none: it holds the results of a run that was"
                    " killed or is at work"
                ) from None
            append_json(self.part, self.about)
        return self

    def add(self, result: Any) -> None:
        """Keep one more result."""
        self.found.append(result)
        if self.part is not None:
            append_json(self.part, result)

    def __exit__(self, kind, error, trace) -> None:
        if self.found or kind is None:
            write_json(self.path, {"results": self.found, "complete": kind is None, **self.about})
        if self.part is not None:
            self.part.unlink(missing_ok=True)
