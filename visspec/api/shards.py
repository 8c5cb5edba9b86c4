"""Records in a folder of parquet shards, which several processes write and a run goes on from."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from visspec.api.sources import need, write_parquet
from visspec.io.files import check_there, lock, replacing, same_settings

PATTERN, LOCK = "part-*.parquet", ".lock"
EXTRA = "ray"


class Shards:
    """A folder of shards. A shard is written to a temporary name and moved, so that it is whole or not there, and it
    is named after the ids in it: one that is made twice replaces itself.

    columns: arrow types by name, `id` among them.
    """

    def __init__(self, folder: str | Path, columns: Mapping[str, str]):
        self.folder, self.columns = Path(folder), dict(columns)

    def lock(self, about: dict[str, Any]) -> Any:
        """Keep the folder for this run, until what is returned is closed. Raises ValueError if another run writes to it
        or its records were made with other settings.
        """
        need("pyarrow", f"--out {self.folder}", EXTRA)
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = open(self.folder / LOCK, "a+b")
        try:
            lock(kept, self.folder)
            same_settings(self.folder / "about.json", self.folder, about)
        except BaseException:
            kept.close()
            raise
        return kept

    def path(self, ids: Sequence[str]) -> Path:
        """The shard of these records."""
        name = hashlib.blake2b(json.dumps(sorted(ids)).encode(), digest_size=8).hexdigest()
        return self.folder / f"part-{name}.parquet"

    def write(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write a shard."""
        path = self.path([row["id"] for row in rows])
        self._write(rows, path)
        return path

    def _write(self, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
        with replacing(path) as draft:
            write_parquet(iter([dict(row) for row in rows]), draft, self.columns)

    def read(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """All records, shard by shard. Raises ValueError for a shard that can't be read."""
        for path in sorted(self.folder.glob(PATTERN)):
            yield from self._rows(path, columns)

    def _rows(self, path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        parquet = importlib.import_module("pyarrow.parquet")
        with open(path, "rb") as file:
            try:
                return parquet.read_table(file, columns=None if columns is None else list(columns)).to_pylist()
            except (OSError, ValueError) as error:
                said = str(error).split("\n")[0][:200]
                raise ValueError(
                    f"{path}: got a shard that can't be read ({said}), expected it whole or gone"
                ) from None

    def ids(self) -> set[str]:
        """Ids of the records that are there."""
        return {row["id"] for row in self.read(["id"])}

    def failed(self) -> set[str]:
        """Ids of the records that have an error."""
        return {row["id"] for row in self.read(["id", "error"]) if row["error"]}

    def take_failed_out(self) -> None:
        """Write the shards without the records that have an error."""
        for path in sorted(self.folder.glob(PATTERN)):
            if any(row["error"] for row in self._rows(path, ["error"])):
                if left := [row for row in self._rows(path) if not row["error"]]:
                    self._write(left, path)
                else:
                    path.unlink()

    def check_there(self) -> None:
        """Raises ValueError if the folder was removed since it was opened."""
        check_there(self.folder / LOCK)
