"""Losses between a drafter's distribution q and the target's p (`kernels.draft_losses`), and between features.

`tv` is half of sum |p - q|: one minus the acceptance rate of exact verification with independent samples, and a bound
for coupled ones. Its gradient is weak while q is far from p, so training starts with `soft_ce`.

Shapes: B rows, T elements, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from visspec import kernels

Steps = Sequence[tuple[Tensor, Tensor, Tensor]]


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


def mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the masked elements; 0 if there are none."""
    return (value_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1)


def rollout_loss(
    steps: Steps,
    p_logits_BTV: Tensor,
    kind: str = "tv",
    *,
    decay: float = 0.8,
    feature_BTd: Tensor | None = None,
    feature_weight: float = 0.0,
) -> tuple[Tensor, list[float]]:
    """Loss of a self-fed rollout, step i weighted by decay^i (EAGLE-3), normalised to sum to one.

    steps: per step (q logits (B, T, V), predicted features (B, T, d), mask (B, T)). feature_BTd: true features, for the
    optional smooth L1 term. Also returns, for each step, the share of elements whose argmax agrees.
    """
    measure = of(kind)
    weights = [decay**i for i in range(len(steps))]
    total = torch.zeros((), device=p_logits_BTV.device)
    agreed = []
    for weight, (q_logits, predicted, mask) in zip(weights, steps):
        term = mean(measure(q_logits, p_logits_BTV), mask)
        if feature_weight and feature_BTd is not None:
            distance = F.smooth_l1_loss(predicted.float(), feature_BTd.float(), reduction="none").mean(-1)
            term = term + feature_weight * mean(distance, mask)
        total = total + weight / sum(weights) * term
        agreed.append(mean((q_logits.argmax(-1) == p_logits_BTV.argmax(-1)).float(), mask).item())
    return total, agreed


def confidence(expected_BT: Tensor, q_logits_BTV: Tensor, p_logits_BTV: Tensor, mask_BT: Tensor) -> Tensor:
    """Binary cross-entropy of logits of acceptance rates with the rates themselves, 1 - TV(p, q) (DSpark, arXiv
    2607.05147): the mean over the masked elements. Only `expected` gets a gradient.
    """
    rate_BT = 1 - tv(q_logits_BTV.detach(), p_logits_BTV)
    each_BT = F.binary_cross_entropy_with_logits(expected_BT.float(), rate_BT.clamp(0, 1), reduction="none")
    return mean(each_BT, mask_BT)
