"""Keys and values of a next-scale model, stored at the positions of its scales.

A mask by scale decides who sees a position, so rejected scales need no clearing: the next pass overwrites them.
Shapes: R rows, L positions, Q positions of a pass, H heads, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.cache import to_device
from visspec.models.scales.multiscale import ScaleSizes


class ScaleCache:
    """KV cache with room for `upto` scales (default: all)."""

    def __init__(self, scales: ScaleSizes, layers: int, upto: int | None = None):
        self.scales, self.room = scales, scales.begins[len(scales) if upto is None else upto]
        self.stores: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.slots: Tensor | None = None  # (R, Q) positions of the pass, if rows differ
        self.span, self.several = (0, 0), False  # the pass's range of positions, and whether it covers several scales
        self.scale = 0  # the first of the pass
        self.peak = 0  # maximum bytes during a pass, if more than after it
        self.level: Tensor | None = None  # (L,) scale of each position
        self.mask: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.nbytes for store in self.stores if store is not None for part in store)

    def open(self, first: int, count: int) -> None:
        """Prepare a pass over the scales first .. first + count - 1 of all rows."""
        begins, self.scale = self.scales.begins, first
        self.slots, self.span, self.mask = None, (begins[first], begins[first + count]), None
        self.several = count > 1

    def open_at(self, slots_RQ: Tensor, end: int) -> None:
        """Prepare a pass over these positions, all before `end` except padding, which is at `room`."""
        self.slots, self.span, self.mask, self.several = slots_RQ, (0, end), None, True

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the pass's keys and values and attend; each position sees its own scale and earlier ones."""
        keys, values = self._store(layer, k)
        begin, end = self.span
        if self.slots is None:
            keys[:, :, begin:end], values[:, :, begin:end] = k, v
        else:
            at = self.slots[:, None, :, None].expand_as(k)
            keys.scatter_(2, at, k)
            values.scatter_(2, at, v)
        if self.several and self.mask is None:
            self.mask = self._visible(q.device)
        return F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], attn_mask=self.mask, scale=1.0)

    def _store(self, layer: int, k: Tensor) -> tuple[Tensor, Tensor]:
        store = self.stores[layer]
        if store is None:
            rows, heads, _, size = k.shape
            buffers = [k.new_zeros(rows, heads, self.room + 1, size) for _ in range(2)]  # the last slot is for padding
            store = self.stores[layer] = (buffers[0], buffers[1])
        return store

    def _visible(self, device: torch.device) -> Tensor:
        """Return the mask (1|R, 1, Q, end) bool."""
        if self.level is None:
            self.level = to_device(list(self.scales.levels), device)
        level_L, (begin, end) = self.level, self.span
        if self.slots is None:
            return (level_L[:end] <= level_L[begin:end, None])[None, None]
        own_RQ = F.pad(level_L[: self.room], (0, 1))[self.slots]  # padding sees the first scale, to avoid empty rows
        return (level_L[:end] <= own_RQ[..., None])[:, None]

    def select(self, rows: list[int]) -> None:
        for layer, store in enumerate(self.stores):
            if store is not None:
                index = to_device(rows, store[0].device)
                self.stores[layer] = store[0][index], store[1][index]
        self.mask = self.slots = None
