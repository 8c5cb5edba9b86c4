"""Records made by several processes, on one machine or more: Ray Data reads them and feeds a pool of actors.

The sources are read by tasks, which put so many records into one row; an actor makes a shard of parquet of every row.
A record is done when its shard is there. If an actor dies, Ray starts another and gives it the rows that it had not
handed back; a shard that was already written is left as it is. What an actor makes of a record follows from the
settings and the record's id, so that it is the same whoever makes it and however often.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from visspec.api.shards import EXTRA, Shards
from visspec.api.sources import Record, as_utf8, need

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.actor import ActorHandle

SIZE = 64  # records of a shard
DEATHS = 2  # of workers at the same record, before it is given up
CLAIMED = 256  # ids asked for at once
READING = 0.01  # of a processor, for a task that reads: it waits for the disk, and actors may hold all processors
READY_S = 1800.0  # until all actors have loaded their models

Rows = Iterator[dict[str, Any]]
Making = Callable[[Iterable[Record]], Rows]


@dataclass(frozen=True)
class WorkerPool:
    """Actors of a run. threads: processors and torch threads of each. gpus: of each."""

    workers: int = 2
    threads: int = 1
    gpus: float = 0.0


@dataclass
class Claims:
    """Who makes what: one actor of a run, which the others ask.

    The first place that asks for an id gets it, and gets it again if its task runs again; `done` are ids of records
    that are there. A shard whose worker died is made record by record, so that one that kills workers is found.
    """

    done: set[str]
    owner: dict[str, tuple[int, int]] = field(default_factory=dict)
    twice: dict[str, None] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)  # times, by shard
    latest: dict[str, str] = field(default_factory=dict)  # record that is being made, by shard
    deaths: dict[str, int] = field(default_factory=dict)  # of workers, by the record that they were at
    loads: int = 0  # begun and not ended

    def claim(self, reader: int, first: int, ids: Sequence[str]) -> list[bool]:
        """Whether the records `first`, `first + 1`, ... of a reader are to be made."""
        return [self._one((reader, place), id) for place, id in enumerate(ids, first)]

    def _one(self, place: tuple[int, int], id: str) -> bool:
        id = as_utf8(id)  # as shards have it
        if self.owner.setdefault(id, place) != place:
            self.twice[id] = None
            return False
        return id not in self.done

    def doubles(self) -> list[str]:
        """Ids that came more than once."""
        return list(self.twice)

    def loading(self, change: int) -> int:
        """An actor begins to load its model (1) or has it (-1). Returns how many have begun and not ended."""
        self.loads += change
        return self.loads

    def begin(self, shard: str) -> tuple[int, dict[str, int]]:
        """How often a shard was begun before, and the records in it that workers died of, with how often."""
        before = self.begun.get(shard, 0)
        self.begun[shard] = before + 1
        if (id := self.latest.pop(shard, None)) is not None:
            self.deaths[id] = self.deaths.get(id, 0) + 1
        return before, self.deaths

    def at(self, shard: str, id: str) -> None:
        """A shard's record is about to be made."""
        self.latest[shard] = id

    def mark_done(self, shard: str) -> None:
        """A shard is there."""
        self.latest.pop(shard, None)


def groups(
    read: Callable[[], Iterator[Record]], claim: Callable[[int, list[str]], list[bool]], size: int
) -> Iterator[list[Record]]:
    """The records of one reader that are to be made, `size` together. claim(first, ids) says which."""
    found, kept, first = iter(read()), list[Record](), 0
    while some := list(islice(found, CLAIMED)):
        kept += [r for r, wanted in zip(some, claim(first, [r.id for r in some])) if wanted]
        first += len(some)
        while len(kept) >= size:
            yield kept[:size]
            kept = kept[size:]
    if kept:
        yield kept


