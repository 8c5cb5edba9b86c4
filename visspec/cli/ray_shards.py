"""What the commands with `--ray` share: a folder of shards, a bar of what the processes make, and its sum."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from visspec.api import distributed
from visspec.api.shards import Shards
from visspec.cli.arguments import earlier, exit_code

if TYPE_CHECKING:
    from visspec.cli import caption, generate

    RayCommand = caption.Options | generate.Options


def pool_of(arguments: RayCommand) -> distributed.WorkerPool:
    """The processes that `arguments` ask for; each has a GPU where models run on them."""
    gpus = 1.0 if arguments.device.startswith("cuda") else 0.0
    return distributed.WorkerPool(arguments.workers, arguments.threads, gpus)


def refuse(arguments: RayCommand, *names: str) -> Path:
    """The folder of --out. Raises ValueError for arguments that mean nothing with --ray, and where --out is missing."""
    if arguments.out is None:
        raise ValueError("--out: got none, expected a folder for the shards of --ray")
    if arguments.out.suffix in (".jsonl", ".parquet"):
        raise ValueError(f"--out: got {arguments.out} with --ray, expected a folder for shards of parquet")
    for name in names:
        if getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')}: got one beside --ray, expected one of the two")
    return arguments.out


class Totals:
    """Sums over the shards of a run."""

    def __init__(self) -> None:
        self.count = self.failed = self.tokens = self.rounds = 0
        self.began, self.ended = float("inf"), 0.0
        self.processes: set[int] = set()

    def add(self, told: Mapping[str, Any]) -> None:
        self.count, self.failed = self.count + told["records"], self.failed + len(told["errors"])
        self.tokens, self.rounds = self.tokens + told["tokens"], self.rounds + told["rounds"]
        self.began, self.ended = min(self.began, told["began"]), max(self.ended, told["ended"])
        self.processes.add(told["process"])

    @property
    def rate(self) -> float:
        """Records a second from the first shard's beginning to the last one's end: models are loaded before."""
        return self.count / max(self.ended - self.began, 1e-9) if self.count else 0.0


def write(
    readers: Sequence, make: Callable[[], distributed.Making], shards: Shards, about: dict, arguments: RayCommand
) -> int:
    """Make and write all records that are not there, under a bar. Returns the exit code."""
    totals, twice = Totals(), 0
    with shards.lock(about), tqdm(unit=" records", disable=not sys.stderr.isatty(), smoothing=0.05) as bar:
        if arguments.retry_failed:
            shards.take_failed_out()
        before, lost = len(shards.ids()), len(shards.failed())

        def complain(sentence: str, of_id: int = 1) -> None:
            nonlocal twice
            twice += of_id
            bar.write(f"visspec: {sentence}", file=sys.stderr)

        options: dict[str, Any] = {"pool": pool_of(arguments), "size": arguments.shard, "complain": complain}
        for told in distributed.run(readers, make, shards, **options):
            shards.check_there()
            totals.add(told)
            for sentence in told["errors"]:
                complain(sentence, of_id=0)
            bar.update(told["records"])
            bar.set_postfix(failed=totals.failed, refresh=False)
        shards.check_there()
        count, failed = len(shards.ids()), len(shards.failed())
    print(
        f"{shards.folder}: {totals.count} records, {totals.failed} of them failed{earlier(before, lost, twice)};"
        f" {totals.rate:.2f} a second by {len(totals.processes)} processes"
    )
    return exit_code(count, failed, twice)
