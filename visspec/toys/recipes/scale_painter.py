"""`painter-var` and `painter-var-small`: a VAR on codes of several scales, a smaller one, and CoDe's distillation.

Stage `features` reads pictures with the encoder of `painter-emoji`'s VQ model, `vq` teaches a quantiser of several
scales on them, `codes` codes them, `draw` trains the large painter, `small` the small one, `refine` teaches that the
large one's distributions, and `finish` writes both folders with model cards and provenance.

Data: the pairs of `animals`. Seeds: 7 (vq), 8 (draw), 9 (small), 10 (refine). One CPU core.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from visspec.api.images import ImageOutput, ImagePipeline
from visspec.eval.metrics import fid
from visspec.eval.metrics.features import FeatureTable, RandomConv
from visspec.io.options import option
from visspec.loop.stats import acceptance_by_depth
from visspec.models.scales.kv_budget import BudgetedCache, CacheBudget
from visspec.models.scales.reading import ConditionState
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.images import calibrate_budget
from visspec.models.var.model import VARImageModel, load
from visspec.models.var.target import ScalePrompt
from visspec.toys.recipes import animals, cards, scale_codes, scale_draw
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter_score import draw_pictures, pictures_of, to_uint8
from visspec.toys.recipes.recipe import PairOptions, Recipe, write_coded
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.suite import Metadata

NAMES = {"painter": "painter-var", "small": "painter-var-small"}
FILES = {"vq": "quantiser.pt", "draw": "painter.pt", "small": "small.pt", "refine": "refined.pt"}
GUIDANCES = (1.5, 2.5, 4.0)
HANDOVERS = (4, 5, 6)
SHARES = (0.1,)
DEPTHS = (1, 2)
SEED = 0
REFERENCES = 4  # renders of each prompt that the distance is taken to


@dataclass
class ScaleOptions(PairOptions):
    vq_steps: int = option("steps of the quantiser", 600)
    vq_rows: int = option("pictures in a batch of the quantiser's training", 32)
    small_steps: int = option("steps of the small one on codes", 500)
    refine_steps: int = option("and on the large one's distributions", 250)


class PainterScores:
    """Right animals and Frechet distance of pictures of prompts."""

    def __init__(self, rows: Sequence[Metadata]):
        self.rows, self.extractor = rows, RandomConv()
        rng = np.random.default_rng(HELD_OUT_SEED)
        scenes = [animals.paint_scene(row, rng) for row in rows for _ in range(REFERENCES)]
        self.reference = FeatureTable(self.features(animals.pixels(scenes)), [])

    def __call__(self, out: ImageOutput) -> dict[str, Any]:
        """`images` (share of right ones) and `fd`."""
        pictures = pictures_of(out)
        right = animals.geneval(to_uint8(pictures), self.rows)
        found = fid.compare(FeatureTable(self.features(pictures), []), self.reference, self.extractor)
        distance = {"fd": round(found["value"], 4), "fd_floor": round(found["noise_floor_here"], 4)}
        return {"images": right["images"], **distance, "n": len(self.rows)}

    def features(self, pictures: Tensor) -> Tensor:
        """Those of pictures (B, 3, S, S) in -1..1."""
        stored = torch.from_numpy(to_uint8(pictures)).permute(0, 3, 1, 2)
        return torch.cat([self.extractor(part) for part in stored.split(32)])


def row(
    judge: PainterScores,
    model: VARImageModel,
    guidance: float,
    rule: str = "scales",
    drafted: int = 0,
    small: VARImageModel | None = None,
    **parts: object,
) -> tuple[dict[str, Any], ImageOutput]:
    """Figures of one way to draw: the judge's; passes of the target, and bytes of its cache between passes and in one,
    of the largest batch; of scales that `small` drafts, always so many, how many were accepted of those reached, by
    depth.
    """
    drafter = None
    if small is not None:
        drafter = SmallVAR(small.var)
        drafter.traits = replace(drafter.traits, adaptive_depth=False)  # by the clock
    pipe, texts = ImagePipeline(model, None, levels=drafted or None, parts=parts), [one["prompt"] for one in judge.rows]
    out = draw_pictures(pipe, texts, guidance, SEED, scale_draw.BATCH, drafter=drafter, acceptance=rule)
    passes = [int(numbers.max()) + 1 for numbers in out.passes]
    first = out.traces[0].memory
    found = judge(out) | {"passes": round(sum(passes) / len(passes), 3), "guarantee": out.stats[0].guarantee}
    found |= {"cache_bytes": first["cache"], "pass_bytes": first["pass"], "batch": len(out.traces[0].origin)}
    if drafter is not None:
        rounds = [entry for trace in out.traces for entry in trace.rounds]
        found["acceptance_by_depth"] = [round(share, 3) for share in acceptance_by_depth(rounds)]
    return found, out


@torch.inference_mode()
def laws(
    painter: VARImageModel, classes_B: Tensor, codes_BT: Tensor, cache: BudgetedCache | None = None
) -> list[Tensor]:
    """Log-distributions (B, S, V) of each map, given the maps before, without guidance."""
    scales = painter.var.config.scales
    reading = ConditionState(painter.var, painter.autoencoder.quantize, classes_B, len(classes_B), cache)
    found: list[Tensor] = []
    for k in range(len(scales)):
        value = None if k == 0 else codes_BT[:, None, scales.begins[k - 1] : scales.begins[k]]
        (group,) = reading.read(value)
        if k:
            reading.keep([1] * len(classes_B))
        found.append(group.logits[0].float().log_softmax(-1))
    return found


def apart(
    model: VARImageModel, other: VARImageModel, out: ImageOutput, budget: CacheBudget | None = None
) -> dict[str, list[float]]:
    """By scale, of a mean code along drawn pictures: entropy of the model's distribution, KL(model, other) and total
    variation. budget: of the other's cache.
    """
    prompt = ImagePipeline(model, None).family.prompt(out.prompts, False)
    assert isinstance(prompt, ScalePrompt)
    codes = torch.stack(out.tokens)
    scales = model.var.config.scales
    cache = None if budget is None else BudgetedCache(scales, budget)
    rows: dict[str, list[float]] = {"entropy": [], "kl": [], "tv": []}
    for own, theirs in zip(laws(model, prompt.classes, codes), laws(other, prompt.classes, codes, cache)):
        p = own.exp()
        rows["entropy"].append(round(-(p * own).sum(-1).mean().item(), 4))
        rows["kl"].append(round((p * (own - theirs)).sum(-1).mean().item(), 5))
        rows["tv"].append(round(0.5 * (p - theirs.exp()).abs().sum(-1).mean().item(), 4))
    return rows


def likeness(out: ImageOutput, other: ImageOutput) -> dict[str, float]:
    """Of pictures of the same seeds: mean peak signal-to-noise ratio in dB (equal ones count 60), and how many are
    equal, code for code.
    """
    errors = torch.stack([(a - b).square().mean() for a, b in zip(out.images, other.images)])
    same = sum(bool(torch.equal(a, b)) for a, b in zip(out.tokens, other.tokens))
    return {"psnr": round((-10 * errors.clamp(min=1e-6).log10()).mean().item(), 2), "equal": same}


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read them back, measure and describe them."""
    codec = scale_codes.load_vq(options.out)
    _, stages = cards.read_stages(options.out, FILES)
    models = {}
    for part, name in (("draw", "painter"), ("refine", "small")):
        taught = scale_draw.SharedClassEmbedding(scale_draw.build(name, codec))
        scale_draw.load_stage(taught, options.out / FILES[part])
        save(taught.fold_classes(), None, options.out / NAMES[name], torch.float16)
        models[name] = load(options.out / NAMES[name])
    rows = animals.rows(2 * options.every_prompt)
    drawing = partial(scale_draw.pictures, models["painter"], seed=SEED + 1)
    sweep = [animals.score(drawing, rows, guidance=guidance) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    judge = PainterScores(animals.rows(options.every_prompt))
    measured = figures(models["painter"], models["small"], guidance, judge)
    measured |= {"sweep": sweep, "decoded": scale_codes.measure(codec, options.every_prompt)}
    own = {"painter": painter_figures(measured), "small": {}}
    seconds = {name: stage["seconds"] for name, stage in stages.items()}
    seeds = {"vq": 7, "draw": 8, "small": 9, "refine": 10, "measured": SEED}
    for name, model in models.items():
        model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, guidance_scale=guidance)
        model.generation_config.save_pretrained(options.out / NAMES[name])
        cards.describe(
            options,
            NAMES[name],
            model,
            measured,
            stages | {"rows": options.rows, "seeds": seeds},
            vars(scale_codes) | vars(scale_draw) | globals(),
            swept=len(rows),
            training=sum(seconds.values()),
            parts=", ".join(f"{part} {spent / 60:.0f}" for part, spent in seconds.items()),
            **own[name],
        )
    cards.say(options.out, stages=stages)


