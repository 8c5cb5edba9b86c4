"""Clocks for calls (alone, in turns, and until the host has issued them)."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Name = TypeVar("Name")


def waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the device; it does nothing on a CPU."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def seconds_of(call: Callable[[], Any], wait: Callable[[], None] = lambda: None) -> tuple[float, Any]:
    """Return the seconds of a call on an idle device until its work is done, and its result."""
    wait()
    began = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - began, result


def median_seconds(
    calls: Mapping[Name, Callable[[], Any]], repeats: int, wait: Callable[[], None]
) -> dict[Name, float]:
    """Return the median seconds of each call, in turns, after two uncounted calls of each."""
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            times[name].append(seconds_of(call, wait)[0])
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}
