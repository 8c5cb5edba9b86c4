"""Typical acceptance: always accept a drafted token that has sufficient probability under the target.

x is accepted if p(x) >= min(epsilon, delta * exp(-H(p))), with H the entropy of the target's distribution (Hewitt et
al. 2022 for the threshold; Cai et al., "Medusa", 2024, section 2.3.1 for its use in acceptance), otherwise with the
exact probability. The distribution of the output changes: each token kept beyond the exact rule adds 1 - min(1, p/q) to
the measured drift. At temperature 0 the rule is greedy and exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visspec.accept.rejection import Rejection, draft_probabilities
from visspec.tree import parents_of
from visspec.types import Draft, RuleTraits


class Typical(Rejection):
    """Typical acceptance, approximate. Larger values are stricter. The defaults are those of the Medusa paper's code.

    Args:
        epsilon: Upper limit of the threshold.
        delta: Scale of the threshold's entropy term.
    """

    traits = RuleTraits(judges_draws=True)

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3):
        if epsilon <= 0 or delta <= 0:
            raise ValueError(f"epsilon, delta: got {epsilon}, {delta}, expected numbers above 0.")
        self.epsilon, self.delta = epsilon, delta

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor:
        """Return 1 if p(x) reaches the threshold, else 0: (B, N) float32."""
        entropy_BN = torch.special.entr(p_BNV).sum(dim=-1)
        threshold_BN = (self.delta * torch.exp(-entropy_BN)).clamp(max=self.epsilon)
        above_BN = parents_of(draft.tree).expand_as(draft.value)
        return (draft_probabilities(draft, p_BNV) >= threshold_BN.gather(1, above_BN)).float()
