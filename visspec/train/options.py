"""Options and learning-rate schedule of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from visspec.train import losses

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a run. `opening` is the share of steps trained on soft cross-entropy before `loss`. The learning rate
    rises during the share `warm_up` and then falls to `floor` of its peak according to `schedule`.
    """

    steps: int = 2000
    unroll: int = 5
    loss: str = "tv"
    opening: float = 0.5
    decay: float = 0.8
    feature_weight: float = 0.0
    confidence_weight: float = 0.0  # weight for a head that predicts acceptance rates: `expected` of its `sequential`
    selector_weight: float = 0.0  # weight of a selector's cross-entropy over candidates: `scores` of its `sequential`
    rate: float = 1e-3
    schedule: str = SCHEDULES[0]
    floor: float = 0.02
    warm_up: float = 0.025
    weight_decay: float = 0.01
    clip: float = 1.0
    batch: int = 32  # rows per request of `prompts`
    rows: int = 8  # rows per training batch
    accumulate: int = 1  # training batches per update, over all processes; at least one each
    group: int = 16
    reuse: int = 4
    seed: int = 0
    save_every: int = 200
    keep: int = 1  # number of newest checkpoints to keep, in addition to the best one
    validate_every: int = 0
    autocast: bool = False  # bfloat16 matrix products

    def __post_init__(self):
        losses.of(self.loss)
        for name in ("steps", "unroll", "batch", "rows", "accumulate", "group", "reuse", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1.")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate: got {self.rate}, expected a positive number.")
        if not 0 <= self.warm_up <= 1:
            raise ValueError(f"warm_up: got {self.warm_up}, expected a share of the steps, from 0 to 1.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: got {self.schedule!r}, expected one of {', '.join(SCHEDULES)}.")

    def batches(self, lessons: int) -> int:
        """Return the number of requests of each stream in a group, given the training batches per update."""
        return math.ceil(self.group / lessons)

    def parts(self, lessons: int) -> int:
        """Return the number of steps of an epoch over a group."""
        return self.batches(lessons) * math.ceil(self.batch / self.rows)

    def loss_at(self, step: int) -> str:
        """Return the name of the loss at a step."""
        return "soft_ce" if step < self.opening * self.steps else self.loss

    def rate_at(self, step: int) -> float:
        """Return the learning rate at a step: linear warm-up, then the schedule."""
        rising = round(self.warm_up * self.steps)
        if step < rising:
            return self.rate * (step + 1) / rising
        x = min(1.0, (step - rising) / max(1, self.steps - rising))
        share = {"cosine": 0.5 * (1 + math.cos(math.pi * x)), "linear": 1 - x, "constant": 1.0}[self.schedule]
        return self.rate * (self.floor + (1 - self.floor) * share)
