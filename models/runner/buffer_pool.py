"""Pool of KV buffers at fixed addresses for calls that are recorded as CUDA graphs.

A graph holds addresses, so the recorder owns the buffers and lends them: a request's tensors move into buffers of the
next *bucket* of slots, and into larger ones when they outgrow it. When the request ends, the buffers return to the
pool, to be lent again with their recordings. Shapes: C rows of a buffer, R of a request, H heads, S slots, E head size.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from visspec.cache import SlotCache, contiguous_copy
from visspec.models.runner.compiled import close, form
from visspec.replay import REPLAYING, Call, Recording, Recordings, capacity, fill, stream
from visspec.types import Request, State

MIN_NEW_TOKENS = 32  # minimum new tokens of a request for which calls are recorded
FIRST, LARGEST = 256, 1 << 17  # slots of the smallest and the largest bucket
MAX_RECORDINGS = 64  # maximum number of recordings; the least recently used is evicted
MAX_IDLE = 8  # maximum number of idle buffers
NUMBERS = itertools.count()


def buckets(positions: int | None) -> list[int]:
    """Return the numbers of slots with recordings: powers of two, up to the first that holds all positions."""
    sizes = [FIRST]
    while sizes[-1] < min(positions or LARGEST, LARGEST):
        sizes.append(2 * sizes[-1])
    return sizes


@dataclass(eq=False)
class KVBuffers:
    """Tensors (C, H, S, E) whose addresses recordings hold.

    Args:
        kind: C, S, the stream, and each tensor's H, E, dtype and device.
    """

    kind: tuple
    tensors: list[Tensor]
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def slots(self) -> int:
        return self.kind[1]

    def contains(self, first: Tensor, slots: int, queue: int) -> bool:
        """Return whether a request's tensors, such as `first`, are in these buffers, with room for `slots` slots."""
        in_place = first.data_ptr() == self.tensors[0].data_ptr()  # false if it needed more rows and moved out
        return in_place and self.slots >= slots and self.kind[2] == queue


class BufferLease:
    """Buffers in use. They return to the pool when the last reference to this ends, with the request or by moving."""

    def __init__(self, stores: KVBuffers, returned: deque[KVBuffers]):
        self.stores = stores
        # this takes no lock, because it runs wherever the last reference ends
        weakref.finalize(self, returned.append, stores).atexit = False