def figures(model: VARImageModel, small: VARImageModel, guidance: float, judge: PainterScores) -> dict[str, Any]:
    """Every way to draw, by name, with the distributions' distances by scale."""
    rows: dict[str, Any] = {}
    rows["plain"], plain = row(judge, model, guidance)
    rows["small alone"], _ = row(judge, small, guidance)
    for handover in HANDOVERS:
        rows[f"code, {handover}"], _ = row(judge, model, guidance, refiner=small, handover=handover)
    kept = {}
    for share in SHARES:
        budget = calibrate_budget(model, share)
        rows[f"scalekv, {share}"], out = row(judge, model, guidance, budget=budget)
        rows[f"scalekv, {share}"] |= likeness(plain, out) | {"window": budget.window, "tokens": budget.tokens}
        rows[f"scalekv, {share}"]["budget_bytes"] = max(budget.bytes(model.var, 2 * rows["plain"]["batch"]))
        kept[str(share)] = apart(model, model, plain, budget)
    for rule in ("scales", "repaired"):
        for depth in DEPTHS:
            name = f"{rule}, {depth} drafted"
            rows[name], out = row(judge, model, guidance, rule, depth, small)
            rows[name] |= likeness(plain, out)
    for found in rows.values():
        found["fd_ratio"] = round(found["fd"] / rows["plain"]["fd"], 3)
    return {"guidance": guidance, "rows": rows, "small": apart(model, small, plain), "kept": kept}


