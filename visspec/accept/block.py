"""Block verification: accept a chain of sampled drafts as one block (Sun et al., ICLR 2025, arXiv 2403.10444).

With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)) along the chain, and S_i the mass of [w_i p - q]+ after node i, the
accepted part ends at the last node whose own uniform number is below

    h_i = S_i / (S_i + 1 - w_i),    at the end of the chain h = w,

and the next token is drawn from [w_i p - q]+, at the end of the chain from p. By induction from the end, node i is kept
with probability w_i given the drafts before it, however the drafter continues, so the output has the target's
distribution. On average no exact rule accepts more of a chain: token-wise rejection keeps node i with the product of
min(1, p/q), which is at most w_i. For point masses both accept the same.

What is accepted depends on later drafts and numbers, so none of them may be reused in a later round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.accept.exact import Exact
from visspec.distributions import categorical, draw
from visspec.sampling import CHUNK, AcceptanceNoise
from visspec.types import Acceptance, Draft, RuleTraits, Scores, Verdict


class RoundNoise(AcceptanceNoise):
    """`AcceptanceNoise` that never uses a number in two rounds, because each round begins a new chunk."""

    read = 0  # positions read in this round

    def window(self, positions: int, first: int = 0) -> Tensor:
        self.read = max(self.read, positions)
        return super().window(positions, first)

    def advance(self, counts: Sequence[int]) -> None:
        chunks = -(-max(self.read, *counts) // CHUNK)
        super().advance([chunks * CHUNK] * len(counts))
        self.read = 0


class Block(Acceptance):
    """Block verification: exact, for chains. On average it accepts at least as many tokens as `rejection`."""

    traits = RuleTraits("exact", judges_draws=True, chains_only=True, whole_chains=True)

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> RoundNoise:
        return RoundNoise(generators)

    def __call__(self, draft: Draft, scores: Scores, noise: RoundNoise | None) -> Verdict:
        if noise is None:
            return Exact()(draft, scores, None)
        keep_BN, rest_BNV = chances(draft, categorical(scores.distribution).p)
        coins_BN, draw_B = noise.accept_uniforms(draft.tree)
        index = torch.arange(draft.tree.size, device=coins_BN.device)
        last_B1 = torch.where(coins_BN < keep_BN, index, 0).amax(dim=-1, keepdim=True)
        path_BD = torch.where(index <= last_B1, index, -1)
        rest_BV = torch.take_along_dim(rest_BNV, last_B1[..., None], dim=1)[:, 0]
        return Verdict(path_BD, last_B1[:, 0] + 1, draw(rest_BV, draw_B.to(rest_BV.dtype)))


def chances(draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute, in float64, for every node of a chain the probability h (B, N) that the accepted part ends there if it
    does not end later, and the distribution (B, N, V), up to a constant, of the token that follows then.
    """
    p_BNV, drafted_BT1 = p_BNV.double(), draft.value[:, 1:, None]
    if draft.q is None:
        q_BTV = torch.zeros_like(p_BNV[:, 1:]).scatter_(-1, drafted_BT1, 1.0)
    else:
        q_BTV = categorical(draft.q).p[:, 1:].double()
    kept_BN = torch.ones_like(p_BNV[..., 0])
    if draft.real is not None:
        kept_BN[:, 1:] = draft.real[:, 1:].double()
        q_BTV = q_BTV * kept_BN[:, 1:, None]
    tiny = torch.finfo(p_BNV.dtype).tiny
    ratio_BT1 = p_BNV[:, :-1].gather(-1, drafted_BT1) / q_BTV.gather(-1, drafted_BT1).clamp(min=tiny)
    w_BN = torch.ones_like(kept_BN)
    for n, ratio_B1 in enumerate(ratio_BT1.unbind(1), start=1):
        w_BN[:, n] = (w_BN[:, n - 1] * ratio_B1[:, 0]).clamp(max=1.0)
    behind_BNV = F.pad(q_BTV, (0, 0, 0, 1))  # nothing is drafted after the end
    rest_BNV = (w_BN[..., None] * p_BNV - behind_BNV).clamp_(min=0)
    left_BN = rest_BNV.sum(dim=-1)
    keep_BN = kept_BN * left_BN / (left_BN + 1 - w_BN).clamp(min=tiny)
    return keep_BN, torch.where(left_BN[..., None] > 0, rest_BNV, p_BNV)
