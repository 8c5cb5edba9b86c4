"""`visspec generate --ray --out FOLDER`: images drawn by several processes with Ray Data. FOLDER/images.jsonl lists
them.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from visspec.api import distributed, sources
from visspec.api.images.pipeline import ImagePipeline
from visspec.api.sources import Record, seed_of
from visspec.cli.arguments import is_picture
from visspec.cli.caption_records import RecordRun
from visspec.cli.generate import CHOSEN, MEASURED, Options, pipeline, settings
from visspec.io import included
from visspec.io.files import Journal, replacing

LINES = "images.jsonl"


def run_ray(arguments: Options) -> int:
    """Draw the images that don't exist yet, and return the exit code. Interruptions keep finished images."""
    for name in ("json", "grid", "maps", "stats"):
        if getattr(arguments, name):
            raise ValueError(f"--{name}: got it with --ray. Leave one of them out.")
    if is_picture(arguments.out):
        raise ValueError(f"--out: got {arguments.out} with --ray, expected a folder.")
    sources.need("ray", "--ray", distributed.EXTRA)
    if not arguments.prompt and arguments.prompts is None:
        raise ValueError("prompt: got none, expected at least one.")
    if arguments.prompts is not None:
        sources.prompts(arguments.prompts)  # raises if the file does not exist
    drawing = settings(arguments)
    about: dict[str, Any] = {"model": arguments.model or included.image_model()}
    about |= {name: getattr(arguments, name) for name in ("preset", "seed", *CHOSEN)}
    about |= {name: value for name, value in drawing.items() if name != "batch_size"}
    about |= {"batch_invariant": True} if arguments.batch_invariant else {}
    read = partial(image_records, arguments.prompt, arguments.prompts, arguments.n)
    with Journal(arguments.out / LINES, about, retry=arguments.retry_failed) as journal:
        run = RecordRun(journal)
        make = partial(worker, arguments, drawing)
        for row in run.with_bar(run.with_ray(read, make, arguments, group=arguments.batch_size)):
            if (file := row["image"]) is not None:  # named after its id, so that drawing it again replaces it
                row["image"] = f"{hashlib.blake2b(repr(row['id']).encode(), digest_size=8).hexdigest()}.png"
                with replacing(arguments.out / row["image"]) as draft:
                    draft.write_bytes(file)
            run.add(row)
    return run.end(arguments.out / LINES)


def image_records(texts: list[str], file: Path | None, n: int) -> Iterator[Record]:
    """Yield a record for each image; those of a prompt are ID#0, ID#1, ..."""
    read = chain((Record(text, prompt=text) for text in texts), () if file is None else sources.prompts(file))
    for record in read:
        yield from (replace(record, id=f"{record.id}#{k}") for k in range(n)) if n > 1 else [record]


def worker(arguments: Options, drawing: dict[str, Any]) -> distributed.Making:
    """In an actor: load the model and return a function that draws the images of records."""
    pipe = pipeline(arguments)
    pipe.set_progress_bar_config(disable=True)
    return RecordImages(pipe, drawing, arguments.seed)


class RecordImages:
    """Draws PNG files of records, each with its own seed. If a record can't be drawn, its row has an error."""

    def __init__(self, pipe: ImagePipeline, options: dict[str, Any], seed: int):
        self.pipe, self.options, self.seed = pipe, options, seed

    def __call__(self, records: Iterable[Record]) -> Iterator[dict[str, Any]]:
        records = list(records)
        yield from (self._row(record, error=record.error) for record in records if record.error is not None)
        if whole := [record for record in records if record.error is None]:
            yield from self._tried(whole)

    def _tried(self, records: list[Record]) -> list[dict[str, Any]]:
        """Return the rows; if several records fail together, draw each alone to find the faulty one."""
        try:
            return list(self._drawn(records))
        except (ValueError, RuntimeError) as error:
            if len(records) == 1:
                return [self._row(records[0], error=f"{records[0].id}: {str(error).splitlines()[0]}")]
            return [row for record in records for row in self._tried([record])]

    def _drawn(self, records: list[Record]) -> Iterator[dict[str, Any]]:
        seeds, left = [seed_of(self.seed, record.id) for record in records], iter(records)
        for part in self.pipe.stream([str(record.prompt) for record in records], seed=seeds, **self.options):
            measured = {name: getattr(part.stats[0], name) for name in MEASURED}
            for i, image in enumerate(part.images):
                image.save(file := io.BytesIO(), format="PNG")
                counts = {"tokens": part.tokens[i].numel(), "rounds": int(part.passes[i].max())}
                yield self._row(next(left), image=file.getvalue(), **counts, **measured)

    def _row(self, record: Record, **found: object) -> dict[str, Any]:
        empty = {"image": None, "tokens": 0, "rounds": 0, **dict.fromkeys(MEASURED), "error": None}
        return {"id": record.id, "prompt": record.prompt, "seed": seed_of(self.seed, record.id)} | empty | found
