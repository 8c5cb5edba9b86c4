"""Calls recorded as CUDA graphs and replayed: one launch, whatever the call consists of.

A recording reads its inputs from buffers of its own and writes its outputs to others. Recordings of one stream share a
pool of memory, so that outputs are copied before the next replay, by one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[[], Any]
DEVICES = frozenset({"cuda"})  # kinds of devices that record
REPLAYING = threading.Lock()  # buffers are filled, replayed and copied out by one thread at a time
WAITING = frozenset({  # operators whose result the host waits for
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select",
    "bincount", "_unique", "_unique2", "unique_dim", "unique_consecutive",
})  # fmt: skip
COPIES = frozenset({"_to_copy", "to", "copy_", "lift_fresh"})


def cuda_graph(
    call: Call, pool: torch.cuda._POOL_HANDLE | None = None, stash: torch.cuda.Stream | None = None
) -> tuple[Any, Callable[[], None]]:
    """Capture a call. Graphs may share a memory pool, because only outputs are needed after a replay and they are
    copied before the next one. Recordings of one pool are made on one stream, `aside`, of the current device. Returns
    the output, which every replay overwrites, and the replay. Raises as `check_waits` does.
    """
    stash, now = stash or torch.cuda.Stream(), torch.cuda.current_stream()
    stash.wait_stream(now)
    with torch.cuda.stream(stash):
        check_waits(call)  # and compiles kernels, opens libraries
    now.wait_stream(stash)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(now),
        torch.cuda.graph(graph, pool=pool, stream=stash, capture_error_mode="thread_local"),
    ):
        output = call()
    return output, graph.replay


def check_waits(call: Call) -> None:
    """Raises RuntimeError if a call synchronises. Checked before the capture, because a failed capture can leave the
    allocator of older versions of torch unusable; and operator by operator, because torch's own check
    (`set_sync_debug_mode`) would raise in other threads too.
    """
    with _Waits():
        call()


class _Waits(TorchDispatchMode):
    """Raises RuntimeError at operators of this thread that wait for the device, or copy between it and the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[-1]
        if name in WAITING or _by_mask(name, args):
            raise RuntimeError(f"called {name}, a synchronizing operation")
        output = function(*args, **(kwargs or {}))
        if name in COPIES:
            kinds = {x.device.type for x in (*args, output) if isinstance(x, Tensor)}
            if len(kinds) > 1 or (name == "lift_fresh" and kinds != {"cpu"}):
                raise RuntimeError(f"called {name} between host and device, a synchronizing operation")
        return output


def _by_mask(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator selects by a mask, whose number of true entries the host must know."""
    if name == "where":
        return len(args) == 1
    return name in ("index", "index_put", "index_put_") and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )


@dataclass
class Recording:
    """Buffers that a recorded call reads, what it writes, and the replay."""

    inputs: list[Tensor]
    output: Any
    replay: Callable[[], None]

    def fill(self, given: Sequence[Tensor]) -> None:
        """Copy inputs into the buffers, to the front of those that are larger."""
        for buffer, value in zip(self.inputs, given):
            buffer[tuple(map(slice, value.shape))].copy_(value)


class Recordings:
    """Recordings by key, at most `most`. `record` stands in for `cuda_graph` in tests."""

    def __init__(self, most: int, record: Callable[[Call], tuple] | None = None):
        self.most, self.record = most, record
        self.recordings: dict[tuple, Recording] = {}
        self.shared: dict[Any, tuple] = {}  # a pool of memory and a stream, of all recordings for one stream

    def forget(self) -> None:
        """Drop all recordings; a pool ends with the last recording in it."""
        self.recordings, self.shared = {}, {}

    def recorder(self, device: torch.device) -> Callable[[Call], tuple] | None:
        """What records calls on a device; None where nothing does."""
        return self.record or (self._graph if device.type in DEVICES else None)

    def _graph(self, call: Call) -> tuple[Any, Callable[[], None]]:
        here = torch.cuda.current_device(), stream()
        if here not in self.shared:
            self.shared[here] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return cuda_graph(call, *self.shared[here])


def stream(device: torch.device | None = None) -> int:
    """The stream that work for a device, or the current one, is queued on; 0 before there is any. Work on different
    streams is not ordered, so each has recordings of its own.
    """
    if (device is not None and device.type != "cuda") or not torch.cuda.is_initialized():
        return 0
    return torch.cuda.current_stream(device).cuda_stream
