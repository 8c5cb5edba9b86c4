"""Key-value cache addressed by slot. Rejected tokens are dropped by not advancing a row's length.

Every layer holds (B, H, S, E) tensors. Row b owns slots [0, length_b). Node n of a draft is written at slot length_b +
n, and `commit` moves the accepted nodes to the front of that range. Keys are rotated at depth-based positions before
they are stored, so moving them needs no second rotation. Shapes: B rows, H heads, S slots, E head size, N nodes, D
path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visspec import kernels

GROW = 128  # minimum number of extra slots per allocation, so that the cache is rarely copied
AT_ONCE = 4096  # maximum slots that are allocated for the answer with the prompt, unless the prompt is longer


def to_device(values: Sequence | Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy Python numbers to a tensor on `device` through pinned memory, which does not block. A copy from pageable
    memory would synchronise with the device. A tensor is returned unchanged.
    """
    if isinstance(values, Tensor):
        return values
    if torch.device(device).type != "cuda":
        return torch.tensor(values, device=device, dtype=dtype)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def contiguous_copy(x: Tensor) -> Tensor:
    """Return a copy whose strides follow from its shape, even for dimensions of size one, as graphs need."""
    return x.clone(memory_format=torch.contiguous_format)


def gather_rows(values_BTX: Tensor, at_BN: Tensor) -> Tensor:
    """Return entries of each row by index, (B, N, X)."""
    return values_BTX.gather(1, at_BN[..., None].expand(-1, -1, values_BTX.shape[-1]))


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive attention mask: 0 where `seen` (bool) is true, the minimum of dtype elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def first_room(prompt: int, answer: int) -> int:
    """Return the number of slots to allocate with a prompt, given the expected length of the answer."""
    return prompt + GROW + min(answer, max(AT_ONCE, prompt))


