"""`visspec bench drafters`: trained drafters of one target beside each other, on the same held-out scenes.

What a drafter's tokens are accepted for is counted at its whole depth in every round, so it does not depend on the
machine. Times are those of `bench caption`, where the pace chooses the depth; --untimed leaves them out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from visspec.api import loading, presets, zoo
from visspec.api.accelerate import accelerate
from visspec.api.captions import PROMPT, prepare
from visspec.cli.arguments import add_hardware, positive
from visspec.cli.bench_caption import CaptionArm, StockCaptionArm, acceptance, reached
from visspec.eval.bench import paired as speed
from visspec.io.checkpoint import read_shapes
from visspec.io.files import write_json
from visspec.io.provenance import provenance
from visspec.toys.world.worlds import WORLDS, known_to, world

MOST = 128  # new tokens


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "drafters", nargs="+", metavar="NAME=DRAFTER", help="a name with options or a folder, as --drafter of others"
    )
    parser.add_argument("--model", help="folder or hub id of a vision-language model (default: the embedded captioner)")
    parser.add_argument("--images", type=positive, default=32, help="how many held-out scenes")
    parser.add_argument("--world", choices=WORLDS, help="of the scenes; default: the one whose words the model knows")
    parser.add_argument("--threads", type=positive, help="torch threads")
    parser.add_argument("--untimed", action="store_true", help="count what is accepted, and time nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    add_hardware(parser)


def run(arguments: argparse.Namespace) -> None:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    named = parsed(arguments.drafters)
    hardware = {name: getattr(arguments, name) for name in ("device", "dtype", "trust_remote_code")}
    model, processor = loading.load(arguments.model, **hardware)
    place = world(arguments.world) if arguments.world else known_to(processor, lambda w: w.captions.vocabulary())
    images = [place.to_image(scene) for scene in place.scenes(arguments.images)]
    record = bench_drafters(model, processor, images, named, timed=not arguments.untimed, seed=arguments.seed)
    Console().print(table(record))
    write_json(arguments.json, record)


def parsed(given: Sequence[str]) -> dict[str, str]:
    """Drafters by name. Raises ValueError for one without a name, or a name that comes twice."""
    named: dict[str, str] = {}
    for text in given:
        name, equals, spec = text.partition("=")
        if not (name and equals and spec) or name in named:
            why = "comes twice" if name in named else "has no name"
            raise ValueError(f"drafters: {text!r} {why}, expected NAME=DRAFTER, each name once")
        named[name] = spec
    return named


def bench_drafters(
    model, processor, images: Sequence, named: dict[str, str], *, timed: bool = True, seed: int = 0
) -> dict[str, Any]:
    """The JSON object of docs/evaluate.md: a row for every drafter of `named`."""
    fast = {name: accelerate(model, spec) for name, spec in named.items()}
    prompts = [(i, prepare(processor, [image], PROMPT, model)) for i, image in enumerate(images)]
    base: dict[str, Any] = {"max_new_tokens": MOST, "do_sample": False}
    whole = {name: CaptionArm(accelerate(model, spec, adaptive=False), base, seed) for name, spec in named.items()}
    stock = StockCaptionArm(model, base, seed)
    if timed:
        arms: dict[str, Any] = {"transformers": stock, "plain": CaptionArm(accelerate(model, None), base, seed)}
        arms |= {f"drafter {name}": CaptionArm(one, base, seed) for name, one in fast.items()}
        times, failures = speed.interleave(arms, prompts, 3, lambda p: tqdm(p, desc="times", leave=False))
    else:
        times, failures = {}, []
    counted, failed = speed.interleave(
        {"transformers": stock, **{f"drafter {name}": arm for name, arm in whole.items()}}, prompts, 0,
        lambda p: tqdm(p, desc="counts", leave=False),
    )  # fmt: skip
    rows = []
    for name, spec in named.items():
        found, one = counted[f"drafter {name}"], fast[name]
        against = speed.compare(counted["transformers"], found)
        row = {
            "name": name,
            "drafter": spec,
            "guarantee": one.setup.guarantee,
            "levels": one.setup.length_policy.levels,
        }
        row |= {"identical": against["identical"], "compared": against["compared"], **speed.tau(found)}
        row |= {"acceptance_by_depth": acceptance(found), "reached_by_depth": reached(found), **about(spec)}
        if timed:
            ours = times[f"drafter {name}"]
            ratio, over = speed.compare(times["transformers"], ours), speed.compare(times["plain"], ours)
            row |= {"speedup": ratio["speedup"], "speedup_ci95": ratio["speedup_ci95"]}
            row |= {"over_plain": over["speedup"], "over_plain_ci95": over["speedup_ci95"]}
            row |= {"tau_paced": speed.tau(ours)["tau"], "time_s": stages(ours)}
            row |= {key: speed.ideal(times["plain"], ours)[key] for key in ("verify_over_plain", "draft_over_plain")}
        rows.append(row)
    return {
        "bench": "drafters", "rows": rows, "failures": failures + failed, "n_prompts": len(images), "batch_size": 1,
        "max_new_tokens": MOST, "temperature": 0.0, "seed": seed, "provenance": provenance(model, seed=seed),
        "target": getattr(model.config, "_name_or_path", ""),
    }  # fmt: skip


def stages(runs: Sequence[speed.ArmRun]) -> dict[str, float]:
    """Seconds by stage, of all runs."""
    names = sorted({stage for run in runs for stage in run.stages})
    return {name: sum(run.stages.get(name, 0.0) for run in runs) for name in names}


def about(spec: str) -> dict[str, Any]:
    """What the checkpoint of a drafter says of it: numbers that were trained, seconds of that, and what it sees of the
    picture; None where it has none, or does not say.
    """
    name = zoo.parse(spec)[0]
    folder = zoo.located(name)
    if not (folder / "config.json").is_file():
        return dict.fromkeys(("parameters", "training_s", "sees_image"))
    told = folder / "provenance.json"
    made = json.loads(told.read_text()) if told.is_file() else {}
    preset = presets.TRAINED.get(str(made.get("preset")))
    return {
        "parameters": sum(math.prod(shape) for shape in read_shapes(folder).values()),
        "training_s": (made.get("training") or {}).get("seconds"),
        "sees_image": preset.sees if preset else None,
    }


def table(record: dict[str, Any]) -> Table:
    """A rich table of a record, for the terminal."""
    view = Table(title=f"{record['n_prompts']} images, greedy, batch 1")
    for column in ("drafter", "levels", "tau", "identical", "parameters", "training s", "over transformers"):
        view.add_column(column, justify="left" if column == "drafter" else "right")
    for row in record["rows"]:
        size, seconds = row["parameters"], row["training_s"]
        paced = "not measured"
        if "speedup" in row:
            paced = f"{row['speedup']:.2f} [{row['speedup_ci95'][0]:.2f}, {row['speedup_ci95'][1]:.2f}]"
        view.add_row(
            row["name"], str(row["levels"]), f"{row['tau']:.2f}", f"{row['identical']}/{row['compared']}",
            "-" if size is None else f"{size / 1e6:.2f} M", "-" if seconds is None else f"{seconds:.0f}", paced,
        )  # fmt: skip
    view.caption = "tau at the whole depth, bonus included; times with the depth that pays"
    return view