def painter_figures(measured: dict[str, Any]) -> dict[str, str]:
    """Tables of the large painter's card."""
    rows, kept, small = measured["rows"], measured["kept"][str(SHARES[0])], measured["small"]
    digits = {"passes": 2, "images": 3, "fd": 2, "fd_ratio": 2}
    kilobytes = {name: [f"{r[key] / 1e3:.0f}" for key in ("cache_bytes", "pass_bytes")] for name, r in rows.items()}
    lines = ([name, *(f"{r[key]:.{n}f}" for key, n in digits.items()), *kilobytes[name]] for name, r in rows.items())
    accepted = {name: r["acceptance_by_depth"] for name, r in rows.items() if "acceptance_by_depth" in r}
    by_map = {"entropy": small["entropy"], "KL to the small model": small["kl"], "total variation to it": small["tv"]}
    by_map |= {"KL, a tenth of the cache": kept["kl"], "total variation": kept["tv"]}
    return {
        "rows": cards.table(lines),
        "by_map": cards.table([name, *(f"{value:.3f}" for value in values)] for name, values in by_map.items()),
        "accepted": "; ".join(f"`{name}` {', '.join(map(str, shares))}" for name, shares in accepted.items()),
    }


PAINTER = Recipe(
    NAMES["painter"],
    "Train the next-scale painters.",
    ScaleOptions,
    {
        "features": partial(write_coded, scale_codes.feature_coders),
        "vq": scale_codes.QuantiserStage,
        "codes": partial(write_coded, scale_codes.code_coders, keep=False),
        "draw": scale_draw.ScaleStage,
        "small": scale_draw.SmallStage,
        "refine": scale_draw.RefineStage,
        "finish": finish,
    },
    {"pairs": 12_000, "steps": 1500, "rows": 16, "rate": 2e-3, "every": 500},
)
