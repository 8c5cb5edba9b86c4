"""Records that a trained drafter learns from, and its predictions, as the trainer sees them.

Shapes: B rows, L prompt, M answer tokens, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from visspec.types import DrafterTraits


@dataclass(frozen=True)
class TrainingBatch:
    """Prompts and the target's recorded answers (`train.capture`). Row b has lengths[b] answer tokens, M at most."""

    ids: Tensor  # (B, L + M) prompts (left-padded) and answers (right-padded)
    prompt_length: int
    lengths: list[int]
    features: Tensor  # (B, L + M - 1, F)
    states: Tensor  # (B, M - 1, X) inputs of `law` after each answer token
    law: Callable[[Tensor], Tensor]  # states (..., X) -> log-distributions (..., V), up to a constant; float32
    width: int  # V
    best: Tensor  # (B, M - 1) the likeliest token after each answer token
    positions: Tensor  # (B, L + M - 1), or (3, B, L + M - 1)
    attention: Tensor | None  # (B, L) bool
    embeddings: Tensor | None  # (B, L, d) input embeddings of the prompt
    host_ids: Tensor  # `ids`, `attention` and the number above all positions on the CPU: no step waits for the device
    host_attention: Tensor | None
    reach: int

    @property
    def logits(self) -> Tensor:
        """All log-distributions at once, (B, M - 1, V). They take much memory if V is large."""
        return self.law(self.states)


class Prediction(NamedTuple):
    """One step of a rollout: states that predict the distributions after the T = M - 1 answer tokens of each row."""

    states: Tensor  # (B, T, d) inputs of the drafter's `trained_logits`
    weight: Tensor  # (B, T) weight in the loss; 0 or False is not counted


Rollout = Sequence[Prediction]


class TrainedDrafter(Protocol):
    """A drafter with a trainable network, as the trainer sees it. It learns from batches of the target's answers."""

    traits: DrafterTraits
    head: nn.Module
    borrowed: tuple[nn.Module, ...]  # modules of the target, frozen in training
    ids: Tensor | None  # the ids of its reduced vocabulary; None: all

    def rollout(self, batch: TrainingBatch, steps: int) -> Rollout:
        """Predict along the answers, each step from the one before.

        Args:
            batch: The recorded answers.
            steps: Number of steps.
        """

    def trained_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (..., V) from predicted states (..., d) after answer tokens (...), by the trained weights."""

    def refresh(self) -> None:
        """Update cached values after the weights changed."""

    def save_pretrained(self, folder: Path, record: dict[str, Any]) -> None:
        """Write configuration, weights and provenance."""
