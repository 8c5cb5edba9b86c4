"""Ancestors of every node of a draft tree, on the device. B rows, N draft nodes."""

import numpy as np
import torch
from torch import Tensor

from visspec.kernels.common import INTS, check_tensor, host, in_range, jit, next_power_of_2, operator, require, tl


def ancestors_host(parent: Tensor, levels: int) -> Tensor:
    """Run on a CPU: all nodes move up one level at a time. The extra column, removed at the end, is above the roots."""
    B, N = parent.shape
    above, mask = np.full((B, N + 1), -1), np.zeros((B, N, N + 1), dtype=bool)
    above[:, :N] = host(parent)
    if not in_range(above[:, :N] + 1, N + 1):
        require(False, "parent", f"nodes from {above.min()} to {above.max()}", f"nodes in [-1, {N})")
    row, node = np.arange(B)[:, None], np.arange(N)
    now = node[None]
    mask[row, node, now] = True
    for _ in range(levels):
        now = above[row, now]
        mask[row, node, now] = True
    return torch.from_numpy(mask[:, :, :N].copy())


@jit("N levels")
def _ancestors_kernel(parent, mask, N, levels, BLOCK_N: tl.constexpr):
    """One program per node: follow the parents to the root."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nodes = tl.arange(0, BLOCK_N)
    seen = (nodes == n).to(tl.int8)
    now = n
    for _step in range(levels):
        now = tl.load(parent + row * N + now, mask=now >= 0, other=-1).to(tl.int32)
        now = tl.where(now < N, now, -1)
        seen = tl.where(nodes == now, 1, seen).to(tl.int8)
    tl.store(mask + (row * N + n) * N + nodes, seen, mask=nodes < N)


def ancestors_triton(parent, levels):
    B, N = parent.shape
    mask = torch.empty(B, N, N, dtype=torch.bool, device=parent.device)
    block = next_power_of_2(N)
    _ancestors_kernel[(B, N)](parent.contiguous(), mask.view(torch.int8), N, levels, BLOCK_N=block, num_warps=1)
    return mask


_ancestors_op = operator(
    "ancestors",
    ancestors_host,
    ancestors_triton,
    lambda parent, levels: parent.new_empty((*parent.shape, parent.shape[1]), dtype=torch.bool),
)


def ancestors(parent: Tensor, levels: int | None = None) -> Tensor:
    """Compute (B, N, N) bool from parent (B, N) int, -1 at a root, earlier nodes elsewhere: [n, m] is true if m is n or
    an ancestor of n.

    Raises ValueError or TypeError naming the argument.

    Args:
        levels: Upper bound of the depth (default N - 1).
    """
    check_tensor("parent", parent, (None, None), INTS)
    levels = max(parent.shape[1] - 1, 0) if levels is None else int(levels)
    require(levels >= 0, "levels", levels, "a depth of at least 0")
    return _ancestors_op(parent.long(), levels)
