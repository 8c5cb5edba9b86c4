"""Train every preset of the feature drafter on the included captioner, on the same answers, and compare them.

python -m visspec.recipes.drafter_presets --out runs/presets [--steps 300] [--world emoji]

Drafts are chains of one depth for all, so that what differs is the network; times are of one thread of this machine.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from visspec.accept.exact import Exact
from visspec.api import loading as targets
from visspec.api import zoo
from visspec.eval.world.worlds import WORLDS, world
from visspec.files import write_json
from visspec.models.drafters.eagle import FeatureDrafter
from visspec.models.drafters.eagle_heads import EagleDrafter
from visspec.models.targets.hf_decoder import HFDecoder
from visspec.provenance import provenance
from visspec.recipes.captioner_card import NAMES
from visspec.recipes.captioner_drafter import Scenes, held_out
from visspec.recipes.train_drafter import of_preset
from visspec.train.loop import Plan, Trainer
from visspec.train.validation import measure

OURS = "ours"  # the drafter of `visspec train drafter` without a preset
DEPTH = 8
SIZES = {"batch": 16, "rows": 8, "group": 4, "reuse": 4}


def compared(name: str, model, scenes: Scenes, checks, steps: int, folder: Path) -> dict[str, Any]:
    """Train one preset and measure it on held-out scenes, at temperature 0 and 1."""
    if name == OURS:
        drafter: Any = FeatureDrafter.for_model(model, image_latents=8, levels=DEPTH)
        plan = Plan(steps=steps, unroll=5, rate=2e-3, **SIZES)
    else:
        network, preset = of_preset(name, model, {"levels": DEPTH})
        drafter = EagleDrafter.for_model(model, **network)
        plan = Plan(**{"steps": steps, "rate": 2e-3, **SIZES, **preset.plan})
    target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True)
    record = provenance(model, recipe="drafter_presets", preset=name)
    start = time.process_time()
    Trainer(target, drafter, Exact(), scenes, plan, folder / name, record).run()
    seconds = time.process_time() - start
    found: dict[str, Any] = {"preset": name, "parameters": sum(p.numel() for p in drafter.head.parameters())}
    found["processor_seconds"] = round(seconds, 1)
    for key, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        tau = measure(target, drafter, Exact(), checks(temperature), DEPTH)
        found[f"tau_{key}"], found[f"by_depth_{key}"] = round(tau.tau, 3), tau.by_depth
    return found


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    depths = " ".join(f"{share:.2f}" for share in row["by_depth_greedy"])
    taus = " | ".join(f"{row[f'tau_{key}']:.2f} / {row[f'tau_{key}'] - 1:.2f}" for key in ("greedy", "sampled"))
    return f"| {row['preset']} | {row['parameters']:,} | {row['processor_seconds']:.0f} s | {taus} | {depths} |"


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--world", choices=WORLDS, default="shapes")
    parser.add_argument("--presets", nargs="+", default=[OURS, *zoo.TRAINED])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seen = world(options.world)
    model, processor = targets.load(str(zoo.CHECKPOINTS / NAMES[options.world][False]))
    checks = held_out(model, processor, seen, 16, 2)
    rows = []
    for name in options.presets:
        scenes = Scenes(model, processor, seen, SIZES["batch"])
        rows.append(compared(name, model, scenes, checks, options.steps, options.out))
        print(json.dumps(rows[-1]), flush=True)
        write_json(
            options.out / "presets.json", {"rows": rows, "steps": options.steps, "provenance": provenance(model)}
        )
    head = "| preset | parameters | training | tau greedy / without bonus | tau sampled / without bonus | by depth |"
    print("\n".join([head, "|---|---|---|---|---|---|", *map(line, rows)]))


if __name__ == "__main__":
    main()
