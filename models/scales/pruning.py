"""Token pruning: of the last scales only some tokens go through the blocks (FastVAR, arXiv 2503.23367). Approximate.

The tokens that run are those whose features differ most from the same spot's at the scale before, alike in all rows of
an image; the others get what the blocks have added to the scale before, enlarged. (Published: the tokens farthest from
the mean of their map, chosen in each layer; others restored from the last full scale.) They are chosen before
the blocks, so that networks know nothing of it: they are given fewer places, whose keys and values alone are kept.

Shapes: B images, R = B or 2 B rows, Q tokens of a scale, M of them through the blocks, C width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.cache import to_device
from visspec.models.scales.blocks import GivenT, NextScale
from visspec.models.scales.cache import ScaleCache
from visspec.models.scales.multiscale import ScaleQuantizer, ScaleSizes
from visspec.models.scales.reading import ConditionState, DistanceGroup


@dataclass(frozen=True)
class TokenPruning:
    """shares: of tokens that go through the blocks, of each of the last scales, none larger than the one before; 0: the
    blocks are left out. audit: measure the drift by a full pass beside each; a scale's is that of its mean code.
    """

    shares: tuple[float, ...]
    audit: bool = False

    @classmethod
    def of(cls, value: Any, scales: ScaleSizes) -> TokenPruning:
        """From one, or from shares. Raises ValueError unless they fit the scales."""
        found = value if isinstance(value, cls) else cls(tuple(value) if isinstance(value, (list, tuple)) else (value,))
        shares, most = found.shares, len(scales) - 1
        if not all(type(share) in (int, float) and 0 <= share <= 1 for share in shares):
            raise ValueError(f"pruning: got {value!r}, expected shares in [0, 1]")
        if not 1 <= len(shares) <= most or sorted(shares, reverse=True) != list(shares):
            raise ValueError(f"pruning: got {shares}, expected 1 to {most} shares, none larger than the one before")
        return found

    def counts(self, scales: ScaleSizes) -> tuple[int, ...]:
        """Tokens of each scale that go through the blocks."""
        shares = (1,) * (len(scales) - len(self.shares)) + self.shares
        return tuple(max(round(share * size), share > 0) for share, size in zip(shares, scales.sizes))

    def whole(self, scales: ScaleSizes) -> bool:
        """Whether nothing is pruned."""
        return self.counts(scales) == scales.sizes


class PrunedState(ConditionState):
    """A reading of one scale at a time, the same of all images. kept: positions (B, M) of the tokens of each scale that
    went through the blocks. full: beside it that of all tokens, with an audit; said: of the latest scale by it.
    """

    def __init__(
        self, net: NextScale[GivenT], quantizer: ScaleQuantizer, condition: GivenT, images: int, pruning: TokenPruning
    ):
        self.counts = pruning.counts(net.config.scales)
        slots = ScaleSizes(tuple((1, max(count, 1)) for count in self.counts))
        super().__init__(net, quantizer, condition, images, ScaleCache(slots, net.config.depth))
        self.full = ConditionState(net, quantizer, condition, images) if pruning.audit else None
        self.said: list[DistanceGroup] = []
        self.kept: list[Tensor] = []
        self.added = torch.empty(0)  # (R, Q, C) by the blocks to the inputs of the latest scale

    def read(self, value_BNS: Tensor | None = None, last: bool = False) -> list[DistanceGroup]:
        if self.full is not None:
            self.said = self.full.read(value_BNS, last)
        return super().read(value_BNS, last)

    def hidden(self, x_RQC: Tensor, places: Tensor) -> Tensor:
        scale, size = len(self.kept), x_RQC.shape[1]
        kept_BM = self._changed(scale, x_RQC)
        self.kept.append(kept_BM)
        if kept_BM.shape[1] == size:
            out = super().hidden(x_RQC, places)
        else:
            out = x_RQC + resize_grid(self.added, *self.scales.grids[scale - 1 : scale + 1])
        if 0 < kept_BM.shape[1] < size:
            index_RM = kept_BM.repeat(self.copies, 1)
            at = index_RM[..., None].expand(-1, -1, x_RQC.shape[2])
            out = out.scatter(1, at, super().hidden(x_RQC.gather(1, at), places[0, index_RM]))
        self.added = out - x_RQC
        return out

    def _changed(self, scale: int, x_RQC: Tensor) -> Tensor:
        """(B, M) sorted positions of the tokens that differ most from the scale before."""
        images, count = len(self.count), self.counts[scale]
        if count in (0, x_RQC.shape[1]):
            return torch.arange(count, device=x_RQC.device).expand(images, -1)
        now, before = (
            self.quantizer.shrink(*of, self.scales) for of in ((self.after[-1], scale), (self.features, scale - 1))
        )
        moved = (now - resize_grid(before, *self.scales.grids[scale - 1 : scale + 1])).norm(dim=-1)
        return moved.topk(count, dim=1).indices.sort(dim=1).values

    def keep(self, counts: list[int]) -> None:
        super().keep(counts)
        if self.full is not None:
            self.full.keep(counts)

    def select(self, images: list[int]) -> None:
        self.added = self.added[to_device(self._rows(images), self.added.device)]
        super().select(images)
        if self.full is not None:
            self.full.select(images)


def resize_grid(x_RQC: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Tokens of a grid on another one (bilinear)."""
    x = x_RQC.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(x, size=size, mode="bilinear").flatten(2).transpose(1, 2)
