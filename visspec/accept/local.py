"""Local acceptance of MuLo-SD (2601.05149): accept the codes of a drafted image one by one, not as a prefix.

A drafted code x is accepted if the k codes nearest to x, including x, have a total probability of at least tau under
the distribution p at its position. Rejections are dilated to squares of side 2 radius + 1, restricted to positions
after the first rejected one in raster order. The target generates that region again
(`visspec.loop.orders.RejectedRegions`). No random numbers and no distribution q are used.

The distribution of an accepted code is a point mass, at total variation 1 - p(x) from p. The drift is the sum of that
over the accepted codes, under the distribution of the verification pass, with the draft as context.
`out_of_order.audit` measures it under the distribution of the finished image.

In raster order the rule accepts the prefix of a draft up to the first rejected node (as in the paper). Shapes: B rows,
N places or nodes, V vocabulary, R and C rows and columns of an image, k neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec import sampling
from visspec.accept import codebook
from visspec.accept.exact import deepest
from visspec.distributions import categorical
from visspec.sampling import Gumbel
from visspec.tree import parents_of, roots
from visspec.types import Acceptance, Capabilities, Draft, RuleTraits, Scores, Verdict


class Local(Acceptance):
    """Local acceptance of drafted images, approximate. Needs a codebook.

    Args:
        tau: Required pooled probability; above 1 rejects everything, 0 nothing.
        radius: Dilation of rejections.
        k: Number of codes pooled.
        window: How far the row above must be ahead when an island is generated (ZipAR, ICML 2025); None for raster
            order.
    """

    traits = RuleTraits(whole_images=True)

    def __init__(self, tau: float = 0.05, radius: int = 1, k: int = 8, window: int | None = None):
        if not tau >= 0:
            raise ValueError(f"tau: got {tau}, expected a probability of at least 0 (above 1 rejects everything).")
        for name, value, least in (("radius", radius, 0), ("k", k, 1), ("window", window, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name}: got {value}, expected a number of at least {least}.")
        self.tau, self.radius, self.k, self.window = tau, radius, k, window
        self.codes = 0  # size of the codebook; larger ids are grammar
        self.near_Vk: Tensor | None = None

    def bind(self, capabilities: Capabilities) -> None:
        """Find the neighbours of each code. The target needs a codebook."""
        codes = codebook.require_codebook(capabilities, "Local", self.k, itself=True)
        ids_V1 = torch.arange(capabilities.vocab, device=codes.device)[:, None]
        near_Vk = codebook.neighbours(codes, self.k - 1, capabilities.vocab) if self.k > 1 else ids_V1[:, :0]
        self.codes, self.near_Vk = len(codes), torch.cat([ids_V1, near_Vk.long()], dim=1)

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> Gumbel:
        return Gumbel(generators, width)

    def within_tolerance(self, p_BNV: Tensor, x_BN: Tensor) -> Tensor:
        """Return whether codes x are accepted under the distributions at their positions, (B, N) bool.

        Args:
            p_BNV: Distributions at the positions.
            x_BN: Codes.
        """
        assert self.near_Vk is not None  # of `bind`
        pooled_BN = p_BNV.gather(2, self.near_Vk[x_BN]).sum(-1)
        return (pooled_BN >= self.tau) & (x_BN < self.codes)

    def again(self, p_BNV: Tensor, x_BN: Tensor, real_BN: Tensor, columns: int) -> Tensor:
        """Return the places of whole image rows that must be generated again, (B, N), in raster order.

        Args:
            p_BNV: Distributions at the positions.
            x_BN: Drafted codes.
            real_BN: Whether a position was drafted.
            columns: Codes per image row.
        """
        rejected_BRC = ~(self.within_tolerance(p_BNV, x_BN) & real_BN).unflatten(1, (-1, columns))
        return spread(rejected_BRC, self.radius).flatten(1)

    def drift(self, p_BNV: Tensor, x_BN: Tensor, stays_BN: Tensor) -> Tensor:
        """Return the drift (B,) of accepting the marked codes x.

        Args:
            p_BNV: Distributions at the positions.
            x_BN: Codes.
            stays_BN: Which codes are accepted.
        """
        here_BN = p_BNV.gather(2, x_BN[..., None])[..., 0]
        return ((1 - here_BN) * stays_BN).sum(1)

    def __call__(self, draft: Draft, scores: Scores, noise: Gumbel | None) -> Verdict:
        tree, x_BN, distribution = draft.tree, draft.value, categorical(scores.distribution)
        chosen_BN = sampling.choose(distribution, tree.depth, noise, draft.levels)
        above_BN = parents_of(tree).expand_as(x_BN)
        p_BNV = distribution.p.gather(1, above_BN[..., None].expand(-1, -1, distribution.width))
        certain_BN = x_BN >= self.codes
        kept_BN = self.within_tolerance(p_BNV, x_BN) | (certain_BN & (x_BN == chosen_BN.gather(1, above_BN)))
        if draft.real is not None:
            kept_BN = kept_BN & draft.real
        verdict = deepest(tree, kept_BN | roots(tree), chosen_BN)
        if tree.size == 1:
            return verdict
        node_BD = verdict.path.clamp(min=0)
        law_BDV = p_BNV.gather(1, node_BD[..., None].expand(-1, -1, p_BNV.shape[-1]))
        law_BDV = sampled_distributions(law_BDV, noise is None)
        stays_BD = (verdict.path > 0) & ~certain_BN.gather(1, node_BD)
        return replace(verdict, drift=self.drift(law_BDV, x_BN.gather(1, node_BD), stays_BD))


def sampled_distributions(p_BNV: Tensor, greedy: bool) -> Tensor:
    """Return the distributions that tokens are sampled from; point masses at the argmax for greedy decoding."""
    if not greedy:
        return p_BNV
    return torch.zeros_like(p_BNV).scatter_(-1, p_BNV.argmax(-1, keepdim=True), 1.0)


def spread(rejected_BRC: Tensor, radius: int) -> Tensor:
    """Mark all places within `radius` rows and columns of a rejected one, from the first rejected place on."""
    size = 2 * radius + 1
    grown_BRC = F.max_pool2d(rejected_BRC.float(), size, stride=1, padding=radius) > 0
    from_first_BN = rejected_BRC.flatten(1).long().cumsum(1) > 0
    return grown_BRC & from_first_BN.view_as(rejected_BRC)
