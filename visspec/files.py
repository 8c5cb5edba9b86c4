"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name beside `path` to write to; it is moved over `path` when the block ends well.

    A kill leaves the former file, or none; an error leaves nothing behind. Folders above are made.
    """
    path = Path(path)
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
