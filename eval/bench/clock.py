"""Clocks of calls, alone: in turns, and until the host has issued them; and the memory that a process took.

The two classes time the calls of `bench kernels`, with the same methods: arm, start, seconds, host.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from visspec.replay import cuda_graph

WARM = 2  # warm-up calls, in which kernels are compiled
BEST_OF = 3
Name = TypeVar("Name")


def waiter(device: torch.device) -> Callable[[], None]:
    """Waits for the device; nothing on a CPU."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def seconds_of(call: Callable[[], Any], wait: Callable[[], None] = lambda: None) -> tuple[float, Any]:
    """Seconds of a call on an idle device until all of it is done, and what it returned; without `wait` on a CPU."""
    wait()
    began = time.perf_counter()
    found = call()
    wait()
    return time.perf_counter() - began, found


def median_seconds(
    calls: Mapping[Name, Callable[[], Any]], repeats: int, wait: Callable[[], None]
) -> dict[Name, float]:
    """Median seconds of each call, in turns, after two of each that are not counted."""
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            times[name].append(seconds_of(call, wait)[0])
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def issue_times(call: Callable[[int], Any], wait: Callable[[], None], repeats: int = 9) -> list[float]:
    """Seconds until each of the calls, with their number, returns, whether the device has done it or not."""
    seconds = []
    for number in range(repeats):
        wait()
        began = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - began)
    return seconds


def peak_above(device: torch.device, call: Callable[[], Any]) -> tuple[int | None, Any]:
    """The peak of memory in a call above what there is before it, and what it returned; None where it is not known."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = call()
        return torch.cuda.max_memory_allocated(device) - before, found
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        return None, call()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before, found = _kilobytes(status, "VmRSS"), call()
    return (_kilobytes(status, "VmHWM") - before) * 1024, found


def _kilobytes(status: Path, name: str) -> int:
    return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])


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
    """GPU: events around the replay of a CUDA graph of the call, which exclude argument checks, dispatch and launches
    (`host` has those), with the L2 cache flushed before each. A call that synchronises or can't be captured is timed by
    events around the call itself, and its row is marked. Only the last four methods use CUDA; the tests replace them.
    """

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
