"""Tree growth on the device: the best children of a frontier, and the ancestor mask they extend.

With s the cumulative log-probability of a frontier node w and law p_w after it, child (w, v) scores s_w + log p_w(v);
the `width` best of all W V children are kept, best first, equal scores by (frontier position, token) (the dynamic tree
of EAGLE-2, Li et al. 2024). A new node's row of the ancestor mask is its parent's row plus itself.
B rows, W frontier nodes, V vocabulary, N draft nodes.
"""

import numpy as np
import torch

from visspec.kernels.common import (
    FLOATS,
    INTS,
    LOW,
    check_tensor,
    jit,
    launchable,
    next_power_of_2,
    on_device,
    require,
    sortable,
    tl,
)

BLOCK = 128  # scores of a maximum on the CPU


def reference(score, law, width, valid=None):
    """The definition: (tokens, frontier positions, scores), each (B, width)."""
    out = []
    for b in range(score.shape[0]):
        children = []
        for w in range(score.shape[1]):
            if valid is None or bool(valid[b, w]):
                total = score[b, w].float() + law[b, w].float().log()
                children += [(-s, w, v) for v, s in enumerate(total.tolist())]
            else:
                children += [(float("inf"), w, v) for v in range(law.shape[2])]
        out.append([(v, w, -s) for s, w, v in sorted(children)[:width]])
    token, position, total = (torch.tensor([[c[i] for c in row] for row in out]) for i in range(3))
    return token, position, total


def draft_topk_torch(score, law, width, valid):
    """The CPU path: maxima of blocks bound the last place from below; what reaches the bound is put in order."""
    total = torch.log(law.float()).add_(score.float().unsqueeze(2))
    if valid is not None:
        total.masked_fill_(~valid.unsqueeze(2), float("-inf"))
    flat = total.flatten(1)
    blocks = flat.shape[1] // BLOCK
    tops = flat
    if blocks >= width:
        whole, tail = flat.tensor_split((blocks * BLOCK,), 1)
        tops = torch.cat((whole.unflatten(1, (blocks, BLOCK)).amax(2), tail), 1)
    bounds = tops.topk(width, dim=1).values
    # NaN counts as the largest number, so one anywhere shows in front.
    require(not np.isnan(bounds[:, 0].numpy()).any(), "law", "NaN, there or in score", "probabilities")
    reached = (flat >= bounds[:, -1:]).numpy()
    index = torch.empty(len(flat), width, dtype=torch.int64)
    for b, row in enumerate(reached):
        at = torch.from_numpy(row.nonzero()[0])  # by index, so a stable sort leaves equal scores in that order
        index[b] = at[flat[b, at].sort(descending=True, stable=True).indices[:width]]
    return index % law.shape[2], index // law.shape[2], flat.gather(1, index)


@jit
def _best_children_kernel(
    score, law, valid, token, best, W, V, KEEP: tl.constexpr, VALID: tl.constexpr, BLOCK_V: tl.constexpr
):
    """One program per frontier node: its KEEP best children, one scan of the law each."""
    node = tl.program_id(0).to(tl.int64)
    base = tl.load(score + node).to(tl.float32)
    alive = tl.full((), 1, tl.int32)
    if VALID:
        alive = tl.load(valid + node).to(tl.int32)
    last = tl.full((), float("inf"), tl.float32)
    last_at = tl.full((), -1, tl.int32)
    for k in range(KEEP):
        top = tl.full((), float("-inf"), tl.float32)
        top_at = tl.full((), 0, tl.int32) + V
        for start in range(0, V, BLOCK_V):
            at = start + tl.arange(0, BLOCK_V)
            p = tl.load(law + node * V + at, mask=at < V, other=0.0).to(tl.float32)
            s = tl.where(alive != 0, base + tl.log(p), float("-inf"))
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


