"""Distributions over maps of codes, such as the scales of VAR. Given the earlier nodes, the codes of a map are
independent. Shapes: B rows, N nodes, S codes of the largest map in a pass, V vocabulary. Smaller maps are padded at the
end.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.distributions.base import Distribution, check_tensor


class Maps(Distribution):
    """Distributions (B, N) from float32 logits (B, N, S, V). Node (b, n) has count (B, N) codes. Values: (B, N, S)."""

    def __init__(self, logits_BNSV: Tensor, count_BN: Tensor):
        self.logits, self.count = logits_BNSV, count_BN

    @property
    def p(self) -> Tensor:
        return torch.softmax(self.logits, dim=-1)

    @property
    def real(self) -> Tensor:
        """(B, N, S) bool: false at padding."""
        return torch.arange(self.logits.shape[2], device=self.count.device) < self.count[..., None]

    @property
    def width(self) -> int:
        return self.logits.shape[-1]

    @classmethod
    def chain(cls, levels: list[Maps], size: int) -> Maps:
        """Stack a chain's distributions (B, 1) to (B, 1 + levels), padded to `size` codes. The root's is unused."""
        padded = [F.pad(distribution.logits, (0, 0, 0, size - distribution.logits.shape[2])) for distribution in levels]
        counts = [distribution.count for distribution in levels]
        stacks = (torch.cat([torch.zeros_like(parts[0]), *parts], dim=1) for parts in (padded, counts))
        return cls(*stacks)

    @classmethod
    def limits(cls, capabilities: Any, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor (S, V), whose shape is used to check drafts."""
        return torch.empty(max(capabilities.scales), capabilities.vocab, device=device)

    @classmethod
    def drafted(cls, value: Tensor, shape: tuple[int, int], limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_tensor("value", value, (*shape, len(limits)), torch.long, limits.device)
        safe = value.clamp(0, limits.shape[1] - 1)
        possible_BN = (safe == value).all(dim=-1)
        return safe, possible_BN, torch.ones_like(possible_BN)

    def sanitize(self, value: Tensor, limits: Tensor) -> tuple[Maps, Tensor]:
        check_tensor("q.logits", self.logits, (*value.shape, limits.shape[1]), None, limits.device)
        check_tensor("q.count", self.count, value.shape[:2], torch.long, limits.device)
        logits = self.logits.float()
        drawn = logits.gather(-1, value[..., None])[..., 0].isfinite()
        sound = ~(logits.isnan() | logits.isposinf()).any(dim=-1)
        lawful_BN = ((drawn & sound) | ~self.real).all(dim=-1)
        return Maps(torch.where(lawful_BN[..., None, None], logits, 0.0), self.count), lawful_BN


Maps.drafts = Maps


def maps(distribution: Distribution) -> Maps:
    """Cast a distribution to `Maps`. `setup.check` has checked the type."""
    return cast(Maps, distribution)
