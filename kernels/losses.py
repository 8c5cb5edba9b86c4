"""Distillation losses between a draft and a target distribution, per row, over large vocabularies.

With p = softmax(target) and q = softmax(draft):

    tv = 1/2 sum |p - q|        1 - tv is the acceptance rate of a drawn token (DistillSpec, Zhou et al. 2024)
    kl = sum p (log p - log q)
    soft_ce = - sum p log q

Gradients with respect to the draft logits z, s = sign(q - p):

    d soft_ce/dz = d kl/dz = q - p        d tv/dz = q (s - sum q s) / 2

Neither softmax is stored: the forward pass keeps two log-sums and sum q s per row, the backward pass recomputes q and p
from the logits in the same sweep that writes the gradient. The target gets no gradient. R rows, V vocabulary.
"""

import torch
from torch import Tensor

from visspec.kernels.common import FLOATS, check_tensor, jit, next_power_of_2, operator, tl

ELEMENTS = 1 << 18  # of a chunk of rows on the CPU


def reference(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition; differentiable by autograd."""
    log_q, log_p = draft.log_softmax(1), target.detach().log_softmax(1)
    q, p = log_q.exp(), log_p.exp()
    tv = (p - q).abs().sum(1) / 2
    kl = torch.where(p > 0, p * (log_p - log_q), 0).sum(1)
    return tv, kl, -torch.where(p > 0, p * log_q, 0).sum(1)


def _chunks(draft, kind, count):
    """Row slices, each with the same `count` buffers of its shape: temporaries stay in the cache."""
    R, V = draft.shape
    rows = max(1, min(R, ELEMENTS // max(V, 1)))
    buffers = torch.empty(count, rows, V, dtype=kind, device=draft.device)
    return [(slice(i, i + rows), buffers[:, : R - i]) for i in range(0, R, rows)]


def draft_losses_torch(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tv, kl, soft_ce, log-sums of both, sum q s: six (R,) tensors."""
    kind = torch.promote_types(draft.dtype, torch.float32)
    out = draft.new_empty(6, draft.shape[0], dtype=kind)
    for rows, (log_q, log_p, q, p) in _chunks(draft, kind, 4):
        d, t = draft[rows].to(kind), target[rows].to(kind)
        torch.softmax(d, 1, out=q), torch.softmax(t, 1, out=p)
        # One exponential per element: the logarithms are differences.
        sum_d, sum_t = d.amax(1) - q.amax(1).log_(), t.amax(1) - p.amax(1).log_()
        torch.sub(d, sum_d.unsqueeze(1), out=log_q), torch.sub(t, sum_t.unsqueeze(1), out=log_p)
        if min(float(d.amin()), float(t.amin())) == float("-inf"):
            # Tokens with p = 0 add nothing, even if q is 0 (-inf logits).
            impossible = p == 0
            log_q.masked_fill_(impossible, 0.0), log_p.masked_fill_(impossible, 0.0)
        soft_ce = -torch.linalg.vecdot(log_q, p)
        kl = torch.linalg.vecdot(log_p, p) + soft_ce
        gap = torch.sub(q, p, out=p)
        tv = torch.abs(gap, out=log_q).sum(1) / 2
        out[:, rows] = torch.stack((tv, kl, soft_ce, sum_d, sum_t, torch.linalg.vecdot(gap.sign_(), q)))
    return tuple(column.clone() for column in out)


def draft_losses_backward_torch(
    draft: Tensor,
    target: Tensor,
    sum_d: Tensor,
    sum_t: Tensor,
    slope: Tensor,
    grad_tv: Tensor,
    grad_kl: Tensor,
    grad_ce: Tensor,
) -> Tensor:
    grad = torch.empty_like(draft, memory_format=torch.contiguous_format)
    for rows, (q, p, turn) in _chunks(draft, sum_d.dtype, 3):
        torch.softmax(draft[rows].to(sum_d.dtype), 1, out=q), torch.softmax(target[rows].to(sum_d.dtype), 1, out=p)
        gap = torch.sub(q, p, out=p)
        torch.sign(gap, out=turn).sub_(slope[rows].unsqueeze(1)).mul_(q).mul_(grad_tv[rows].unsqueeze(1) / 2)
        grad[rows] = turn.addcmul_(gap, (grad_kl[rows] + grad_ce[rows]).unsqueeze(1))
    return grad


@jit()
def _losses_kernel(draft, target, tv, kl, soft_ce, sum_d, sum_t, slope, V, BLOCK_V: tl.constexpr):
    """One program per row: running log-sums of both rows, then the three sums."""
    r = tl.program_id(0).to(tl.int64)
    kind = tv.dtype.element_ty
    top_d = tl.full((), float("-inf"), kind)
    top_t = tl.full((), float("-inf"), kind)
    all_d = tl.full((), 0.0, kind)
    all_t = tl.full((), 0.0, kind)
    for start in range(0, V, BLOCK_V):
        at = start + tl.arange(0, BLOCK_V)
        d = tl.load(draft + r * V + at, mask=at < V, other=float("-inf")).to(kind)
        t = tl.load(target + r * V + at, mask=at < V, other=float("-inf")).to(kind)
        new_d = tl.maximum(top_d, tl.max(d, 0))
        new_t = tl.maximum(top_t, tl.max(t, 0))
        base_d = tl.where(new_d == float("-inf"), 0.0, new_d)
        base_t = tl.where(new_t == float("-inf"), 0.0, new_t)
        all_d = all_d * tl.exp(top_d - base_d) + tl.sum(tl.exp(d - base_d), 0)
        all_t = all_t * tl.exp(top_t - base_t) + tl.sum(tl.exp(t - base_t), 0)
        top_d = new_d
        top_t = new_t
    all_d = top_d + tl.log(all_d)
    all_t = top_t + tl.log(all_t)
    distance = tl.full((), 0.0, kind)
    entropy = tl.full((), 0.0, kind)
    cross = tl.full((), 0.0, kind)
    lean = tl.full((), 0.0, kind)
    for start in range(0, V, BLOCK_V):
        at = start + tl.arange(0, BLOCK_V)
        log_q = tl.load(draft + r * V + at, mask=at < V, other=float("-inf")).to(kind) - all_d
        log_p = tl.load(target + r * V + at, mask=at < V, other=float("-inf")).to(kind) - all_t
        q = tl.exp(log_q)
        p = tl.exp(log_p)
        gap = q - p
        distance += tl.sum(tl.abs(gap), 0)
        entropy += tl.sum(tl.where(p > 0, p * log_p, 0.0), 0)
        cross += tl.sum(tl.where(p > 0, p * log_q, 0.0), 0)
        lean += tl.sum(tl.where(gap > 0, q, tl.where(gap < 0, -q, 0.0)), 0)
    tl.store(tv + r, distance * 0.5)
    tl.store(kl + r, entropy - cross)
    tl.store(soft_ce + r, -cross)
    tl.store(sum_d + r, all_d)
    tl.store(sum_t + r, all_t)
    tl.store(slope + r, lean)


@jit()
def _losses_backward_kernel(
    draft, target, sum_d, sum_t, slope, grad_tv, grad_kl, grad_ce, grad, V, BLOCK_V: tl.constexpr
):
    """One program per (row, block): recompute q and p, write the gradient."""
    r = tl.program_id(0).to(tl.int64)
    kind = sum_d.dtype.element_ty
    at = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.load(draft + r * V + at, mask=at < V, other=float("-inf")).to(kind)
    t = tl.load(target + r * V + at, mask=at < V, other=float("-inf")).to(kind)
    q = tl.exp(d - tl.load(sum_d + r))
    gap = q - tl.exp(t - tl.load(sum_t + r))
    sign = tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
    turn = q * (sign - tl.load(slope + r)) * (tl.load(grad_tv + r) * 0.5)
    out = gap * (tl.load(grad_kl + r) + tl.load(grad_ce + r)) + turn
    tl.store(grad + r * V + at, out.to(grad.dtype.element_ty), mask=at < V)


def draft_losses_triton(draft, target):
    R, V = draft.shape
    kind = torch.promote_types(draft.dtype, torch.float32)
    outs = tuple(torch.empty(R, dtype=kind, device=draft.device) for _ in range(6))
    _losses_kernel[(R,)](
        draft.contiguous(), target.contiguous(), *outs, V, BLOCK_V=min(4096, next_power_of_2(V)), num_warps=8
    )
    return outs


def draft_losses_backward_triton(draft, target, sum_d, sum_t, slope, grad_tv, grad_kl, grad_ce):
    R, V = draft.shape
    block = min(4096, next_power_of_2(V))
    grad = torch.empty(R, V, dtype=draft.dtype, device=draft.device)
    _losses_backward_kernel[(R, -(-V // block))](
        draft.contiguous(), target.contiguous(), sum_d, sum_t, slope, grad_tv.contiguous(), grad_kl.contiguous(),
        grad_ce.contiguous(), grad, V, BLOCK_V=block, num_warps=8,
    )  # fmt: skip
    return grad


def _draft_losses_fake(draft, target):
    kind = torch.promote_types(draft.dtype, torch.float32)
    return tuple(draft.new_empty(draft.shape[0], dtype=kind) for _ in range(6))


_draft_losses_op = operator("draft_losses", draft_losses_torch, draft_losses_triton, _draft_losses_fake)
_draft_losses_backward_op = operator(
    "draft_losses_backward",
    draft_losses_backward_torch,
    draft_losses_backward_triton,
    lambda draft, *_: torch.empty_like(draft, memory_format=torch.contiguous_format),
)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[3:])


def _backward(ctx, grad_tv, grad_kl, grad_ce, *unused):
    draft, target, sum_d, sum_t, slope = ctx.saved_tensors
    grad = _draft_losses_backward_op(draft, target, sum_d, sum_t, slope, grad_tv, grad_kl, grad_ce)
    return grad, None


_draft_losses_op.register_autograd(_backward, setup_context=_save)


def draft_losses(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tv, kl and soft_ce of each row, (R,) each, fp32 (fp64 for fp64 logits), differentiable in draft_logits.

    Both (R, V), same dtype and device. Raises ValueError or TypeError naming the argument.
    """
    check_tensor("draft_logits", draft_logits, (None, None), FLOATS)
    shape = tuple(draft_logits.shape)
    check_tensor("target_logits", target_logits, shape, (draft_logits.dtype,), draft_logits.device)
    return _draft_losses_op(draft_logits, target_logits.detach())[:3]


def random_case(seed, rows=3, vocabulary=21, dtype=torch.float32):
    """Arguments of `draft_losses` for the tests."""
    g = torch.Generator().manual_seed(seed)
    draft, target = (torch.randn(2, rows, vocabulary, generator=g) * 2).to(dtype)
    return {"draft_logits": draft, "target_logits": target}


CASES = [{}, {"rows": 1, "vocabulary": 4100}, {"vocabulary": 1}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}]
