"""Timing of calls for `bench kernels`. Two clocks with the same methods: arm, start, seconds, host.

On a CPU: processor time. On a GPU: events around the replay of a CUDA graph of the call, which exclude argument checks,
dispatch and launches (`host` has those), with the L2 cache flushed before each. A call that synchronises or can't be
captured is timed by events around the call itself, and its row is marked.
"""

import time
from functools import partial

import torch

from visspec.eval.bench.clock import issue_times
from visspec.replay import cuda_graph

WARM = 2  # warm-up calls, in which kernels are compiled
BEST_OF = 3


class ProcessorClock:
    """CPU: processor time, which excludes other processes, the best of three calls."""

    repeats, fewest = 40, 8

    def arm(self, call, draws=1):
        """(argument of `start`, description of the timing); `draws` is ignored."""
        for index in range(WARM):
            call(index)
        return call, f"processor time, best of {BEST_OF}"

    def start(self, armed, index):
        return min(self._once(armed, index) for _ in range(BEST_OF))

    def _once(self, call, index):
        begun = time.process_time()
        call(index)
        return time.process_time() - begun

    def seconds(self, started):
        return started

    def host(self, call, repeats):
        """None: the call runs on the host."""


class Device:
    """GPU. Only the last four methods use CUDA; the tests replace them."""

    repeats, fewest = 60, 30

    def __init__(self, device):
        self.device = device
        self.over = torch.empty(2 * self.cache_bytes(), dtype=torch.uint8, device=device)

    def arm(self, call, draws=1):
        """(argument of `start`, description of the timing). The call is captured for the indices 0 .. draws - 1."""
        for index in range(max(WARM, draws)):
            call(index)
        try:
            replays = [self.record(partial(call, index)) for index in range(draws)]
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return (lambda index: call(index % draws)), f"events around plain calls ({reason})"
        return (lambda index: replays[index % draws]()), "events around a CUDA graph"

    def start(self, armed, index):
        """Queues one repeat and returns its two events, without waiting: the flush hides the replay's launch."""
        begun, ended = self.event(), self.event()
        self.over.zero_()
        begun.record()
        armed(index)
        ended.record()
        return begun, ended

    def seconds(self, started):
        self.synchronize()
        return [begun.elapsed_time(ended) / 1e3 for begun, ended in started]

    def host(self, call, repeats):
        """Wall time in seconds until a plain call returns, with an idle device: checks, dispatch and launches."""
        times = issue_times(call, self.synchronize, repeats)
        self.synchronize()
        return times

    def record(self, call):
        return cuda_graph(call)[1]

    def event(self):
        return torch.cuda.Event(enable_timing=True)

    def synchronize(self):
        torch.cuda.synchronize(self.device)

    def cache_bytes(self):
        return torch.cuda.get_device_properties(self.device).L2_cache_size


def clock_of(device):
    return Device(device) if device.type == "cuda" else ProcessorClock()
