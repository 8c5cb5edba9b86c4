"""Exact acceptance of drafted scales: a scale is accepted where all of its codes are, and a repaired one ends the path.

Given the scales before it, the codes of a scale are independent, so the target's scale is drawn code by code, each by a
coupling with the drafted code; the result has the target's distribution whatever was drafted. Where no code differs the
drafted scale *is* that draw, and the next one counts; otherwise the draw, with the accepted codes in it, is the next
scale, and drafts behind it, which were conditioned on another, fall.

Two couplings. `Scales`: both sides use the codes' own noise, so the output is code for code that of plain decoding with
the same seed; codes agree with probability at least (1 - TV) / (1 + TV). `Repaired`: min(1, p/q) and the residual
[p - q]+, so codes agree with probability 1 - TV; the distribution is kept, the codes of a seed are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.accept.coupled import accepted_path
from visspec.distributions import Maps, draw, maps, residual
from visspec.sampling import ScaleAcceptanceNoise, ScaleGumbel, ScaleNoise
from visspec.types import Acceptance, Capabilities, Draft, RuleTraits, Scores, Verdict


class Scales(Acceptance[ScaleNoise]):
    """Scales code for code as plain decoding draws them, greedy and sampling."""

    traits = RuleTraits("exact", chains_only=True, distribution=Maps)
    sizes: tuple[int, ...] = ()

    def bind(self, capabilities: Capabilities) -> None:
        self.sizes = capabilities.scales

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> ScaleNoise:
        return ScaleGumbel(generators, width, self.sizes)

    def target_maps(self, draft: Draft, distribution: Maps, noise: ScaleNoise) -> Tensor:
        """(B, N, S): the target's map after each node."""
        return (distribution.logits + _wide(noise.codes(draft.tree.size), distribution)).argmax(dim=-1)

    def __call__(self, draft: Draft, scores: Scores, noise: ScaleNoise | None) -> Verdict:
        distribution, size = maps(scores.distribution), draft.value.shape[-1]
        codes_BNS = (
            distribution.logits.argmax(dim=-1) if noise is None else self.target_maps(draft, distribution, noise)
        )
        codes_BNS = codes_BNS.masked_fill(~distribution.real, 0)
        codes_BNS = F.pad(codes_BNS, (0, size - codes_BNS.shape[-1]))
        same_BN = torch.zeros_like(distribution.count, dtype=torch.bool)
        if draft.tree.size > 1:
            found = codes_BNS[:, :-1, : distribution.logits.shape[2]]
            same_BN[:, :-1] = (child_maps(draft, distribution) == found).all(dim=-1) & (distribution.count[:, :-1] > 0)
            if draft.real is not None:
                same_BN[:, :-1] &= draft.real[:, 1:]
        return accepted_path(draft, codes_BNS.flatten(0, 1), same_BN.flatten())


class Repaired(Scales):
    """Scales drawn by a maximal coupling with the drafted ones, code by code. Takes draws with their distribution,
    points.
    """

    traits = RuleTraits("exact", judges_draws=True, chains_only=True, distribution=Maps)

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> ScaleNoise:
        return ScaleAcceptanceNoise(generators, self.sizes)

    def target_maps(self, draft: Draft, distribution: Maps, noise: ScaleNoise) -> Tensor:
        uniform, fresh, _ = _wide(noise.codes(draft.tree.size), distribution).unbind(dim=-1)
        p_BNSV = distribution.p
        if draft.tree.size == 1:
            return draw(p_BNSV, fresh)
        drafted, head = child_maps(draft, distribution), p_BNSV[:, :-1]
        if draft.q is None:
            q = torch.zeros_like(head).scatter_(-1, drafted[..., None], 1.0)
        else:
            q = maps(draft.q).p[:, 1:, : head.shape[2]]
        own = repair_codes(drafted, head, q, uniform[:, :-1], fresh[:, :-1])
        if draft.real is not None:
            own = torch.where(draft.real[:, 1:, None], own, draw(head, fresh[:, :-1]))
        return torch.cat([own, draw(p_BNSV[:, -1:], fresh[:, -1:])], dim=1)


def repair_codes(drafted: Tensor, p: Tensor, q: Tensor, uniform: Tensor, fresh: Tensor) -> Tensor:
    """Draws from distributions p (..., V), equal to codes (...) drawn from q as often as can be; coin, fresh (...) in
    [0, 1).
    """
    at = drafted[..., None]
    kept = uniform * q.gather(-1, at)[..., 0] < p.gather(-1, at)[..., 0]
    return torch.where(kept, drafted, draw(residual(p, q), fresh))


def child_maps(draft: Draft, distribution: Maps) -> Tensor:
    """(B, N - 1, S): the map drafted below each node but the last, zero at padding."""
    drafted = draft.value[:, 1:, : distribution.logits.shape[2]]
    return drafted.masked_fill(~distribution.real[:, :-1], 0)


def _wide(numbers_BNSU: Tensor, distribution: Maps) -> Tensor:
    """Numbers padded to the distribution's largest map, which a row near its end may not have."""
    lacking = distribution.logits.shape[2] - numbers_BNSU.shape[2]
    return F.pad(numbers_BNSU, (0, 0, 0, lacking))
