"""Key-value cache addressed by slot; rejected tokens are dropped by not advancing a row's length.

Every layer holds (B, H, S, E) tensors. Row b owns slots [0, length_b); a draft's node n is written at slot
length_b + n, and `commit` moves the accepted nodes down to the front of that range. Keys are rotated at depth-based
positions before they are stored, so moving them needs no re-rotation. Shapes: B rows, H heads, S slots, E head size,
N nodes, D path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visspec import kernels

GROW = 128  # extra slots allocated at least, so that the cache is copied rarely
AT_ONCE = 4096  # slots, or as many as the prompt has: an answer's room that is allocated with the prompt, at most


def to_device(values: Sequence | Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy Python numbers to a tensor on `device`. The copy is from pinned memory and doesn't block; a copy from
    pageable memory would synchronise with the device. A tensor, which is there already, is returned as it is.
    """
    if isinstance(values, Tensor):
        return values
    if torch.device(device).type != "cuda":
        return torch.tensor(values, device=device, dtype=dtype)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def contiguous_copy(x: Tensor) -> Tensor:
    """A copy whose strides follow from its shape, also those of dimensions of one: a graph is made for strides."""
    return x.clone(memory_format=torch.contiguous_format)


def gather_rows(values_BTX: Tensor, at_BN: Tensor) -> Tensor:
    """Entries of each row by their index, (B, N, X)."""
    return values_BTX.gather(1, at_BN[..., None].expand(-1, -1, values_BTX.shape[-1]))


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores, of the shape of `seen` (bool): 0 where that is true, the minimum elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def first_room(prompt: int, answer: int) -> int:
    """Slots to allocate with a prompt that `answer` more are expected to follow."""
    return prompt + GROW + min(answer, max(AT_ONCE, prompt))


