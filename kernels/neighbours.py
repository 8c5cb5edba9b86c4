"""Mass of the codebook neighbors of a drafted token, the relaxation of LANTERN and LANTERN++.

With n_1, n_2, ... the neighbors of x, nearest first, and c_j = p(n_1) + ... + p(n_j):

    mass(x) = c_m,  m the largest j with c_j <= delta              (LANTERN, Jang et al., ICLR 2025)
                    m the largest j with c_j <= (lam - 1) p(x)     (LANTERN++, Park et al., ICLR-W 2025)

and x is accepted with probability min(1, (p(x) + mass)/q(x)). delta bounds the total variation between p and the
distribution in which the mass of the neighbors is moved to x. R rows, V vocabulary, K neighbors.
"""

import numpy as np
import torch
from torch import Tensor

from visspec.kernels.common import (
    FLOATS,
    INTS,
    BenchCase,
    as_float32,
    check_ids,
    check_number,
    check_tensor,
    host,
    in_range,
    jit,
    next_power_of_2,
    ones,
    operator,
    require,
    tl,
)

EPSILON = 2.0**-52  # machine epsilon of fp64
FEW = 64  # neighbors to read first if the bound is small


def reference(
    p: Tensor,
    token: Tensor,
    neighbours: Tensor,
    delta: float | None = None,
    lam: float | None = None,
    row: Tensor | None = None,
) -> Tensor:
    """Define the result: (R,) fp64."""
    masses = []
    for r, x in enumerate(token.tolist()):
        law = p[r if row is None else int(row[r])].tolist()
        bound = law[x] * (as_float32(lam or 1.0) - 1.0) if delta is None else as_float32(delta)  # an fp32 number
        masses.append(reference_prefix(law, neighbours[x].tolist(), bound)[0])
    return torch.tensor(masses, dtype=torch.float64, device=p.device)


def reference_prefix(law: list[float], near: list[int], bound: float) -> tuple[float, int]:
    """Return the largest prefix sum of the neighbors' weights within the bound, and its length."""
    mass = 0.0
    for count, y in enumerate(near):
        weight = law[y] if 0 <= y < len(law) else 0.0
        if mass + weight > bound:
            return mass, count
        mass += weight
    return mass, len(near)


def neighbour_mass_torch(
    p: Tensor, token: Tensor, neighbours: Tensor, delta: float | None, lam: float | None, row: Tensor | None
) -> Tensor:
    """Run on a CPU: gather every neighbor, accumulate, take the largest prefix within the bound."""
    R, V = token.shape[0], p.shape[1]
    check_ids("token", token, V)
    if row is not None:
        check_ids("row", row, p.shape[0])
    near = neighbours.index_select(0, token).long()
    if not in_range(host(near), V):
        p, near = torch.nn.functional.pad(p, (0, 1)), torch.where((near >= 0) & (near < V), near, V)
    start = (torch.arange(R, device=p.device) if row is None else row).unsqueeze(1) * p.shape[1]
    flat = near.add_(start)
    summed = p.reshape(-1).index_select(0, flat.view(-1)).view_as(flat).cumsum(1, dtype=torch.float64)
    if delta is not None:
        kept = summed <= delta
    else:
        assert lam is not None
        kept = summed <= torch.take(p, token.unsqueeze(1) + start).double() * (lam - 1.0)
    return summed.mul_(kept).amax(1).float()


def prefix_mass(law: np.ndarray, near: np.ndarray, bound: float) -> tuple[float, int]:
    """Return one row's largest prefix sum of distribution[near] within the bound, and its length, on the host."""
    if len(near) > FEW > bound * len(law):  # under a uniform distribution, FEW neighbors reach the bound
        result = _prefix(law, near[:FEW], bound)
        if result[1] < FEW:
            return result
    return _prefix(law, near, bound)


def _prefix(law: np.ndarray, near: np.ndarray, bound: float) -> tuple[float, int]:
    weight = _weights(law, near).astype(np.float64)
    summed = float(weight.dot(ones(len(weight))))
    if summed <= bound * (1 - len(weight) * EPSILON):  # otherwise the order of summation matters: accumulate
        return summed, len(weight)
    running = weight.cumsum()
    inside = int(running.searchsorted(bound, side="right"))
    return float(running[inside - 1]) if inside else 0.0, inside


