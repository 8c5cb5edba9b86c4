"""VAR as a family of images: prompts are class numbers. (Tian et al., arXiv 2404.02905)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visspec.models.image_codes.class_numbers import class_numbers
from visspec.models.image_codes.target import ImageLayout
from visspec.models.scales.blocks import NextScale
from visspec.models.scales.multiscale import MultiScaleVAE
from visspec.models.scales.target import ScaleImages
from visspec.models.var.network import GUIDANCE


@dataclass(frozen=True, eq=False)
class ScalePrompt:
    """classes (B,): numbers, the model's count of classes for none. against (B,): what guidance leads away from."""

    classes: Tensor
    against: Tensor

    def __len__(self) -> int:
        return len(self.classes)

    def of(self, images: list[int]) -> ScalePrompt:
        return ScalePrompt(self.classes[images], self.against[images])

    @property
    def ids(self) -> Tensor:
        """(B, 1), of no meaning: the prompt has no tokens."""
        return torch.zeros_like(self.classes)[:, None]

    def rows(self, guided: bool) -> Tensor:
        """(R,), conditional rows first."""
        return torch.cat([self.classes, self.against]) if guided else self.classes

    def check(self, images: int, model: NextScale) -> None:
        """Raises ValueError for other shapes, or for numbers that are none of the model's classes."""
        rows, none = (images,), model.config.classes
        if self.classes.shape != rows or self.against.shape != rows:
            found = f"{tuple(self.classes.shape)} and {tuple(self.against.shape)}"
            raise ValueError(f"classes, against: got shapes {found}, expected {rows} twice")
        low, high = torch.cat([self.classes, self.against]).aminmax()
        if int(low) < 0 or int(high) > none:
            raise ValueError(f"classes: got {int(low)}..{int(high)}, expected 0..{none}, the last for none")


class VARImages(ScaleImages):
    """Prompts are numbers of classes ("207") or their names, negative ones too; an empty negative prompt is no class.

    codec: `visspec.models.var.layout.load_var_vae`.
    """

    name = "var"
    default_guidance = GUIDANCE
    autoencoder = MultiScaleVAE, "VAR's autoencoder (visspec.models.var.layout.load_var_vae)"

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> Any:
        count = self.model.config.classes
        classes = class_numbers(texts, count, "prompt", self.labels)
        against = torch.full((len(texts),), count)
        if negative is not None:
            worded = [b for b, text in enumerate(negative) if text.strip()]
            if worded:
                others = [negative[b] for b in worded]
                against[worded] = class_numbers(others, count, "negative_prompt", self.labels)
        return ScalePrompt(classes.to(self.model.device), against.to(self.model.device))
