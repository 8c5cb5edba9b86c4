"""OpenAI's penalties and biases as a logits processor of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class GeneratedTokenPenalties:
    """Scores of (ids (B, L), scores (B, V)): a token that stands c times behind the first `prompt` ids loses
    c * frequency, and presence once; `bias` is added. Nothing is kept between calls.
    """

    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    prompt: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        generated = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        scores = scores - self.frequency * counts - self.presence * counts.clamp(max=1)
        if self.bias:
            scores[:, list(self.bias)] += scores.new_tensor(list(self.bias.values()))
        return scores
