"""Infinity as a target of the loop, like VAR with texts for classes and bits for codes. (arXiv 2412.04431)

A map's codes are its bits, n adjacent ones per position, each a code with two values. They are independent given the
earlier scales, so that everything that works for VAR's codes works for bits: drafted scales, compositions, cache
budgets. Guidance is the same at all scales, as published (`ramp`), with two rows per image; unconditional rows have the
model's own features for no text, as many as the prompt has, or those of a negative prompt.

Shapes: B images, R = B or 2 B rows, T text tokens, F features of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.models.image_codes.family import ImageLayout
from visspec.models.image_codes.text_features import NO_ENCODER
from visspec.models.infinity.layout import InfinityImageModel
from visspec.models.infinity.network import GUIDANCE, Texts
from visspec.models.scales.bsq import BSQVAE
from visspec.models.scales.target import ScaleImages, ScalePrompt

Features = tuple[Tensor, Tensor]  # (B, T, F), and the mask of real tokens (B, T) bool


class TextPrompt(ScalePrompt):
    """A prompt of `Texts`."""

    def rows(self, guided: bool) -> Texts:
        if not guided:
            return self.given
        both = self.given, self.against
        most = max(texts.real.shape[1] for texts in both)
        features, real = ([_wide(getattr(texts, name), most) for texts in both] for name in ("features", "real"))
        return Texts(torch.cat(features), torch.cat(real), torch.cat([texts.none for texts in both]))


def _wide(x: Tensor, most: int) -> Tensor:
    missing = most - x.shape[1]
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))


class InfinityImages(ScaleImages):
    """Prompts are texts; an empty negative prompt selects the model's own features for no text.

    processor: encodes texts as features (B, T, F) with a mask (B, T), padded on the right (`T5Features`). codec:
    `visspec.models.infinity.layout.load_infinity_vae`. All other arguments are VAR's.
    """

    name = "infinity"
    default_guidance, default_ramp = GUIDANCE, "constant"
    load = staticmethod(InfinityImageModel.read)
    autoencoder = BSQVAE, "Infinity's autoencoder (visspec.models.infinity.layout.load_infinity_vae)"

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> Any:
        features = self._features(texts)
        none = torch.tensor([not text.strip() for text in negative or [""] * len(texts)], device=self.model.device)
        unconditional = features
        if negative is not None and any(text.strip() for text in negative):
            # "no text" is as long as the prompt, so the prompt is the placeholder where a negative one is empty
            unconditional = self._features([text if text.strip() else own for text, own in zip(negative, texts)])
        return TextPrompt(Texts(*features, torch.zeros_like(none)), Texts(*unconditional, none))

    def _features(self, texts: list[str]) -> Features:
        if self.processor is None:
            raise ValueError(NO_ENCODER)
        features, real = self.processor(texts)
        return features.to(self.model.device), real.to(self.model.device).bool()

    def check(self, prompt: Any, layout: ImageLayout, guidance: float) -> None:
        for texts in (prompt.given, prompt.against):
            if (count := texts.real.shape[1]) > self.model.config.longest:
                raise ValueError(f"prompt: got {count} tokens, expected at most {self.model.config.longest}.")
