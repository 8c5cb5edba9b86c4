"""`visspec caption SOURCES --out`: records of many images, kept one by one in a file, with the page of `--report`; with
--ray by several processes.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from visspec.api import distributed, sources
from visspec.api.accelerate import Accelerated
from visspec.api.captions import PROMPT, Caption, Captions
from visspec.api.sources import Record
from visspec.cli import caption, generate
from visspec.cli.arguments import earlier, exit_code, load
from visspec.eval.report.captions import CaptionSamples, write_page
from visspec.io.files import Journal, replacing

COLUMNS = dict.fromkeys(("id", "image", "prompt", "caption"), "string") | {"tokens": "int64", "rounds": "int64"}
COLUMNS |= {"ended": "string", "drift": "double", "error": "string"}


def run_records(arguments: caption.Options, options: dict[str, Any]) -> int:
    """Finished records are kept whatever ends it; ids that are there are not captioned again. Returns the exit code."""
    out, request, pictures = output_path(arguments), arguments.prompt or PROMPT, CaptionSamples()
    read = partial(sources.records, arguments.image)
    found = read()  # a source that isn't there is refused before work starts
    if arguments.ray:
        sources.need("ray", "--ray", distributed.EXTRA)
        about = caption.settings(arguments, request, options)
    else:
        fast, captions = load_captions(arguments, request, options, arguments.workers)
        about = caption.run_settings(arguments, fast, request, options)
    caption.warn_of_foreign(arguments)
    lines = out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.jsonl")
    with Journal(lines, about, retry=arguments.retry_failed) as journal:
        run = RecordRun(journal)
        if arguments.ray:
            make = partial(worker, arguments, request, options)
            made = run.with_ray(read, make, arguments, group=4 * arguments.slots)
        else:
            made = captions(shown(pictures, sources.new_records(found, journal.done, run.repeat)))
        try:
            for one in run.with_bar(made):
                run.add(row_of(one))
                pictures.tell(one.path, one.pieces)
        finally:
            if lines != out:
                with replacing(out) as draft:
                    sources.write_parquet(iter(journal), draft, COLUMNS)
            if arguments.report is not None:
                write_page(arguments.report, journal, pictures, about)
    return run.end(out)


def shown(pictures: CaptionSamples, records: Iterable[Record]) -> Iterator[Record]:
    """The records, whose images the page may need."""
    for record in records:
        pictures.look(record.id, record.image)
        yield record


def worker(arguments: caption.Options, request: str, options: dict[str, Any]) -> distributed.Making:
    """In an actor: load the model. What is returned makes the captions of records."""
    return load_captions(arguments, request, options, 1)[1]


def load_captions(
    arguments: caption.Options, request: str, options: dict[str, Any], workers: int
) -> tuple[Accelerated, Callable[[Iterable[Record]], Iterator[Caption]]]:
    """The model, and what makes the captions of records, whose images so many threads read ahead."""
    fast, processor = load(arguments, needs_pictures=True)
    constraint, check = caption.by_schema(arguments, fast.model, processor)
    reading = {name: getattr(arguments, name) for name in ("slots", "max_pixels", "frames")}
    captions = Captions(fast, processor, request=request, workers=workers, **reading, **options, **constraint)
    return fast, lambda records: map(check, captions(records))


def output_path(arguments: caption.Options) -> Path:
    """The path of --out. Raises ValueError for arguments that don't go together."""
    out = arguments.out
    if out is None:
        source = next((s for s in arguments.image if not sources.is_plain(s)), arguments.image[0])
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


class RecordRun:
    """What one run adds to a journal, under a bar."""

    def __init__(self, journal: Journal):
        self.journal, self.before, self.lost = journal, len(journal.done), len(journal.failed)
        self.count = self.failed = self.twice = self.rounds = self.committed = 0
        self.bar: tqdm[Any]

    def with_bar(self, made: Iterable[Any]) -> Iterator[Any]:
        """What is made, with a bar: records per second, tau, failures."""
        hidden = not sys.stderr.isatty()
        with tqdm(made, unit=" records", disable=hidden, smoothing=0.05) as self.bar:
            for one in self.bar:
                yield one
                self.bar.set_postfix(tau=f"{self.tau:.2f}", failed=self.failed, refresh=False)

    def with_ray(
        self,
        read: Callable[[], Iterator[Record]],
        make: Callable[[], distributed.Making],
        arguments: caption.Options | generate.Options,
        group: int,
    ) -> Iterator[Any]:
        """What the processes of --ray make, of so many records at a time."""
        gpus = 1.0 if arguments.device.startswith("cuda") else 0.0
        pool = {"workers": arguments.workers, "threads": arguments.threads, "gpus": gpus, "group": group}
        return distributed.run(read, make, done=self.journal.done, repeated=self.repeat, **pool)

    @property
    def tau(self) -> float:
        return self.committed / max(self.rounds, 1)

    def add(self, row: dict[str, Any]) -> None:
        self.count += 1
        self.rounds, self.committed = self.rounds + row["rounds"], self.committed + max(row["tokens"] - 1, 0)
        self.journal.add(row)
        if row["error"] is not None:
            self.failed += 1
            self._complain(row["error"])

    def repeat(self, id: str) -> None:
        """An id came again: only its first record is made."""
        self.twice += 1
        self._complain(f"{id}: got this id twice, expected one record of each")

    def _complain(self, sentence: str) -> None:
        self.bar.write(f"visspec: {sentence}", file=sys.stderr)

    def end(self, out: Path) -> int:
        """Print a summary. Returns the exit code."""
        there = earlier(self.before, self.lost, self.twice)
        print(f"{out}: {self.count} records, {self.failed} of them failed{there}; tau {self.tau:.2f}")
        return exit_code(len(self.journal.done), len(self.journal.failed), self.twice)
