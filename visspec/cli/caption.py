"""`visspec caption`: writes captions of images as they are finished, with a record of how each was made."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from visspec.cli.arguments import ModelOptions, RayOptions, SamplingOptions, load
from visspec.io import included
from visspec.io.files import Journal, Json, atomic_write
from visspec.io.options import Count, Positive, number, option

if TYPE_CHECKING:
    from visspec.api.captions import Caption, Captions
    from visspec.api.distributed import Making
    from visspec.api.sources import Record

TopK = Annotated[int, number(int, lambda value: value >= 0, "0 (off) or more")]
TopP = Annotated[float, number(float, lambda value: 0 < value <= 1, "a number in (0, 1]")]
LOOKS = 4  # maximum number of files to check whether the included model is suitable
COLUMNS = dict.fromkeys(("id", "image", "prompt", "caption"), "string") | {"tokens": "int64", "rounds": "int64"}
COLUMNS |= {"ended": "string", "drift": "double", "error": "string"}


@dataclass(kw_only=True)
class Options(RayOptions, SamplingOptions, ModelOptions):
    prompt: str | None = option("question about each image (default: Describe this image in detail.)", None)
    max_new_tokens: Positive | None = option("maximum number of tokens (default: 256; 128 for an included model)", None)  # type: ignore[assignment]
    image: list[Path] = option(
        "image (PNG, JPEG, WEBP, BMP, GIF, TIFF, AVIF) or video files; with --out also folders, globs, .jsonl or"
        " .parquet of {image, prompt, id}, .tar shards (webdataset), hf:NAME[:SPLIT] (datasets)",
        positional=True,
    )
    out: Path | None = option(
        "file of records, .jsonl or .parquet; an interrupted run is continued", None, writes="file"
    )
    slots: Positive = option("number of images captioned at once", 8)
    workers: Positive = option("number of threads that read images ahead, or with --ray of processes", 2)
    report: Path | None = option("write an HTML page of the records with thumbnails, with --out", None, writes="file")
    compare: Count = option("also time transformers' generate on this many images, and print the speed-up", 0)
    max_pixels: Positive = option("maximum number of pixels of an image", 64_000_000)
    frames: Positive = option("number of frames read from a video", 8)
    schema: Path | None = option("JSON schema of the captions (pip install 'visspec[grammar]')", None)
    top_k: TopK | None = option("sample from this many most likely tokens (default: all)", None)
    top_p: TopP | None = option("sample from the most likely tokens with this total probability (default: 1)", None)
    stats: bool = option("print the speed even without --out", False)

    @property
    def generation(self) -> dict[str, Any]:
        """Keyword arguments of `generate`. Raises ValueError for top_k or top_p at temperature 0."""
        cuts = {name: value for name in ("top_k", "top_p") if (value := getattr(self, name)) is not None}
        if cuts and not self.temperature:
            name, value = next(iter(cuts.items()))
            raise ValueError(f"--{name.replace('_', '-')}: got {value} at temperature 0, expected one above 0.")
        usual = 128 if included.is_included(self.model_name) else 256
        options = super().generation | {"max_new_tokens": self.max_new_tokens or usual} | cuts
        return options | ({"seed": self.seed} if self.temperature else {})

    @property
    def model_name(self) -> str:
        """The model by name or folder. Raises ValueError if none is given and none is included."""
        return self.model or included.text_model()

    def check(self) -> None:
        """Raise ValueError for arguments that don't go together."""
        from visspec.api import sources

        if self.out is None:
            source = next((s for s in self.image if not sources.is_plain(s)), self.image[0] if self.ray else None)
            if source is not None:
                raise ValueError(f"--out: got none, expected a .jsonl or .parquet file for the records of {source}")
            for name in ("report", "retry_failed"):
                if getattr(self, name):
                    raise ValueError(f"--{name.replace('_', '-')}: got it without --out. Pass both.")
        elif self.out.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"--out: got {self.out}, expected a file that ends in .jsonl or .parquet")
        elif self.out.suffix == ".parquet":
            sources.need("pyarrow", f"--out {self.out}")
        if self.ray and self.compare:
            raise ValueError("--compare: got it with --ray, but generate runs in this process. Leave one of them out.")
        if self.ray:
            sources.need("ray", "--ray", "ray")


