"""The k nearest codes of every code, the table used by LANTERN's rule.

    d(i, j) = |e_i|^2 + |e_j|^2 - 2 e_i . e_j,   i's row: the k smallest d(i, j), j != i, nearest first

Equal distances are ordered by index. `normalise` first scales every code to unit length, as LlamaGen's and Janus's
decoders do on lookup (the published tables don't). Rows are processed in chunks: distances become sortable 64-bit keys
(ordered bits of the distance above the index), so the result does not depend on how ties are sorted. V codes, F
features, k neighbours; arithmetic in fp32.
"""

import torch
from torch import Tensor

from visspec.kernels.common import FLOATS, check_tensor, jit, next_power_of_2, operator, require, tl


def reference(codebook: Tensor, k: int, normalise: bool = False) -> Tensor:
    """The definition, in fp64 from differences: (V, k) int64."""
    e = codebook.double()
    if normalise:
        e = torch.nn.functional.normalize(e, dim=1)
    far = (e.unsqueeze(1) - e).square().sum(2)
    far.fill_diagonal_(float("inf"))
    return far.sort(dim=1, stable=True).indices[:, :k]


def _unit(codebook, normalise):
    e = codebook.float()
    return torch.nn.functional.normalize(e, dim=1) if normalise else e


def codebook_neighbours_torch(codebook: Tensor, k: int, normalise: bool, chunk: int) -> Tensor:
    """The CPU path: one matrix product and one selection per chunk of rows."""
    e = _unit(codebook, normalise)
    V = e.shape[0]
    squared = e.square().sum(1)
    order = torch.arange(V, device=e.device)
    table = torch.empty(V, k, dtype=torch.int64, device=e.device)
    for start in range(0, V, chunk):
        rows = order[start : start + chunk]
        far = torch.addmm(squared, e[rows], e.T, alpha=-2).add_(squared[rows].unsqueeze(1)).clamp_min_(0)
        # Distances are not negative, so their bits are ordered.
        key = far.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(order)
        key[torch.arange(rows.numel(), device=e.device), rows] = torch.iinfo(torch.int64).max
        table[rows] = key.topk(k, dim=1, largest=False).values & 0xFFFFFFFF
    return table


@jit()
def _distance_key_kernel(
    codes, squared, keys, first, count, V, F,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One tile of distances, written as keys: ordered bits of the distance above the index of the column."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = first + r
    dot = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        a = tl.load(codes + row[:, None] * F + f[None, :], mask=(row[:, None] < V) & (f[None, :] < F), other=0.0)
        b = tl.load(codes + c[None, :] * F + f[:, None], mask=(c[None, :] < V) & (f[:, None] < F), other=0.0)
        dot = tl.dot(a, b, dot, input_precision="ieee")
    left = tl.load(squared + row, mask=row < V, other=0.0)
    right = tl.load(squared + c, mask=c < V, other=0.0)
    far = tl.maximum(left[:, None] + (right[None, :] - 2.0 * dot), 0.0)
    key = (far.to(tl.int32, bitcast=True).to(tl.int64) << 32) | c[None, :].to(tl.int64)
    key = tl.where(row[:, None] == c[None, :], 0x7FFFFFFFFFFFFFFF, key)
    tl.store(keys + r[:, None].to(tl.int64) * V + c[None, :], key, mask=(r[:, None] < count) & (c[None, :] < V))


def codebook_neighbours_triton(codebook, k, normalise, chunk):
    """Keys by one tiled launch per chunk, then torch's selection."""
    e = _unit(codebook, normalise).contiguous()
    V, F = e.shape
    squared = e.square().sum(1)
    table = torch.empty(V, k, dtype=torch.int64, device=e.device)
    keys = torch.empty(min(chunk, V), V, dtype=torch.int64, device=e.device)
    block_r = block_v = 64 if V > 64 else max(16, next_power_of_2(V))
    for start in range(0, V, chunk):
        count = min(chunk, V - start)
        grid = (-(-count // block_r), -(-V // block_v))
        rows = keys[:count]
        _distance_key_kernel[grid](
            e, squared, rows, start, count, V, F, BLOCK_R=block_r, BLOCK_V=block_v,
            BLOCK_F=min(32, max(16, next_power_of_2(F))), num_warps=4,
        )  # fmt: skip
        table[start : start + count] = rows[:count].topk(k, dim=1, largest=False).values & 0xFFFFFFFF
    return table


_codebook_neighbours_op = operator(
    "codebook_neighbours",
    codebook_neighbours_torch,
    codebook_neighbours_triton,
    lambda codebook, k, *_: codebook.new_empty((codebook.shape[0], k), dtype=torch.int64),
)


def codebook_neighbours(codebook: Tensor, k: int, normalise: bool = False, chunk: int = 256) -> Tensor:
    """(V, k) int64: the k nearest codes of each code, itself excluded, nearest first, equal distances by index.

    codebook (V, F) float; 1 <= k < V; chunk rows at a time (8 chunk V bytes of keys). Raises ValueError or TypeError.
    """
    check_tensor("codebook", codebook, (None, None), FLOATS)
    V = codebook.shape[0]
    require(1 <= k < V, "k", k, f"a count in [1, {V})")
    require(chunk >= 1, "chunk", chunk, "a positive number of rows")
    return _codebook_neighbours_op(codebook, int(k), bool(normalise), int(chunk))


def random_case(seed, codes=40, features=5, k=7, normalise=False, chunk=16, ties=False, dtype=torch.float32):
    """Arguments of `codebook_neighbours` for the tests; with ties, integer codes and repeated ones."""
    g = torch.Generator().manual_seed(seed)
    e = torch.randn(codes, features, generator=g)
    return {"codebook": (e.round() if ties else e).to(dtype), "k": k, "normalise": normalise, "chunk": chunk}


CASES = [{}, {"normalise": True}, {"ties": True}, {"codes": 130, "features": 40, "chunk": 100}, {"codes": 3, "k": 2}]
