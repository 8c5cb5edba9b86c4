"""Mass of the group that a drafted token belongs to, the relaxation of GSD (grouped speculative decoding, ICCV 2025).

A drafted x is accepted with probability min(1, p(C)/q(C)), where C is the group of x: with tokens sorted by p, largest
first (ties by index), x and the `group // 2` ranks on each side of it. Such windows are not a partition, so the ratio
may be below the exact one: pass mass = q(x) p(C)/q(C) - p(x) to `accept_tree`, which clamps it. R rows, V vocabulary.
"""

import torch
from torch import Tensor

from visspec.kernels.common import (
    FLOATS,
    INTS,
    LOW,
    BenchCase,
    check_ids,
    check_tensor,
    jit,
    next_power_of_2,
    operator,
    require,
    sortable,
    tl,
)


def reference(p: Tensor, q: Tensor | None, token: Tensor, group: int) -> Tensor:
    """Define the result: (R, 2) fp64, the mass of the group under p and under q (1 for a point mass)."""
    masses = []
    for r, x in enumerate(token.tolist()):
        law = p[r].double().tolist()
        order = sorted(range(len(law)), key=lambda v: (-law[v], v))
        rank, half = order.index(x), group // 2
        members = order[max(0, rank - half) : rank + half + 1]
        masses.append((sum(law[v] for v in members), 1.0 if q is None else float(q[r].double()[members].sum())))
    return torch.tensor(masses, dtype=torch.float64, device=p.device)


def grouped_mass_torch(p: Tensor, q: Tensor | None, token: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Run on a CPU and return (p_mass, q_mass), each (R,) fp32."""
    check_ids("token", token, p.shape[1])
    ids, member = _window(p, token, min(group // 2, p.shape[1] - 1))
    in_p, in_q = ((law.gather(1, ids).double() * member).sum(1).float() for law in (p, p if q is None else q))
    return in_p, torch.ones_like(in_q) if q is None else in_q


def _window(p, token, half):
    """Return ids (R, 2 half + 1) of x and of the ranks above and below it, and which of them exist, without sorting the
    distribution.
    """
    key = sortable(p.float(), torch.arange(p.shape[1], device=p.device))
    own_key = key.gather(1, token.unsqueeze(1))
    ends = torch.iinfo(torch.int64)
    above = key.masked_fill(key <= own_key, ends.max).topk(half, dim=1, largest=False).values
    below = key.masked_fill(key >= own_key, ends.min).topk(half, dim=1).values
    keys = torch.cat((own_key, above, below), 1)
    return (LOW - (keys & LOW)).clamp(0, p.shape[1] - 1), (keys != ends.max) & (keys != ends.min)


@jit()
def _window_kernel(p, q, token, p_mass, q_mass, V, half, BLOCK_V: tl.constexpr):
    """One program per row: step to the next rank above and below, `half` times each. A step scans the distribution
    once.
    """
    r = tl.program_id(0).to(tl.int64)
    x = tl.load(token + r).to(tl.int64)
    in_range = (x >= 0) & (x < V)
    x = tl.where(in_range, x, 0)
    px = tl.load(p + r * V + x).to(tl.float64)
    in_p = px
    in_q = tl.load(q + r * V + x).to(tl.float64)
    for side in range(2):
        upward = side == 0
        value = px.to(tl.float32)
        index = x.to(tl.int32)
        step = tl.full((), 0, tl.int32)
        while step < half:
            best = tl.full((), -1.0, tl.float32)
            if upward:
                best = tl.full((), float("inf"), tl.float32)
            best_at = tl.full((), -1, tl.int32)
            for start in range(0, V, BLOCK_V):
                at = start + tl.arange(0, BLOCK_V)
                w = tl.load(p + r * V + at, mask=at < V, other=0.0).to(tl.float32)
                if upward:
                    farther = ((w > value) | ((w == value) & (at < index))) & (at < V)
                    closest = tl.min(tl.where(farther, w, float("inf")), 0)
                    where = tl.max(tl.where(farther & (w == closest), at, -1), 0)
                    better = (where >= 0) & (closest <= best)
                else:
                    farther = ((w < value) | ((w == value) & (at > index))) & (at < V)
                    closest = tl.max(tl.where(farther, w, -1.0), 0)
                    where = tl.min(tl.where(farther & (w == closest), at, V), 0)
                    better = (where < V) & (closest > best)
                best_at = tl.where(better, where, best_at).to(tl.int32)
                best = tl.where(better, closest, best)
            exists = best_at >= 0
            value = tl.where(exists, best, value)
            index = tl.where(exists, best_at, index)
            in_p += tl.where(exists, value.to(tl.float64), 0.0)
            in_q += tl.where(exists, tl.load(q + r * V + index).to(tl.float64), 0.0)
            step = tl.where(exists, step + 1, half)
    tl.store(p_mass + r, tl.where(in_range, in_p, 0.0).to(tl.float32))
    tl.store(q_mass + r, tl.where(in_range, in_q, 0.0).to(tl.float32))


def grouped_mass_triton(p, q, token, group):
    R, V = p.shape
    p, token = p.contiguous(), token.contiguous()
    second = p if q is None else q.contiguous()
    masses = [torch.empty(R, dtype=torch.float32, device=p.device) for _ in range(2)]
    block = min(4096, next_power_of_2(V))
    _window_kernel[(R,)](p, second, token, *masses, V, group // 2, BLOCK_V=block, num_warps=8)
    return masses[0], torch.ones_like(masses[1]) if q is None else masses[1]


_grouped_mass_op = operator(
    "grouped_mass",
    grouped_mass_torch,
    grouped_mass_triton,
    lambda p, q, token, *_: tuple(p.new_empty(token.shape[0], dtype=torch.float32) for _ in range(2)),
)


def grouped_mass(p: Tensor, q: Tensor | None, token: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Compute the masses of each token's group under p and q: two (R,) fp32 tensors.

    p (R, V); q (R, V) or None for a point mass (its mass is 1); token (R,) int; group >= 0 ranks around x. Raises
    ValueError or TypeError naming the argument; on a CPU also for token ids out of range, for which CUDA returns masses
    of 0.
    """
    check_tensor("p", p, (None, None), FLOATS)
    R, V = p.shape
    check_tensor("token", token, (R,), INTS, p.device)
    if q is not None:
        check_tensor("q", q, (R, V), FLOATS, p.device)
    require(group >= 0, "group", group, "a number of ranks of at least 0")
    return _grouped_mass_op(p, q, token, group)


def bench_case(device: str, rows: int = 16, vocabulary: int = 65536, group: int = 14) -> BenchCase:
    """Time groups of neighboring ranks, against a sort."""
    g = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, rows, vocabulary, generator=g).softmax(-1).to(device)
    token = torch.randint(vocabulary, (rows,), generator=g).to(device)

    def eager() -> tuple[Tensor, ...]:
        order = p.argsort(dim=1, descending=True, stable=True)
        rank = (order == token[:, None]).int().argmax(1, keepdim=True)
        near = rank + torch.arange(-(group // 2), group // 2 + 1, device=p.device)
        ids = order.gather(1, near.clamp(0, vocabulary - 1))
        kept = (near >= 0) & (near < vocabulary)
        return tuple((law.gather(1, ids) * kept).sum(1) for law in (p, q))

    shape = f"{rows}x{vocabulary}, group of {group}"
    return BenchCase(shape, "float32", lambda: grouped_mass(p, q, token, group=group), eager)
