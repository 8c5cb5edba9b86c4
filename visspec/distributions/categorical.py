"""Distributions over ids. Shapes: B rows, N nodes, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from visspec.distributions.base import Distribution, check_tensor

SUM_TOLERANCE = 1e-3  # a float32 softmax over 256k entries sums to one within 1e-4


class Categorical(Distribution):
    """Distributions over V ids, from logits or probabilities, float32 (..., V). The other form is computed on use."""

    __slots__ = ("_logits", "_p")

    def __init__(self, logits: Tensor | None = None, *, p: Tensor | None = None):
        self._logits, self._p = logits, p

    @property
    def logits(self) -> Tensor:
        if self._logits is None:
            self._logits = self.p.log()
        return self._logits

    @property
    def p(self) -> Tensor:
        if self._p is None:
            assert self._logits is not None
            self._p = torch.softmax(self._logits, dim=-1)
        return self._p

    @property
    def width(self) -> int:
        known = self._p if self._logits is None else self._logits
        assert known is not None
        return known.shape[-1]

    def at(self, ids: Tensor) -> Tensor:
        """Return the probability of an id (...) under each distribution (...)."""
        return self.p.gather(-1, ids[..., None])[..., 0]

    @classmethod
    def chain(cls, distributions: Sequence[Categorical]) -> Categorical:
        """Stack the distributions (B, V) of a chain's levels to (B, 1 + levels, V). The root's entry is unused."""
        levels = [distribution.p for distribution in distributions]
        return cls(p=torch.stack([torch.zeros_like(levels[0]), *levels], dim=1))

    @classmethod
    def limits(cls, capabilities: Any, device: torch.device | str) -> Tensor:
        allowed_V = torch.ones(capabilities.vocab, dtype=torch.bool, device=device)
        allowed_V[[i for i in capabilities.never_drafted if 0 <= i < len(allowed_V)]] = False
        return allowed_V

    @classmethod
    def drafted(cls, value: Tensor, shape: tuple[int, int], limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_tensor("value", value, shape, torch.long, limits.device)
        safe = value.clamp(0, len(limits) - 1)
        return safe, safe == value, limits[safe]

    def sanitize(self, value: Tensor, limits: Tensor) -> tuple[Categorical, Tensor]:
        check_tensor("q", self.p, (*value.shape, len(limits)), None, limits.device)
        q = self.p.float()
        sums = (q.sum(dim=-1) - 1.0).abs() <= SUM_TOLERANCE
        drawn = q.gather(-1, value[..., None])[..., 0] > 0
        lawful = q.isfinite().all(dim=-1) & (q >= 0).all(dim=-1) & sums & drawn
        return Categorical(p=torch.where(lawful[..., None], q, 0.0)), lawful


Categorical.drafts = Categorical


def categorical(distribution: Distribution) -> Categorical:
    """Cast a distribution to `Categorical`, for code that only handles ids. `setup.check` has checked the type."""
    return cast(Categorical, distribution)


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Sample ids by inverse CDF from probabilities p (..., V) and uniforms u (...), never an id of probability zero."""
    total = p.cumsum(dim=-1)
    pick = torch.searchsorted(total, (u * total[..., -1])[..., None].contiguous(), right=True)[..., 0]
    last = (p > 0).long().mul(torch.arange(p.shape[-1], device=p.device)).amax(dim=-1)
    return torch.minimum(pick, last)


def residual(p: Tensor, qf: Tensor) -> Tensor:
    """Return the distribution after a rejection, proportional to [p - q f]+; p itself if that is zero (p = q f)."""
    rest = (p - qf).clamp_(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)
