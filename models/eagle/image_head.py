"""One-layer network of a feature drafter for image tokens: `EagleHead` with image positions and a code head.

The target's feature after a token is its conditional hidden state; with classifier-free guidance, the unconditional
one is concatenated. Both are reduced to one vector. Drafting needs no unconditional pass: the network's head is
trained on the *guided* distribution at one guidance scale, which the configuration stores. Each element also gets a
learned embedding of the row and column of the code that it predicts.

Shapes: T positions of an image, d hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from visspec.models.eagle.config import EagleConfig
from visspec.models.eagle.head import EagleHead
from visspec.models.layers import TINY

SPREAD = 6.0  # scales the difference of the two states to roughly their own magnitude


@dataclass(frozen=True)
class ImageHeadConfig(EagleConfig):
    """`vocab` counts codes and grammar ids. An image has `rows` rows of `columns` positions, including row ends."""

    images: str = "none"
    eps: float = 1e-12
    norm_embedding: bool = True
    norm_input: bool = True
    norm_output: bool = True
    codes: int = 0
    rows: int = 0
    columns: int = 0
    guided: bool = True  # features are pairs, conditional and unconditional
    guidance: float = 1.0  # guidance scale of the training targets

    @property
    def parts(self) -> int:
        return 2 if self.guided else 1

    @property
    def places(self) -> int:
        return self.rows * self.columns


class ImageHead(EagleHead):
    """`EagleHead` with position embeddings and a head over the codes."""

    kind: ClassVar[str] = "image_drafter"
    config_class: ClassVar[type[EagleConfig]] = ImageHeadConfig
    config: ImageHeadConfig

    def __init__(self, config: ImageHeadConfig):
        super().__init__(config)
        self.row = nn.Embedding(config.rows, config.hidden)
        self.column = nn.Embedding(config.columns, config.hidden)
        self.codes = nn.Linear(config.hidden, config.codes)
        if config.guided:
            self.reduce = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        with torch.no_grad():
            for table in (self.row, self.column):
                table.weight.mul_(0.1)
            if config.guided:  # starts as the mixture of the two states, c + (s - 1) (c - u)
                eye = torch.eye(config.hidden)
                mixture = torch.cat([eye, (config.guidance - 1) / SPREAD * eye], dim=1)
                self.reduce.weight.mul_(0.5).add_(mixture)

    def reduced(self, feature: Tensor) -> Tensor:
        """Reduce target features (..., F) to (..., d). The difference of the two states is small and scaled up."""
        if not self.config.guided:
            return feature
        conditional, unconditional = feature.to(self.reduce.weight.dtype).chunk(2, dim=-1)
        size = torch.linalg.vector_norm(conditional, dim=-1, keepdim=True).clamp(min=TINY)
        both = torch.cat([conditional, SPREAD * (conditional - unconditional)], dim=-1)
        return self.reduce(both * (math.sqrt(self.config.hidden) / size))

    def places(self) -> Tensor:
        """Return the embedding of each predicted image position, (T, d); zero at 0, which is never predicted."""
        index = torch.arange(1, self.config.places, device=self.row.weight.device)
        own = self.row(index // self.config.columns) + self.column(index % self.config.columns)
        return nn.functional.pad(own, (0, 0, 1, 0))

    def join(self, embed: Tensor, feature: Tensor, image: Tensor | None) -> Tensor:
        """Return layer inputs (..., d): fc([norm(embedding); feature]) plus the position embedding."""
        assert image is not None
        return super().join(embed, feature, None) + image