def _weights(law: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Return distribution[near], where ids outside the distribution have no mass."""
    if near.dtype == np.uint32:
        try:
            return law.take(near)
        except IndexError:
            pass
    elif in_range(near, len(law)):
        return law.take(near)
    inside = (near >= 0) & (near < len(law))
    return np.where(inside, law[np.where(inside, near, 0)], 0.0)


def table_on_host(neighbours: Tensor) -> np.ndarray:
    """Return the table for `prefix_mass`. int32 is read as uint32, so that a negative id is huge and `take` raises."""
    stored = host(neighbours)
    return stored.view(np.uint32) if stored.dtype == np.int32 else stored


@jit("laws")
def _neighbour_mass_kernel(
    p, token, neighbours, row, out, laws, V, K, delta, lam,
    ROW: tl.constexpr, LAM: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per drafted token: prefix scan in chunks, which ends when the bound is passed."""
    r = tl.program_id(0).to(tl.int64)
    x = tl.load(token + r).to(tl.int64)
    known = (x >= 0) & (x < V)
    safe = tl.where(known, x, 0)
    line = r
    if ROW:
        line = tl.load(row + r).to(tl.int64)
        known = known & (line >= 0) & (line < laws)
        line = tl.where(known, line, 0)
    law = p + line * V
    bound = tl.full((), 0.0, tl.float64) + delta
    if LAM:
        bound = tl.load(law + safe).to(tl.float64) * (lam - 1.0)
    mass = tl.full((), 0.0, tl.float64)
    total = tl.full((), 0.0, tl.float64)
    k = tl.full((), 0, tl.int32)
    limit = tl.full((), 0, tl.int32) + K
    while k < limit:
        at = k + tl.arange(0, BLOCK_K)
        near = tl.load(neighbours + safe * K + at, mask=at < K, other=-1).to(tl.int64)
        weight = tl.load(law + near, mask=(near >= 0) & (near < V), other=0.0).to(tl.float64)
        summed = total + tl.cumsum(weight, 0)
        mass = tl.maximum(mass, tl.max(tl.where(summed <= bound, summed, 0.0), 0))
        total += tl.sum(weight, 0)
        k += BLOCK_K
        limit = tl.where(total <= bound, limit, 0)
    tl.store(out + r, tl.where(known, mass, 0.0).to(tl.float32))


def neighbour_mass_triton(p, token, neighbours, delta, lam, row):
    R, (V, K) = token.shape[0], neighbours.shape
    p, token, neighbours = p.contiguous(), token.contiguous(), neighbours.contiguous()
    out = torch.empty(R, dtype=torch.float32, device=p.device)
    _neighbour_mass_kernel[(R,)](
        p, token, neighbours, token if row is None else row.contiguous(), out, p.shape[0], V, K,
        0.0 if delta is None else delta, 1.0 if lam is None else lam,
        ROW=row is not None, LAM=delta is None, BLOCK_K=min(128, next_power_of_2(K)), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


_neighbour_mass_op = operator(
    "neighbour_mass",
    neighbour_mass_torch,
    neighbour_mass_triton,
    lambda p, token, *_: p.new_empty(token.shape[0], dtype=torch.float32),
)


def neighbour_mass(
    p: Tensor,
    token: Tensor,
    neighbours: Tensor,
    delta: float | None = None,
    lam: float | None = None,
    row: Tensor | None = None,
) -> Tensor:
    """Compute the mass of each token's neighbors under its distribution: (R,) fp32.

    p (R, V), or (any, V) with row (R,), the index of each token's distribution; token (R,) int; neighbours (V, K) int,
    nearest first, without the token itself; exactly one of delta >= 0 and lam >= 1. A neighbor outside the vocabulary
    has no mass. Raises ValueError or TypeError naming the argument; on a CPU also for ids out of range (0 on CUDA).
    """
    check_tensor("p", p, (None, None), FLOATS)
    check_tensor("token", token, (None,), INTS, p.device)
    R, V = token.shape[0], p.shape[1]
    require(row is not None or p.shape[0] == R, "p", f"{p.shape[0]} rows", f"one row per token ({R})")
    check_tensor("neighbours", neighbours, (V, None), INTS, p.device)
    require(neighbours.shape[1] > 0, "neighbours", "no columns", "at least one neighbour per token")
    delta, lam = checked_bound(delta, lam)
    if row is not None:
        check_tensor("row", row, (R,), INTS, p.device)
    return _neighbour_mass_op(p, token, neighbours, delta, lam, row)


def checked_bound(delta: float | None, lam: float | None) -> tuple[float | None, float | None]:
    """Return delta and lam as the fp32 numbers that both paths compare with. Exactly one of them must be given."""
    require((delta is None) != (lam is None), "delta", f"delta={delta} and lam={lam}", "exactly one of the two")
    if delta is not None:
        check_number("delta", delta, 0)
    if lam is not None:
        check_number("lam", lam, 1)
    return None if delta is None else as_float32(delta), None if lam is None else as_float32(lam)


def bench_case(device: str, rows: int = 59, vocabulary: int = 16384, k: int = 1000) -> BenchCase:
    """Time LANTERN's bound at every node of a draft."""
    g = torch.Generator().manual_seed(0)
    p = torch.randn(rows, vocabulary, generator=g).softmax(-1).to(device)
    table = torch.randint(vocabulary, (vocabulary, k), generator=g).to(device)
    token = torch.randint(vocabulary, (rows,), generator=g).to(device)

    def eager() -> Tensor:
        sums = p.gather(1, table[token]).cumsum(1)
        return sums.masked_fill(sums > 0.05, 0.0).amax(1)

    shape = f"{rows}x{vocabulary}, k={k}"
    return BenchCase(shape, "float32", lambda: neighbour_mass(p, token, table, delta=0.05), eager)
