"""The distribution that a token is drawn from, or its logarithm, in one pass per row: guidance, temperature, top-k,
top-p, softmax.

    z = u + s (c - u)            classifier-free guidance on logits, before anything else (s = `guidance`)
    z = z / temperature          temperature 0: all the mass on the arg-max, lowest index first
    top-k                        keep z >= the k-th largest value, ties included
    top-p                        sort ascending (equal values by index), drop while the running sum of softmax(z),
                                 rounded to fp32, is <= 1 - top_p as an fp32 number; keep at least the last
    p = softmax(z)               or z itself (`scores`), cut tokens at -inf; at temperature 0 the mixed logits

The order and the treatment of ties are those of transformers' warpers. A token that is -inf in either branch stays
-inf. On CUDA the k-th value and the nucleus are found by bisection on the ordered bits of z instead of sorting, with
one read of the logits up to 32,768 tokens (8,192 with top-p).
R rows, V vocabulary; arithmetic in fp32, running sums of fp32 probabilities in fp64.
"""

import torch
from torch import Tensor

from visspec.kernels.common import (
    FLOATS,
    BenchCase,
    as_float32,
    check_number,
    check_tensor,
    jit,
    next_power_of_2,
    operator,
    require,
    tl,
)

WHOLE, WHOLE_TOP_P = 1 << 15, 1 << 13  # maximum row length held in the registers of one program
BLOCK = 4096  # block size for longer rows


def reference(
    logits: Tensor,
    uncond: Tensor | None = None,
    guidance: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    scores: bool = False,
) -> Tensor:
    """Define the result, one row at a time."""
    rows = []
    for r, c in enumerate(logits.float()):
        z = c if uncond is None else _mix(c, uncond[r].float(), guidance)
        if temperature == 0:
            rows.append(z if scores else torch.nn.functional.one_hot(z.argmax(), z.numel()).float())
            continue
        z = z / temperature
        if 0 < top_k < z.numel():
            z = z.masked_fill(z < z.sort(descending=True).values[top_k - 1], float("-inf"))
        if top_p < 1:
            order = z.sort(stable=True).indices
            dropped = order[z[order].softmax(0).double().cumsum(0).float() <= _tail(top_p)]
            z = z.index_fill(0, dropped[dropped != order[-1]], float("-inf"))
        rows.append(z if scores else z.softmax(0))
    return torch.stack(rows)


def _tail(top_p):
    """Return the mass that top-p may drop, in fp32: torch and Triton compare an fp32 tensor with a number in fp32."""
    return as_float32(1.0 - top_p)


def _mix(c, u, guidance):
    mixed = u + guidance * (c - u)
    return mixed.nan_to_num_(float("-inf"), float("inf"), float("-inf"))


def guided_warp_torch(
    logits: Tensor, uncond: Tensor | None, guidance: float, temperature: float, top_k: int, top_p: float, scores: bool
) -> Tensor:
    """Run the same steps on a CPU for all rows at once."""
    z = logits.contiguous().float()
    if uncond is not None:
        z = _mix(z, uncond.contiguous().float(), guidance)
    if temperature > 0:
        z = _cut(z, temperature, top_k, top_p)
    elif not scores:
        return torch.zeros_like(z).scatter_(1, z.argmax(1, keepdim=True), 1.0)
    if not scores:
        return z.softmax(1)
    return z.clone() if z.data_ptr() == logits.data_ptr() else z  # an operator must not return its arguments


def _cut(z, temperature, top_k, top_p):
    if temperature != 1:
        z = z / temperature
    if 0 < top_k < z.shape[1]:
        z = z.masked_fill(z < z.topk(top_k, sorted=False).values.amin(1, keepdim=True), float("-inf"))
    if top_p < 1:
        ordered, index = z.sort(dim=1, stable=True)
        dropped = ordered.softmax(1).cumsum(1, dtype=torch.float64).float() <= _tail(top_p)
        dropped[:, -1] = False
        z = z.masked_fill(torch.zeros_like(dropped).scatter_(1, index, dropped), float("-inf"))
    return z


@jit()
def _rank(x):
    """Return an int32 whose order is the order of x (adding zero maps -0.0 to 0.0)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit()
def _value(rank):
    """Invert `_rank`."""
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@jit()
def _store_ranks(out, at, V):
    """Load the ranks of a block; beyond the row the minimum, which is the rank of no float."""
    return tl.where(at < V, _rank(tl.load(out + at, mask=at < V, other=0.0)), -2147483648)


@jit()
def _scale_block(
    logits, uncond, at, V, guidance, temperature, GUIDED: tl.constexpr, GREEDY: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Compute z for one block of a row."""
    z = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
    if GUIDED:
        u = tl.load(uncond + at, mask=at < V, other=float("-inf")).to(tl.float32)
        z = u + guidance * (z - u)
        z = tl.where(z == z, z, float("-inf"))
    if not GREEDY:
        z = tl.div_rn(z, temperature + tl.zeros((BLOCK_V,), tl.float32))
    return z


