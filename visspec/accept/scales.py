"""Exact acceptance of drafted scales: accept a scale if all of its codes are accepted; a repaired scale ends the path.

Given the earlier scales, the codes of a scale are independent. So the target's scale is drawn code by code, each by a
coupling with the drafted code, and has the target's distribution whatever was drafted. If no code differs, the drafted
scale *is* that draw, and the next scale is tested. Otherwise the draw, with the accepted codes in it, is the next
scale, and later drafts, which were conditioned on another scale, are dropped.

There are two couplings. In `Scales` both sides use the codes' own noise, so the output has the codes of plain decoding
with the same seed; codes agree with probability at least (1 - TV) / (1 + TV). `Repaired` uses min(1, p/q) and the
residual [p - q]+, so codes agree with probability 1 - TV. It keeps the distribution, but not the codes of a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.accept.coupled import accepted_path
from visspec.distributions import Maps, draw, residual
from visspec.sampling import ScaleAcceptanceNoise, ScaleGumbel, ScaleNoise
from visspec.types import Acceptance, Draft, RuleTraits, Scores, Verdict


class Scales(Acceptance):
    """Accepts scales with the codes that plain decoding draws, greedy or sampled."""

    traits = RuleTraits("exact", chains_only=True, distribution=Maps)

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> ScaleNoise:
        return ScaleGumbel(generators, width, self.capabilities.scales)

    def target_maps(self, draft: Draft, distribution: Maps, noise: ScaleNoise) -> Tensor:
        """Return the target's map after each node, (B, N, S)."""
        return (distribution.logits + _wide(noise.codes(draft.tree.size), distribution)).argmax(dim=-1)

    def __call__(self, draft: Draft, scores: Scores, noise: ScaleNoise | None) -> Verdict:
        distribution, size = cast(Maps, scores.distribution), draft.value.shape[-1]
        codes_BNS = (
            distribution.logits.argmax(dim=-1) if noise is None else self.target_maps(draft, distribution, noise)
        )
        codes_BNS = codes_BNS.masked_fill(~distribution.real, 0)
        codes_BNS = F.pad(codes_BNS, (0, size - codes_BNS.shape[-1]))
        same_BN = torch.zeros_like(distribution.count, dtype=torch.bool)
        if draft.tree.size > 1:
            drafted = codes_BNS[:, :-1, : distribution.logits.shape[2]]
            same_BN[:, :-1] = (child_maps(draft, distribution) == drafted).all(dim=-1) & (
                distribution.count[:, :-1] > 0
            )
            if draft.real is not None:
                same_BN[:, :-1] &= draft.real[:, 1:]
        return accepted_path(draft, codes_BNS.flatten(0, 1), same_BN.flatten())


class Repaired(Scales):
    """Draws scales by a maximal coupling with the drafted ones, code by code. Takes sampled drafts and point masses."""

    traits = RuleTraits("exact", judges_draws=True, chains_only=True, distribution=Maps)

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> ScaleNoise:
        return ScaleAcceptanceNoise(generators, self.capabilities.scales)

    def target_maps(self, draft: Draft, distribution: Maps, noise: ScaleNoise) -> Tensor:
        uniform, fresh, _ = _wide(noise.codes(draft.tree.size), distribution).unbind(dim=-1)
        p_BNSV = distribution.p
        if draft.tree.size == 1:
            return draw(p_BNSV, fresh)
        drafted, head = child_maps(draft, distribution), p_BNSV[:, :-1]
        if draft.q is None:
            q = torch.zeros_like(head).scatter_(-1, drafted[..., None], 1.0)
        else:
            q = cast(Maps, draft.q).p[:, 1:, : head.shape[2]]
        own = repair_codes(drafted, head, q, uniform[:, :-1], fresh[:, :-1])
        if draft.real is not None:
            own = torch.where(draft.real[:, 1:, None], own, draw(head, fresh[:, :-1]))
        return torch.cat([own, draw(p_BNSV[:, -1:], fresh[:, -1:])], dim=1)


def repair_codes(drafted: Tensor, p: Tensor, q: Tensor, uniform: Tensor, fresh: Tensor) -> Tensor:
    """Draw from p (..., V) so that results equal codes (...) drawn from q most often; uniforms (...) in [0, 1)."""
    at = drafted[..., None]
    keep = uniform * q.gather(-1, at)[..., 0] < p.gather(-1, at)[..., 0]
    return torch.where(keep, drafted, draw(residual(p, q), fresh))


def child_maps(draft: Draft, distribution: Maps) -> Tensor:
    """Return the map drafted below each node but the last, (B, N - 1, S), zero at padding."""
    drafted = draft.value[:, 1:, : distribution.logits.shape[2]]
    return drafted.masked_fill(~distribution.real[:, :-1], 0)


def _wide(numbers_BNSU: Tensor, distribution: Maps) -> Tensor:
    """Pad numbers to the distribution's largest map, which can be larger than those of a row near its end."""
    lacking = distribution.logits.shape[2] - numbers_BNSU.shape[2]
    return F.pad(numbers_BNSU, (0, 0, 0, lacking))