def draft_topk_triton(score, law, width, valid):
    """The scan of the laws in Triton; the last selection is over W * width numbers."""
    launchable(law)
    B, W, V = law.shape
    keep = min(width, V)
    score, law = score.contiguous(), law.contiguous()
    token = torch.empty(B, W * keep, dtype=torch.int64, device=law.device)
    best = torch.empty(B, W * keep, dtype=torch.float32, device=law.device)
    flags = score if valid is None else valid.to(torch.int8).contiguous()
    _best_children_kernel[(B * W,)](
        score, law, flags, token, best, W, V, KEEP=keep, VALID=valid is not None,
        BLOCK_V=min(4096, next_power_of_2(V)), num_warps=8,
    )  # fmt: skip
    order = torch.arange(W * keep, device=law.device)
    index = LOW - (sortable(best, order).topk(width, dim=1).values & LOW)
    return token.gather(1, index), index // keep, best.gather(1, index)


@torch.library.custom_op("visspec::draft_topk", mutates_args=())
def _draft_topk_op(
    score: torch.Tensor, law: torch.Tensor, width: int, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draft_topk_torch(score, law, width, valid)


_draft_topk_op.register_kernel("cuda")(on_device(draft_topk_triton))


@_draft_topk_op.register_fake
def _draft_topk_fake(score, law, width, valid):
    ids = score.new_empty((score.shape[0], width), dtype=torch.int64)
    return ids, torch.empty_like(ids), torch.empty_like(ids, dtype=torch.float32)


def draft_topk(score, law, width, valid=None):
    """The `width` best children of a frontier: tokens, frontier positions (int64) and scores (fp32), each (B, width).

    score (B, W): cumulative log-probabilities; law (B, W, V): probabilities after each node; valid (B, W) bool marks
    real frontier nodes. 1 <= width <= W V. Raises ValueError or TypeError naming the argument; on a CPU also for NaN.
    """
    check_tensor("law", law, (None, None, None), FLOATS)
    B, W, V = law.shape
    check_tensor("score", score, (B, W), FLOATS, law.device)
    require(1 <= width <= W * V, "width", width, f"a count in [1, {W * V}]")
    if valid is not None:
        check_tensor("valid", valid, (B, W), (torch.bool,), law.device)
    return torch.ops.visspec.draft_topk(score, law, int(width), valid)


@torch.library.custom_op("visspec::extend_ancestors", mutates_args=("mask",))
def _extend_ancestors_op(mask: torch.Tensor, parent: torch.Tensor, start: int) -> None:
    count, N = parent.shape[1], mask.shape[2]
    rows = mask.gather(1, parent.unsqueeze(2).expand(-1, -1, N))
    own = torch.arange(start, start + count, device=mask.device).unsqueeze(1) == torch.arange(N, device=mask.device)
    mask[:, start : start + count] = rows | own


@_extend_ancestors_op.register_fake
def _extend_ancestors_fake(mask, parent, start):
    return None


def extend_ancestors(mask, parent, start):
    """Writes rows start .. start + W of the ancestor mask (B, N, N) bool in place; parent (B, W): node ids < start."""
    check_tensor("mask", mask, (None, None, None), (torch.bool,))
    B, N, _ = mask.shape
    require(mask.shape[2] == N, "mask", f"shape {tuple(mask.shape)}", "a square matrix per row")
    check_tensor("parent", parent, (B, None), INTS, mask.device)
    require(0 < start <= N - parent.shape[1], "start", start, f"a node in [1, {N - parent.shape[1]}]")
    torch.ops.visspec.extend_ancestors(mask, parent.long(), int(start))


def random_case(seed, rows=3, frontier=4, vocabulary=19, width=5, masked=False, ties=False, dtype=torch.float32):
    """Arguments of `draft_topk` for the tests; with ties, laws and scores with many equal entries."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, frontier, vocabulary, generator=g)
    score = -torch.rand(rows, frontier, generator=g) * 3
    if ties:
        logits, score = logits.round().clamp(0, 1) * 0 + torch.randint(0, 2, logits.shape, generator=g), score * 0
    valid = torch.rand(rows, frontier, generator=g) < 0.7
    valid[:, 0] = True
    return {
        "score": score,
        "law": logits.softmax(-1).to(dtype),
        "width": width,
        "valid": valid if masked else None,
    }


CASES = [
    {},
    {"masked": True},
    {"ties": True},
    {"frontier": 1, "width": 10, "vocabulary": 2100, "rows": 1},
    {"width": 7, "vocabulary": 3},
    {"dtype": torch.bfloat16},
]
