"""Stores at fixed addresses, lent to requests, for calls that are recorded as CUDA graphs.

A graph holds addresses, so the recorder owns the stores and lends them: a request's tensors move into stores of the
next *bucket* of slots, and on to others when they outgrow it; when it ends they go back, to be lent again with their
recordings. Shapes: C rows of a store, R of a request, S slots.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from visspec.kernels.common import next_power_of_2
from visspec.replay import Recordings
from visspec.types import Request

MIN_NEW_TOKENS = 32  # new tokens that a request must ask for to be one that calls are recorded for
FIRST, LARGEST = 256, 1 << 17  # slots of the smallest and the largest bucket
MAX_RECORDINGS = 64  # recordings; the one that was not used for the longest makes room
MAX_IDLE = 8  # stores that no request uses and that are kept
NUMBERS = itertools.count()


def buckets(positions: int | None) -> list[int]:
    """Numbers of slots that calls are recorded for: powers of two, up to the first that holds all positions."""
    sizes = [FIRST]
    while sizes[-1] < min(positions or LARGEST, LARGEST):
        sizes.append(2 * sizes[-1])
    return sizes


def capacity(rows: int) -> int:
    """Rows of stores for so many: few sizes, so that rows may join and other batches find their recordings."""
    return next_power_of_2(rows) if rows <= 8 else -(-rows // 8) * 8


@dataclass(eq=False)
class KVBuffers:
    """Tensors (C, ..., S, ...) at addresses that recordings hold. kind: C, S, the stream, and what each is like."""

    kind: tuple
    tensors: list[Tensor]
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def slots(self) -> int:
        return self.kind[1]

    def contains(self, first: Tensor, wanted: int, queue: int) -> bool:
        """Whether a request's rows, of whose tensors one is given, are in these, with room for `wanted` slots."""
        here = first.data_ptr() == self.tensors[0].data_ptr()  # it has moved out where it needed more rows
        return here and self.slots >= wanted and self.kind[2] == queue


class BufferLease:
    """Stores in use. They are back as soon as nothing holds this: the request has ended, or went on to others."""

    def __init__(self, stores: KVBuffers, returned: deque[KVBuffers]):
        self.stores = stores
        # no lock is taken in it, because it runs wherever the last reference ends
        weakref.finalize(self, returned.append, stores).atexit = False


class GraphBufferPool(Recordings):
    """Recordings of calls that read stores, which begin with the number of these in their keys. `graphs` counts those
    that were made, `refused` says why none are made any more. All but `due` and `refuse` is called with `REPLAYING`.
    """

    late = 0  # none is made but for its own call

    def __init__(self, name: str, positions: int | None = None):
        super().__init__(MAX_RECORDINGS)
        self.name, self.graphs, self.refused = name, 0, ""
        self.buckets = buckets(positions)
        self.idle: list[KVBuffers] = []
        self.returned: deque[KVBuffers] = deque()

    def bucket(self, slots: int) -> int | None:
        """The smallest bucket with room for so many slots; None where there is none."""
        return next((size for size in self.buckets if size >= slots), None)

    def due(self, request: Request) -> bool:
        """Whether calls are recorded for a request."""
        return not self.refused and request.max_new_tokens >= MIN_NEW_TOKENS

    def refuse(self, why: str) -> None:
        """Nothing is recorded from now on, which is said. All that was taken is freed."""
        self.refused = why
        self.forget()
        warnings.warn(f"graphs: {why}", RuntimeWarning, stacklevel=4)

    def forget(self) -> None:
        super().forget()
        self.idle, self.returned = [], deque()  # stores in use end with their requests

    def make_room(self) -> None:
        """For another recording."""
        while len(self.recordings) >= self.most:
            del self.recordings[next(iter(self.recordings))]

    def acquire(
        self, lease: BufferLease | None, old: Sequence[Tensor], dim: int, end: int, wanted: int, queue: int
    ) -> tuple[BufferLease, list[Tensor]]:
        """A request's tensors, of which `end` slots are used, in stores with room for `wanted` slots, and what lends
        these. Nothing happens where they are in such already. dim: of the slots.
        """
        if lease is not None and lease.stores.contains(old[0], wanted, queue):
            return lease, list(old)
        rows = old[0].shape[0]
        parts = tuple((x.shape[1:dim], x.shape[dim + 1 :], x.dtype, x.device) for x in old)
        stores = self._free((capacity(rows), wanted, queue, parts))
        for new, x in zip(stores.tensors, old):
            new[:rows].narrow(dim, 0, end).copy_(x.narrow(dim, 0, end))
            new[:rows].narrow(dim, end, wanted - end).zero_()  # masked slots are multiplied by 0, and others may have
            new[rows:] = 0  # left NaN
        return BufferLease(stores, self.returned), [new[:rows] for new in stores.tensors]

    def _free(self, kind: tuple) -> KVBuffers:
        """Stores that no request uses."""
        while self.returned:
            self.idle.append(self.returned.popleft())
        for stores in reversed(self.idle):
            if stores.kind == kind:
                self.idle.remove(stores)
                return stores
        self._drop(len(self.idle) - MAX_IDLE)
        try:
            return allocated_bytes(kind)
        except torch.OutOfMemoryError:
            self._drop(len(self.idle))
        return allocated_bytes(kind)

    def _drop(self, count: int) -> None:
        """Free the idle stores that were not used for the longest, and their recordings."""
        gone = {stores.number for stores in self.idle[: max(count, 0)]}
        self.idle = [stores for stores in self.idle if stores.number not in gone]
        self.recordings = {key: held for key, held in self.recordings.items() if key[0] not in gone}


def allocated_bytes(kind: tuple) -> KVBuffers:
    rows, slots, _, parts = kind
    made = [torch.empty(rows, *ahead, slots, *behind, dtype=dtype, device=dev) for ahead, behind, dtype, dev in parts]
    return KVBuffers(kind, made)


def one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
