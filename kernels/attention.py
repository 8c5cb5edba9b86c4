"""Grouped-query attention of a draft tree over its prefix and itself, without a 4-D mask and without repeat_kv.

Node n of row b attends to the slots start[b] <= s < length[b] of the cache (the prefix) and, among the N slots from
length[b] on (the tree, cached in node order), to its ancestors and itself:

    out_n = sum_s softmax_s(scale q_n . k_s) v_s

Head h uses key head h // (H / G); the heads of a group are folded into one matrix, so every key is read once per group.
On CUDA the slots are split among programs (flash decoding, Dao et al. 2023): each keeps a running maximum and sum in
fp32, and a second launch merges them. The tree is given by `parent`, or by the mask that `growth.ancestors` computes.
B rows, H query heads, G key heads, N nodes, S slots, F features.

Draft passes call it on a GPU, where a mask for the tree costs bandwidth; elsewhere they fold heads under `sdpa` with
such a mask (`models/attention/draft_attention.py`).
"""

import torch
from torch import Tensor

from visspec.kernels.common import (
    FLOATS,
    INTS,
    BenchCase,
    check_tensor,
    jit,
    next_power_of_2,
    operator,
    require,
    tl,
    triton,
)
from visspec.kernels.growth import ancestors as relation


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor,
    ancestors: Tensor,
    start: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Define the result, one row, head and node at a time, in fp32 (fp64 for fp64 inputs)."""
    B, H, N, F = q.shape
    kind = torch.promote_types(q.dtype, torch.float32)
    scale = F**-0.5 if scaling is None else scaling
    out = torch.empty(B, H, N, v.shape[3], dtype=kind, device=q.device)
    for b in range(B):
        prefix = torch.arange(0 if start is None else int(start[b]), int(length[b]), device=q.device)
        for n in range(N):
            slots = torch.cat((prefix, int(length[b]) + ancestors[b, n].nonzero().squeeze(1)))
            for h in range(H):
                g = h // (H // k.shape[1])
                weight = (k[b, g, slots].to(kind) @ q[b, h, n].to(kind) * scale).softmax(0)
                out[b, h, n] = weight @ v[b, g, slots].to(kind)
    return out.to(q.dtype)


def tree_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, ancestors: Tensor, start: Tensor | None, scaling: float | None
) -> Tensor:
    """Run on a CPU: the heads of a group are rows of one matrix, so that torch reads each key head once."""
    B, H, N, F = q.shape
    G, S = k.shape[1:3]
    slot = torch.arange(S, device=q.device)
    node = slot - length.unsqueeze(1)
    prefix = node < 0
    if start is not None:
        prefix = prefix & (slot >= start.unsqueeze(1))
    is_node = ((node >= 0) & (node < N)).unsqueeze(1)
    tree = ancestors.gather(2, node.clamp(0, N - 1).unsqueeze(1).expand(B, N, S))
    allowed = (prefix.unsqueeze(1) | (tree & is_node)).unsqueeze(1)
    rows = allowed.expand(B, H // G, N, S).reshape(B, 1, H // G * N, S)
    folded = q.reshape(B, G, H // G * N, F)
    out = torch.nn.functional.scaled_dot_product_attention(folded, k, v, attn_mask=rows, scale=scaling)
    return out.reshape(B, H, N, v.shape[3])


@jit("N lb sb ab an SPLITS", unaligned="length start ancestors")
def _tree_attention_kernel(
    q, k, v, length, start, ancestors, part, high, mass,
    H, G, N, F, scale, kb, kg, ks, vb, vg, vs, lb, sb, ab, an, SPLITS,
    START: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program per (row, key head), block of (head, node) rows and share of the slots."""
    bg = tl.program_id(0)
    b = (bg // G).to(tl.int64)
    g = (bg % G).to(tl.int64)
    split = tl.program_id(2)
    share = H // G
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < share * N
    node = rows % N
    f = tl.arange(0, BLOCK_F)
    query = q + ((b * H + g * share + rows // N) * N + node)[:, None] * F + f[None, :]
    tile = tl.load(query, mask=live[:, None] & (f[None, :] < F), other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    filled = tl.load(length + b * lb).to(tl.int32)
    first = tl.full((), 0, tl.int32)
    if START:
        first = tl.load(start + b * sb).to(tl.int32)
    blocks = (filled + N + BLOCK_S - 1) // BLOCK_S
    each = (blocks + SPLITS - 1) // SPLITS
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for block in range(split * each, tl.minimum(split * each + each, blocks)):
        s = block * BLOCK_S + tl.arange(0, BLOCK_S)
        wide = s.to(tl.int64)
        cached = s < filled + N
        keys = tl.load(
            k + b * kb + g * kg + wide[None, :] * ks + f[:, None], mask=cached[None, :] & (f[:, None] < F), other=0.0
        )
        values = tl.load(
            v + b * vb + g * vg + wide[:, None] * vs + f[None, :], mask=cached[:, None] & (f[None, :] < F), other=0.0
        )
        if UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        score = tl.dot(tile, keys, input_precision="ieee") * scale
        own = s - filled
        in_tree = (own >= 0) & (own < N)
        relation = ancestors + (b * ab + node * an)[:, None] + own[None, :]
        related = tl.load(relation, mask=live[:, None] & in_tree[None, :], other=0) != 0
        prefix = (s < filled) & (s >= first)
        allowed = (prefix[None, :] | related) & live[:, None]
        score = tl.where(allowed, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(score - safe[:, None])
        decay = tl.exp(top - safe)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        top = new_top
    slot = (bg.to(tl.int64) * SPLITS + split) * (share * N) + rows
    tl.store(high + slot, top, mask=live)
    tl.store(mass + slot, total, mask=live)
    tl.store(part + slot[:, None] * F + f[None, :], acc, mask=live[:, None] & (f[None, :] < F))


@jit("rows SPLITS")
def _merge_kernel(part, high, mass, out, rows, F, SPLITS, BLOCK_F: tl.constexpr):
    """One program per output row: combine the shares, weighted by their maxima."""
    bg = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    f = tl.arange(0, BLOCK_F)
    top = tl.full((), float("-inf"), tl.float32)
    for split in range(0, SPLITS):
        top = tl.maximum(top, tl.load(high + (bg * SPLITS + split) * rows + r))
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_F,), tl.float32)
    for split in range(0, SPLITS):
        slot = (bg * SPLITS + split) * rows + r
        weight = tl.exp(tl.load(high + slot) - top)
        total += weight * tl.load(mass + slot)
        acc += weight * tl.load(part + slot * F + f, mask=f < F, other=0.0)
    tl.store(out + (bg * rows + r) * F + f, acc / total, mask=f < F)


def tiles(dtype, block_f):
    """Return (BLOCK_M, BLOCK_S) for 8 warps and 2 stages. On sm_90 nothing spills up to 256 features."""
    size = dtype.itemsize * block_f
    if dtype.itemsize == 2 and size <= 512:
        return (64, 64) if size <= 256 else (64, 16)
    return (32, 32) if size <= 512 else (16, 32) if size <= 1024 else (16, 16)


def tree_attention_triton(q, k, v, length, ancestors, start, scaling, splits=None):
    """Launch twice: for shares of the slots, then to merge them. By default `splits` fills the device."""
    B, H, N, F = q.shape
    G = k.shape[1]
    rows = H // G * N
    block_f = max(16, next_power_of_2(F))
    block_m, block_s = tiles(q.dtype, block_f)
    block_m, block_s = min(block_m, max(16, next_power_of_2(rows))), block_s if q.is_cuda else 16
    blocks = -(-rows // block_m)
    if splits is None:
        units = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        splits = max(1, min(64, 2 * units // (B * G * blocks), -(-k.shape[2] // block_s)))
    q = q.contiguous()
    part = torch.empty(B * G, splits, rows, F, dtype=torch.float32, device=q.device)
    high, mass = (torch.empty(B * G, splits, rows, dtype=torch.float32, device=q.device) for _ in range(2))
    out = torch.empty(B, H, N, F, dtype=torch.float32, device=q.device)
    # The interpreter computes 16-bit products wrongly; tensor cores accumulate them in fp32.
    upcast = q.dtype in (torch.float32, torch.float64) or triton.knobs.runtime.interpret
    first = length if start is None else start
    if ancestors.stride(2) != 1:
        ancestors = ancestors.contiguous()
    _tree_attention_kernel[(B * G, blocks, splits)](
        q, k, v, length, first, ancestors.view(torch.int8), part, high, mass,
        H, G, N, F, F**-0.5 if scaling is None else scaling, *k.stride()[:3], *v.stride()[:3],
        length.stride(0), first.stride(0), *ancestors.stride()[:2], splits,
        START=start is not None, UPCAST=upcast, BLOCK_M=block_m, BLOCK_S=block_s, BLOCK_F=block_f,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    _merge_kernel[(B * G, rows)](part, high, mass, out, rows, F, splits, BLOCK_F=block_f, num_warps=1)
    return out.to(q.dtype)


_tree_attention_op = operator(
    "tree_attention",
    tree_attention_torch,
    tree_attention_triton,
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor,
    parent: Tensor | None = None,
    ancestors: Tensor | None = None,
    start: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Compute the attention of the tree's nodes, (B, H, N, F) in q's dtype.

    q (B, H, N, F); k and v (B, G, S, F), G dividing H, with the tree in slots length .. length + N; length (B,) int;
    parent (N,) or (1|B, N) int, or ancestors (1|B, N, N) bool; start (B,) int: first prefix slot (left padding);
    scaling defaults to F ** -0.5. length + N <= S is not checked. Raises ValueError or TypeError.
    """
    check_tensor("q", q, (None, None, None, None), FLOATS)
    B, H, N, F = q.shape
    require(N > 0, "q", "an empty tree (0 nodes)", "at least one node")
    check_tensor("k", k, (B, None, None, F), (q.dtype,), q.device)
    check_tensor("v", v, tuple(k.shape), (q.dtype,), q.device)
    require(H % k.shape[1] == 0, "k", f"{k.shape[1]} heads", f"a divisor of the {H} query heads")
    require(k.shape[2] >= N, "k", f"{k.shape[2]} slots", f"at least the tree's {N}")
    require(k.stride(3) == 1 and v.stride(3) == 1, "k", "a last stride other than 1", "contiguous features")
    check_tensor("length", length, (B,), INTS, q.device)
    require((parent is None) != (ancestors is None), "parent", "both or neither of parent and ancestors", "one of them")
    if start is not None:
        check_tensor("start", start, (B,), INTS, q.device)
    if parent is not None:
        if parent.dim() == 1 or parent.shape[0] == 1:
            parent = parent.expand(B, -1)
        check_tensor("parent", parent, (B, N), INTS, q.device)
        ancestors = relation(parent)
    elif ancestors is not None and ancestors.shape[0] == 1:
        ancestors = ancestors.expand(B, -1, -1)
    check_tensor("ancestors", ancestors, (B, N, N), (torch.bool,), q.device)
    return _tree_attention_op(q, k, v, length, ancestors, start, scaling)


def bench_case(device: str, prefix: int = 4096, nodes: int = 64, heads: int = 32, groups: int = 8) -> BenchCase:
    """Time a tree of draft nodes after a long prefix, against SDPA with a mask."""
    cuda = torch.device(device).type == "cuda"
    dtype, prefix = (torch.bfloat16, prefix) if cuda else (torch.float32, prefix // 8)
    sizes = ((heads, nodes), (groups, prefix + nodes), (groups, prefix + nodes))
    q, k, v = (torch.randn(1, count, slots, 128, device=device).to(dtype) for count, slots in sizes)
    parent = ((torch.arange(nodes, device=device) - 1) // 4).clamp_min(-1).unsqueeze(0)
    parent[:, 0] = -1
    seen, length = relation(parent), torch.tensor([prefix], device=device)
    mask = torch.nn.functional.pad(seen, (prefix, 0), value=True).unsqueeze(1)

    def eager() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    shape = f"{nodes} nodes, prefix {prefix}, {heads}/{groups} heads"
    ours = lambda: tree_attention(q, k, v, length, ancestors=seen)  # noqa: E731
    return BenchCase(shape, str(dtype).removeprefix("torch."), ours, eager)
