"""Additive attention masks of draft passes, for any decoder that takes a 4-D mask.

Shapes: R cache rows, N nodes, S slots, G query heads per key head, M = G N mask rows: row g N + n belongs to node n
(`draft_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visspec.cache import GROW, SlotCache, additive, contiguous_copy, to_device, visibility
from visspec.models.attention.draft_attention import NAME
from visspec.models.attention.ragged import MASK, Backend, DraftLayout
from visspec.types import Tree

STATEFUL = ("linear_attention", "conv")  # layer types without attention; they need no mask, as drafts have no padding
HYBRID = "hybrid"  # layers with attention and a state
AttentionInputs = dict[str, Any]  # keyword arguments of a forward pass that define what its nodes attend to
MOST_KEPT = 1 << 24  # numbers in all shared masks together


class Masks:
    """Builds the mask of a pass; masks shared by all rows come from a buffer. `window` 0 means full attention in every
    layer; `mixed` models take a dictionary with a mask per layer type. `groups` is G, or 1 for models that attend with
    the mask alone. `backend` can replace the mask (`ragged`).
    """

    def __init__(
        self, dtype: torch.dtype, window: int = 0, mixed: bool = False, groups: int = 1, backend: Backend | None = None
    ):
        self.dtype, self.window, self.mixed, self.groups = dtype, window, mixed, groups
        self.backend = backend or Backend()
        self._bias: dict[int, tuple[Tree, Tensor]] = {}

    def __call__(self, slots: SlotCache, tree: Tree, extent: int) -> AttentionInputs:
        """Return the arguments of a pass over a draft. A tree per row has R rows; no mask means plain causal."""
        if self.window:
            return self.whole(tree.ancestor, tree.depth, slots.lengths, slots.padding, extent)
        single = (
            tree.size == 1 and slots.uniform and slots.padding is None and not slots.steady and slots.extents is None
        )
        if single and (self.groups == 1 or self.backend.name != MASK):
            return {"attention_mask": None}
        if (layout := self.backend(slots, tree)) is not None:
            return self.unmasked(layout)
        if slots.apart or slots.padding is not None or tree.parent.shape[0] > 1 or slots.extents is not None:
            mask = self._ragged_mask(slots, tree, extent)
        else:
            mask = self._shared_mask(tree, slots.length)
        return self.inputs(laid(mask, slots.steady))

    def whole(
        self, ancestor: Tensor, depth: Tensor, lengths: list[int] | Tensor, padding: Tensor | None, extent: int
    ) -> AttentionInputs:
        """Like a call, without cached masks; lengths (R,) may be a tensor, which is then not read on the host."""
        seen_RNS = visibility(ancestor, lengths, padding, extent)
        full = laid(self.additive(seen_RNS, self.groups), False)
        if not self.window:
            return self.inputs(full)
        sliding = laid(self.additive(seen_RNS & nearby(depth, lengths, extent, self.window), self.groups), False)
        if not self.mixed:
            return self.inputs(sliding)
        kinds = self.inputs(full), self.inputs(sliding)
        return {
            name: {"full_attention": inputs, "sliding_attention": kinds[1][name], **dict.fromkeys(STATEFUL)}
            for name, inputs in kinds[0].items()
        }

    def inputs(self, mask: Tensor) -> AttentionInputs:
        """Return the arguments for a mask of M rows: the part for N nodes, and all of it for our attention."""
        if self.groups == 1:
            return {"attention_mask": mask}
        return {"attention_mask": mask[:, :, : mask.shape[2] // self.groups], NAME: mask}

    def unmasked(self, layout: DraftLayout) -> AttentionInputs:
        """Return the arguments without a mask. The empty mask makes attention that ignores the layout fail."""
        nodes = layout.ancestor.shape[2]
        empty = torch.empty(1, 1, nodes, 0, dtype=self.dtype, device=layout.ancestor.device)
        return {"attention_mask": empty, NAME: layout}

    def additive(self, seen_RNS: Tensor, groups: int = 1) -> Tensor:
        """Return 0 where a node attends and the dtype's minimum elsewhere: (R, 1, M, S)."""
        bias = additive(seen_RNS, self.dtype)[:, None]
        return bias if groups == 1 else bias.repeat(1, 1, groups, 1)

    def _shared_mask(self, tree: Tree, length: int) -> Tensor:
        """Return the mask if all rows are equal: a view into a buffer of [zeros | tree], not built every round."""
        known = self._bias.get(id(tree))
        if known is not None and known[0] is tree and known[1].shape[-1] - tree.size >= length:
            buffer = known[1]
        else:
            own = self.additive(tree.ancestor, self.groups)
            buffer = torch.cat([own.new_zeros(*own.shape[:3], length + length // 4 + GROW), own], dim=-1)
            kept = list(self._bias.values())  # copied, as other threads may add to it
            if sum(other.numel() for _, other in kept) + buffer.numel() > MOST_KEPT:
                self._bias.clear()
            self._bias[id(tree)] = (tree, buffer)
        return buffer[..., buffer.shape[-1] - tree.size - length :]

    def _ragged_mask(self, slots: SlotCache, tree: Tree, extent: int) -> Tensor:
        """Return the mask if rows differ. It is kept with the request and updated after each row's prefix only."""
        kept = slots.mask
        if not isinstance(kept, IncrementalMask) or not kept.fits(slots, tree, self.groups, extent):
            room = extent + extent // 4 + GROW
            seen_RNS = visibility(tree.ancestor, slots.lengths, slots.padding, room)
            slots.mask = IncrementalMask(self.additive(seen_RNS, self.groups), slots.lengths, tree.size)
        else:
            kept.move(slots.lengths, self.additive(tree.ancestor))
        return slots.mask.bias[:, :, : self.groups * tree.size, :extent]


class IncrementalMask:
    """A mask for rows of different lengths that is updated through the rounds of a request: bias (R, 1, M, S).

    All M rows of a cache row share its prefix, so that a pass with fewer nodes uses the first ones.
    """

    def __init__(self, bias: Tensor, lengths: list[int], nodes: int):
        self.bias, self.lengths, self.nodes = bias, lengths, nodes

    def fits(self, slots: SlotCache, tree: Tree, groups: int, extent: int) -> bool:
        """Return whether the next pass can be written over the last one's slots."""
        rows, _, most, room = self.bias.shape
        growth = [new - old for new, old in zip(slots.lengths, self.lengths)]
        return (
            rows == len(slots.lengths)
            and most >= groups * tree.size
            and room >= max(max(self.lengths) + self.nodes + tree.size + 1, extent)
            and 0 <= min(growth)
            and max(growth) <= self.nodes
        )

    def move(self, lengths: list[int], own: Tensor) -> None:
        """Update the mask after rows have committed nodes; `own` (1|R, 1, N, N) is the next pass's tree."""
        device, (rows, _, most, _), size = self.bias.device, self.bias.shape, own.shape[-1]
        lowest = torch.finfo(own.dtype).min
        start_RX = to_device([[old, self.nodes + old - new] for new, old in zip(lengths, self.lengths)], device)
        ahead = torch.arange(self.nodes + size, device=device)
        padded = torch.nn.functional.pad(own[:, 0], (self.nodes, 0))
        padded = torch.nn.functional.pad(padded, (0, self.nodes), value=lowest).expand(rows, -1, -1)
        values_RNW = padded.gather(2, (start_RX[:, 1:] + ahead)[:, None].expand(-1, size, -1))
        values_RMW = values_RNW.repeat(1, -(-most // size), 1)[:, :most]
        self.bias[:, 0].scatter_(2, (start_RX[:, :1] + ahead)[:, None].expand(-1, most, -1), values_RMW)
        self.lengths, self.nodes = lengths, size


def laid(bias: Tensor, steady: bool) -> Tensor:
    """Lay out a mask for attention. steady: copy it so that strides depend on the shape alone, which lets one graph
    serve all masks.
    """
    if not bias.is_cuda:
        return contiguous_copy(bias) if steady else bias
    aligned = bias.is_contiguous() and bias.storage_offset() % 8 == bias.shape[-1] % 8 == 0
    return bias if aligned and not steady else align_mask(bias, spare=steady)


def align_mask(bias: Tensor, spare: bool = False) -> Tensor:
    """Copy the mask to aligned rows, because SDPA selects wide loads by strides only. spare: always make the allocated
    rows longer than the visible part.
    """
    seen = bias.shape[-1]
    width = (seen // 8 + 1) * 8 if spare else -(-seen // 8) * 8
    new = bias.new_empty(*bias.shape[:-1], width)[..., :seen]
    return new.copy_(bias)


def nearby(depth: Tensor, lengths: list[int] | Tensor, extent: int, window: int) -> Tensor:
    """Return sliding windows, (R, N, extent) bool: a node attends to the last `window` tokens on its path."""
    length_R = to_device(lengths, depth.device)
    rows, size = len(lengths), depth.shape[-1]
    depth_RN = depth.expand(rows, size)
    slot = torch.arange(extent, device=depth.device).expand(rows, extent)
    node = slot - length_R[:, None]
    inside = (node >= 0) & (node < size)
    index_RS = torch.where(inside, length_R[:, None] + depth_RN.gather(1, node.clamp(0, size - 1)), slot)
    return (length_R[:, None] + depth_RN)[..., None] - index_RS[:, None] < window
