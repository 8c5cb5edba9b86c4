"""LANTERN and LANTERN++: a drafted code borrows the probability of its neighbours in the codebook.

With n_1, n_2, ... the codes nearest to x and c_j = p(n_1) + ... + p(n_j), x is accepted with probability min(1, (p(x) +
c_m)/q(x)), where m <= k is the largest number with c_m <= delta (LANTERN, Jang et al., ICLR 2025) or c_m <= (lam - 1)
p(x) (LANTERN++, Park et al., ICLR-W 2025). The residual is that of `Rejection`, [p - q]+, which has the least total
variation. Later siblings in a tree use the residual after the earlier ones as p, in which codes within the bound of an
earlier sibling have no mass.

At temperature 0 a code is kept if p(x) + c_m exceeds every probability of the target's (unwarped) distribution. Each
kept code that is not the argmax adds 1 to the drift. A grammar id is its own neighbour: its probability is 0 or 1, so
this adds nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visspec import kernels
from visspec.accept import codebook
from visspec.accept.exact import deepest
from visspec.accept.rejection import Rejection, draft_probabilities
from visspec.distributions import categorical
from visspec.tree import parents_of, roots
from visspec.types import Capabilities, Draft, RuleTraits, Scores, Verdict

MOST = 1024  # maximum k: published runs use up to 1000, and the table grows with k


class Lantern(Rejection):
    """LANTERN, approximate. Needs a codebook.

    Args:
        k: Number of neighbours.
        delta: Maximum mass of the neighbours.
    """

    traits = RuleTraits(judges_draws=True)
    bound = "delta"
    lazy = True

    def __init__(self, k: int = 100, delta: float = 0.1):
        if not 0 <= delta < 1:
            raise ValueError(f"delta: got {delta}, expected a mass in [0, 1).")
        self._open(k, delta)

    def _open(self, k: int, value: float) -> None:
        if not 1 <= k <= MOST:
            raise ValueError(f"k: got {k}, expected a number of neighbours from 1 to {MOST}.")
        self.k, self.value = k, value
        self.table_Vk: Tensor | None = None

    def bind(self, capabilities: Capabilities) -> None:
        """Find the neighbours of each code. The target needs a codebook."""
        codes = codebook.require_codebook(capabilities, type(self).__name__, self.k)
        self.table_Vk = codebook.neighbours(codes, self.k, capabilities.vocab)

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor:
        """Return the mass (B, N) of the neighbours of each node's code."""
        return self.borrowed_mass(p_BNV, draft.value, parents_of(draft.tree).expand_as(draft.value))

    def relaxation(self, draft: Draft, p_BNV: Tensor) -> dict[str, Any]:
        """Return arguments that let the kernel sum the neighbours' mass for the tested nodes only."""
        return {"neighbours": self.table_Vk, self.bound: self.value}

    def borrowed_mass(self, p_BNV: Tensor, x_BD: Tensor, above_BD: Tensor) -> Tensor:
        """Return the mass (B, D) added to codes x under the distributions of their parents.

        Args:
            p_BNV: Distributions after every node.
            x_BD: Codes.
            above_BD: The node whose distribution each code is tested under.
        """
        assert self.table_Vk is not None  # of `bind`
        rows, size, _ = p_BNV.shape
        law_BD = above_BD + torch.arange(0, rows * size, size, device=p_BNV.device)[:, None]
        mass_R = kernels.neighbour_mass(
            p_BNV.flatten(0, 1), x_BD.flatten(), self.table_Vk, row=law_BD.flatten(), **{self.bound: self.value}
        )
        return mass_R.view_as(x_BD)

    def greedy(self, draft: Draft, scores: Scores) -> Verdict:
        """Return the verdict of greedy decoding: accept a code if it and its neighbours outweigh the likeliest code."""
        if draft.tree.size == 1:
            return super().greedy(draft, scores)
        distribution = categorical(scores.distribution)
        p_BNV, best_BN = distribution.p, distribution.logits.argmax(dim=-1)
        above_BN = parents_of(draft.tree).expand_as(draft.value)
        wanted_BN, top_BN = best_BN.gather(1, above_BN), p_BNV.amax(dim=-1).gather(1, above_BN)
        kept_BN = (draft.value == wanted_BN) | (draft_probabilities(draft, p_BNV) + self.mass(draft, p_BNV) > top_BN)
        if draft.real is not None:
            kept_BN &= draft.real
        kept_BN = kept_BN | roots(draft.tree)
        verdict = deepest(draft.tree, kept_BN, best_BN)
        on_BD, path_BD = verdict.path > 0, verdict.path.clamp(min=0)
        x_BD, y_BD = draft.value.gather(1, path_BD), wanted_BN.gather(1, path_BD)
        return replace(verdict, drift=(on_BD & (x_BD != y_BD)).sum(1).float())


class LanternPlus(Lantern):
    """LANTERN++, approximate. Needs a codebook.

    Args:
        k: Number of neighbours.
        lam: Maximum factor on a code's own probability.
    """

    bound = "lam"

    def __init__(self, k: int = 10, lam: float = 2.0):
        if not lam >= 1:
            raise ValueError(f"lam: got {lam}, expected a factor of at least 1.")
        self._open(k, lam)
