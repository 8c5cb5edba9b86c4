"""Moving the accepted path of every row to the front of its draft slots, in all layers, in place.

Draft node n of row b was cached at slot length[b] + n. Afterwards slot length[b] + j holds node path[b, j], for
j < count[b]; all other slots are unchanged. Nodes are topologically ordered, so path[b, j] >= j, and an ascending copy
never reads a slot that it has overwritten. Keys were rotated at depth-based positions and need no re-rotation.
B rows, H heads, S slots, F features, D path columns.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from visspec.kernels.common import FLOATS, INTS, BenchCase, check_tensor, jit, next_power_of_2, operator, require, tl


def reference(kv: Sequence[Tensor], length: Tensor, path: Tensor, count: Tensor) -> list[Tensor]:
    """Define the result: new tensors, slot by slot."""
    out = [t.clone() for t in kv]
    for old, new in zip(kv, out):
        for b in range(old.shape[0]):
            for j in range(min(int(count[b]), path.shape[1])):
                new[b, :, int(length[b]) + j] = old[b, :, int(length[b]) + int(path[b, j])]
    return out


def commit_kv_torch(kv: Sequence[Tensor], length: Tensor, path: Tensor, count: Tensor) -> None:
    """Run on a CPU: gather the accepted slots, then write them. Columns past the count repeat column 0."""
    B, D = path.shape
    first = length.clamp_max(kv[0].shape[2] - 1).unsqueeze(1)
    column = torch.arange(D, device=path.device)
    moved = column < count.unsqueeze(1)
    target = first + torch.where(moved, column, 0)
    # A row that keeps nothing writes its first slot to itself.
    source = first + torch.where(moved, path, path[:, :1] * moved[:, :1])
    if B == 1:  # takes half the time of general indexing
        for t in kv:
            t[0].index_copy_(1, target[0], t[0].index_select(1, source[0]))
        return
    batch = torch.arange(B, device=path.device).unsqueeze(1)
    for t in kv:
        t[batch, :, target] = t[batch, :, source]


@jit("D")
def _commit_kernel(
    pointers, like, length, path, count, D, F, stride_b, stride_h, stride_s,
    ALIGNED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program per (tensor, row, head): ascending copy, a block of path columns at a time."""
    base = tl.load(pointers + tl.program_id(0)).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:  # the compiler can't infer the alignment of a loaded address
        base = tl.multiple_of(base, 16)
    b = tl.program_id(1).to(tl.int64)
    base += b * stride_b + tl.program_id(2).to(tl.int64) * stride_h
    base += tl.load(length + b).to(tl.int64) * stride_s
    lanes = tl.arange(0, BLOCK_F)
    accepted = tl.minimum(tl.load(count + b).to(tl.int32), D)
    for start in range(0, accepted, BLOCK_D):
        j = start + tl.arange(0, BLOCK_D)
        source = tl.load(path + b * D + j, mask=j < accepted, other=-1).to(tl.int64)
        moves = (source > j)[:, None] & (lanes < F)[None, :]
        rows = tl.load(base + source[:, None] * stride_s + lanes[None, :], mask=moves)
        tl.debug_barrier()  # a slot may be the source of one row and the destination of another
        tl.store(base + j.to(tl.int64)[:, None] * stride_s + lanes[None, :], rows, mask=moves)


@lru_cache(maxsize=64)
def _addresses(pointers, device):
    """Upload a table of addresses once, so that rounds with the same preallocated cache can be captured in graphs."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def commit_kv_triton(kv, length, path, count):
    """Launch once for all tensors of one shape, with their addresses in a table."""
    B, H, _, F = kv[0].shape
    D = path.shape[1]
    addresses = tuple(t.data_ptr() for t in kv)
    block_d, block_f = min(16, next_power_of_2(D)), next_power_of_2(F)
    _commit_kernel[(len(kv), B, H)](
        _addresses(addresses, kv[0].device), kv[0], length.contiguous(), path.contiguous(), count.contiguous(), D, F,
        *kv[0].stride()[:3], ALIGNED=all(address % 16 == 0 for address in addresses), BLOCK_D=block_d, BLOCK_F=block_f,
        num_warps=1 if block_d * block_f <= 1024 else 4,
    )  # fmt: skip


_commit_kv_op = operator("commit_kv", commit_kv_torch, commit_kv_triton, lambda *_: None, mutates=("kv",))


def _layout(t: Tensor) -> tuple:
    return tuple(t.shape), t.stride(), t.dtype, t.device


def commit_kv(kv: Tensor | Sequence[Tensor], length: Tensor, path: Tensor, count: Tensor) -> None:
    """Commit accepted paths in place. kv: a tensor (B, H, S, F) or a list of them (keys and values of every layer).

    length (B,) int: slots in use before the draft; path (B, D) int as returned by `accept_tree`; count (B,) int: nodes
    to keep, at most the valid columns of path. Tensors of a call share shape, strides, dtype and device; the last
    stride is 1. Raises ValueError or TypeError naming the argument.
    """
    kv = [kv] if isinstance(kv, Tensor) else list(kv)
    require(len(kv) > 0, "kv", "no tensor", "at least one")
    check_tensor("kv", kv[0], (None, None, None, None), FLOATS)
    first = _layout(kv[0])
    for t in kv[1:]:
        require(_layout(t) == first, "kv", _layout(t), f"the first tensor's {first}")
    require(kv[0].stride(3) == 1, "kv", f"last stride {kv[0].stride(3)}", "1")
    B, device = kv[0].shape[0], kv[0].device
    check_tensor("path", path, (B, None), INTS, device)
    check_tensor("length", length, (B,), INTS, device)
    check_tensor("count", count, (B,), INTS, device)
    _commit_kv_op(kv, length, path, count)


def bench_case(device: str, tensors: int = 16, rows: int = 4, heads: int = 8, slots: int = 1024) -> BenchCase:
    """Time moving an accepted path in place. Later calls do the same work on other values."""
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    kv = [torch.randn(rows, heads, slots, 128, device=device).to(dtype) for _ in range(tensors)]
    nodes = torch.tensor([0, 3, 12, 30, 50], device=device)
    length, count = (torch.full((rows,), n, device=device) for n in (slots - 64, len(nodes)))

    def eager() -> None:
        for t in kv:
            t[:, :, slots - 64 : slots - 64 + len(nodes)] = t[:, :, slots - 64 + nodes]

    shape = f"{tensors} x {rows}x{heads}x{slots}x128"
    path = nodes.repeat(rows, 1)
    return BenchCase(shape, str(dtype).removeprefix("torch."), lambda: commit_kv(kv, length, path, count), eager)
