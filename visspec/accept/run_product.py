"""SJD-SV: a run of confident tokens is accepted by one uniform number and the product of their ratios (ICML 2026).

A run is a stretch of the chain along which the target's p(x) of the drafted tokens does not fall; its confident suffix
are the tokens with p(x) >= alpha. The suffix is kept up to the last of its tokens with u < W_j, W_j the product of the
ratios p/q from the suffix's start to j (not cut at 1); failing at the tail falls back to the token before. All other
tokens are tested separately. (Our interpretation of the description; no code is public.)

One uniform for a run gives the same distribution as separate uniforms for its tokens with f_j = S_j / S_{j-1}, where
S_j = max over k >= j of min(1, W_k) is the chance that the run is kept at least up to j; so this is a `mass`, with the
shared uniform numbers, residual and meter. f_j is never below the exact probability. Where no ratio exceeds 1 (point
masses) it is equal to it. f_j looks ahead, so the drift is an upper bound of the total variation. With a relaxed `base`
the ratios are those of the base.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from visspec.accept.rejection import Rejection, draft_probabilities
from visspec.distributions import categorical
from visspec.types import Acceptance, Capabilities, Draft, RuleTraits

TINY = 1e-30


class RunProduct(Rejection):
    """alpha: minimum probability of a confident token (1: exact); base: the rule for single tokens, one that adds
    `mass` ("rejection" by default).
    """

    traits = RuleTraits(judges_draws=True, chains_only=True)  # a run is a stretch of a chain

    def __init__(self, alpha: float = 0.8, base: Acceptance | None = None):
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha: got {alpha}, expected a probability in (0, 1]")
        base = Rejection() if base is None else base.inner
        if not isinstance(base, Rejection) or base.traits.chains_only:
            raise ValueError(f"base: got {type(base).__name__}, expected a rule that judges tokens one by one by mass")
        self.alpha, self.base = alpha, base

    def bind(self, capabilities: Capabilities) -> None:
        super().bind(capabilities)
        self.base = copy.copy(self.base)  # its owner may bind it to another target
        self.base.bind(capabilities)

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor:
        if not draft.tree.chain:
            raise ValueError(f"acceptance: RunProduct got a tree of {draft.tree.size} nodes, expected chains")
        absent_BN = draft.tree.parent < 0 if draft.real is None else ~draft.real
        p_BN = draft_probabilities(draft, p_BNV).double().masked_fill(absent_BN, 0.0)
        q_BN = torch.ones_like(p_BN)
        if draft.q is not None:
            q_BN = categorical(draft.q).at(draft.value).double().clamp(min=TINY)
        exact_BN, lent_BN = (p_BN / q_BN).clamp(max=1.0), self.base.mass(draft, p_BNV)
        ratio_BN = p_BN / q_BN if lent_BN is None else torch.maximum(p_BN + lent_BN, p_BN) / q_BN
        joined_BN = torch.zeros_like(p_BN, dtype=torch.bool)  # in one suffix with the node before
        joined_BN[:, 2:] = (p_BN[:, 1:-1] >= self.alpha) & (p_BN[:, 2:] >= p_BN[:, 1:-1])
        run_BN = (~joined_BN).cumsum(1)
        same_BNN = run_BN[:, :, None] == run_BN[:, None, :]
        product_BN = torch.where(same_BNN.tril(), ratio_BN[:, None, :], 1.0).prod(-1).clamp(max=1.0)  # min(1, W)
        reach_BN = torch.where(same_BNN.triu(), product_BN[:, None, :], 0.0).amax(-1)  # S
        before_BN = torch.where(joined_BN, reach_BN.roll(1, dims=1), 1.0)
        return (reach_BN / before_BN.clamp(min=TINY) - exact_BN) * q_BN
