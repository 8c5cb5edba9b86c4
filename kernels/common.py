"""Helpers of the kernel files: the optional Triton import, the device of a launch, argument checks."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton every operator uses its torch implementation

    class _NoTriton:
        """Stands in for Triton so that kernel signatures still parse."""

        constexpr = None

    triton, tl = None, _NoTriton

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
UNSIGNED = {4: np.uint32, 8: np.uint64}
TINY = 1e-30
LOW = 0xFFFFFFFF
Result = TypeVar("Result")


class BenchCase(NamedTuple):
    """A timing case of `visspec bench kernels`: our call, and the same computation in eager torch."""

    shape: str
    dtype: str
    ours: Callable[[], Any]
    eager: Callable[[], Any]


def jit(varying: str = "", unaligned: str = "") -> Callable[[Callable], Any]:
    """Apply `triton.jit` if Triton is installed, else return the plain function (never launched).

    Args:
        varying: Integers that change from call to call, on which Triton must not specialize: it would recompile, for
            about a second, for values of 1 or divisible by 16.
        unaligned: Pointers whose alignment Triton must not specialize on.
    """
    options = {"do_not_specialize": varying.split(), "do_not_specialize_on_alignment": unaligned.split()}
    return lambda fn: fn if triton is None else triton.jit(fn, **options)


def on_device(launch: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `launch` to make the device of its first argument, a tensor or a list of them, the current device.

    Triton launches on the current device, not on the device of the tensors. Raises RuntimeError without Triton.
    """

    @functools.wraps(launch)
    def call_on_device(first: Tensor | Sequence[Tensor], *rest: object) -> Result:
        with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):
            if triton is None:
                raise RuntimeError("triton: not installed, but kernels on CUDA tensors need it.")
            return launch(first, *rest)

    return call_on_device


def operator(
    name: str, on_host: Callable, on_cuda: Callable, fake: Callable, mutates: tuple[str, ...] = ()
) -> torch.library.CustomOpDef:
    """Register the operator visspec::`name`, with the schema given by the annotations of `on_host`."""
    op = torch.library.custom_op(f"visspec::{name}", on_host, mutates_args=mutates)
    op.register_kernel("cuda", on_device(on_cuda))
    op.register_fake(fake)
    return op


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def as_float32(value: float) -> float:
    """Round to the fp32 value of a Triton scalar argument, so that both paths compare with the same number."""
    return ctypes.c_float(value).value


def host(tensor: Tensor) -> np.ndarray:
    """Return the tensor as a numpy array, without a copy on a CPU; bf16, which numpy lacks, as its 16 bits."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def widen(stored: np.ndarray) -> np.ndarray:
    """Convert an array from `host` to fp32, unless it is fp32 or fp64 already."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if stored.dtype == np.float16 else stored


@functools.lru_cache
def ones(count: int) -> np.ndarray:
    """Return a vector of ones in fp64, for sums as dot products."""
    return np.ones(count)


def require(condition: bool, name: str, found: object, expected: object) -> None:
    """Raise ValueError with the argument, the value found and the value expected, unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: found {found}, expected {expected}.")


def check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Check type, dtype, shape (None matches any size) and device of one argument."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: found {type(tensor).__name__}, expected a tensor.")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: found dtype {tensor.dtype}, expected one of {[str(d)[6:] for d in dtypes]}.")
    sizes = tensor.shape
    if len(sizes) != len(shape) or any([want not in (None, size) for want, size in zip(shape, sizes)]):
        expected = tuple("any" if size is None else size for size in shape)
        require(False, name, f"shape {tuple(sizes)}", f"shape {expected}")
    if device is not None and tensor.device != device:
        require(False, name, f"device {tensor.device}", f"device {device}")


def check_number(name: str, value: float, low: float = -math.inf, high: float = math.inf) -> None:
    """Check that a scalar is finite, in fp32 as well, and in [low, high]."""
    fits = math.isfinite(as_float32(value)) and low <= value <= high
    require(fits, name, value, f"a finite number in [{low}, {high}]")


def check_ids(name: str, ids: Tensor, count: int) -> None:
    """Raise ValueError for ids outside [0, count) on a CPU, where no sync is needed; CUDA kernels mask them."""
    if ids.device.type == "cpu" and not in_range(stored := host(ids), count):
        require(False, name, f"ids from {int(stored.min())} to {int(stored.max())}", f"ids in [0, {count})")


def in_range(ids: np.ndarray, count: int) -> bool:
    """Return whether all ids of an array are in [0, count), in one pass: as unsigned numbers, negative ids are huge."""
    return np.maximum.reduce(ids.view(UNSIGNED[ids.dtype.itemsize]), axis=None, initial=0) < count


def sortable(score: Tensor, index: Tensor) -> Tensor:
    """Return int64 keys that order fp32 scores, then smaller indices first. `LOW - (key & LOW)` recovers the index."""
    bits = (score + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (LOW - index)
