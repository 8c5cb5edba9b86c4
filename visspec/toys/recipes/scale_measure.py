"""What the next-scale painters' cards say: pictures, distributions by scale, drafted scales and bytes of each way to
draw.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visspec.api.images import ImageOutput, ImagePipeline
from visspec.eval.metrics import fid, references
from visspec.eval.metrics.features import RandomConv
from visspec.loop.stats import acceptance_by_depth
from visspec.models.scales.kv_budget import BudgetedCache
from visspec.models.scales.reading import ConditionState
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.model import VARImageModel
from visspec.toys.recipes.painter_data import pixels
from visspec.toys.recipes.painter_score import summary, to_uint8, verdicts
from visspec.toys.recipes.scale_data import SIDE, painted
from visspec.toys.recipes.scale_draw import draw, pipeline
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.suite import Metadata

REFERENCES = 4  # renders of each prompt that the distance is taken to


class PainterScores:
    """GenEval and Frechet distance of pictures of prompts, `copies` of each."""

    def __init__(self, rows: Sequence[Metadata], copies: int = 1):
        self.rows, self.copies = [row for row in rows for _ in range(copies)], copies
        self.extractor = RandomConv()
        rng = np.random.default_rng(HELD_OUT_SEED)
        scenes = [painted(row, rng) for row in rows for _ in range(REFERENCES)]
        features = [self.extractor(part) for part in self._uint8(pixels(scenes, SIDE)).split(32)]
        self.reference = references.from_features(torch.cat(features), self.extractor)

    def __call__(self, out: ImageOutput) -> dict[str, Any]:
        """`images` (share of right ones), `geneval` and `fd`."""
        shown = torch.stack(list(out.images)) * 2 - 1
        right = summary(verdicts(to_uint8(shown), self.rows), self.rows)
        features = torch.cat([self.extractor(part) for part in self._uint8(shown).split(32)])
        stats = fid.GaussianStats(self.extractor.dim).update(features)
        found = fid.compare(stats, self.reference, self.extractor)
        return {
            "geneval": right["geneval"], "images": right["images"], "fd": round(found.value, 4),
            "fd_floor": round(found.noise_floor_here, 4), "n": len(self.rows),
        }  # fmt: skip

    @staticmethod
    def _uint8(pictures: Tensor) -> Tensor:
        return torch.from_numpy(to_uint8(pictures)).permute(0, 3, 1, 2)


def row(
    judge: PainterScores, model: VARImageModel, guidance: float, seed: int, rule: str = "scales", drafted: int = 0,
    small: VARImageModel | None = None, **parts: Any,
) -> tuple[dict[str, Any], ImageOutput]:  # fmt: skip
    """Figures of one way to draw: the judge's; passes of the target, and bytes of its cache between passes and in one,
    of the largest batch; of scales that `small` drafts, always so many, how many were accepted of those reached, by
    depth.
    """
    drafter = None
    if small is not None:
        drafter = SmallVAR(small.var)
        drafter.traits = replace(drafter.traits, adaptive_depth=False)  # by the clock
    pipe = pipeline(model, drafted or None, **parts)
    out = draw(pipe, [one["prompt"] for one in judge.rows], guidance, seed, drafter=drafter, acceptance=rule)
    passes = [int(numbers.max()) + 1 for numbers in out.passes]
    first = out.traces[0].memory
    found = judge(out) | {
        "passes": round(sum(passes) / len(passes), 3), "guarantee": out.stats[0].guarantee,
        "cache_bytes": first["cache"], "pass_bytes": first["pass"], "batch": len(out.traces[0].origin),
    }  # fmt: skip
    if drafter is not None:
        rounds = [entry for trace in out.traces for entry in trace.rounds]
        found["acceptance_by_depth"] = [round(share, 3) for share in acceptance_by_depth(rounds)]
    return found, out


@torch.inference_mode()
def laws(painter: VARImageModel, classes_B: Tensor, codes_BT: Tensor, cache: Any = None) -> list[Tensor]:
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


def apart(model: VARImageModel, other: VARImageModel, out: ImageOutput, budget: Any = None) -> dict[str, list[float]]:
    """By scale, of a mean code along drawn pictures: entropy of the model's distribution, KL(model, other) and total
    variation. budget: of the other's cache.
    """
    pipe = ImagePipeline(model, None)
    prompt: Any = pipe.family.prompt(out.prompts, False)
    classes: Tensor = prompt.classes
    codes = torch.stack(out.tokens)
    scales = model.var.config.scales
    cache = None if budget is None else BudgetedCache(scales, budget)
    rows: dict[str, list[float]] = {"entropy": [], "kl": [], "tv": []}
    for own, theirs in zip(laws(model, classes, codes), laws(other, classes, codes, cache)):
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
