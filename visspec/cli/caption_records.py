"""`visspec caption SOURCES --out`: records of many images, kept one by one in a file, with the page of `--report`; with
--ray by several processes, in a folder of shards.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from visspec.api import distributed, sources
from visspec.api.accelerate import Accelerated, accelerate
from visspec.api.captions import PROMPT, Caption, Captions
from visspec.api.shards import EXTRA, Shards
from visspec.api.sources import Record
from visspec.cli import caption
from visspec.cli.arguments import earlier, exit_code, load
from visspec.cli.ray_shards import refuse, write
from visspec.eval.report.captions import CaptionSamples, write_page
from visspec.io.files import Journal, replacing

COLUMNS = dict.fromkeys(("id", "image", "prompt", "caption"), "string") | {"tokens": "int64", "rounds": "int64"}
COLUMNS |= {"ended": "string", "drift": "double", "error": "string"}


def run_records(arguments: caption.Options, options: dict[str, Any]) -> int:
    """Finished records are kept whatever ends it; ids that are there are not captioned again. Returns the exit code."""
    out = output_path(arguments)
    found = sources.records(arguments.image)
    request = arguments.prompt or PROMPT
    fast, captions = load_captions(arguments, request, options, arguments.workers)
    caption.warn_of_foreign(arguments)
    about = caption.run_settings(arguments, fast, request, options)
    lines = out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.jsonl")
    with Journal(lines, about, retry=arguments.retry_failed) as journal:
        run = CaptionRun(journal)
        try:
            for made in run.with_bar(captions(run.new(found))):
                run.add(made)
        finally:
            if lines != out:
                with replacing(out) as draft:
                    sources.write_parquet(iter(journal), draft, COLUMNS)
            if arguments.report is not None:
                write_page(arguments.report, journal, run.pictures, about)
    print(run.summary(out))
    return exit_code(len(journal.done), len(journal.failed), run.twice)


def run_ray(arguments: caption.Options, options: dict[str, Any]) -> int:
    """Finished shards are kept whatever ends it; ids that are there are not captioned again. Returns the exit code."""
    out = refuse(arguments, "json", "report", "stats")
    sources.need("ray", "--ray", EXTRA)
    readers = sources.readers(arguments.image)
    caption.warn_of_foreign(arguments)
    request = arguments.prompt or PROMPT
    make = partial(worker, arguments, request, options)
    return write(readers, make, Shards(out, COLUMNS), caption.settings(arguments, request, options), arguments)


def worker(arguments: caption.Options, request: str, options: dict[str, Any]) -> distributed.Making:
    """In an actor: load the model. What is returned makes the captions of records."""
    _, captions = load_captions(arguments, request, options, 1)
    return lambda records: map(row_of, captions(records))


def load_captions(
    arguments: caption.Options, request: str, options: dict[str, Any], workers: int
) -> tuple[Accelerated, Callable[[Iterable[Record]], Iterator[Caption]]]:
    """The model, and what makes the captions of records, whose images so many threads read ahead."""
    model, processor, drafter = load(arguments)
    constraint, check = caption.by_schema(arguments, model, processor)
    fast = accelerate(model, drafter, acceptance=arguments.acceptance)
    reading = {name: getattr(arguments, name) for name in ("slots", "max_pixels", "frames")}
    captions = Captions(fast, processor, request=request, workers=workers, **reading, **options, **constraint)
    return fast, lambda records: map(check, captions(records))


def output_path(arguments: caption.Options) -> Path:
    """The path of --out. Raises ValueError for arguments that don't go together."""
    out = arguments.out
    if out is None:
        source = next(s for s in arguments.image if not sources.is_plain(s))
        raise ValueError(f"--out: got none, expected a .jsonl or .parquet file for the records of {source}")
    if out.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"--out: got {out}, expected a file that ends in .jsonl or .parquet")
    if arguments.json is not None:
        raise ValueError(f"--json: got {arguments.json} beside --out, expected one of the two")
    if out.suffix == ".parquet":
        sources.need("pyarrow", f"--out {out}")
    return out


def row_of(made: Caption) -> dict[str, Any]:
    record = made.record
    assert record is not None
    told = made.text, made.tokens, made.rounds, made.ended, made.drift, made.error
    return dict(zip(COLUMNS, (made.path, record.image, record.prompt, *told)))


class CaptionRun:
    """What one run adds to a journal."""

    def __init__(self, journal: Journal):
        self.journal, self.before, self.lost = journal, len(journal.done), len(journal.failed)
        self.count = self.failed = self.twice = self.rounds = self.committed = 0
        self.taken: set[str] = set()
        self.pictures = CaptionSamples()
        self.bar: tqdm[Caption]

    def new(self, records: Iterable[Record]) -> Iterator[Record]:
        """Records that are not there yet. An id that comes twice is named, and captioned once."""
        for record in records:
            if record.id in self.taken:
                self.twice += 1
                self._complain(f"{record.id}: got this id twice, expected one record of each")
                continue
            self.taken.add(record.id)
            if record.id not in self.journal.done:
                self.pictures.look(record.id, record.image)
                yield record

    def with_bar(self, captions: Iterator[Caption]) -> Iterator[Caption]:
        """The captions, with a bar: images per second, tau, failures."""
        hidden = not sys.stderr.isatty()
        with tqdm(captions, unit=" images", disable=hidden, smoothing=0.05) as self.bar:
            for made in self.bar:
                yield made
                self.bar.set_postfix(tau=f"{self.tau:.2f}", failed=self.failed, refresh=False)

    @property
    def tau(self) -> float:
        return self.committed / max(self.rounds, 1)

    def add(self, made: Caption) -> None:
        self.count += 1
        self.rounds, self.committed = self.rounds + made.rounds, self.committed + max(made.tokens - 1, 0)
        self.journal.add(row_of(made))
        self.pictures.tell(made.path, made.pieces)
        if made.error is not None:
            self.failed += 1
            self._complain(made.error)

    def _complain(self, sentence: str) -> None:
        self.bar.write(f"visspec: {sentence}", file=sys.stderr)

    def summary(self, out: Path) -> str:
        there = earlier(self.before, self.lost, self.twice)
        return f"{out}: {self.count} records, {self.failed} of them failed{there}; tau {self.tau:.2f}"
