"""How often one of k drafts of a position is accepted, and the most that any rule can reach.

k siblings are drawn from q, independently or without replacement, and the token emitted has to have the distribution p.
A rule is a coupling of the tuple of drafts with a draw from p; it accepts where the draw is one of them. The best
coupling is an optimal transport (SpecTr, Sun et al., arXiv 2310.15141). By duality its acceptance is

    1 - max over sets H of tokens of P(all drafts are in H) - p(H),

since drafts that are all in H can only become tokens of H; the maximum is over the sets of largest q/p alone (Hu et
al., "Towards optimal multi-draft speculative decoding", arXiv 2502.18779). `sequential` is what `rejection` reaches,
`gumbel_agreement` what `exact` reaches with the k best by the drafter's distribution given the noise of the position.

Laws are float64 tensors (V,), all tuples of drafts are enumerated: for small V and k, to judge rules by.
"""

from __future__ import annotations

import torch
from torch import Tensor


def optimal(p: Tensor, q: Tensor, k: int, replacement: bool) -> float:
    """The acceptance of the best rule for k drafts from q."""
    place = (q / p).argsort(descending=True).argsort()  # inf where p is zero: these are first in any set
    chance = tuples(q, k, replacement)
    last = place.expand(chance.shape)
    for dim in range(k - 1):
        last = torch.maximum(last, place.view(-1, *[1] * (k - 1 - dim)).expand(chance.shape))
    within = torch.zeros_like(q).index_add_(0, last.flatten(), chance.flatten()).cumsum(0)
    held = p[place.argsort()].cumsum(0)
    return 1.0 - max(float((within - held).max()), 0.0)


def tuples(q: Tensor, k: int, replacement: bool) -> Tensor:
    """The probability of every tuple of drafts, (V,) * k."""
    if k == 1:
        return q
    if replacement:
        return q.view(-1, *[1] * (k - 1)) * tuples(q, k - 1, True)
    rows = [q[x] * tuples(distribution, k - 1, False) for x, distribution in enumerate(without(q))]
    return torch.stack(rows)


def without(q_NV: Tensor) -> Tensor:
    """The distributions that are left when each token is taken, (..., V, V): row x has none of x."""
    left = q_NV[..., None, :] * (1 - torch.eye(q_NV.shape[-1], dtype=q_NV.dtype))
    return left / left.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(q_NV.dtype).tiny)


def sequential(p: Tensor, q: Tensor, k: int, replacement: bool) -> float:
    """The acceptance of rejection sampling draft after draft, with the residual as the next one's target."""
    p_NV, q_NV, weight_N, total = p[None], q[None], torch.ones(1, dtype=p.dtype), 0.0
    for left in range(k, 0, -1):
        kept_NV = torch.minimum(p_NV, q_NV)
        total += float(weight_N @ kept_NV.sum(dim=-1))
        if left == 1:
            break
        rest_NV = p_NV - kept_NV
        rest_NV = rest_NV / rest_NV.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        refused_NV = weight_N[:, None] * (q_NV - kept_NV)
        if replacement:
            p_NV, weight_N = rest_NV, refused_NV.sum(dim=-1)
            continue
        vocab = p.shape[0]
        p_NV = rest_NV.repeat_interleave(vocab, dim=0)
        q_NV, weight_N = without(q_NV).flatten(0, 1), refused_NV.flatten()
    return total


def gumbel_agreement(p: Tensor, q: Tensor, k: int, draws: int, generator: torch.Generator) -> float:
    """The share of `draws` Gumbel vectors under which the best of p is among the k best of q."""
    uniform = torch.rand(draws, p.shape[0], dtype=p.dtype, generator=generator)
    gumbel = -(-uniform.clamp(min=torch.finfo(p.dtype).tiny).log()).log()
    best = (p.log() + gumbel).argmax(dim=-1, keepdim=True)
    return float(((q.log() + gumbel).topk(k, dim=-1).indices == best).any(dim=-1).double().mean())
