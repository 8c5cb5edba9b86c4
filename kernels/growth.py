"""Growth of a draft tree on the device: the children that a frontier proposes, and the ancestors of every node.

Child v of a frontier node w scores s_w + log p_w(v), with s_w its cumulative log-probability and p_w the distribution
after it. Every frontier node proposes its K most likely children; the K best of all proposals are the next frontier
(the dynamic tree of EAGLE-2, Li et al. 2024). Equal scores are ordered by (frontier position, token). B rows, W
frontier nodes, K children, V vocabulary, N draft nodes.
"""

import numpy as np
import torch
from torch import Tensor

from visspec.kernels.common import (
    FLOATS,
    INTS,
    check_tensor,
    host,
    in_range,
    jit,
    next_power_of_2,
    operator,
    require,
    tl,
)

GROUPS = 128  # minimum number of groups per row on a CPU
MANY = 32  # candidates sorted at once, as a multiple of the number of children


def reference(score: Tensor, logp: Tensor, width: int) -> tuple[Tensor, ...]:
    """The definition: (tokens (B, W K), scores (B, W K), which of them are best (B, K))."""
    tokens, totals, best = [], [], []
    for before, distributions in zip(score.float(), logp.float()):
        sums = (before.unsqueeze(1) + distributions).tolist()
        children = [sorted((-s, v) for v, s in enumerate(row))[:width] for row in sums]
        tokens.append([v for node in children for _, v in node])
        totals.append([-s for node in children for s, _ in node])
        best.append(sorted(range(len(totals[-1])), key=lambda i: (-totals[-1][i], i))[:width])
    return tuple(map(torch.tensor, (tokens, totals, best)))


