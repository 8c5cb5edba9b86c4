"""`visspec bench workers`: captions by one worker process and by several, through Ray Data (extra `ray`).

The same held-out scenes are captioned by one worker and by several, of so many threads each; passes alternate in order.
The rate counts from the beginning of the first shard, when all workers have loaded their models, to the last one's end.
"""

import os
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from visspec.api import distributed
from visspec.api.captions import PROMPT
from visspec.api.shards import Shards
from visspec.api.sources import readers
from visspec.cli import caption, caption_records
from visspec.cli.arguments import CaptioningOptions, Positive
from visspec.cli.ray_shards import Totals, pool_of
from visspec.eval.bench.paired import turns
from visspec.io import included
from visspec.io.files import write_json
from visspec.io.options import option
from visspec.io.provenance import provenance


@dataclass(kw_only=True)
class Options(CaptioningOptions):
    images: Positive = option("how many held-out scenes", 256)
    workers: Positive = option(default=2)
    threads: Positive = option("of each worker", 1)
    slots: Positive = option("captions that a worker writes at once", 8)
    shard: Positive = option("records of a shard", 16)
    passes: Positive = option("with one worker, and with several", 3)


def run(arguments: Options) -> None:
    rates: dict[int, list[float]] = {1: [], arguments.workers: []}
    texts: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as home:
        for i, image in enumerate(included.scenes().images(arguments.images)):
            image.save(Path(home) / f"{i:05}.png")
        for number, order in turns(list(rates), arguments.passes):
            for workers in order:
                rate, found = time_run(arguments, workers, Path(home), f"{workers}-{number}")
                rates[workers].append(rate)
                texts.append(found)
                print(f"{workers} workers: {rate:.2f} images a second", flush=True)
    ratios = [several / one for one, several in zip(rates[1], rates[arguments.workers])]
    record = {"bench": "workers", "n_prompts": arguments.images, "threads": arguments.threads, "slots": arguments.slots}
    rows = [{"workers": n, "images_per_second": statistics.median(r), "passes": r} for n, r in rates.items()]
    record |= {"speedup": statistics.median(ratios), "ratios": ratios, "load": os.getloadavg()[0], "rows": rows}
    same = sum(all(t[id] == text for t in texts) for id, text in texts[0].items())
    record |= {"identical": same, "compared": len(texts[0]), "provenance": provenance()}
    print(
        f"{arguments.workers} workers of {arguments.threads} threads over one: {record['speedup']:.2f} times; identical"
        f" {record['identical']}/{record['compared']}; load {record['load']:.1f}"
    )
    write_json(arguments.json, record)


def time_run(arguments: Options, workers: int, home: Path, name: str) -> tuple[float, dict[str, str]]:
    """Images a second of one run, and its captions."""
    named = {field: getattr(arguments, field) for field in ("model", "drafter", "acceptance", "slots", "threads")}
    given = caption.Options(image=[home], workers=workers, **named, **arguments.hardware)
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    make = partial(caption_records.worker, given, arguments.prompt or PROMPT, options)
    shards, totals = Shards(home / "out" / name, caption_records.COLUMNS), Totals()
    with shards.lock({}):
        for told in distributed.run(readers([home]), make, shards, pool=pool_of(given), size=arguments.shard):
            totals.add(told)
    return totals.rate, {row["id"]: row["caption"] for row in shards.read(["id", "caption"])}