def pack_records(records: Sequence[Record]) -> Any:
    """Records as one row of an arrow table. Images are paths or the bytes of files."""
    arrow = importlib.import_module("pyarrow")
    told, pixels = [], []
    for record in records:
        image = record.image
        pixels.append(image if isinstance(image, bytes) else b"")
        told.append([record.id, None if image is None or pixels[-1] else str(image), record.prompt, record.error])
    row = arrow.array([pixels], arrow.list_(arrow.large_binary()))
    return arrow.table({"records": [json.dumps(told)], "pixels": row})


def unpack_records(row: Mapping[str, Any]) -> list[Record]:
    """The records of such a row."""
    return [
        Record(id, pixels or (None if path is None else Path(path)), prompt, error)
        for (id, path, prompt, error), pixels in zip(json.loads(row["records"]), row["pixels"])
    ]


class ReadTask:
    """A task of Ray Data: numbers of readers in, rows of so many records out."""

    def __init__(self, readers: Sequence[Callable[[], Iterator[Record]]], claims: ActorHandle, size: int, home: str):
        self.readers, self.claims, self.size, self.home = readers, claims, size, home

    def __call__(self, batch: Table) -> Iterator[Table]:
        ray = importlib.import_module("ray")
        os.chdir(self.home)  # sources may be relative paths
        for number in batch["item"].to_pylist():

            def claim(first: int, ids: list[str], number: int = number) -> list[bool]:
                return ray.get(self.claims.claim.remote(number, first, ids))

            for records in groups(self.readers[number], claim, self.size):
                yield pack_records(records)


class RayWorker:
    """An actor of Ray Data: rows of records in, what was written of each out. `make` loads what makes records."""

    def __init__(self, make: Callable[[], Making], shards: Shards, claims: ActorHandle, pool: WorkerPool, home: str):
        os.chdir(home)
        self.shards, self.claims = shards, claims
        died = self._ask("loading", 1) - pool.workers
        if died > DEATHS:
            raise ValueError(f"--ray: {died} workers died while they loaded the model, expected memory for it")
        self.making = make()
        if "torch" in sys.modules:  # importing it takes seconds of a worker that makes its records without
            sys.modules["torch"].set_num_threads(pool.threads)
        self._ask("loading", -1)

    def __call__(self, batch: Table) -> Table:
        told = [json.dumps(self.write(unpack_records(row))) for row in batch.to_pylist()]
        return importlib.import_module("pyarrow").table({"told": told})

    def write(self, records: list[Record]) -> dict[str, Any]:
        """Make the shard of these records, if it is not there. Returns what it holds, and when it was made (unix
        seconds) by which process.
        """
        began, path = time.time(), self.shards.path([record.id for record in records])
        rows: list[dict[str, Any]] = []
        if not path.is_file():
            before, deaths = self._ask("begin", path.name)
            rows = list(self._one_by_one(path.name, records, deaths) if before else self.making(records))
            self.shards.write(rows)
            self._ask("mark_done", path.name)
        told: dict[str, Any] = {"shard": path.name, "records": len(records), "process": os.getpid()}
        sums = {name: sum(row.get(name) or 0 for row in rows) for name in ("tokens", "rounds")}
        return told | sums | {"errors": [r["error"] for r in rows if r["error"]], "began": began, "ended": time.time()}

    def _one_by_one(self, shard: str, records: list[Record], deaths: Mapping[str, int]) -> Rows:
        for record in records:
            if deaths.get(record.id, 0) >= DEATHS:
                died = f"{record.id}: {DEATHS} workers died at it, expected a record that can be made"
                record = replace(record, error=died)
            self._ask("at", shard, record.id)
            yield from self.making([record])

    def _ask(self, what: str, *values: str | int) -> Any:
        ray = importlib.import_module("ray")
        return ray.get(getattr(self.claims, what).remote(*values))


