"""Clocks for calls (alone, in turns, and until the host has issued them), and a meter of their peak memory."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

Name = TypeVar("Name")


def waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the device; it does nothing on a CPU."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def seconds_of(call: Callable[[], Any], wait: Callable[[], None] = lambda: None) -> tuple[float, Any]:
    """Return the seconds of a call on an idle device until its work is done, and its result. On a CPU leave out
    `wait`.
    """
    wait()
    began = time.perf_counter()
    found = call()
    wait()
    return time.perf_counter() - began, found


def median_seconds(
    calls: Mapping[Name, Callable[[], Any]], repeats: int, wait: Callable[[], None]
) -> dict[Name, float]:
    """Return the median seconds of each call, in turns, after two uncounted calls of each."""
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            times[name].append(seconds_of(call, wait)[0])
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def issue_times(call: Callable[[int], Any], wait: Callable[[], None], repeats: int = 9) -> list[float]:
    """Return the seconds until each numbered call returns, whether or not the device has finished."""
    seconds = []
    for number in range(repeats):
        wait()
        began = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - began)
    return seconds


def peak_above(device: torch.device, call: Callable[[], Any]) -> tuple[int | None, Any]:
    """Return the peak memory of a call beyond what was used before, None if unknown, and the call's result."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = call()
        return torch.cuda.max_memory_allocated(device) - before, found
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        return None, call()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, found = _kilobytes(status, "VmRSS"), call()
    return (_kilobytes(status, "VmHWM") - before) * 1024, found


def _kilobytes(status: Path, name: str) -> int:
    return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])
