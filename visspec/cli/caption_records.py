"""The work of `visspec caption`: records of images, stored one by one in a file, made here or by several processes."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from visspec import registry
from visspec.api import distributed, sources
from visspec.api.captions import Caption, Captions, default_prompt, prepare
from visspec.api.progress import Progress
from visspec.api.schemas import JsonGrammars
from visspec.api.sources import Record
from visspec.cli import caption
from visspec.cli.arguments import load
from visspec.eval.report.captions import CaptionSamples, write_page
from visspec.io import included
from visspec.io.files import Journal, replacing
from visspec.io.provenance import provenance
from visspec.types import ConfiguredModel, Processor

LOOKS = 4  # maximum number of files to check whether the included model is suitable
COLUMNS = dict.fromkeys(("id", "image", "prompt", "caption"), "string") | {"tokens": "int64", "rounds": "int64"}
COLUMNS |= {"ended": "string", "drift": "double", "error": "string"}


def run_records(arguments: caption.Options, options: dict[str, Any]) -> int:
    """Caption images without a record, or print captions without --out. Returns the exit code."""
    check_output(arguments)
    read = partial(sources.records, arguments.image)
    records = read()  # raises for a missing source before work starts
    request = arguments.prompt or default_prompt(caption.model_of(arguments))
    pictures, sample = CaptionSamples(), dict[str, Record]()
    about = settings(arguments, request, options)
    make = partial(load_captions, arguments, request, options)
    if arguments.ray:
        sources.need("ray", "--ray", distributed.EXTRA)
        about["provenance"] = provenance()
    else:
        captions, check = make(arguments.workers)
        about["provenance"] = provenance(captions.fast.model, drafter=captions.fast.name)
    warn_of_foreign(arguments)
    with tempfile.TemporaryDirectory(prefix="visspec-") as home:
        out = arguments.out or Path(home, "captions.jsonl")
        lines = out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.jsonl")
        with Journal(lines, about, retry=arguments.retry_failed) as journal:
            run = RecordRun(journal)
            if arguments.ray:
                made = run.with_ray(read, partial(worker, make), arguments, group=4 * arguments.slots)
            else:
                new = sources.new_records(records, journal.done, run.repeat)
                made = map(check, captions(shown(pictures, new, sample, arguments.compare)))
            try:
                for one in run.with_bar(made, records.total):
                    run.add(row_of(one))
                    pictures.tell(one.path, one.pieces)
                    if one.text is None:
                        sample.pop(one.path, None)
                    elif arguments.out is None:
                        run.bar.write(f"{one.path}: {one.text}" if len(arguments.image) > 1 else one.text, sys.stdout)
            finally:
                if lines != out:
                    with replacing(out) as draft:
                        sources.write_parquet(iter(journal), draft, COLUMNS)
                if arguments.report is not None:
                    write_page(arguments.report, journal, pictures, about)
    code = run.end(arguments.out, arguments.stats)
    if sample:
        print(compare(captions, list(sample.values()), run.rate))
    return code


def settings(arguments: caption.Options, request: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of captions, which don't depend on processes, so that any process can continue a run."""
    rule = arguments.acceptance
    about: dict[str, Any] = {
        "model": caption.model_of(arguments),
        "prompt": request,
        "drafter": arguments.drafter,
        "acceptance": rule,
        "sampling": options,
        "frames": arguments.frames,
    }
    if arguments.schema is not None:
        about["schema"] = caption.read_schema(arguments.schema)
    if arguments.batch_invariant:
        about["batch_invariant"] = True
    if arguments.preset is not None:
        about["preset"] = arguments.preset
        rule = registry.preset(arguments.preset, "text").acceptance if rule == "exact" else rule
    return about | {"guarantee": registry.rule(rule).traits.guarantee}


def by_schema(
    arguments: caption.Options, model: ConfiguredModel, processor: Processor
) -> tuple[dict[str, Any], Callable[[Caption], Caption]]:
    """Return generate's arguments for --schema, and a function that checks a caption against it."""
    if arguments.schema is None:
        return {}, lambda found: found
    schema = caption.read_schema(arguments.schema)
    grammars = JsonGrammars(processor.tokenizer, model, "--schema")
    return grammars.options(schema), partial(grammars.check, schema=schema)


def warn_of_foreign(arguments: caption.Options) -> None:
    """Warn if the first files of the sources are not images of the kind for which the included model was made."""
    local = [source for source in arguments.image if source.is_dir() or sources.is_plain(source)]
    files = (record.image for record in islice(sources.records(local), LOOKS) if record.error is None)
    check = included.table().foreign if arguments.model is None else ""
    if check and (why := included.load(check)(files, arguments.max_pixels)) is not None:
        print(f"visspec: {why}", file=sys.stderr)


