"""Records made by several processes, on one machine or more: a task of Ray Data reads the sources, and a pool of actors
makes the results of groups of records.

The result of a record depends only on the settings and the record's id, so it does not matter which actor makes it, or
how often.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visspec.api.sources import Record, need, new_records

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.actor import ActorHandle

EXTRA = "ray"
DEATHS = 2  # number of workers that may die at a record before it is skipped
READING = 0.01  # CPU share of the reading task: it waits for the disk, and actors may hold all CPUs
READY_S = 1800.0  # time limit for all actors to load their models

Making = Callable[[Iterable[Record]], Iterator[Any]]  # one result for each record


@dataclass(frozen=True)
class Job:
    """A run. `read` and `make` are the functions of `run`, `done` has the ids of finished records, and relative paths
    start at `home`. Each worker has `threads` CPUs and torch threads and `gpus` GPUs. `group` is the number of records
    per call.
    """

    read: Callable[[], Iterator[Record]]
    make: Callable[[], Making]
    done: Collection[str]
    home: str
    workers: int
    threads: int = 1
    gpus: float = 0.0
    group: int = 32


class Attempts:
    """An actor that counts what workers have begun and not finished."""

    def __init__(self) -> None:
        self.open: Counter[str] = Counter()

    def add(self, what: str, change: int) -> int:
        self.open[what] += change
        return self.open[what]


class ReadTask:
    """A task that reads all records, each id once, and yields groups of them with the ids that were repeated."""

    def __init__(self, job: Job):
        self.job = job

    def __call__(self, batch: Table) -> Iterator[Table]:
        os.chdir(self.job.home)
        twice: list[str] = []
        records = new_records(self.job.read(), self.job.done, twice.append)
        while (group := list(islice(records, self.job.group))) or twice:
            yield pack((group, list(twice)))
            twice.clear()


class RayWorker:
    """An actor that makes the results of groups of records."""

    def __init__(self, job: Job, attempts: ActorHandle):
        os.chdir(job.home)
        self.attempts, self.making = attempts, job.make()
        if "torch" in sys.modules:  # importing torch takes seconds, which workers without it can save
            sys.modules["torch"].set_num_threads(job.threads)

    def __call__(self, batch: Table) -> Table:
        records, twice = serializer().loads(batch["pickled"][0].as_py())
        again = self._add(f"group of {[r.id for r in records[:1]]}", 1) > 1  # its previous worker has died
        return pack((list(self._one_by_one(records) if again else self.making(records)), twice))

    def _one_by_one(self, records: Sequence[Record]) -> Iterator[Any]:
        for record in records:
            if self._add(record.id, 1) > DEATHS:
                died = f"{record.id}: {DEATHS} workers died at this record"
                record = replace(record, error=died)
            yield from self.making([record])
            self._add(record.id, -1)

    def _add(self, what: str, change: int) -> int:
        return importlib.import_module("ray").get(self.attempts.add.remote(what, change))


def serializer() -> Any:
    """Return Ray's own serializer, for tables passed between processes of a run. It never reads from files."""
    return importlib.import_module("ray").cloudpickle


def pack(value: object) -> Table:
    """Return a table of one row, as tasks of Ray Data exchange them."""
    arrow = importlib.import_module("pyarrow")
    return arrow.table({"pickled": arrow.array([serializer().dumps(value)], arrow.large_binary())})


def run(
    read: Callable[[], Iterator[Record]],
    make: Callable[[], Making],
    *,
    done: Collection[str] = (),
    repeated: Callable[[str], None] = print,
    **pool: Any,
) -> Iterator[Any]:
    """Yield the results of all records that are not done, as they finish. `read` yields the records, in a task. `make`
    is called in every actor and returns the function that makes results. `repeated` is called with each repeated id.
    `pool` are further fields of `Job`. Raises ValueError with the message of an actor's exception.
    """
    need("pyarrow", "--ray", EXTRA)
    ray, job = need("ray", "--ray", EXTRA), Job(read, make, done, str(Path.cwd()), **pool)
    own = not ray.is_initialized()
    try:
        start(job)
        for outputs, twice in results(job):
            yield from outputs
            for id in twice:
                repeated(id)
    except Exception as error:
        raise ValueError(error_text(error)) from None
    finally:
        if own:
            ray.shutdown()


def start(job: Job) -> None:
    """Connect to the Ray of RAY_ADDRESS, or start one. Raises ValueError if it can't hold the workers."""
    ray, there = importlib.import_module("ray"), os.environ.get("RAY_ADDRESS")
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_BACKEND_LOG_LEVEL", "fatal")):
        os.environ.setdefault(name, value)
    importlib.import_module("ray.data")
    warnings.filterwarnings("ignore", "The minimum number of concurrent actors")  # one source yields many groups
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are raised as exceptions
    if not ray.is_initialized():
        own = {} if there else {"num_cpus": job.workers * job.threads + 1, "include_dashboard": False}
        ray.init(address=there, logging_level="ERROR", log_to_driver=False, configure_logging=False, **own)
    has = ray.cluster_resources()
    for what, each in (("CPU", job.threads), ("GPU", job.gpus)):
        if job.workers * each > has.get(what, 0):
            need_text = f"{job.workers} workers need {each:g} {what} each"
            raise ValueError(f"workers: {need_text}, but Ray has {has.get(what, 0):g}.")


def results(job: Job) -> Iterator[tuple[list[Any], list[str]]]:
    """Yield the results of groups of records, and the repeated ids."""
    ray, data = importlib.import_module("ray"), importlib.import_module("ray.data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = READY_S
    context.target_max_block_size = 1  # makes a block of each group, so that actors share them
    attempts = ray.remote(Attempts).options(num_cpus=0).remote()
    whole: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}
    rows = (
        data.range(1)
        .map_batches(ReadTask(job).__call__, **whole, num_cpus=READING)
        .map_batches(
            RayWorker,
            fn_constructor_args=(job, attempts),
            **whole,
            compute=data.ActorPoolStrategy(size=job.workers, max_tasks_in_flight_per_actor=2),
            num_cpus=job.threads,
            num_gpus=job.gpus or None,
        )
    )
    return (serializer().loads(row["pickled"]) for row in rows.iter_rows())


def error_text(error: BaseException) -> str:
    """Return what went wrong in an actor, in one sentence."""
    chain = [error]
    for one in chain:  # grows
        inner = (getattr(one, "cause", None), one.__cause__, *one.args)
        chain += [other for other in inner if isinstance(other, BaseException) and other not in chain]
    own = next((one for one in chain if isinstance(one, (ValueError, OSError)) and str(one)), None)
    if own is not None:
        return str(getattr(own, "cause", own))  # Ray wraps the error in a class that prints its own traceback
    lines = str(error).strip().splitlines() or [""]
    return f"--ray: {type(error).__name__}: {lines[0][:300]}"
