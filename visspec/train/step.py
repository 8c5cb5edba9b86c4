"""The loss of a drafter on a lesson.

Shapes: B rows, T elements, N elements of a chunk, K steps of a rollout, V vocabulary, C candidates, d hidden size, X
numbers of a state of the target.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from visspec.train import losses
from visspec.train.options import TrainingOptions
from visspec.types import TrainedDrafter, TrainingBatch


class Step(nn.Module):
    """The loss of a lesson as a forward pass, so that what wraps a module for several processes sees one."""

    def __init__(self, drafter: TrainedDrafter, plan: TrainingOptions):
        super().__init__()
        self.head: Any = drafter.head
        self.plan = plan
        self._drafter = (drafter,)  # the target's modules are not trained

    def forward(self, lesson: TrainingBatch, kind: str) -> tuple[Tensor, Tensor]:
        """(loss, share of agreement (K,) by step of the rollout)."""
        (drafter,), plan, ids = self._drafter, self.plan, self._drafter[0].ids
        with self._autocast(lesson):
            rollout = drafter.rollout(lesson, plan.unroll)
        weights = [step.weight for step in rollout]
        if ids is not None:  # the distributions over these ids, where the target's choice is one of them (EAGLE-3)
            inside_BT = torch.isin(lesson.best, ids)
            weights = [weight * inside_BT for weight in weights]
        states_NX = lesson.states.flatten(0, 1)

        def law(at_N: Tensor) -> Tensor:
            logits_NV = lesson.law(states_NX[at_N])
            return logits_NV if ids is None else logits_NV[:, ids]

        each = partial(self._each, lesson, kind, [plan.decay**k for k in range(len(rollout))])
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        return losses.rollout_loss(rollout, weights, law, each, lesson.best.shape[1], lesson.width, parameters)

    def _autocast(self, lesson: TrainingBatch) -> torch.autocast:
        return torch.autocast(lesson.ids.device.type, torch.bfloat16, enabled=self.plan.autocast)

    def _each(self, lesson: TrainingBatch, kind: str, decays: list[float], part: losses.Part) -> tuple[Tensor, Tensor]:
        """Losses and agreements of elements (N,), see `losses.rollout_loss`."""
        (drafter,), plan, start, count = self._drafter, self.plan, lesson.prompt_length, lesson.best.shape[1]
        k, at_N, states_Nd, p_NV = part
        before_N, after_N = (lesson.ids[:, start + i :][:, :count].flatten()[at_N] for i in (0, 1))
        with self._autocast(lesson):
            q_NV = drafter.trained_logits(states_Nd, before_N)
        loss_N = losses.of(kind)(q_NV, p_NV)
        if plan.feature_weight:  # the target's features after each answer token, which the rollout predicts
            feature_Nd = lesson.features[:, start : start + count, -states_Nd.shape[1] :].flatten(0, 1)[at_N]
            loss_N = loss_N + plan.feature_weight * losses.distance(states_Nd, feature_Nd)
        loss_N = loss_N * (decays[k] / sum(decays))
        if k == 0 and plan.confidence_weight:
            expected_N = self.head.sequential.expected(states_Nd, before_N)
            loss_N = loss_N + plan.confidence_weight * losses.confidence(expected_N, q_NV, p_NV)
        if k == 0 and plan.selector_weight:
            scores_NC, ids_NC = self.head.sequential.scores(q_NV, states_Nd, before_N, after_N)
            loss_N = loss_N + plan.selector_weight * losses.soft_ce(scores_NC, p_NV.gather(-1, ids_NC))
        best_N = p_NV.argmax(dim=-1)
        return loss_N, q_NV.argmax(dim=-1) == best_N