def draft_topk_host(score: Tensor, logp: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The CPU path: select the few candidates of each row that can be among its best, then sort them."""
    (B, W, V), keep = logp.shape, min(width, logp.shape[2])
    total = (logp.float() + score.float().unsqueeze(2)).contiguous().view(B * W, V).numpy()
    token, scores = (found.reshape(B, W * keep) for found in _likeliest(total, keep))
    best = (-scores).argsort(axis=1, kind="stable")[:, :width]
    return torch.from_numpy(token), torch.from_numpy(scores), torch.from_numpy(np.ascontiguousarray(best))


def _likeliest(total, keep):
    """Indices and values (R, keep) of the largest numbers of each row (R, V), equal ones in their order.

    The row is split into groups. The maxima of the `keep` best groups are `keep` numbers, so nothing below the smallest
    of them is among the `keep` largest of the row, and only slightly more than `keep` numbers are sorted.
    """
    R, V = total.shape
    groups = min(V, max(GROUPS, 8 * keep))
    best = total[:, : V // groups * groups].reshape(R, -1, groups).max(1)
    floor = np.partition(best, groups - keep, axis=1)[:, groups - keep, None]
    flat = np.flatnonzero(~(total < floor))  # a NaN too
    among = total.ravel()[flat]
    require(not np.isnan(among).any(), "logp", "NaN, there or in score", "logarithms of probabilities")
    if len(flat) > MANY * R * keep:  # e.g. many are minus infinity
        index = np.stack([_first(each, keep) for each in total])
        return index, np.take_along_axis(total, index, 1)
    row = flat // V
    order, start = np.lexsort((-among, row)), row.searchsorted(np.arange(R))
    chosen = order[start[:, None] + np.arange(keep)]
    return flat[chosen] % V, among[chosen]


def _first(row, keep):
    """Indices for one row; of equal numbers only as many as needed are sorted."""
    edge = np.partition(row, len(row) - keep)[len(row) - keep]
    above, level = (row > edge).nonzero()[0], (row == edge).nonzero()[0]
    at = np.concatenate((above, level[: keep - len(above)]))
    return at[np.argsort(-row[at], kind="stable")]


@jit()
def _children_kernel(score, logp, token, best, V, KEEP: tl.constexpr, BLOCK_V: tl.constexpr):
    """One program per frontier node: its KEEP best children, one scan of the distribution each."""
    node = tl.program_id(0).to(tl.int64)
    base = tl.load(score + node).to(tl.float32)
    last = tl.full((), float("inf"), tl.float32)
    last_at = tl.full((), -1, tl.int32)
    for k in range(KEEP):
        top = tl.full((), float("-inf"), tl.float32)
        top_at = tl.full((), 0, tl.int32) + V
        for start in range(0, V, BLOCK_V):
            at = start + tl.arange(0, BLOCK_V)
            s = base + tl.load(logp + node * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
            behind = ((s < last) | ((s == last) & (at > last_at))) & (at < V)
            high = tl.max(tl.where(behind, s, float("-inf")), 0)
            where = tl.min(tl.where(behind & (s == high), at, V), 0).to(tl.int32)
            better = (where < V) & ((high > top) | (top_at >= V))
            top_at = tl.where(better, where, top_at)
            top = tl.where(better, high, top)
        tl.store(token + node * KEEP + k, tl.minimum(top_at, V - 1).to(tl.int64))
        tl.store(best + node * KEEP + k, top)
        last = top
        last_at = top_at


@jit("M K")
def _best_kernel(total, best, M, K, BLOCK_M: tl.constexpr):
    """One program per row: the rank of a proposal is the number of those before it."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK_M)
    mine = tl.load(total + row * M + each, mask=each < M, other=float("-inf"))
    place = tl.zeros((BLOCK_M,), tl.int32)
    for i in range(M):
        other = tl.load(total + row * M + i)
        place += ((other > mine) | ((other == mine) & (i < each))).to(tl.int32)
    tl.store(best + row * K + place, each.to(tl.int64), mask=(each < M) & (place < K))


def draft_topk_triton(score, logp, width):
    """The scans of the distributions, then the selection among W K numbers."""
    B, W, V = logp.shape
    keep = min(width, V)
    score, logp = score.contiguous(), logp.contiguous()
    token = torch.empty(B, W * keep, dtype=torch.int64, device=logp.device)
    total = torch.empty(B, W * keep, dtype=torch.float32, device=logp.device)
    block = min(4096, next_power_of_2(V))
    _children_kernel[(B * W,)](score, logp, token, total, V, KEEP=keep, BLOCK_V=block, num_warps=8)
    best = torch.empty(B, min(width, W * keep), dtype=torch.int64, device=logp.device)
    _best_kernel[(B,)](total, best, W * keep, best.shape[1], BLOCK_M=next_power_of_2(W * keep), num_warps=4)
    return token, total, best


def _draft_topk_fake(score, logp, width):
    B, W, V = logp.shape
    children = W * min(width, V)
    ids = score.new_empty((B, children), dtype=torch.int64)
    return ids, torch.empty_like(ids, dtype=torch.float32), ids.new_empty((B, min(width, children)))


_draft_topk_op = operator("draft_topk", draft_topk_host, draft_topk_triton, _draft_topk_fake)


def draft_topk(score: Tensor, logp: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The children that a frontier proposes: tokens (B, W K) int64 and scores (B, W K) fp32, grouped by
    node, best first, and best (B, width) int64: indices of the overall best, best first.

    score (B, W): cumulative log-probabilities; logp (B, W, V): log-distribution after each node; K is min(width, V).
    Raises ValueError or TypeError naming the argument; on a CPU also for NaN.
    """
    check_tensor("logp", logp, (None, None, None), FLOATS)
    B, W, V = logp.shape
    require(W > 0 and V > 0, "logp", f"shape {tuple(logp.shape)}", "at least one node and one token")
    check_tensor("score", score, (B, W), FLOATS, logp.device)
    require(width >= 1, "width", width, "a count of at least 1")
    return _draft_topk_op(score, logp, int(width))


def ancestors_host(parent: Tensor, levels: int) -> Tensor:
    """The CPU path: all nodes move up one level at a time; the extra column, cut off, is above the roots."""
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
    """(B, N, N) bool from parent (B, N) int, -1 at a root, earlier nodes elsewhere: [n, m] is true if m is n or an
    ancestor of n.

    levels: upper bound of the depth (default N - 1). Raises ValueError or TypeError naming the argument.
    """
    check_tensor("parent", parent, (None, None), INTS)
    levels = max(parent.shape[1] - 1, 0) if levels is None else int(levels)
    require(levels >= 0, "levels", levels, "a depth of at least 0")
    return _ancestors_op(parent.long(), levels)


def random_case(seed, rows=3, frontier=4, vocabulary=19, width=5, ties=False, cut=False, dtype=torch.float32):
    """Arguments of `draft_topk` for the tests; ties: distributions and scores with many equal entries; cut: fewer than
    `width` possible tokens.
    """
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, frontier, vocabulary, generator=g)
    score = -torch.rand(rows, frontier, generator=g) * 3
    if ties:
        logits, score = logits.round().clamp(0, 1) * 0 + torch.randint(0, 2, logits.shape, generator=g), score * 0
    if cut:
        logits[..., 2:] = float("-inf")
    return {"score": score, "logp": logits.log_softmax(-1).to(dtype), "width": width}


CASES = [
    {},
    {"ties": True},
    {"cut": True},
    {"frontier": 1, "width": 10, "vocabulary": 2100, "rows": 1},
    {"frontier": 2, "width": 10, "vocabulary": 2100, "rows": 2, "ties": True},
    {"frontier": 2, "width": 10, "vocabulary": 2100, "rows": 2, "cut": True},
    {"width": 7, "vocabulary": 3},
    {"dtype": torch.bfloat16},
]