def shown(
    pictures: CaptionSamples, records: Iterable[Record], sample: dict[str, Record], count: int
) -> Iterator[Record]:
    """Yield the records, and keep the first `count` in `sample`, by id, because the page may need their images."""
    for record in records:
        pictures.look(record.id, record.image)
        if len(sample) < count:
            sample[record.id] = record
        yield record


def compare(captions: Captions, records: Sequence[Record], rate: float) -> str:
    """Return a sentence that compares a run of `rate` images per second with transformers' `generate` on these records,
    in batches of as many as there are slots. Both include reading and preparing images.
    """
    options, start = {k: v for k, v in captions.generate.items() if k != "seed"}, time.monotonic()
    model: Any = captions.fast.model
    for first in range(0, len(records), captions.slots):
        some = records[first : first + captions.slots]
        prompts = [record.prompt or captions.request for record in some]
        inputs = prepare(captions.processor, list(map(captions.open_record, some)), prompts, model)
        model.generate(**inputs, **options).cpu()
    theirs = len(records) / (time.monotonic() - start)
    return (
        f"transformers' generate: {theirs:.3g} images per second, {len(records)} in batches of {captions.slots};"
        f" this run was {rate / theirs:.2f} times as fast"
    )


def worker(make: Callable[[int], tuple[Captions, Callable[[Caption], Caption]]]) -> distributed.Making:
    """In an actor: load the model and return a function that makes the captions of records."""
    captions, check = make(1)
    return lambda records: map(check, captions(records))


def load_captions(
    arguments: caption.Options, request: str, options: dict[str, Any], workers: int
) -> tuple[Captions, Callable[[Caption], Caption]]:
    """Load the model, with threads that read ahead, and a function that checks a caption against --schema."""
    fast, processor = load(arguments, needs_pictures=True)
    constraint, check = by_schema(arguments, fast.model, processor)
    reading = {name: getattr(arguments, name) for name in ("slots", "max_pixels", "frames")}
    return Captions(fast, processor, request=request, workers=workers, **reading, **options, **constraint), check


def check_output(arguments: caption.Options) -> None:
    """Raise ValueError for arguments that don't go together."""
    out = arguments.out
    if out is None:
        source = next((s for s in arguments.image if not sources.is_plain(s)), None)
        if source is not None or arguments.ray:
            source = source or arguments.image[0]
            raise ValueError(f"--out: got none, expected a .jsonl or .parquet file for the records of {source}")
        for name in ("report", "retry_failed"):
            if getattr(arguments, name):
                raise ValueError(f"--{name.replace('_', '-')}: got it without --out. Pass both.")
    if arguments.ray and arguments.compare:
        raise ValueError("--compare: got it with --ray, but generate runs in this process. Leave one of them out.")
    if out is None:
        return
    if out.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"--out: got {out}, expected a file that ends in .jsonl or .parquet")
    if out.suffix == ".parquet":
        sources.need("pyarrow", f"--out {out}")


def row_of(made: Caption) -> dict[str, Any]:
    values = made.text, made.tokens, made.rounds, made.ended, made.drift, made.error
    return dict(zip(COLUMNS, (made.path, made.record.image, made.record.prompt, *values)))


class RecordRun:
    """The records that one run adds to a journal, and its speed."""

    def __init__(self, journal: Journal):
        self.journal, self.before, self.lost = journal, len(journal.done), len(journal.failed)
        self.count = self.failed = self.twice = self.cut = self.rounds = self.committed = 0
        self.bar: Progress
        self.start = self.seconds = 0.0

    def with_bar(self, made: Iterable[Any], total: int | None = None) -> Iterator[Any]:
        """Yield the results, with a progress bar. `total` counts all records, including existing ones."""
        self.start = time.monotonic()
        with Progress("images", total, self.before if total is None else min(self.before, total)) as self.bar:
            for one in made:
                yield one
                self.seconds = time.monotonic() - self.start
                speed = self.committed / max(self.seconds, 1e-9)
                figures = {"tau": f"{self.tau:.2f}", "tokens/s": f"{speed:.3g}", "failed": self.failed}
                self.bar.update(self.before + self.count, figures)

    def with_ray(
        self,
        read: Callable[[], Iterator[Record]],
        make: Callable[[], distributed.Making],
        arguments: Any,
        group: int,
    ) -> Iterator[Any]:
        """Yield the results of the processes of --ray, which take `group` records at a time."""
        auto = arguments.device == "auto" and torch.cuda.is_available()
        gpus = 1.0 if auto or arguments.device.startswith("cuda") else 0.0
        pool = {"workers": arguments.workers, "threads": arguments.threads, "gpus": gpus, "group": group}
        return distributed.run(read, make, done=self.journal.done, repeated=self.repeat, **pool)

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
