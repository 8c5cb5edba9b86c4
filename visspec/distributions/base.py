"""Base class of distributions, and checks of a drafter's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Distribution:
    """Base class. `width`: maximum random numbers per sample; `drafts`: type of the drafts' distributions."""

    drafts: type[Distribution]

    @property
    def width(self) -> int:
        raise NotImplementedError

    @classmethod
    def limits(cls, capabilities: Any, device: torch.device | str) -> Tensor:
        """Return data about a target (`types.Capabilities`) for `drafted` and `sanitize`, computed once."""
        raise NotImplementedError

    @classmethod
    def drafted(cls, value: Tensor, shape: tuple[int, int], limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Check drafted values of (B, N) nodes. Returns sanitised values, which of them are valid, and which may be
        drafted, both (B, N) bool. Raises ValueError if `value` is not a tensor of such values.
        """
        raise NotImplementedError

    def sanitize(self, value: Tensor, limits: Tensor) -> tuple[Distribution, Tensor]:
        """Return the sanitised distribution, and where it is valid, (B, N) bool. Raises ValueError for a wrong shape or
        dtype.
        """
        raise NotImplementedError


def check_tensor(
    name: str, value: object, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Raise ValueError unless `value` is a tensor of this shape, dtype (None: floating) and device."""
    if not isinstance(value, Tensor) or value.device != device:
        what = f"a tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: got {what}, expected a tensor on {device}.")
    if value.dtype != dtype if dtype else not value.is_floating_point():
        raise ValueError(f"{name}: got {value.dtype}, expected {dtype or 'floats'}.")
    if value.shape != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {tuple(shape)}.")
