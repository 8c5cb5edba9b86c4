"""Result rows of a metric that scores one item at a time, appended to a JSONL file so that a run can be resumed."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from visspec.io.files import append_json

Item = TypeVar("Item")


def with_progress(items: Iterable[Item], unit: str = "img") -> Iterable[Item]:
    """Return the items, on a terminal with a progress bar."""
    return tqdm(items, unit=unit, leave=False, disable=not sys.stderr.isatty())


class ResultFile:
    """Rows by key, read from and appended to `path`; only in memory if it is None. Every row has a field `evaluator`, a
    digest of model and settings. Raises ValueError for rows of another evaluator or other content. An incomplete last
    line is removed.
    """

    def __init__(self, path: str | Path | None, evaluator: str, key: str = "id"):
        self.path, self.evaluator, self.key = None if path is None else Path(path), evaluator, key
        self.rows: dict[str, dict] = {}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._read(self.path)
            self.path.open("a").close()  # raises before any work if the file can't be written

    def _read(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with path.open("r+b") as file:
                file.truncate(end)
        for i, line in enumerate(data[:end].splitlines(), 1):
            try:
                row = json.loads(line)
                found, name = row["evaluator"], row[self.key]
            except (ValueError, KeyError, TypeError):
                found = name = None
            if not isinstance(name, str):
                raise ValueError(f"line {i} of {path} is not a result row. Choose another results file.")
            if found != self.evaluator:
                raise ValueError(
                    f"{path} was written by the evaluator {found}, and this run's is {self.evaluator}."
                    " Choose another results file."
                )
            self.rows[name] = row

    def add(self, row: dict) -> dict:
        """Add a row and write it to the file."""
        row = row | {"evaluator": self.evaluator}
        self.rows[row[self.key]] = row
        if self.path is not None:
            append_json(self.path, row)
        return row
