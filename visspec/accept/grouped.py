"""GSD: a drafted code is accepted by the mass of its group (grouped speculative decoding, ICCV 2025).

x is accepted with probability min(1, p(C)/q(C)), C its group, never below the exact probability (windows of ranks are
not a partition, so the ratio itself can be below it). A group is the `group // 2` ranks of p on each side of x, less
the codes whose p differs by more than `max_gap` or whose vectors lie farther than `max_distance` (dynamic); with
`clusters=n` it is the cluster of x among n clusters of the codebook (static). The residual is that of `Rejection`.
Point masses have q(C) = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visspec import kernels
from visspec.accept import codebook
from visspec.accept.rejection import Rejection
from visspec.distributions import categorical
from visspec.tree import above
from visspec.types import Capabilities, Draft, RuleTraits


class Grouped(Rejection):
    """group 1, or as many clusters as codes: exact."""

    traits = RuleTraits(judges_draws=True)

    def __init__(
        self,
        group: int = 10,
        clusters: int | None = None,
        max_gap: float | None = None,
        max_distance: float | None = None,
    ):
        for name, value, least in (("group", group, 1), ("clusters", clusters, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name}: got {value}, expected a number of at least {least}")
        for name, most in (("max_gap", max_gap), ("max_distance", max_distance)):
            if most is not None and most < 0:
                raise ValueError(f"{name}: got {most}, expected a number of at least 0")
            if most is not None and clusters is not None:
                raise ValueError(f"{name}: got {most} with clusters={clusters}, expected it with groups of ranks only")
        self.group, self.count, self.max_gap, self.max_distance = group, clusters, max_gap, max_distance
        self.reads_codes = clusters is not None or max_distance is not None
        self.clusters_V: Tensor | None = None
        self.embedding_VE: Tensor | None = None

    def bind(self, capabilities: Capabilities) -> None:
        super().bind(capabilities)
        if self.reads_codes:
            codes = codebook.require_codebook(capabilities, "Grouped")
            if self.count is None:
                self.embedding_VE = codebook.pad_codebook(codes, capabilities.vocab)
            elif self.count > len(codes):
                raise ValueError(f"clusters: got {self.count}, expected at most the codebook's {len(codes)} codes")
            else:
                self.clusters_V = codebook.clusters(codes, self.count, capabilities.vocab)

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor:
        """q(x) p(C)/q(C) - p(x), as one fraction, so that a group of one adds exactly 0."""
        rows, q = torch.arange(p_BNV.shape[0], device=p_BNV.device)[:, None], draft.q
        q_BNV = None if q is None else categorical(q).p
        law_BNV, x_BN1 = p_BNV[rows, above(draft.tree)], draft.value[..., None]
        in_p, in_q = kernels.grouped_mass(
            law_BNV.flatten(0, 1),
            None if q_BNV is None else q_BNV.flatten(0, 1),
            x_BN1.flatten(),
            clusters=self.clusters_V,
            group=self.group if self.count is None else None,
            max_gap=self.max_gap,
            embedding=self.embedding_VE,
            max_distance=self.max_distance,
        )
        here_BN1, in_p, in_q = law_BNV.gather(2, x_BN1), in_p.view_as(x_BN1), in_q.view_as(x_BN1)
        if q_BNV is None:
            return (in_p - here_BN1)[..., 0]
        return ((q_BNV.gather(2, x_BN1) * in_p - here_BN1 * in_q) / in_q.clamp(min=1e-30))[..., 0]
