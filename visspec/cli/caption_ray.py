"""`visspec caption SOURCES --ray --out FOLDER`: captions by several processes, through Ray Data."""

from functools import partial
from typing import Any

from visspec.api import distributed, sources
from visspec.api.accelerate import accelerate
from visspec.api.captions import PROMPT, Captions
from visspec.api.shards import EXTRA, Shards
from visspec.cli.arguments import load
from visspec.cli.caption import Options, settings, warn_of_foreign
from visspec.cli.caption_records import COLUMNS, row_of
from visspec.cli.ray_shards import refuse, write


def run_ray(arguments: Options, options: dict[str, Any]) -> int:
    """Finished shards are kept whatever ends it; ids that are there are not captioned again. Returns the exit code."""
    out = refuse(arguments, "json", "report", "stats")
    sources.need("ray", "--ray", EXTRA)
    readers = sources.readers(arguments.image)
    warn_of_foreign(arguments)
    request = arguments.prompt or PROMPT
    make = partial(worker, arguments, request, options)
    return write(readers, make, Shards(out, COLUMNS), settings(arguments, request, options), arguments)


def worker(arguments: Options, request: str, options: dict[str, Any]) -> distributed.Making:
    """In an actor: load the model. What is returned makes the captions of records."""
    model, processor, drafter = load(arguments)
    fast = accelerate(model, drafter, acceptance=arguments.acceptance)
    reading = {name: getattr(arguments, name) for name in ("slots", "max_pixels")}
    captions = Captions(fast, processor, request=request, workers=1, **reading, **options)
    return lambda records: map(row_of, captions(records))
