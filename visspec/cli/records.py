"""Records that a run adds to a journal one by one, made in this process or by several with --ray."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from visspec.api import distributed
from visspec.api.progress import Progress
from visspec.api.sources import Record
from visspec.io.files import Journal


class RecordRun:
    """The records that one run adds to a journal, and its speed."""

    def __init__(self, journal: Journal):
        self.journal, self.before, self.lost = journal, len(journal.done), len(journal.failed)
        self.count = self.failed = self.twice = self.cut = self.rounds = self.committed = 0
        self.bar: Progress
        self.start = self.seconds = 0.0

    def with_bar(self, results: Iterable[Any], total: int | None = None) -> Iterator[Any]:
        """Yield the results, with a progress bar. `total` counts all records, including existing ones."""
        self.start = time.monotonic()
        with Progress("images", total, self.before if total is None else min(self.before, total)) as self.bar:
            for one in results:
                yield one
                self.seconds = time.monotonic() - self.start
                speed = self.committed / max(self.seconds, 1e-9)
                figures = {"tau": f"{self.tau:.2f}", "tokens/s": f"{speed:.3g}", "failed": self.failed}
                self.bar.update(self.before + self.count, figures)

    def with_ray(
        self, reader: Callable[[], Iterator[Record]], make: Callable[[], distributed.Making], arguments: Any, group: int
    ) -> Iterator[Any]:
        """Yield the results of the processes of --ray, which take `group` records at a time."""
        auto = arguments.device == "auto" and torch.cuda.is_available()
        gpus = 1.0 if auto or arguments.device.startswith("cuda") else 0.0
        pool = {"workers": arguments.workers, "threads": arguments.threads, "gpus": gpus, "group": group}
        return distributed.run(reader, make, done=self.journal.done, repeated=self.repeat, **pool)

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return self.committed / max(self.rounds, 1)

    @property
    def rate(self) -> float:
        """Images per second, without failed ones."""
        return (self.count - self.failed) / max(self.seconds, 1e-9)

    def add(self, row: dict[str, Any]) -> None:
        self.count += 1
        self.rounds, self.committed = self.rounds + row["rounds"], self.committed + max(row["tokens"] - 1, 0)
        self.cut += row.get("ended") == "length"
        self.journal.add(row)
        if row["error"] is not None:
            self.failed += 1
            self.bar.write(f"visspec: {row['error']}")

    def repeat(self, id: str) -> None:
        """Report an id that occurs again. Only its first record is made."""
        self.twice += 1
        self.bar.write(f"visspec: {id}: got this id twice. Only its first record is used.")

    def end(self, out: Path | None, stats: bool = True) -> int:
        """Print a summary. Returns the exit code: 2 if all records failed, 1 if some did or ids were repeated."""
        if out is not None or stats:
            there = f", {self.before} were there" if self.before else ""
            there += f" ({self.lost} of these failed; --retry-failed makes them again)" if self.lost else ""
            there += f", {self.twice} repeated ids" if self.twice else ""
            where = "" if out is None else f"{out}: "
            speed = f"; {self.seconds:.1f} s, {self.rate:.3g} images per second, {self.tau:.2f} tokens per pass (tau)"
            speed = speed if self.count > self.failed else ""
            cut = f"; {self.cut} cut at the limit (--max-new-tokens)" if self.cut else ""
            print(f"{where}{self.count} records, {self.failed} of them failed{there}{speed}{cut}")
        count, failed = len(self.journal.done), len(self.journal.failed)
        return 2 if count and failed == count else 1 if failed or self.twice else 0
