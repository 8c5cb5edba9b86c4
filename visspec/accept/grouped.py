"""GSD: accept a drafted code by the probability mass of its group (grouped speculative decoding, ICCV 2025).

x is accepted with probability min(1, p(C)/q(C)), where its group C has the `group // 2` ranks of p on each side of x,
but never with less than the exact probability. (Windows of ranks are not a partition, so the ratio alone can be
smaller.) The residual is that of `Rejection`. Point masses have q(C) = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visspec import kernels
from visspec.accept.rejection import Rejection
from visspec.distributions import categorical
from visspec.tree import parents_of
from visspec.types import Draft, RuleTraits


class Grouped(Rejection):
    """Grouped speculative decoding, approximate.

    Args:
        group: Number of codes of a group; 1 is exact.
    """

    traits = RuleTraits(judges_draws=True)

    def __init__(self, group: int = 10):
        if group < 1:
            raise ValueError(f"group: got {group}, expected a number of at least 1.")
        self.group = group

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor:
        """Return q(x) p(C)/q(C) - p(x), as one fraction, so that a group of one adds exactly 0."""
        rows, q = torch.arange(p_BNV.shape[0], device=p_BNV.device)[:, None], draft.q
        q_BNV = None if q is None else categorical(q).p
        law_BNV, x_BN1 = p_BNV[rows, parents_of(draft.tree)], draft.value[..., None]
        in_p, in_q = kernels.grouped_mass(
            law_BNV.flatten(0, 1),
            None if q_BNV is None else q_BNV.flatten(0, 1),
            x_BN1.flatten(),
            self.group,
        )
        here_BN1, in_p, in_q = law_BNV.gather(2, x_BN1), in_p.view_as(x_BN1), in_q.view_as(x_BN1)
        if q_BNV is None:
            return (in_p - here_BN1)[..., 0]
        return ((q_BNV.gather(2, x_BN1) * in_p - here_BN1 * in_q) / in_q.clamp(min=1e-30))[..., 0]