class SlotCache:
    """Preallocated keys and values of all layers of one request. A layer is allocated when it is first written.

    `answer` slots are allocated with the prompt, up to `AT_ONCE` or the prompt's length; a full layer grows by half.
    `lean` only allocates the prompt's slots, for rows that will be copied (`join`). `steady` makes all passes alike, as
    compiled ones need: several rows are always addressed by slot, and a mask is always built.
    """

    def __init__(self, rows: int, answer: int = 0, lean: bool = False):
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths = [0] * rows  # committed slots of each row, on the host
        self.padding: Tensor | None = None  # (B, L) bool: which prompt slots are real; None when all are
        self.nodes = 0  # slots per row written by this pass
        self.answer, self.lean = answer, lean
        self.spare = 0  # allocated rows behind those in use, left by rows that have ended
        self.mask: Any = None  # reused by `pass_inputs.Masks` from pass to pass
        self.steady = False
        # maps the slots that a pass needs to the slots it attends to; the mask hides the extra ones
        self.extents: Callable[[int], int] | None = None
        self.lease: Any = None  # keeps borrowed stores (`models.runner.graphs`) from being lent again
        self._slots: Tensor | None = None  # (B, N) slots written by this pass, if rows differ
        self._start = self._extent = 0

    @property
    def length(self) -> int:
        """Length of the longest row."""
        return max(self.lengths)

    def committed_mask(self, device: torch.device | str) -> Tensor:
        """Return a mask (B, S) of the slots, up to the longest row's length, that are committed and not padding."""
        mask = torch.arange(self.length, device=device) < to_device(self.lengths, device)[:, None]
        if self.padding is not None:
            mask[:, : self.padding.shape[1]] &= self.padding
        return mask

    @property
    def uniform(self) -> bool:
        return min(self.lengths) == max(self.lengths)

    @property
    def apart(self) -> bool:
        """Return whether rows are addressed by slot."""
        return not self.uniform or (self.steady and len(self.lengths) > 1)

    def open(self, nodes: int, device: torch.device | str) -> int:
        """Start a pass that writes `nodes` slots per row. Returns its extent, the number of slots it attends to."""
        self.nodes, self._start = nodes, self.length
        extent = self._start + nodes
        self._extent = extent if self.extents is None else self.extents(extent)
        self._slots = None
        if self.apart:
            self._slots = to_device(self.lengths, device)[:, None] + torch.arange(nodes, device=device)
        self._reserve()
        return self._extent

    def open_at(self, slots: Tensor, extent: int) -> None:
        """Start a pass that overwrites these slots (B, N) and attends to `extent` slots. It must not be committed."""
        self.nodes, self._slots, self._extent = slots.shape[1], slots, extent
        self._reserve()

    def fill(self, starts: Sequence[tuple[Sequence[Tensor], int]], more: int) -> None:
        """Initialise the cache with copies of the first slots of other rows, and `more` slots behind them. Each row has
        the keys of all layers, then the values, (H, S, E), and the number of used slots.
        """
        self.lengths = [length for _, length in starts]
        filled = []
        for stores in zip(*(stores for stores, _ in starts)):
            heads, _, width = stores[0].shape
            new = stores[0].new_empty(len(starts), heads, self.length + more, width)
            for row, old, length in zip(new, stores, self.lengths):
                row[:, :length], row[:, length:] = old[:, :length], 0  # as in `_allocate`
            filled.append(new)
        self.keys, self.values = filled[: len(filled) // 2], filled[len(filled) // 2 :]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, H, N, E) of a layer. Returns views of the layer's slots [0, extent)."""
        if layer == len(self.keys):
            room = self._extent if self.lean else first_room(self._extent, self.answer)
            self.keys.append(self._allocate(key, room))
            self.values.append(self._allocate(value, room))
        return self.write_to(self.keys[layer], self.values[layer], key, value)

    def write_to(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Like `write`, to the given tensors of a layer."""
        if torch.compiler.is_dynamo_compiling():  # rows and slots are dynamic in a compiled graph, heads are not
            for store, new in ((keys, key), (values, value)):
                torch._check(store.shape[1] == new.shape[1])
                torch._check(store.shape[3] == new.shape[3])
        if self._slots is None:
            keys[:, :, self._start : self._start + self.nodes] = key
            values[:, :, self._start : self._start + self.nodes] = value
        else:
            rows = torch.arange(key.shape[0], device=key.device)[:, None]
            slots = self._slots.to(key.device)
            keys[rows, :, slots] = key.transpose(1, 2)
            values[rows, :, slots] = value.transpose(1, 2)
        return keys[:, :, : self._extent], values[:, :, : self._extent]

    def _reserve(self) -> None:
        if self.keys and self.keys[0].shape[2] < self._extent:
            for store in (self.keys, self.values):
                for layer, old in enumerate(store):
                    had = old.shape[2]
                    more = max(self._extent + GROW, had * 3 // 2)
                    room = first_room(self._extent, self.answer) if self.lean else more
                    store[layer] = self._allocate(old, room)
                    store[layer][:, :, :had] = old
            self.lean = False

    def _allocate(self, like: Tensor, slots: int) -> Tensor:
        rows, heads, _, size = like.shape
        # zeros, not empty: masked slots are multiplied by 0, and 0 * NaN is NaN
        return torch.zeros(rows + self.spare, heads, slots, size, dtype=like.dtype, device=like.device)[:rows]

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the nodes of each row's path, in order, and advance the row's length. Paths start with node 0."""
        if any(path != list(range(len(path))) for path in paths):
            longest = max(len(path) for path in paths)
            padded = [path + [0] * (longest - len(path)) for path in paths]
            moves = [[n, len(p), *q] for n, p, q in zip(self.lengths, paths, padded)]
            groups: dict[tuple, list[Tensor]] = {}
            for store in (*self.keys, *self.values):
                groups.setdefault((store.device, store.shape, store.dtype), []).append(store)
            for stores in groups.values():
                told_BX = to_device(moves, stores[0].device)
                kernels.commit_kv(stores, told_BX[:, 0], told_BX[:, 2:], told_BX[:, 1])
        self.lengths = [n + len(path) for n, path in zip(self.lengths, paths)]

    def select(self, keep: list[int]) -> None:
        """Keep only these rows, in this order; keep[b] >= b. The room behind the last row is kept."""
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                used = store[:, :, : self.length]
                for b, row in enumerate(keep):
                    if row != b:
                        used[b] = used[row]
                stores[layer] = store[: len(keep)]
        self.spare += len(self.lengths) - len(keep)
        self.lengths, self.mask = [self.lengths[b] for b in keep], None
        if self.padding is not None:
            self.padding = self.padding[to_device(keep, self.padding.device)]

    def pack(self, real: list[list[bool]]) -> None:
        """Remove the prompts' padding, so that no slot of a row is masked. `real` is `padding` on the host."""
        longest, slots = self.length, []
        for row, length in zip(real, self.lengths):
            order = [s for s, is_real in enumerate(row) if is_real] + list(range(len(row), length))
            slots.append(order + [0] * (longest - len(order)))  # slots behind a row's length are never attended to
        for tensor in (*self.keys, *self.values):
            old = tensor[:, :, :longest]
            old.copy_(old.gather(2, to_device(slots, tensor.device)[:, None, :, None].expand_as(old)))
        self.lengths = [length - row.count(False) for length, row in zip(self.lengths, real)]
        self.padding = self.mask = None

    def join(self, other: SlotCache, take: list[int], skip: list[int]) -> None:
        """Add rows `take` of another cache of the same model, using spare rows first. The first skip[b] slots of row b
        are padding and are not copied. Nothing else may be masked (`pack`).
        """
        rows, total = len(self.lengths), len(self.lengths) + len(take)
        growth = [other.lengths[b] - skip[b] for b in take]
        slots = max(max(growth), *(store.shape[2] for store in self.keys))
        enough = self.spare >= len(take) and all(store.shape[2] == slots for store in self.keys)
        self.spare = self.spare - len(take) if enough else 0
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, (old, new) in enumerate(zip(mine, theirs)):
                if enough:
                    store = old.as_strided((total, *old.shape[1:]), old.stride(), old.storage_offset())
                else:
                    store = self._allocate(old[:1].expand(total, -1, -1, -1), slots)
                    store[:rows, :, : self.length] = old[:, :, : self.length]
                for row, b, length in zip(range(rows, total), take, growth):
                    store[row, :, :length] = new[b, :, skip[b] : other.lengths[b]]
                mine[layer] = store
        self.lengths, self.mask = self.lengths + growth, None


def visibility(tree_ancestor: Tensor, lengths: list[int] | Tensor, padding_BS: Tensor | None, extent: int) -> Tensor:
    """Return an attention mask (B, W, extent) for W of N draft nodes, true where a node attends to a slot: the
    committed slots of its row (B,) that are not padding, and behind them its ancestors (1|B, W, N) and itself.
    padding_BS is true for real prompt slots.
    """
    device, (width, size) = tree_ancestor.device, tree_ancestor.shape[-2:]
    length_B = to_device(lengths, device)
    slot = torch.arange(extent, device=device)
    seen = slot < length_B[:, None]
    if padding_BS is not None:
        seen[:, : padding_BS.shape[1]] &= padding_BS
    rows = len(lengths)
    node_BWS = (slot - length_B[:, None])[:, None].expand(rows, width, extent)
    inside = (node_BWS >= 0) & (node_BWS < size)
    drafted = tree_ancestor.expand(rows, width, size).gather(2, node_BWS.clamp(0, size - 1)) & inside
    return seen[:, None] | drafted
