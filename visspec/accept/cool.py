"""COOL-SD: acceptance relaxed by a factor that decreases with depth (annealed relaxation, AAAI 2026, arXiv 2601.09212).

A drafted x at depth i (1 is the first drafted position) is accepted with probability min(1, w_i p(x)/q(x)), where w_i =
1 + (omega - 1) nu^(i - 1) decays exponentially to the exact rule, because an early token conditions all later ones. The
residual [p - q]+ is the optimal one, and the same as that of `Rejection`. That the decay starts at omega at depth 1 is
our interpretation of the paper. Neither neighbours nor a codebook are needed. Later siblings of a tree add (w_i - 1)
p(x) as well.
"""

from __future__ import annotations

from torch import Tensor

from visspec.accept.rejection import Rejection, draft_probabilities
from visspec.sampling import place
from visspec.types import Draft, RuleTraits


class Cool(Rejection):
    """COOL-SD, approximate.

    Args:
        omega: Factor at depth 1; 1 is exact.
        nu: Decay of (factor - 1) per level.
    """

    traits = RuleTraits(judges_draws=True)

    def __init__(self, omega: float = 1.1, nu: float = 0.7):
        if not omega >= 1:
            raise ValueError(f"omega: got {omega}, expected a factor of at least 1.")
        if not 0 <= nu <= 1:
            raise ValueError(f"nu: got {nu}, expected a decay in [0, 1].")
        self.omega, self.nu = omega, nu

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor:
        """Return the mass (B, N) that relaxes a node's probability by a factor, which decays with its level."""
        excess_BN = (self.omega - 1.0) * self.nu ** place(draft.tree).to(p_BNV.dtype)
        return draft_probabilities(draft, p_BNV) * excess_BN
