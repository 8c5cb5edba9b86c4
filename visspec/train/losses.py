"""Losses between a drafter's distribution q and the target's p, of features, and of a rollout.

`tv` is half of sum |p - q|: one minus the acceptance rate of exact verification with independent samples, and a bound
for coupled ones. Its gradient is weak while q is far from p, so training starts with `soft_ce`.

Shapes: B rows, T elements, N elements of a chunk, K steps of a rollout, V vocabulary, C candidates, d hidden size, X
numbers of a state of the target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visspec.train.batches import Rollout

ELEMENTS = 1 << 22  # maximum number of logits in a chunk on a CPU, for its cache; four times as many elsewhere


def _per_token(formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Apply a formula to logits of q and to p in the wider dtype, compiled on a GPU. Only q gets a gradient."""

    @functools.wraps(formula)
    def loss(q_logits: Tensor, p: Tensor) -> Tensor:
        kind = torch.promote_types(q_logits.dtype, p.dtype)
        q, p = q_logits.to(kind), p.detach().to(kind).expand_as(q_logits)
        p = p.clone() if p.is_inference() else p  # compiled code saves it for the backward pass
        return (_compiled(formula) if q.is_cuda else formula)(q, p)

    return loss


@functools.cache
def _compiled(formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(formula, dynamic=True)


@_per_token
def tv(q: Tensor, p: Tensor) -> Tensor:
    """Return the total variation, half of sum |p - q|: (..., V) -> (...)."""
    return (q.softmax(dim=-1) - p).abs().sum(dim=-1) / 2


@_per_token
def kl(q: Tensor, p: Tensor) -> Tensor:
    """Return KL(p | q) = sum p (log p - log q), in nats; entries with p = 0 contribute 0: (..., V) -> (...)."""
    return torch.where(p > 0, p * (p.log() - q.log_softmax(dim=-1)), 0).sum(dim=-1)


@_per_token
def soft_ce(q: Tensor, p: Tensor) -> Tensor:
    """Return the cross-entropy of q under p, - sum p log q, in nats: (..., V) -> (...)."""
    return -torch.where(p > 0, p * q.log_softmax(dim=-1), 0).sum(dim=-1)


KINDS = {"tv": tv, "soft_ce": soft_ce, "kl": kl}


def of(kind: str):
    """Return a loss by name; only q gets a gradient. Raises ValueError for an unknown name."""
    if kind not in KINDS:
        raise ValueError(f"loss: got {kind!r}, expected one of {', '.join(KINDS)}.")
    return KINDS[kind]


class Chunk(NamedTuple):
    """N of the elements that one step of a rollout predicts."""

    step: int
    part: slice  # of the batch flattened to (B * (M - 1),)
    states: Tensor  # (N, d)
    p: Tensor  # (N, V) the target's distribution, in at least float32
    best: Tensor  # (N,) its mode


class _KnownGradient(torch.autograd.Function):
    """A value whose gradients were computed together with it."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return None, None, *(gradient.mul_(grad.to(gradient.dtype)) for gradient in ctx.gradients)


def rollout_loss(
    steps: Rollout,
    weights: Sequence[Tensor],
    law: Callable[[slice], Tensor],
    each: Callable[[Chunk], tuple[Tensor, Tensor]],
    width: int,
    parameters: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Return the sum over steps of the mean loss of their elements, and the agreement of each step (K,).

    Logits are computed in chunks of at most `ELEMENTS` numbers. The gradient of a chunk is taken, and the chunk is
    freed, before the next one. The loss can be differentiated once. `weights` (B, T) are those of each step's elements.
    `law` maps a part of the flattened batch to the target's logits (N, width), and `each` maps a chunk to losses and
    agreements (N,), using `parameters` besides the states.
    """
    graph, device = torch.is_grad_enabled(), weights[0].device
    shares = [weight.flatten().float() / weight.sum().clamp(min=1) for weight in weights]
    leaves = [step.states.detach().flatten(0, 1) for step in steps]
    grads = [torch.zeros_like(leaf) for leaf in leaves]
    of_head: dict[Tensor, Tensor] = {}
    total, agreed, size = torch.zeros((), device=device), torch.zeros(len(steps), device=device), ELEMENTS // width + 1
    size = size if device.type == "cpu" else 4 * size
    for start in range(0, len(leaves[0]), size):
        part = slice(start, start + size)
        p_logits = law(part)
        p = p_logits.softmax(dim=-1, dtype=torch.promote_types(p_logits.dtype, torch.float32))
        best = p_logits.argmax(dim=-1)
        for k in range(len(steps)):
            states = leaves[k][part].requires_grad_(graph)
            loss_N, same_N = each(Chunk(k, part, states, p, best))
            loss = (loss_N * shares[k][part]).sum()
            total += loss.detach()
            agreed[k] += (same_N * shares[k][part]).sum()
            if graph:
                grads[k][part], *of_parameters = torch.autograd.grad(loss, (states, *parameters), allow_unused=True)
                for weight, gradient in zip(parameters, of_parameters):
                    if gradient is not None:
                        of_head[weight] = of_head[weight].add_(gradient) if weight in of_head else gradient
    if graph:
        gradients = [gradient.view_as(step.states) for gradient, step in zip(grads, steps)]
        total = _KnownGradient.apply(total, [*gradients, *of_head.values()], *(step.states for step in steps), *of_head)
    return total, agreed


def distance(predicted_Nd: Tensor, feature_Nd: Tensor) -> Tensor:
    """Return the smooth L1 distance of features, averaged over channels, (N,)."""
    return F.smooth_l1_loss(predicted_Nd.float(), feature_Nd.float(), reduction="none").mean(-1)


def confidence(expected_N: Tensor, q_logits_NV: Tensor, p_NV: Tensor) -> Tensor:
    """Return the cross-entropy (N,) of predicted acceptance rates with 1 - TV(p, q) (DSpark, arXiv 2607.05147)."""
    rate_N = 1 - tv(q_logits_NV.detach(), p_NV)
    return F.binary_cross_entropy_with_logits(expected_N.float(), rate_N.clamp(0, 1), reduction="none")
