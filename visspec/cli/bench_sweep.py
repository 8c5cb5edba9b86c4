"""Relaxed rules over their parameters (`visspec bench image --sweep`): passes against quality; how flat distributions
are.

All rules have one drafter, beside exact rejection with it and plain decoding. Nothing is timed: passes, drift and
displacement are those of the images that are judged, kept beside them, so that a killed sweep goes on where it was.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visspec.accept.exact import Exact
from visspec.accept.scales import Scales
from visspec.api import zoo
from visspec.api.images import ImageOutput, ImagePipeline
from visspec.cli.bench import measured_on
from visspec.distributions import categorical, maps
from visspec.eval.bench import paired as speed
from visspec.io.checkpoint import read_json
from visspec.sampling import Gumbel, ScaleNoise
from visspec.types import Capabilities, Draft, Scores, Verdict

DRAFTER = "jacobi:redraw=maximal,window=16"
FAMILIES = {  # of swept rules: the rule with the parameter to fill in, and its values
    "lantern": ("lantern:k=100,delta={}", (0.05, 0.1, 0.2, 0.4, 0.7)),
    "lantern-k": ("lantern:k={},delta=0.2", (10, 30, 100, 300, 1000)),
    "lantern++": ("lantern_plus:k=10,lam={}", (1.5, 2.0, 4.0, 8.0, 16.0)),
    "grouped": ("grouped:group={}", (2, 4, 8, 14, 30)),
    "cool": ("cool:omega={},nu=0.7", (1.05, 1.1, 1.3, 1.6, 2.0)),
}


def swept(
    pipe: ImagePipeline, families: Sequence[str], drafter: str, options: dict[str, Any], seed: int
) -> tuple[dict[str, str], dict[str, Any]]:
    """Methods by name, and a record with a row for each that is to be judged. What can't be is refused here."""
    methods, rows = {"plain": "none/exact", "exact": f"{drafter}/rejection"}, []
    marks: dict[str, tuple[str | None, str | None]] = {"plain": (None, None), "exact": (None, None)}
    for family in families:
        text, values = FAMILIES[family]
        for value in values:
            name = f"{family} {value}"
            methods[name], marks[name] = f"{drafter}/{text.format(value)}", (family, str(value))
    sampling = pipe.sampling(options.get("guidance_scale"), options.get("temperature"), None, None)
    for name, method in methods.items():
        setup, (rule, given) = pipe.setup(**zoo.method(method)), marks[name]
        row: dict[str, Any] = {"name": name, **zoo.method(method), "order": "raster", "family": rule, "setting": given}
        row |= {"guarantee": setup.guarantee, "promises_tokens": setup.promises_tokens(sampling.greedy)}
        rows.append(row)
    record = measured_on(pipe.model, seed=seed) | {"bench": "image", "rows": rows, "n_prompts": 0, "batch_size": 16}
    record |= {"seed": seed, "failures": [], "stock": None, "guidance_scale": sampling.guidance}
    return methods, record | {"temperature": sampling.temperature}


def sidecar(out: ImageOutput, row: int) -> dict[str, Any]:
    """Passes of an image of a batch, the prefill included; drift and displacement per code of its batch."""
    origin, stats = out.traces[0].origin[row], out.stats[0]
    measured = {"drift": stats.drift_per_token, "displacement": stats.displacement_per_token}
    return {"passes": sum(kind != "drafted" for kind in origin), **measured}


def passes_of(paths: Sequence[Path], plain: dict[str, Any]) -> dict[str, Any]:
    """What a row of a sweep says of passes, from the files beside its images; plain: the first row, which may be this
    one.
    """
    kept = [read_json(path.parent, path.with_suffix(".json").name) for path in paths]
    passes = np.array([float(one["passes"]) for one in kept])
    base = plain.get("nfe", float(passes.mean()))
    far = [one["displacement"] for one in kept if one["displacement"] is not None]
    row = {"nfe": float(passes.mean()), "nfe_plain": base, "nfe_reduction": base / float(passes.mean())}
    row |= {"nfe_reduction_ci95": list(speed.bootstrap((base / passes).tolist())), "n_prompts": len(kept)}
    drift = float(np.mean([one["drift"] for one in kept]))
    return row | {"drift_per_token": drift, "latent_displacement": float(np.mean(far)) if far else None}


class EntropyRecorder(Exact):
    """Plain decoding that notes how flat the distributions are that codes are drawn from."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []  # (B, 3): entropy in nats, top-1 and top-10 mass
        self.codes = 0

    def bind(self, capabilities: Capabilities) -> None:
        self.codes = capabilities.vocab if capabilities.codebook is None else len(capabilities.codebook)

    def __call__(self, draft: Draft, scores: Scores, noise: Gumbel | None) -> Verdict:
        p_BV = categorical(scores.distribution).p[:, 0]
        self.seen.append(flatness(p_BV)[p_BV.argmax(-1) < self.codes])  # not of grammar
        return super().__call__(draft, scores, noise)


class ScaleEntropyRecorder(Scales):
    """The same of maps of codes."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, draft: Draft, scores: Scores, noise: ScaleNoise | None) -> Verdict:
        distribution = maps(scores.distribution)
        self.seen.append(flatness(distribution.p[distribution.real]))
        return super().__call__(draft, scores, noise)


def flatness(p_NV: torch.Tensor) -> torch.Tensor:
    """(N, 3): entropy in nats, top-1 and top-10 mass of distributions."""
    top_NK = p_NV.topk(min(10, p_NV.shape[-1])).values
    return torch.stack([torch.special.entr(p_NV).sum(-1), top_NK[:, 0], top_NK.sum(-1)], 1)


def law_of(pipe: ImagePipeline, texts: Sequence[str], options: dict[str, Any], seed: int) -> dict[str, float]:
    """Mean entropy in nats, top-1 and top-10 mass of codes, as sampled, over plainly drawn images."""
    rule = ScaleEntropyRecorder() if pipe.family.draws == "maps" else EntropyRecorder()
    drawn = {"drafter": "none", "acceptance": rule, "output_type": "latent", **options}
    pipe(list(texts), seed=[1000 * seed + i for i in range(len(texts))], batch_size=len(texts), **drawn)
    mean = torch.cat(rule.seen).mean(0).tolist()
    return dict(zip(("entropy", "top1", "top10"), mean)) | {"n": sum(map(len, rule.seen))}
