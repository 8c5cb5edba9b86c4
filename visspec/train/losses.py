"""Losses between a drafter's distribution q and the target's p (`kernels.draft_losses`), and between features.

`tv` is half of sum |p - q|: one minus the acceptance rate of exact verification with independent samples, and a bound
for coupled ones. Its gradient is weak while q is far from p, so training starts with `soft_ce`.

Shapes: B rows, T elements, N elements of a chunk, K steps, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visspec import kernels
from visspec.types import Rollout

ELEMENTS = 1 << 24  # numbers of the logits of a chunk: 64 MB in float32


def tv(q_logits: Tensor, p_logits: Tensor) -> Tensor:
    """Total variation, half of sum |p - q|: (..., V) -> (...)."""
    return _per_token(q_logits, p_logits)[0]


def kl(q_logits: Tensor, p_logits: Tensor) -> Tensor:
    """KL(p | q) = sum p (log p - log q), in nats; entries with p = 0 contribute 0: (..., V) -> (...)."""
    return _per_token(q_logits, p_logits)[1]


def soft_ce(q_logits: Tensor, p_logits: Tensor) -> Tensor:
    """Cross-entropy of q under p, - sum p log q, in nats: (..., V) -> (...)."""
    return _per_token(q_logits, p_logits)[2]


def _per_token(q_logits: Tensor, p_logits: Tensor) -> tuple[Tensor, ...]:
    kind = torch.promote_types(q_logits.dtype, torch.float32)
    q, p = q_logits.to(kind), p_logits.detach().to(kind).expand_as(q_logits)
    p = p.clone() if p.is_inference() else p  # autograd can't save inference tensors
    each = kernels.draft_losses(*(logits.reshape(-1, logits.shape[-1]) for logits in (q, p)))
    return tuple(loss_R.view(q_logits.shape[:-1]) for loss_R in each)


KINDS = {"tv": tv, "soft_ce": soft_ce, "kl": kl}


def of(kind: str):
    """A loss by name; only q gets a gradient. Raises ValueError for an unknown name."""
    if kind not in KINDS:
        raise ValueError(f"loss: got {kind!r}, expected one of {', '.join(KINDS)}")
    return KINDS[kind]


class Part(NamedTuple):
    """A chunk of what one step of a rollout predicts: N elements."""

    step: int
    at: Tensor  # (N,) places in a batch that is flattened to (B * M,)
    states: Tensor  # (N, d)
    p_logits: Tensor  # (N, V) of the target


class _KnownGradient(torch.autograd.Function):
    """A value whose gradients have been computed with it."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return None, None, *(known.mul_(grad.to(known.dtype)) for known in ctx.gradients)


def rollout_loss(
    steps: Rollout,
    weights: Sequence[Tensor],
    law: Callable[[Tensor], Tensor],
    each: Callable[[Part], tuple[Tensor, Tensor]],
    count: int,
    width: int,
    parameters: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """(sum over the steps of the mean loss of their elements, share of agreement (K,) of each step).

    Logits exist in chunks of at most `ELEMENTS` numbers: each is computed, its gradient taken, and freed before the
    next, so that no memory of a vocabulary's size is held. The loss can be differentiated once.

    weights: of the elements (B, T) of each step. law: from places (N,) of a batch that is flattened to (B * count,), to
    the target's logits (N, width). each: from a part to losses and agreements (N,) of its elements; parameters: those
    that it may use beside the states.
    """
    graph, device = torch.is_grad_enabled(), weights[0].device
    shares = [weight.flatten().float() / weight.sum().clamp(min=1) for weight in weights]
    leaves = [step.states.detach().flatten(0, 1) for step in steps]
    known = [torch.zeros_like(leaf) for leaf in leaves]
    used: dict[Tensor, Tensor] = {}
    total, agreed, size = torch.zeros((), device=device), torch.zeros(len(steps), device=device), ELEMENTS // width + 1
    for at, members in _places(steps, count):
        for part in (slice(start, start + size) for start in range(0, len(at), size)):
            p_logits = law(at[part])
            for k in members:
                states = leaves[k][part].requires_grad_(graph)
                loss_N, same_N = each(Part(k, at[part], states, p_logits))
                loss = (loss_N * shares[k][part]).sum()
                total += loss.detach()
                agreed[k] += (same_N * shares[k][part]).sum()
                if graph:
                    known[k][part], *of_parameters = torch.autograd.grad(loss, (states, *parameters), allow_unused=True)
                    for p, gradient in zip(parameters, of_parameters):
                        if gradient is not None:
                            used[p] = used[p].add_(gradient) if p in used else gradient
    if graph:
        found = [gradient.view_as(step.states) for gradient, step in zip(known, steps)]
        total = _KnownGradient.apply(total, [*found, *used.values()], *(step.states for step in steps), *used)
    return total, agreed


def _places(steps: Rollout, count: int) -> Iterator[tuple[Tensor, list[int]]]:
    """Places in the flattened batch (N,) and the steps that predict them: all at once that predict every place."""
    whole = [k for k, step in enumerate(steps) if step.place is None]
    for members in ([whole] if whole else []) + [[k] for k in range(len(steps)) if k not in whole]:
        states, _, place = steps[members[0]]
        device = states.device
        row = count * torch.arange(len(states), device=device)[:, None]
        yield (row + (torch.arange(count, device=device) if place is None else place)).flatten(), members


def distance(predicted_Nd: Tensor, feature_Nd: Tensor) -> Tensor:
    """Smooth L1 distance of features, the mean of their channels, (N,)."""
    return F.smooth_l1_loss(predicted_Nd.float(), feature_Nd.float(), reduction="none").mean(-1)


def confidence(expected_N: Tensor, q_logits_NV: Tensor, p_logits_NV: Tensor) -> Tensor:
    """Binary cross-entropy of logits of acceptance rates with the rates themselves, 1 - TV(p, q) (DSpark, arXiv
    2607.05147), (N,). Only `expected` gets a gradient.
    """
    rate_N = 1 - tv(q_logits_NV.detach(), p_logits_NV)
    return F.binary_cross_entropy_with_logits(expected_N.float(), rate_N.clamp(0, 1), reduction="none")
