"""Infinity as a target of the loop: VAR's, with texts for classes and bits for codes. (arXiv 2412.04431)

A map's codes are its bits, n of every position one after another, each a code of two values; given the scales before
they are independent, so all that is said of VAR's codes holds of bits: drafted scales, compositions, a part of the
cache. Guidance is the same at all scales, as published (`ramp`), over two rows of an image; unconditional rows have the
model's own features for no text, as many as the prompt has, or those of a negative prompt.

Shapes: B images, R = B or 2 B rows, T text tokens, F features of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.models.image_codes.target import ImageLayout
from visspec.models.image_codes.text_features import NO_ENCODER
from visspec.models.infinity.model import InfinityImageModel
from visspec.models.infinity.network import GUIDANCE, Texts
from visspec.models.scales.bsq import BSQVAE
from visspec.models.scales.target import ScaleImages

Features = tuple[Tensor, Tensor]  # (B, T, F), which are real (B, T) bool


@dataclass(frozen=True, eq=False)
class TextPrompt:
    """features (B, T, F) of texts and which are real (B, T); what guidance leads away from, alike, with `none` (B,)
    where it is the model's own for no text.
    """

    features: Tensor
    real: Tensor
    against: Tensor
    against_real: Tensor
    none: Tensor

    def __len__(self) -> int:
        return len(self.real)

    def of(self, images: list[int]) -> TextPrompt:
        return TextPrompt(*(part[images] for part in vars(self).values()))

    @property
    def ids(self) -> Tensor:
        """(B, 1), of no meaning: tokens of the text are not the loop's."""
        return torch.zeros(len(self), 1, dtype=torch.long, device=self.real.device)

    def rows(self, guided: bool) -> Texts:
        """Of R rows, conditional rows first."""
        given = Texts(self.features, self.real, torch.zeros_like(self.none))
        if not guided:
            return given
        most = max(self.real.shape[1], self.against_real.shape[1])
        features, real = (
            torch.cat([_wide(a, most), _wide(b, most)])
            for a, b in ((self.features, self.against), (self.real, self.against_real))
        )
        return Texts(features, real, torch.cat([given.none, self.none]))


def _wide(x: Tensor, most: int) -> Tensor:
    """(B, T, ...) padded to `most` tokens."""
    lacking = most - x.shape[1]
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, lacking))


class InfinityImages(ScaleImages):
    """Prompts are texts; an empty negative prompt is the model's own features for none.

    processor: texts -> features (B, T, F) and which are real (B, T), padded on the right (`T5Features`). codec:
    `visspec.models.infinity.layout.load_infinity_vae`. The others are VAR's.
    """

    name = "infinity"
    default_guidance, default_ramp = GUIDANCE, "constant"
    load = staticmethod(InfinityImageModel.read)
    autoencoder = BSQVAE, "Infinity's autoencoder (visspec.models.infinity.layout.load_infinity_vae)"

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> Any:
        features, real = self._features(texts)
        none = torch.tensor([not text.strip() for text in negative or [""] * len(texts)], device=self.model.device)
        if negative is None or not any(text.strip() for text in negative):
            return TextPrompt(features, real, features, real, none)
        # no text is as long as the prompt, so the prompt stands where there is none
        return TextPrompt(
            features, real, *self._features([text if text.strip() else own for text, own in zip(negative, texts)]), none
        )

    def _features(self, texts: list[str]) -> Features:
        if self.processor is None:
            raise ValueError(NO_ENCODER)
        features, real = self.processor(texts)
        return features.to(self.model.device), real.to(self.model.device).bool()

    def check(self, prompt: Any, layout: ImageLayout, guidance: float) -> None:
        for real in (prompt.real, prompt.against_real):
            if real.shape[1] > self.model.config.longest:
                raise ValueError(f"prompt: got {real.shape[1]} tokens, expected at most {self.model.config.longest}")