@jit()
def _guided_warp_kernel(  # noqa: C901
    logits, uncond, out, V, guidance, temperature, top_k, rest,
    GUIDED: tl.constexpr, GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, SCORES: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program per row. WHOLE: the ranks of z stay in registers; otherwise z is processed in blocks, and stored in
    `out` until the last pass. `rest` is the mass that top-p may drop.
    """
    row = tl.program_id(0).to(tl.int64) * V
    logits += row
    uncond += row
    out += row
    lanes = tl.arange(0, BLOCK_V)
    peak = tl.full((), float("-inf"), tl.float32)
    mode = tl.full((), 0, tl.int32)
    rank = tl.full((BLOCK_V,), -2147483648, tl.int32)
    for start in range(0, V, BLOCK_V):
        at = start + lanes
        z = _scale_block(logits, uncond, at, V, guidance, temperature, GUIDED, GREEDY, BLOCK_V)
        top = tl.max(z, 0)
        where = tl.min(tl.where((z == top) & (at < V), at, V), 0)
        mode = tl.where(top > peak, where, mode)
        peak = tl.maximum(top, peak)
        if WHOLE:
            rank = tl.where(at < V, _rank(z), -2147483648)
        else:
            tl.store(out + at, z, mask=at < V)
    if not WHOLE:
        tl.debug_barrier()
    floor = tl.full((), -2147483648, tl.int64)
    if TOP_K and not GREEDY:
        # The largest rank reached by at least top_k tokens; if exactly top_k reach it, a smaller one is equivalent.
        high = tl.full((), 2147483647, tl.int64)
        while floor < high:
            middle = floor + (high - floor + 1) // 2
            reached = tl.full((), 0, tl.int32)
            for start in range(0, V, BLOCK_V):
                at = start + lanes
                if not WHOLE:
                    rank = _store_ranks(out, at, V)
                reached += tl.sum((rank >= middle.to(tl.int32)).to(tl.int32), 0)
            floor = tl.where(reached >= top_k, middle, floor)
            high = tl.where(reached > top_k, high, tl.where(reached == top_k, middle, middle - 1))
    least = floor.to(tl.int32)
    total = tl.full((), 0.0, tl.float64)
    if not GREEDY and (TOP_P or not SCORES):
        for start in range(0, V, BLOCK_V):
            at = start + lanes
            if not WHOLE:
                rank = _store_ranks(out, at, V)
            kept = (rank >= least) & (at < V)
            total += tl.sum(tl.where(kept, tl.exp(_value(rank) - peak), 0.0).to(tl.float64), 0)
    if TOP_P and not GREEDY:
        # The smallest rank whose running sum, itself included, exceeds rest; ties are ordered by index.
        below = tl.full((), 0.0, tl.float64)
        whole = total.to(tl.float32) + tl.zeros((BLOCK_V,), tl.float32)
        low = floor
        high = _rank(peak).to(tl.int64)
        while low < high:
            middle = low + (high - low) // 2
            summed = tl.full((), 0.0, tl.float64)
            for start in range(0, V, BLOCK_V):
                at = start + lanes
                if not WHOLE:
                    rank = _store_ranks(out, at, V)
                counted = (rank >= least) & (rank <= middle.to(tl.int32)) & (at < V)
                share = tl.div_rn(tl.exp(_value(rank) - peak), whole)
                summed += tl.sum(tl.where(counted, share, 0.0).to(tl.float64), 0)
            beyond = summed.to(tl.float32) > rest
            high = tl.where(beyond, middle, high)
            low = tl.where(beyond, low, middle + 1)
        edge = low.to(tl.int32)
        ties = tl.full((), 0, tl.int32)
        for start in range(0, V, BLOCK_V):
            at = start + lanes
            if not WHOLE:
                rank = _store_ranks(out, at, V)
            counted = (rank >= least) & (rank < edge) & (at < V)
            share = tl.div_rn(tl.exp(_value(rank) - peak), whole)
            below += tl.sum(tl.where(counted, share, 0.0).to(tl.float64), 0)
            ties += tl.sum((rank == edge).to(tl.int32), 0)
        total = tl.full((), 0.0, tl.float64)
        seen = tl.full((), 0, tl.int32)
        for start in range(0, V, BLOCK_V):
            at = start + lanes
            if not WHOLE:
                rank = _store_ranks(out, at, V)
            weight = tl.exp(_value(rank) - peak)
            tied = rank == edge
            place = seen + tl.cumsum(tied.to(tl.int32), 0)
            summed = below + place.to(tl.float64) * tl.div_rn(weight, whole).to(tl.float64)
            dropped = tied & (summed.to(tl.float32) <= rest) & (place < ties)
            dropped = dropped | (rank < edge)
            total += tl.sum(tl.where(dropped | (at >= V), 0.0, weight).to(tl.float64), 0)
            seen += tl.sum(tied.to(tl.int32), 0)
            if WHOLE:
                rank = tl.where(dropped, -2147483648, rank)
            else:
                tl.store(out + at, tl.where(dropped, float("-inf"), _value(rank)), mask=at < V)
        if not WHOLE:
            tl.debug_barrier()
    scale = total.to(tl.float32)
    for start in range(0, V, BLOCK_V):
        at = start + lanes
        if not WHOLE:
            rank = _store_ranks(out, at, V)
        kept = (rank >= least) & (rank > -2147483648)
        if GREEDY:
            result = _value(rank) if SCORES else (at == mode).to(tl.float32)
        elif SCORES:
            result = tl.where(kept, _value(rank), float("-inf"))
        else:
            result = tl.where(kept, tl.exp(_value(rank) - peak), 0.0) / scale
        tl.store(out + at, result, mask=at < V)


def guided_warp_triton(logits, uncond, guidance, temperature, top_k, top_p, scores):
    R, V = logits.shape
    logits, uncond = logits.contiguous(), None if uncond is None else uncond.contiguous()
    out = torch.empty(R, V, dtype=torch.float32, device=logits.device)
    whole = V <= (WHOLE_TOP_P if top_p < 1 else WHOLE)
    block = next_power_of_2(V) if whole else min(BLOCK, next_power_of_2(V))
    _guided_warp_kernel[(R,)](
        logits, logits if uncond is None else uncond, out, V, guidance, temperature, top_k, _tail(top_p),
        GUIDED=uncond is not None, GREEDY=temperature == 0, TOP_K=0 < top_k < V, TOP_P=top_p < 1, SCORES=scores,
        WHOLE=whole, BLOCK_V=block, num_warps=max(4, min(32, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return out


# `guided_warp` of arguments that were checked before, without `None`
guided_warp_unchecked = operator(
    "guided_warp",
    guided_warp_torch,
    guided_warp_triton,
    lambda logits, *_: torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format),
)


def guided_warp(
    logits: Tensor,
    uncond: Tensor | None = None,
    guidance: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    scores: bool = False,
) -> Tensor:
    """Compute p (R, V) fp32 from logits (R, V) and, with guidance, the unconditional logits (R, V).

    scores: return log p up to a constant instead (at temperature 0 the mixed logits). top_k None or 0 and top_p None or
    1 disable that step. Raises ValueError or TypeError naming the argument.
    """
    check_tensor("logits", logits, (None, None), FLOATS)
    require(logits.shape[1] > 0, "logits", f"shape {tuple(logits.shape)}", "at least one token")
    if uncond is not None:
        check_tensor("uncond", uncond, tuple(logits.shape), FLOATS, logits.device)
    top_k, top_p = int(top_k or 0), 1.0 if top_p is None else float(top_p)
    check_number("guidance", guidance, 0)
    check_number("temperature", temperature, 0)
    require(top_k >= 0, "top_k", top_k, "a count of at least 0")
    check_number("top_p", top_p, 0, 1)
    guidance, temperature = as_float32(guidance), as_float32(temperature)
    return guided_warp_unchecked(logits, uncond, guidance, temperature, top_k, top_p, scores)


def bench_case(device: str, rows: int = 59, vocabulary: int = 16384) -> BenchCase:
    """Time guidance, temperature and top-k of a draft's nodes."""
    c, u = torch.randn(2, rows, vocabulary, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)

    def eager() -> Tensor:
        z = (u.float() + 7.5 * (c.float() - u.float())) / 0.9
        return z.masked_fill(z < z.topk(1000).values[:, -1:], float("-inf")).softmax(-1)

    return BenchCase(f"{rows}x{vocabulary}, top-k", "bfloat16", lambda: guided_warp(c, u, 7.5, 0.9, 1000), eager)