def more_room(wanted: int, had: int) -> int:
    """Slots to allocate where `wanted` are more than there are."""
    return max(wanted + GROW, had * 3 // 2)


class SlotCache:
    """Preallocated keys and values of all layers of one request. A layer is allocated when it is first written.

    `answer`: slots that will follow the prompt. They are allocated with it, up to `AT_ONCE` or the prompt's own; a
    layer that is full grows by half. `steady`: passes have the same form whether rows are of one length or not, as
    compiled ones want: several rows are always addressed by slot, and a mask is always given. `lean`: nothing beyond
    the prompt is allocated before more is written, for rows that will be copied to another cache (`join`).
    """

    def __init__(self, rows: int, answer: int = 0, lean: bool = False):
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths = [0] * rows  # committed slots of each row, on the host
        self.padding: Tensor | None = None  # (B, L) bool: which prompt slots are real; None when all are
        self.nodes = 0  # slots per row written by this pass
        self.answer, self.lean = answer, lean
        self.spare = 0  # rows that are allocated behind each store's: those of rows that have left
        self.mask: Any = None  # what `masks` keeps from pass to pass
        self.steady = False
        # how many slots a pass attends to that needs so many; its mask hides the last ones
        self.extents: Callable[[int], int] | None = None
        self.lease: Any = None  # what keeps stores that were lent (`models.runner.graphs`) from others
        self._slots: Tensor | None = None  # (B, N) slots written by this pass, if rows differ
        self._start = self._extent = 0

    @property
    def length(self) -> int:
        """Length of the longest row."""
        return max(self.lengths)

    def held(self, device: torch.device | str) -> Tensor:
        """(B, S) bool: which slots up to the longest row's are committed and no padding."""
        held = torch.arange(self.length, device=device) < to_device(self.lengths, device)[:, None]
        if self.padding is not None:
            held[:, : self.padding.shape[1]] &= self.padding
        return held

    @property
    def uniform(self) -> bool:
        return min(self.lengths) == max(self.lengths)

    @property
    def apart(self) -> bool:
        """Whether rows are addressed by slot."""
        return not self.uniform or (self.steady and len(self.lengths) > 1)

    def open(self, nodes: int, device: torch.device | str) -> int:
        """Start a pass that writes `nodes` slots per row. Returns its extent: the number of slots it attends to."""
        self.nodes, self._start = nodes, self.length
        self._extent = self.length + nodes if self.extents is None else self.extents(self.length + nodes)
        self._slots = None
        if self.apart:
            self._slots = to_device(self.lengths, device)[:, None] + torch.arange(nodes, device=device)
        self._reserve()
        return self._extent

    def open_at(self, slots: Tensor, extent: int) -> None:
        """Start a pass that overwrites the given slots (B, N) and attends to `extent` slots. It must not be followed by
        `commit`: row lengths do not change.
        """
        self.nodes, self._slots, self._extent = slots.shape[1], slots, extent
        self._reserve()

    def fill(self, starts: Sequence[tuple[Sequence[Tensor], int]], more: int) -> None:
        """Begin with copies of other rows' first slots, and room for `more` behind them. Of each row: keys of all
        layers, then values, (H, S, E), and how many slots are taken.
        """
        self.lengths = [length for _, length in starts]
        made = []
        for stores in zip(*(stores for stores, _ in starts)):
            heads, _, width = stores[0].shape
            new = stores[0].new_empty(len(starts), heads, self.length + more, width)
            for row, old, length in zip(new, stores, self.lengths):
                row[:, :length], row[:, length:] = old[:, :length], 0  # as in `_allocate`
            made.append(new)
        self.keys, self.values = made[: len(made) // 2], made[len(made) // 2 :]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new (B, H, N, E) pair; return views of that layer's slots [0, extent)."""
        if layer == len(self.keys):
            room = self._extent if self.lean else first_room(self._extent, self.answer)
            self.keys.append(self._allocate(key, room))
            self.values.append(self._allocate(value, room))
        keys, values = self.keys[layer], self.values[layer]
        if torch.compiler.is_dynamo_compiling():  # a graph holds for any rows and slots, for heads of the model's
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
        """Make room for this pass in all layers, which are of one size."""
        if self.keys and self.keys[0].shape[2] < self._extent:
            for store in (self.keys, self.values):
                for layer, old in enumerate(store):
                    store[layer] = self._grown(old)
            self.lean = False

    def _allocate(self, like: Tensor, slots: int) -> Tensor:
        rows, heads, _, size = like.shape
        # zeros, not empty: masked slots are multiplied by 0, and 0 * NaN is NaN
        return torch.zeros(rows + self.spare, heads, slots, size, dtype=like.dtype, device=like.device)[:rows]

    def _grown(self, old: Tensor) -> Tensor:
        wanted = first_room(self._extent, self.answer) if self.lean else more_room(self._extent, old.shape[2])
        new = self._allocate(old, wanted)
        new[:, :, : old.shape[2]] = old
        return new

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the nodes of each row's path, in order, and advance the row's length. Paths start with node 0."""
        if any(path != list(range(len(path))) for path in paths):
            longest = max(len(path) for path in paths)
            padded = [path + [0] * (longest - len(path)) for path in paths]
            moves = [[n, len(p), *q] for n, p, q in zip(self.lengths, paths, padded)]
            for stores in self._alike():
                told_BX = to_device(moves, stores[0].device)
                kernels.commit_kv(stores, told_BX[:, 0], told_BX[:, 2:], told_BX[:, 1])
        self.lengths = [n + len(path) for n, path in zip(self.lengths, paths)]

    def _alike(self) -> list[list[Tensor]]:
        """Keys and values of all layers, grouped by device and shape."""
        groups: dict[tuple, list[Tensor]] = {}
        for store in (*self.keys, *self.values):
            groups.setdefault((store.device, store.shape, store.dtype), []).append(store)
        return list(groups.values())

    def select(self, keep: list[int]) -> None:
        """Keep only these rows, in this order, keep[b] >= b. Those that change their place are moved in the stores; the
        room behind the last one is kept.
        """
        longest = self.length
        for stores in (self.keys, self.values):
            stores[:] = [move_rows(store, keep, store[:, :, :longest]) for store in stores]
        self.spare += len(self.lengths) - len(keep)
        self.lengths, self.mask = [self.lengths[b] for b in keep], None
        if self.padding is not None:
            self.padding = self.padding[to_device(keep, self.padding.device)]

    def pack(self, real: list[list[bool]]) -> None:
        """Drop the padding of prompts, so that no slot below a row's length is masked. real: `padding` on the host."""
        longest, slots = self.length, []
        for row, length in zip(real, self.lengths):
            kept = [s for s, is_real in enumerate(row) if is_real] + list(range(len(row), length))
            slots.append(kept + [0] * (longest - len(kept)))  # what is behind a row's length is never attended to
        for tensor in (*self.keys, *self.values):
            old = tensor[:, :, :longest]
            old.copy_(old.gather(2, to_device(slots, tensor.device)[:, None, :, None].expand_as(old)))
        self.lengths = [length - row.count(False) for length, row in zip(self.lengths, real)]
        self.padding = self.mask = None

    def join(self, other: SlotCache, take: list[int], skip: list[int]) -> None:
        """Add rows of another cache of the same model, in the room that is spare. The first skip[b] slots of the
        other's row b are padding and are left behind; nothing else may be masked in either (`pack`).
        """
        rows, wanted = len(self.lengths), len(self.lengths) + len(take)
        growth = [other.lengths[b] - skip[b] for b in take]
        slots = max(max(growth), *(store.shape[2] for store in self.keys))
        enough = self.spare >= len(take) and all(store.shape[2] == slots for store in self.keys)
        self.spare = self.spare - len(take) if enough else 0
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, (old, new) in enumerate(zip(mine, theirs)):
                if enough:
                    store = widen_store(old, wanted)
                else:
                    store = self._allocate(old[:1].expand(wanted, -1, -1, -1), slots)
                    store[:rows, :, : self.length] = old[:, :, : self.length]
                for row, b, length in zip(range(rows, wanted), take, growth):
                    store[row, :, :length] = new[b, :, skip[b] : other.lengths[b]]
                mine[layer] = store
        self.lengths, self.mask = self.lengths + growth, None


def move_rows(store: Tensor, keep: list[int], used: Tensor) -> Tensor:
    """The rows `keep` of a store, in place; keep[b] >= b, so no row is written over before it has been moved. used: the
    view of the store that holds anything.
    """
    for b, row in enumerate(keep):
        if row != b:
            used[b] = used[row]
    return store[: len(keep)]


def widen_store(store: Tensor, rows: int) -> Tensor:
    """A store with rows of its memory that are behind it (`move_rows`)."""
    return store.as_strided((rows, *store.shape[1:]), store.stride(), store.storage_offset())


def visibility(tree_ancestor: Tensor, lengths: list[int] | Tensor, padding_BS: Tensor | None, extent: int) -> Tensor:
    """Attention mask of W of N draft nodes: (B, W, extent) bool, true where a node attends to a slot.

    Committed slots of its row that are not padding (`padding_BS`: true for real prompt slots, S prompt slots), and its
    ancestors and itself among the slots behind them. tree_ancestor is (1|B, W, N), lengths (B,).
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