@contextmanager
def cluster(pool: WorkerPool) -> Iterator[Any]:
    """The Ray of RAY_ADDRESS or of this process, or else one that is started here and ends with the block.

    Raises ValueError if it has too little for the pool.
    """
    ray = need("ray", "--ray", EXTRA)
    need("pyarrow", "--ray", EXTRA)
    started = not ray.is_initialized()
    if started:
        there = os.environ.get("RAY_ADDRESS")
        for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_BACKEND_LOG_LEVEL", "fatal")):
            os.environ.setdefault(name, value)
        importlib.import_module("ray.data")
        _name_in_utf8(importlib.import_module("ray._private.utils"))
        warnings.filterwarnings("ignore", "The minimum number of concurrent actors")  # one source gives many rows
        for name in ("ray", "ray.data"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are raised
        own = {} if there else {"num_cpus": pool.workers * pool.threads + 1, "include_dashboard": False}
        ray.init(address=there, logging_level="ERROR", log_to_driver=False, configure_logging=False, **own)
    try:
        has = ray.cluster_resources()
        for what, each in (("CPU", pool.threads), ("GPU", pool.gpus)):
            if pool.workers * each > has.get(what, 0):
                raise ValueError(
                    f"workers: got {pool.workers} of {each:g} {what} each, expected at most the {has.get(what, 0):g}"
                    f" {what} that Ray has"
                )
        yield ray
    finally:
        if started:
            ray.shutdown()


def _name_in_utf8(utils: ModuleType) -> None:
    """Ray records its command line, and would raise UnicodeEncodeError for file names in it that are not UTF-8."""
    if (named := getattr(utils, "get_entrypoint_name", None)) is not None:
        utils.get_entrypoint_name = lambda: as_utf8(named())  # type: ignore[attr-defined]


def run(
    readers: Sequence[Callable[[], Iterator[Record]]],
    make: Callable[[], Making],
    shards: Shards,
    *,
    pool: WorkerPool | None = None,
    size: int = SIZE,
    complain: Callable[[str], None] = print,
) -> Iterator[dict[str, Any]]:
    """Make all records that are not in the folder, which is open. Yields what `RayWorker.write` tells of every shard as
    it is ready. make: called in every actor; what it returns makes rows of records. complain: told of ids that came
    twice.

    Raises ValueError with what an actor raised, or if an actor died too often; finished shards stay.
    """
    pool = pool or WorkerPool()
    with cluster(pool) as ray:
        claims = ray.remote(Claims).options(num_cpus=0, max_restarts=0).remote(shards.ids())
        try:
            yield from _shards(readers, claims, make, shards, pool, size)
        except ray.exceptions.RayError as error:
            raise ValueError(error_text(error)) from None
        for id in ray.get(claims.doubles.remote()):
            complain(f"{id}: got this id twice, expected one record of each")


def _shards(readers, claims, make, shards: Shards, pool: WorkerPool, size: int) -> Iterator[dict[str, Any]]:
    data, home = importlib.import_module("ray.data"), str(Path.cwd())
    context = data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = READY_S
    context.target_max_block_size = 1  # a row is a block, so that actors share them
    shards = Shards(shards.folder.absolute(), shards.columns)
    whole: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}
    with data.DataContext.current(context):
        numbers = data.from_items(list(range(len(readers))), override_num_blocks=max(len(readers), 1))
        rows = numbers.map_batches(ReadTask(readers, claims, size, home).__call__, **whole, num_cpus=READING)
        made = rows.map_batches(
            RayWorker,
            fn_constructor_args=(make, shards, claims, pool, home),
            **whole,
            compute=data.ActorPoolStrategy(size=pool.workers, max_tasks_in_flight_per_actor=2),
            num_cpus=pool.threads,
            num_gpus=pool.gpus or None,
        )
        for row in made.iter_rows():
            yield json.loads(row["told"])


def error_text(error: BaseException) -> str:
    """What went wrong in an actor, in one sentence."""
    found = [error]
    for one in found:  # grows
        inner = (getattr(one, "cause", None), one.__cause__, *one.args)
        found += [other for other in inner if isinstance(other, BaseException) and other not in found]
    own = next((one for one in found if isinstance(one, (ValueError, OSError)) and str(one)), None)
    if own is not None:
        return str(getattr(own, "cause", own))  # Ray wraps it in a class of both kinds, which shows its own traceback
    lines = str(error).strip().splitlines() or [""]
    return f"--ray: {type(error).__name__}: {lines[0][:300]}"
