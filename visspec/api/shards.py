"""Records in a folder of parquet shards, which several processes write and a run goes on from."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from visspec.api.sources import need, write_parquet
from visspec.files import lock, replacing, same_settings

PATTERN = "part-*.parquet"
EXTRA = "ray"


class Shards:
    """A folder of shards. A shard is written to a temporary name and moved, so that it is whole or not there, and it
    is named after the ids in it: one that is made twice replaces itself.

    columns: arrow types by name, `id` among them.
    """

    def __init__(self, folder: str | Path, columns: Mapping[str, str]):
        self.folder, self.columns = Path(folder), dict(columns)

    def opened(self, about: dict[str, Any]) -> Any:
        """Keep the folder for this run, until what is returned is closed. Raises ValueError if another run writes to it
        or its records were made with other settings.
        """
        need("pyarrow", f"--out {self.folder}", EXTRA)
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = open(self.folder / ".lock", "a+b")
        try:
            lock(kept, self.folder)
            same_settings(self.folder / "about.json", self.folder, about)
        except BaseException:
            kept.close()
            raise
        return kept

    def path(self, ids: Sequence[str]) -> Path:
        """The shard of these records."""
        name = hashlib.blake2b("\n".join(sorted(ids)).encode(), digest_size=8).hexdigest()
        return self.folder / f"part-{name}.parquet"

    def write(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write a shard."""
        path = self.path([row["id"] for row in rows])
        with replacing(path) as draft:
            write_parquet(iter([dict(row) for row in rows]), draft, self.columns)
        return path

    def read(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """All records, shard by shard. Raises ValueError for a shard that can't be read."""
        parquet = importlib.import_module("pyarrow.parquet")
        for path in sorted(self.folder.glob(PATTERN)):
            try:
                yield from parquet.read_table(path, columns=None if columns is None else list(columns)).to_pylist()
            except (OSError, ValueError) as error:
                said = str(error).split("\n")[0][:200]
                raise ValueError(
                    f"{path}: got a shard that can't be read ({said}), expected it whole or gone"
                ) from None

    def ids(self) -> set[str]:
        """Ids of the records that are there."""
        return {row["id"] for row in self.read(["id"])}
