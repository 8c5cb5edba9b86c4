"""`painter-var` and `painter-var-small`: a VAR on codes of several scales, a smaller one, and CoDe's distillation.

Stage `features` reads pictures with the encoder of `painter`'s VQ model, `vq` teaches a quantiser of several scales on
them, `codes` codes them, `draw` trains the large painter, `small` the small one, `refine` teaches that the large one's
distributions, and `finish` writes both folders with model cards and provenance.

Data: scenes of one shape on plain ground after prompts of GenEval's tasks for one object and colours, the classes;
seeds from 2^30 on are never trained on. Seeds: 7 (vq), 8 (draw), 9 (small), 10 (refine). One CPU core, less than an
hour.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from visspec.io.options import option
from visspec.models.var.images import calibrated
from visspec.models.var.model import VARImageModel, load
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.recipe import Options, Recipe, trained
from visspec.toys.recipes.scale_data import LABELS, RADII, SCALES, SIDE, STEP, rows_of_labels
from visspec.toys.recipes.scale_draw import (
    FIRST,
    FIRST_SHARE,
    LATE,
    RefineStage,
    ScaleStage,
    SharedClassEmbedding,
    SmallStage,
    build,
    score,
    taken,
)
from visspec.toys.recipes.scale_measure import PainterScores, apart, likeness, row
from visspec.toys.recipes.scale_vq import QuantiserStage, load_vq, measure, write_codes, write_features

NAMES = {"painter": "painter-var", "small": "painter-var-small"}
FILES = {"vq": "quantiser.pt", "draw": "painter.pt", "small": "small.pt", "refine": "refined.pt"}
GUIDANCES = (1.5, 2.5, 4.0)
HANDOVERS = (4, 5, 6)
SHARES = (0.1,)
DEPTHS = (1, 2)
SEED = 0


@dataclass
class ScaleOptions(Options):
    """Options of the recipe."""

    vq_steps: int = option("steps of the quantiser", 600)
    vq_rows: int = option("pictures in a batch of the quantiser's training", 32)
    pairs: int = option("pairs of class and picture that both are taught", 6000)
    steps: int = option("steps of the large painter", 1000)
    small_steps: int = option("steps of the small one on codes", 500)
    refine_steps: int = option("and on the large one's distributions", 250)
    rows: int = option("pictures in a batch of one worker", 16)
    rate: float = option("peak learning rate of both painters", 2e-3)
    every: int = option("steps between reports and checkpoints", 400)
    copies: int = option("pictures of each prompt that are measured", 1)


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read them back, measure and describe them."""
    codec = load_vq(options.out)
    stages = {part: cards.read_stage(options.out / file)[1] for part, file in FILES.items()}
    models = {}
    for part, name in (("draw", "painter"), ("refine", "small")):
        taught = SharedClassEmbedding(build(name, codec))
        taken(taught, options.out / FILES[part])
        save(taught.settled(), None, options.out / NAMES[name], torch.float16)
        models[name] = load(options.out / NAMES[name])
    rows = rows_of_labels(2 * options.every_prompt)
    sweep = [score(models["painter"], rows, guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    judge = PainterScores(rows_of_labels(options.every_prompt), options.copies)
    measured = figures(models["painter"], models["small"], guidance, judge)
    measured |= {"sweep": sweep, "decoded": measure(codec)}
    own = {"painter": painter_figures(models["painter"], measured), "small": {}}
    seconds = {name: stage["seconds"] for name, stage in stages.items()}
    for name, model in models.items():
        folder = options.out / NAMES[name]
        model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, guidance_scale=guidance)
        model.generation_config.save_pretrained(folder)
        record = cards.origin(
            model, f"visspec.toys {NAMES['painter']}", folder, measured, pairs=options.pairs, rows=options.rows,
            **stages, seeds={"vq": 7, "draw": 8, "small": 9, "refine": 10, "measured": SEED},
        )  # fmt: skip
        text = cards.fill(
            NAMES[name],
            record=record,
            network=model.var.config,
            parameters=cards.millions(model.var),
            codec=cards.millions(model.autoencoder),
            copies=options.copies,
            swept=len(rows),
            training=sum(seconds.values()),
            parts=", ".join(f"{part} {spent / 60:.0f}" for part, spent in seconds.items()),
            first=FIRST,
            late=LATE,
            note=options.note,
            **own[name],
        )
        cards.publish(folder, text)
    cards.say(options.out, stages=stages)


def figures(model: VARImageModel, small: VARImageModel, guidance: float, judge: PainterScores) -> dict[str, Any]:
    """Every way to draw, by name, with the distributions' distances by scale."""
    rows: dict[str, Any] = {}
    rows["plain"], plain = row(judge, model, guidance, SEED)
    rows["small alone"], _ = row(judge, small, guidance, SEED)
    for handover in HANDOVERS:
        rows[f"code, {handover}"], _ = row(judge, model, guidance, SEED, refiner=small, handover=handover)
    kept = {}
    for share in SHARES:
        budget = calibrated(model, share)
        rows[f"scalekv, {share}"], out = row(judge, model, guidance, SEED, budget=budget)
        rows[f"scalekv, {share}"] |= likeness(plain, out) | {"window": budget.window, "tokens": budget.tokens}
        rows[f"scalekv, {share}"]["budget_bytes"] = max(budget.bytes(model.var, 2 * rows["plain"]["batch"]))
        kept[str(share)] = apart(model, model, plain, budget)
    for rule in ("scales", "repaired"):
        for depth in DEPTHS:
            name = f"{rule}, {depth} drafted"
            rows[name], out = row(judge, model, guidance, SEED, rule, depth, small)
            rows[name] |= likeness(plain, out)
    for found in rows.values():
        found["fd_ratio"] = round(found["fd"] / rows["plain"]["fd"], 3)
    return {"guidance": guidance, "rows": rows, "small": apart(model, small, plain), "kept": kept}


def painter_figures(model: VARImageModel, measured: dict[str, Any]) -> dict[str, Any]:
    """What the large painter's card says beside its provenance."""
    rows, kept, small = measured["rows"], measured["kept"][str(SHARES[0])], measured["small"]
    lines = (
        [name, *(f"{r[key]:.{digits}f}" for key, digits in (("passes", 2), ("geneval", 3), ("fd", 2), ("fd_ratio", 2))),
         *(f"{r[key] / 1e3:.0f}" for key in ("cache_bytes", "pass_bytes"))]
        for name, r in rows.items()
    )  # fmt: skip
    accepted = {name: r["acceptance_by_depth"] for name, r in rows.items() if "acceptance_by_depth" in r}
    by_map = {
        "entropy": small["entropy"], "KL to the small model": small["kl"], "total variation to it": small["tv"],
        "KL, a tenth of the cache": kept["kl"], "total variation": kept["tv"],
    }  # fmt: skip
    return {
        "plain": rows["plain"],
        "drafted": rows["scales, 1 drafted"],
        "maps": len(SCALES),
        "total": SCALES.total,
        "sides": [side for side, _ in SCALES.grids],
        "codes": model.autoencoder.shape.codes,
        "side": SIDE,
        "classes": len(LABELS),
        "rows": cards.table(lines),
        "sweep": cards.swept(measured["sweep"]),
        "sizes": " | ".join(map(str, SCALES.sizes)),
        "rules": cards.rule(len(SCALES)),
        "by_map": cards.table([name, *(f"{value:.3f}" for value in values)] for name, values in by_map.items()),
        "accepted": "; ".join(f"`{name}` {', '.join(map(str, shares))}" for name, shares in accepted.items()),
        "step": STEP,
        "radii": len(RADII),
        "short": FIRST_SHARE,
    }


PAINTER = Recipe(
    NAMES["painter"],
    "Train the next-scale painters.",
    ScaleOptions,
    {
        "features": write_features,
        "vq": trained(QuantiserStage),
        "codes": write_codes,
        "draw": trained(ScaleStage),
        "small": trained(SmallStage),
        "refine": trained(RefineStage),
        "finish": finish,
    },
)
