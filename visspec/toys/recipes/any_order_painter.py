"""`painter-any-order`: a RandAR behind words, on the codes of the included painter's VQ model.

Stage `tokens` codes pictures with the VQ model of `painter`, `draw` trains a RandAR behind words on them, `finish`
writes a complete folder with a model card and its provenance.

Data: the pairs of the painter's recipe. Seeds: 6 (draw). Two CPU cores, 1.6 s a step and 55 ms a pair.
"""

import argparse
from dataclasses import dataclass

import torch

from visspec.io.options import option
from visspec.models.randar.model import load
from visspec.toys.recipes import cards
from visspec.toys.recipes.any_order_data import included_vq, write_tokens
from visspec.toys.recipes.any_order_draw import NAMED, WHOLE, AnyOrderStage, build, score
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter_build import build_processor
from visspec.toys.recipes.recipe import Options, Recipe, trained
from visspec.toys.world.suite import suite

NAME, SEED = "painter-any-order", 0
GUIDANCES = (1.0, 2.0, 3.0)
ORDERS = ("halton", "spread", "raster")
DRAFTERS = ("none", "ahead:levels=4", "ahead:levels=8", "jacobi:window=8", "neighbours:levels=8")


@dataclass
class AnyOrderOptions(Options):
    """Options of the recipe."""

    pairs: int = option("pairs of prompt and picture", 6000)
    steps: int = option("steps of the draw stage", 4500)
    rows: int = option("pictures in a batch of one worker", 8)
    rate: float = option("peak learning rate", 1.5e-3)
    every_prompt: int = option("measure the finished painter on every such prompt", 8)


def finish(options: argparse.Namespace) -> None:
    """Write the folder from the last checkpoint, read it back, measure it and describe it."""
    saved, stage = cards.read_stage(options.out / "any-order.pt")
    made, processor, folder = build(included_vq()), build_processor(), options.out / NAME
    made.load_state_dict(saved["model"])
    save(made, processor, folder, torch.float16)
    model, rows = load(folder), suite()[:: options.every_prompt]
    sweep = [score(model, processor, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    model.generation_config.guidance_scale = guidance
    model.generation_config.save_pretrained(folder)
    few = rows[::4]

    def passes(order: str) -> dict[str, float]:
        drawn = (score(model, processor, few, guidance, SEED, order=order, drafter=drafter) for drafter in DRAFTERS)
        return dict(zip(DRAFTERS, (record["passes"] for record in drawn)))

    drawn = {o: score(model, processor, rows, guidance, SEED, order=o, drafter="none") for o in ORDERS}
    taken = {order: passes(order) for order in ORDERS}
    measured = {"sweep": sweep, "swept": len(rows[::2]), "pictures": drawn, "few": len(few), "passes": taken}
    record = cards.origin(
        model, f"visspec.toys {NAME}", folder, measured, draw=stage, seeds={"draw": 6, "measured": SEED},
        rows=options.rows * options.workers, pairs=options.pairs,
    )  # fmt: skip
    shares = {o: [f"{taken[o][drafter]:.3f}" for drafter in DRAFTERS] for o in ORDERS}
    text = cards.fill(
        NAME,
        record=record,
        sizes=model.net.config,
        parameters=cards.millions(model),
        places=model.net.config.grid**2,
        prompts=len(rows),
        rows=cards.table([order, f"{drawn[order]['geneval']:.3f}", *shares[order]] for order in ORDERS),
        drafters=" | ".join(f"`{drafter}`" for drafter in DRAFTERS),
        rules=cards.rule(len(DRAFTERS)),
        guidance=guidance,
        sweep=cards.swept(sweep),
        seen=stage["steps"] * record["rows"],
        named=NAMED,
        whole=WHOLE,
        note=options.note,
    )
    cards.publish(folder, text)
    cards.say(folder, draw=stage, guidance=guidance)


PAINTER = Recipe(
    NAME,
    "Train an any-order painter on the codes of the included painter's VQ model.",
    AnyOrderOptions,
    {"tokens": write_tokens, "draw": trained(AnyOrderStage), "finish": finish},
)
