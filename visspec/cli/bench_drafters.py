"""`visspec bench drafters`: trained drafters of one target beside each other, on the same held-out scenes.

What a drafter's tokens are accepted for is counted at its whole depth in every round, so it does not depend on the
machine. Times are those of `bench caption`, where the pace chooses the depth; --untimed leaves them out.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from visspec.api import loading, presets, zoo
from visspec.api.accelerate import accelerate
from visspec.api.captions import PROMPT, prepare
from visspec.cli.arguments import Positive, TargetOptions
from visspec.cli.bench import CaptionArm, Cell, ScenesOptions, StockCaptionArm, cell, measured_on, table
from visspec.eval.bench import paired as speed
from visspec.io.checkpoint import read_shapes
from visspec.io.options import option

MOST = 128  # new tokens
CAPTION = "tau at the whole depth, bonus included; times with the depth that pays"
COLUMNS: dict[str, Cell] = {
    "drafter": "{name}",
    "levels": "{levels}",
    "tau": "{tau:.2f}",
    "identical": "{identical}/{compared}",
    "parameters": lambda row: "-" if row["parameters"] is None else f"{row['parameters'] / 1e6:.2f} M",
    "training s": lambda row: "-" if row["training_s"] is None else f"{row['training_s']:.0f}",
    "over transformers": lambda row: cell(PACED, row) or "not measured",
}
PACED = "{speedup:.2f} [{speedup_ci95[0]:.2f}, {speedup_ci95[1]:.2f}]"


@dataclass(kw_only=True)
class Options(ScenesOptions, TargetOptions):
    drafters: list[str] = option(
        "a name with options or a folder, as --drafter of others", positional=True, metavar="NAME=DRAFTER"
    )
    images: Positive = option("how many held-out scenes", 32)
    untimed: bool = option("count what is accepted, and time nothing", False)
    seed: int = option(default=0)


def run(arguments: Options) -> None:
    arguments.begin()
    record = bench_drafters(parse_drafters(arguments.drafters), arguments)
    arguments.end(record, table(f"{record['n_prompts']} images, greedy, batch 1", record["rows"], COLUMNS, CAPTION))


def parse_drafters(given: Sequence[str]) -> dict[str, str]:
    """Drafters by name. Raises ValueError for one without a name, or a name that comes twice."""
    named: dict[str, str] = {}
    for text in given:
        name, equals, spec = text.partition("=")
        if not (name and equals and spec) or name in named:
            why = "comes twice" if name in named else "has no name"
            raise ValueError(f"drafters: {text!r} {why}, expected NAME=DRAFTER, each name once")
        named[name] = spec
    return named


def bench_drafters(named: dict[str, str], arguments: Options) -> dict[str, Any]:
    """The JSON object of docs/evaluate.md: a row for every drafter of `named`."""
    model, processor = loading.load(arguments.model, **arguments.hardware)
    fast, seed = {name: accelerate(model, spec) for name, spec in named.items()}, arguments.seed
    images = arguments.scenes(processor).images(arguments.images)
    prompts = [(i, prepare(processor, [image], PROMPT, model)) for i, image in enumerate(images)]
    base: dict[str, Any] = {"max_new_tokens": MOST, "do_sample": False}
    whole = {name: CaptionArm(accelerate(model, spec, adaptive=False), base, seed) for name, spec in named.items()}
    stock = StockCaptionArm(model, base, seed)
    if not arguments.untimed:
        arms: dict[str, Any] = {"transformers": stock, "plain": CaptionArm(accelerate(model, None), base, seed)}
        arms |= {f"drafter {name}": CaptionArm(one, base, seed) for name, one in fast.items()}
        times, failures = speed.interleave(arms, prompts, 3, "times")
    else:
        times, failures = {}, []
    counting = {"transformers": stock} | {f"drafter {name}": arm for name, arm in whole.items()}
    counted, failed = speed.interleave(counting, prompts, 0, "counts")
    rows = []
    for name, spec in named.items():
        found, setup = counted[f"drafter {name}"], fast[name].setup
        against = speed.compare(counted["transformers"], found)
        row = {"name": name, "drafter": spec, "guarantee": setup.guarantee, "levels": setup.length_policy.levels}
        row |= {key: against[key] for key in ("identical", "compared")}
        row |= speed.tau(found) | speed.acceptance(found) | about(spec)
        if not arguments.untimed:
            ours = times[f"drafter {name}"]
            row |= speed.over("speedup", times["transformers"], ours) | speed.over("over_plain", times["plain"], ours)
            row |= {"tau_paced": speed.tau(ours)["tau"], "time_s": speed.time_by_stage(ours)}
            row |= {key: speed.ideal(times["plain"], ours)[key] for key in ("verify_over_plain", "draft_over_plain")}
        rows.append(row)
    record = {"bench": "drafters", "rows": rows, "failures": failures + failed, "n_prompts": len(images)}
    record |= {"batch_size": 1, "max_new_tokens": MOST, "temperature": 0.0, "seed": seed}
    return measured_on(model, seed=seed) | record


def about(spec: str) -> dict[str, Any]:
    """What the checkpoint of a drafter says of it: numbers that were trained, seconds of that, and what it sees of the
    picture; None where it has none, or does not say.
    """
    name = zoo.parse(spec)[0]
    folder = zoo.included_folder(name)
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