def run(arguments: Options) -> int:
    """Caption images without a record, or print captions without --out. Returns the exit code. Finished captions are
    kept if the run is interrupted.
    """
    arguments.check()
    from visspec.api import sources
    from visspec.api.captions import default_prompt
    from visspec.cli.records import RecordRun
    from visspec.eval.report import captions as page
    from visspec.io.provenance import provenance

    options, request = arguments.generation, arguments.prompt or default_prompt(arguments.model_name)
    reader = partial(sources.records, arguments.image)
    records = reader()  # raises for a missing source before work starts
    about = settings(arguments, request, options)
    make = partial(load_captions, arguments, request, options)
    examples: dict[str, Record] = {}  # the first records, with their pixels
    pieces: dict[str, Sequence[tuple[str, str]]] = {}  # their captions by origin
    most = max(arguments.compare, page.MOST if arguments.report else 0)
    if arguments.ray:
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
                results = run.with_ray(reader, partial(worker, make), arguments, group=4 * arguments.slots)
            else:
                new = sources.new_records(records, journal.done, run.repeat)
                results = map(check, captions(remember(new, examples, most)))
            try:
                for one in run.with_bar(results, records.total):
                    run.add(row_of(one))
                    if len(pieces) < most:
                        pieces[one.path] = one.pieces
                    if arguments.out is None and one.text is not None:
                        run.bar.write(f"{one.path}: {one.text}" if len(arguments.image) > 1 else one.text, sys.stdout)
            finally:
                if lines != out:
                    with atomic_write(out) as draft:
                        sources.write_parquet(iter(journal), draft, COLUMNS)
                if arguments.report is not None:
                    images = {id: record.image for id, record in examples.items()}
                    page.write_page(arguments.report, journal, images, pieces, about)
    code = run.end(arguments.out, arguments.stats)
    if good := [record for id, record in examples.items() if id not in journal.failed][: arguments.compare]:
        print(compare(captions, good, run.rate))
    return code


def settings(arguments: Options, request: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of captions, which don't depend on processes, so that any process can continue a run."""
    from visspec import registry

    rule, preset = arguments.acceptance, arguments.preset
    about: dict[str, Any] = {"model": arguments.model_name, "prompt": request, "sampling": options}
    about |= {name: getattr(arguments, name) for name in ("drafter", "acceptance", "frames")}
    about |= {name: value for name in ("batch_invariant", "preset") if (value := getattr(arguments, name))}
    if arguments.schema is not None:
        about["schema"] = read_schema(arguments.schema)
    if preset is not None and rule == "exact":
        rule = registry.preset(preset, "text").acceptance
    return about | {"guarantee": registry.rule(rule).traits.guarantee}


def read_schema(path: Path) -> Json:
    """Read the schema in a file. Raises ValueError if it can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--schema: got {path}, expected a file with a JSON schema ({error}).") from None


def load_captions(
    arguments: Options, request: str, options: dict[str, Any], workers: int
) -> tuple[Captions, Callable[[Caption], Caption]]:
    """Load the model, with threads that read ahead, and a function that checks a caption against --schema."""
    from visspec.api.captions import Captions
    from visspec.api.schemas import JsonGrammars

    fast, processor = load(arguments, needs_pictures=True)
    check: Callable[[Caption], Caption] = lambda caption: caption  # noqa: E731
    if arguments.schema is not None:
        schema, grammars = read_schema(arguments.schema), JsonGrammars(processor.tokenizer, fast.model, "--schema")
        options, check = options | grammars.options(schema), partial(grammars.check, schema=schema)
    reading = {name: getattr(arguments, name) for name in ("slots", "max_pixels", "frames")}
    return Captions(fast, processor, request=request, workers=workers, **reading, **options), check


def worker(make: Callable[[int], tuple[Captions, Callable[[Caption], Caption]]]) -> Making:
    """In an actor: load the model and return a function that makes the captions of records."""
    captions, check = make(1)
    return lambda records: map(check, captions(records))


def warn_of_foreign(arguments: Options) -> None:
    """Warn if the first files of the sources are not images of the kind for which the included model was made."""
    from visspec.api import sources

    local = [source for source in arguments.image if source.is_dir() or sources.is_plain(source)]
    files = (record.image for record in islice(sources.records(local), LOOKS) if record.error is None)
    check = included.table().foreign if arguments.model is None else ""
    if check and (why := included.load(check)(files, arguments.max_pixels)) is not None:
        print(f"visspec: {why}", file=sys.stderr)


def remember(records: Iterable[Record], examples: dict[str, Record], most: int) -> Iterator[Record]:
    """Yield the records, and keep the first `most` in `examples`, by id."""
    for record in records:
        if len(examples) < most:
            examples[record.id] = record
        yield record


def compare(captions: Captions, records: Sequence[Record], rate: float) -> str:
    """Return a sentence that compares a run of `rate` images per second with transformers' `generate` on these records,
    in batches of as many as there are slots. Both include reading and preparing images.
    """
    from visspec.api.captions import prepare

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


def row_of(caption: Caption) -> dict[str, Any]:
    values = caption.text, caption.tokens, caption.rounds, caption.ended, caption.drift, caption.error
    return dict(zip(COLUMNS, (caption.path, caption.record.image, caption.record.prompt, *values)))
