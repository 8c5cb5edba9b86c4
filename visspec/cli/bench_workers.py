"""`visspec bench workers`: captions by one worker process and by several, through Ray Data (extra `ray`).

The same held-out scenes are captioned by one worker and by several, of so many threads each; passes alternate in order.
The rate counts from the beginning of the first shard, when all workers have loaded their models, to the last one's end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from visspec.api import distributed
from visspec.api.captions import PROMPT
from visspec.api.shards import Shards
from visspec.api.sources import readers
from visspec.cli import caption_ray
from visspec.cli.arguments import add_captioning, positive
from visspec.cli.caption_records import COLUMNS
from visspec.cli.ray_shards import Totals, pool_of
from visspec.io.files import write_json
from visspec.io.provenance import provenance
from visspec.toys.world.render import to_image
from visspec.toys.world.scene import held_out_scenes


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=positive, default=256, help="how many held-out scenes")
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=1, help="of each worker")
    parser.add_argument("--slots", type=positive, default=8, help="captions that a worker writes at once")
    parser.add_argument("--shard", type=positive, default=16, help="records of a shard")
    parser.add_argument("--passes", type=positive, default=3, help="with one worker, and with several")
    add_captioning(parser)


def run(arguments: argparse.Namespace) -> None:
    rates: dict[int, list[float]] = {1: [], arguments.workers: []}
    texts: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as home:
        for i, scene in enumerate(held_out_scenes(arguments.images)):
            to_image(scene).save(Path(home) / f"{i:05}.png")
        for number in range(arguments.passes):
            for workers in list(rates) if number % 2 == 0 else list(rates)[::-1]:
                rate, found = captioned(arguments, workers, Path(home), f"{workers}-{number}")
                rates[workers].append(rate)
                texts.append(found)
                print(f"{workers} workers: {rate:.2f} images a second", flush=True)
    ratios = [several / one for one, several in zip(rates[1], rates[arguments.workers])]
    record = {
        "bench": "workers", "n_prompts": arguments.images, "threads": arguments.threads, "slots": arguments.slots,
        "speedup": statistics.median(ratios), "ratios": ratios, "load": os.getloadavg()[0],
        "rows": [{"workers": n, "images_per_second": statistics.median(r), "passes": r} for n, r in rates.items()],
        "identical": sum(all(t[id] == text for t in texts) for id, text in texts[0].items()),
        "compared": len(texts[0]), "provenance": provenance(),
    }  # fmt: skip
    print(
        f"{arguments.workers} workers of {arguments.threads} threads over one: {record['speedup']:.2f} times; identical"
        f" {record['identical']}/{record['compared']}; load {record['load']:.1f}"
    )
    write_json(arguments.json, record)


def captioned(arguments: argparse.Namespace, workers: int, home: Path, name: str) -> tuple[float, dict[str, str]]:
    """Images a second of one run, and its captions."""
    given = argparse.Namespace(**{k: v for k, v in vars(arguments).items() if k != "run"} | {"workers": workers})
    given.max_pixels = 64_000_000
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    make = partial(caption_ray.worker, given, arguments.prompt or PROMPT, options)
    shards, totals = Shards(home / "out" / name, COLUMNS), Totals()
    with shards.opened({}):
        for told in distributed.run(readers([home]), make, shards, pool=pool_of(given), size=arguments.shard):
            totals.add(told)
    return totals.rate, {row["id"]: row["caption"] for row in shards.read(["id", "caption"])}