class GraphBufferPool(Recordings):
    """Recordings of calls that read pooled buffers, whose number is the first entry of a recording's key. `graphs`
    counts recordings, and `refused` says why no more are made. `replayed`, `move_in` and `forget` need `REPLAYING`.
    """

    late = 0  # recordings are only made by the call that needs them
    what = "drafts"  # that are recorded

    def __init__(self, name: str, positions: int | None = None):
        super().__init__(MAX_RECORDINGS)
        self.name, self.graphs, self.refused = name, 0, ""
        self.buckets = buckets(positions)
        self.idle: list[KVBuffers] = []
        self.returned: deque[KVBuffers] = deque()
        self.form: tuple = ()

    def follow(self, parts: Sequence[nn.Module], renew: Callable[[], None] = lambda: None) -> None:
        """Drop the recordings and call `renew` if these modules or their weights are not those of the last call."""
        weights = (w.data_ptr() for part in parts for w in itertools.chain(part.parameters(), part.buffers()))
        now = (*map(form, parts), *weights)
        if now != self.form:
            with REPLAYING:
                self.form = now
                self.forget()
                renew()

    def bucket(self, slots: int) -> int | None:
        """Return the smallest bucket with room for this many slots, or None."""
        return next((size for size in self.buckets if size >= slots), None)

    def due(self, request: Request) -> bool:
        """Return whether calls are recorded for a request."""
        return not self.refused and request.max_new_tokens >= MIN_NEW_TOKENS

    def lend(self, state: State, slots: SlotCache, more: int) -> bool:
        """Move a request's keys and values to buffers with room for `more` slots. Returns False if it runs eagerly."""
        device, room = slots.keys[0].device, self.bucket(slots.length + more)
        if self.refused or room is None or self.recorder(device) is None or torch.is_autocast_enabled(device.type):
            return False
        if not (self.recordings or self.due(state.request)):
            return False
        with REPLAYING:
            try:
                self.move_in(slots, room, stream(device))
            except Exception as error:
                self.fail(error)
        return not self.refused

    def run_recorded(
        self, key: tuple, args: Sequence[Tensor], function: Callable[..., Sequence[Any]], held: Sequence[Tensor] = ()
    ) -> list[Any]:
        """Return a function's outputs: copies of those of the recording of this key, or if recording fails, its own.

        Args:
            key: The number of the buffers, and what else the function depends on beside its arguments.
            held: Other tensors that it reads, whose addresses must remain valid.
        """
        key = (*key, *((x.shape, x.dtype) for x in args))
        with REPLAYING, torch.cuda.device_of(args[0]):
            if not self.refused:
                try:
                    recording = self.replayed(key, args, lambda: self._recorded(args, function, held))
                    return [x.clone() if isinstance(x, Tensor) else x for x in recording.output]
                except Exception as error:
                    self.fail(error)
            return list(function(*args))

    def _recorded(
        self, args: Sequence[Tensor], function: Callable[..., Sequence[Any]], held: Sequence[Tensor]
    ) -> Recording:
        """Record a function and replay it once. Raises ValueError if its first output of floating point differs."""
        inputs = [contiguous_copy(x) for x in args]
        want = function(*inputs)
        recording = self.recording([*inputs, *held], lambda: function(*inputs))
        number = next(n for n, x in enumerate(want) if isinstance(x, Tensor) and x.is_floating_point())
        close(recording.output[number].float(), want[number].float(), want[number].dtype)
        return recording

    def recording(self, inputs: list[Tensor], call: Call) -> Recording:
        """Record a call that reads `inputs`, and replay it once."""
        record = self.recorder(inputs[0].device)
        assert record is not None
        recording = Recording(inputs, *record(call))
        recording.replay()
        return recording

    def fail(self, error: Exception) -> None:
        self.refuse(f"{self.what} of {self.name} run without CUDA graphs: {one_line(error)}")

    def refuse(self, why: str) -> None:
        """Stop recording, free everything and warn."""
        self.refused = why
        self.forget()
        warnings.warn(f"graphs: {why}", RuntimeWarning, stacklevel=4)

    def forget(self) -> None:
        super().forget()
        self.idle, self.returned = [], deque()  # buffers in use end with their requests

    def replayed(self, key: tuple, inputs: Sequence[Tensor], record: Callable[[], Recording]) -> Recording:
        """Replay the recording of this key, which becomes the most recently used, or make it."""
        recording = self.recordings.pop(key, None)
        if recording is not None:
            fill(recording.inputs, inputs)
            recording.replay()
        else:
            while len(self.recordings) >= self.most:
                del self.recordings[next(iter(self.recordings))]
            recording = record()
            self.graphs += 1
        self.recordings[key] = recording
        return recording

    def move_in(self, slots: SlotCache, room: int, queue: int) -> None:
        """Move a request's keys and values to buffers with room for `room` slots, unless they are in such buffers."""
        old, rows, half = [*slots.keys, *slots.values], len(slots.lengths), len(slots.keys)
        if slots.lease is not None and slots.lease.stores.contains(old[0], room, queue):
            return
        parts = tuple((x.shape[1], x.shape[3], x.dtype, x.device) for x in old)
        stores = self._free((capacity(rows), room, queue, parts))
        for new, x in zip(stores.tensors, old):
            new[:rows, :, : slots.length] = x[:, :, : slots.length]
            # masked slots are multiplied by 0, but earlier requests may have left NaN in them
            new[:rows, :, slots.length :] = 0
            new[rows:] = 0
        slots.lease, views = BufferLease(stores, self.returned), [new[:rows] for new in stores.tensors]
        slots.keys, slots.values = views[:half], views[half:]
        slots.spare, slots.lean = capacity(rows) - rows, False

    def finish(self, slots: SlotCache, keep: bool = False) -> None:
        """Return the buffers of a request that has ended.

        Args:
            keep: Whether to copy its keys and values first, for further use.
        """
        if slots.lease is not None:
            end = slots.length
            slots.keys, slots.values = (
                [store[:, :, :end].clone() for store in stores] if keep else [] for stores in (slots.keys, slots.values)
            )
            slots.lease = None

    def _free(self, kind: tuple) -> KVBuffers:
        """Return buffers that no request uses."""
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
        """Free the least recently used idle buffers, and their recordings."""
        evicted = {stores.number for stores in self.idle[: max(count, 0)]}
        self.idle = [stores for stores in self.idle if stores.number not in evicted]
        self.recordings = {key: recording for key, recording in self.recordings.items() if key[0] not in evicted}


def allocated_bytes(kind: tuple) -> KVBuffers:
    rows, slots, _, parts = kind
    return KVBuffers(kind, [torch.empty(rows, h, slots, e, dtype=dtype, device=dev) for h, e, dtype, dev in parts])


def one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
