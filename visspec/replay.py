"""Recording of calls as CUDA graphs, which are replayed with a single launch.

A recording reads inputs from its own buffers and writes outputs to others. Recordings of one stream share a memory
pool, so outputs must be copied before the next replay, by one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from visspec.kernels.common import next_power_of_2

Call = Callable[[], Any]
DEVICES = frozenset({"cuda"})
REPLAYING = threading.Lock()  # only one thread at a time fills buffers, replays and copies outputs
WAITING = frozenset({  # operators that synchronise
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select",
    "bincount", "_unique", "_unique2", "unique_dim", "unique_consecutive",
})  # fmt: skip
COPIES = frozenset({"_to_copy", "to", "copy_", "lift_fresh"})


def cuda_graph(
    call: Call, pool: torch.cuda._POOL_HANDLE | None = None, stash: torch.cuda.Stream | None = None
) -> tuple[Any, Callable[[], None]]:
    """Capture a call as a CUDA graph. Returns its output, which every replay overwrites, and a function that replays
    it. Raises RuntimeError if the call synchronises.

    Graphs may share a memory pool, because only their outputs are needed after a replay and these are copied before the
    next one. All recordings of a pool must be made on the same stream (`stash`) of the current device.
    """
    stash, now = stash or torch.cuda.Stream(), torch.cuda.current_stream()
    stash.wait_stream(now)
    with torch.cuda.stream(stash):
        check_waits(call)  # also compiles kernels and loads libraries
    now.wait_stream(stash)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(now),
        torch.cuda.graph(graph, pool=pool, stream=stash, capture_error_mode="thread_local"),
    ):
        output = call()
    return output, graph.replay


def check_waits(call: Call) -> None:
    """Raise RuntimeError if a call synchronises. Run this before a capture: a failed capture can make the allocator of
    older torch versions unusable. It checks each operator, because torch's own check (`set_sync_debug_mode`) would also
    raise in other threads.
    """
    with _Waits():
        call()


class _Waits(TorchDispatchMode):
    """Raises RuntimeError at operators of this thread that wait for the device or copy between device and host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[-1]
        if name in WAITING or _by_mask(name, args):
            raise RuntimeError(f"The call contains {name}, a synchronizing operation.")
        output = function(*args, **(kwargs or {}))
        if name in COPIES:
            kinds = {x.device.type for x in (*args, output) if isinstance(x, Tensor)}
            if len(kinds) > 1 or (name == "lift_fresh" and kinds != {"cpu"}):
                raise RuntimeError(f"The call contains {name} between host and device, a synchronizing operation.")
        return output


def _by_mask(name: str, args: Sequence[Any]) -> bool:
    if name == "where":
        return len(args) == 1
    return name in ("index", "index_put", "index_put_") and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )


@dataclass
class Recording:
    """A recorded call: its input buffers, its output, and the function that replays it."""

    inputs: list[Tensor]
    output: Any
    replay: Callable[[], None]


class Recordings:
    """Recordings by key, at most `most` of them. Tests replace `cuda_graph` by `record`."""

    def __init__(self, most: int, record: Callable[[Call], tuple] | None = None):
        self.most, self.record = most, record
        self.recordings: dict[tuple, Recording] = {}
        self.shared: dict[Any, tuple] = {}  # memory pool and capture stream shared by all recordings for one stream

    def forget(self) -> None:
        """Drop all recordings. A pool is freed with its last recording."""
        self.recordings, self.shared = {}, {}

    def recorder(self, device: torch.device) -> Callable[[Call], tuple] | None:
        """Return the function that records calls on a device, or None if the device does not support it."""
        return self.record or (self._graph if device.type in DEVICES else None)

    def _graph(self, call: Call) -> tuple[Any, Callable[[], None]]:
        here = torch.cuda.current_device(), stream()
        if here not in self.shared:
            self.shared[here] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return cuda_graph(call, *self.shared[here])


def capacity(rows: int) -> int:
    """Round rows up to few sizes, so that rows may join and other batches can reuse the recordings."""
    return next_power_of_2(rows) if rows <= 8 else -(-rows // 8) * 8


def fill(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to buffers, or to their front if they are larger."""
    for buffer, value in zip(buffers, values):
        buffer[tuple(map(slice, value.shape))].copy_(value)


def stream(device: torch.device | None = None) -> int:
    """Return the current CUDA stream of a device, 0 before CUDA is initialised. Each stream has its own recordings."""
    if (device is not None and device.type != "cuda") or not torch.cuda.is_initialized():
        return 0
    return torch.cuda.current_stream(device).cuda_stream
