"""Additive attention masks of draft passes, for any decoder that takes a 4-D mask. R cache rows, N nodes, S slots."""

from __future__ import annotations

import torch
from torch import Tensor

from visspec.cache import SlotCache, to_device, visibility
from visspec.types import Tree

MASKS_KEPT = 32


class Masks:
    """Builds the mask of a pass; shared shapes come from a buffer. `window` 0 means full attention in every layer;
    `mixed` models take a dictionary with a mask for each kind of layer.
    """

    def __init__(self, dtype: torch.dtype, window: int = 0, mixed: bool = False):
        self.dtype, self.window, self.mixed = dtype, window, mixed
        self._bias: dict[int, tuple[Tree, Tensor]] = {}

    def __call__(self, slots: SlotCache, tree: Tree, extent: int) -> Tensor | dict[str, Tensor] | None:
        """(1|R, 1, N, extent); None where plain causal attention does the same. A tree per row has R rows."""
        if slots.uniform and slots.padding is None and not self.window and tree.parent.shape[0] == 1:
            return None if tree.size == 1 else self._shared(tree, slots.length)
        seen_RNS = visibility(tree.ancestor, slots.lengths, slots.padding, extent)
        full = self.additive(seen_RNS)
        if not self.window:
            return full
        sliding = self.additive(seen_RNS & nearby(tree.depth, slots.lengths, extent, self.window))
        return {"full_attention": full, "sliding_attention": sliding} if self.mixed else sliding

    def additive(self, seen_RNS: Tensor) -> Tensor:
        """0 where a node attends, the minimum elsewhere: (R, 1, N, S)."""
        bias = torch.zeros(seen_RNS.shape, dtype=self.dtype, device=seen_RNS.device)
        return bias.masked_fill_(~seen_RNS, torch.finfo(self.dtype).min)[:, None]

    def _shared(self, tree: Tree, length: int) -> Tensor:
        """The mask if all rows are equal: a view into a buffer of [zeros | tree], not built per round."""
        known = self._bias.get(id(tree))
        if known is not None and known[0] is tree and known[1].shape[-1] - tree.size >= length:
            buffer = known[1]
        else:
            own = self.additive(tree.ancestor)
            buffer = torch.cat([own.new_zeros(1, 1, tree.size, 2 * length), own], dim=-1)
            if len(self._bias) >= MASKS_KEPT:
                self._bias.clear()
            self._bias[id(tree)] = (tree, buffer)
        view = buffer[..., buffer.shape[-1] - tree.size - length :]
        return aligned(view) if view.is_cuda else view


def aligned(bias: Tensor) -> Tensor:
    """The mask at an aligned address, because SDPA selects wide loads by strides only."""
    seen = bias.shape[-1]
    new = bias.new_empty(*bias.shape[:-1], -(-seen // 8) * 8)[..., :seen]
    return new.copy_(bias)


def nearby(depth: Tensor, lengths: list[int], extent: int, window: int) -> Tensor:
    """Sliding windows, (R, N, extent) bool: a node attends to the last `window` tokens on its path."""
    length_R = to_device(lengths, depth.device)
    rows, size = len(lengths), depth.shape[-1]
    depth_RN = depth.expand(rows, size)
    slot = torch.arange(extent, device=depth.device).expand(rows, extent)
    node = slot - length_R[:, None]
    inside = (node >= 0) & (node < size)
    index_RS = torch.where(inside, length_R[:, None] + depth_RN.gather(1, node.clamp(0, size - 1)), slot)
    return (length_R[:, None] + depth_RN)[..., None] - index_RS[:, None] < window
