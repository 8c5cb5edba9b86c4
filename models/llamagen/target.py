"""LlamaGen, class- and caption-conditional, on `visspec.models.llamagen.network`. (arXiv 2406.06525)

The unconditional prompt is a learned "nothing". Captions are text features, computed by `processor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.models.codecs.vq_layout import ImageCodec
from visspec.models.folders import OwnImageModel, unpack
from visspec.models.image_codes.family import EncodedPrompt, Family, ImageLayout, class_numbers
from visspec.models.image_codes.target import ImageAR
from visspec.models.image_codes.text_features import NO_ENCODER
from visspec.models.llamagen.layout import LlamaGenImageModel
from visspec.models.llamagen.network import GUIDANCE, LlamaGen, left_padded

FACTOR = 16  # pixels per code, along one side, in the published codec


class LlamaGenImages(Family):
    """Prompts of a class-conditional model are class numbers ("207"), including negative ones. An empty negative prompt
    is the learned "nothing".

    Args:
        processor: For captions, encodes texts as features (B, P, F) with a mask (B, P), padded on the right like the
            output of T5's encoder.
        codec: `visspec.models.codecs.vq_layout.load_llamagen_vq`, or the folder's.
    """

    target: type[Any] = ImageAR
    name = "llamagen"
    load = staticmethod(LlamaGenImageModel.read)

    def __init__(
        self,
        model: LlamaGen | OwnImageModel,
        processor: Callable[[list[str]], tuple[Tensor, Tensor]] | None = None,
        codec: ImageCodec | None = None,
    ):
        net, codec, guidance = unpack(model, codec)
        self.model = self.decoder = net
        self.processor, self.codec, self.codes = processor, codec, net.config.codes
        self.codebook = None if codec is None else codec.codebook.float()
        self.factor = FACTOR if codec is None else codec.factor
        self.guided = net.guided
        usual = GUIDANCE[net.config.condition] if net.guided else 1.0
        self.default_guidance = usual if guidance is None else guidance
        if codec is None:
            self.no_pixels = "no codec was given, parts={'codec': load_llamagen_vq(FILE)} of models.codecs.vq_layout"

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        grid = self.model.config.grid
        return ImageLayout.only(grid, grid * self.factor, height, width, "the grid it was given")

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> EncodedPrompt:
        condition, real = self._condition(texts, "prompt")
        embeds = self.model.prefix(condition.to(self.model.device), guidance=guided)
        # placeholders: the prefix has no ids
        ids = torch.zeros(len(texts), embeds.shape[1], dtype=torch.long, device=embeds.device)
        mask = torch.ones_like(ids).bool() if real is None else real.to(embeds.device).bool()
        # "nothing" gets the caption's mask, as in the published sampling code
        both = mask.repeat(2, 1) if guided else mask
        if worded := [b for b, text in enumerate(negative or ()) if guided and text.strip()]:
            condition, real = self._condition([text for text in negative or () if text.strip()], "negative_prompt")
            own = len(texts) + torch.tensor(worded, device=embeds.device)
            embeds = embeds.index_copy(0, own, self.model.prefix(condition.to(self.model.device)))
            if real is not None:
                both = both.index_copy(0, own, real.to(embeds.device).bool())
        return EncodedPrompt(ids, embeds, both)

    def _condition(self, texts: list[str], name: str) -> tuple[Tensor, Tensor | None]:
        """Return class numbers (B,), or text features (B, P, F) and their mask (B, P), padded on the left."""
        if self.model.config.condition == "class":
            return class_numbers(texts, self.model.config.classes, name), None
        if self.processor is None:
            raise ValueError(NO_ENCODER)
        # lower case, like the training texts; the authors also remove addresses and markup
        features, real = left_padded(*self.processor([" ".join(text.lower().split()) for text in texts]))
        missing = self.model.config.prefix - features.shape[1]
        if missing < 0:
            raise ValueError(f"{name}: got {features.shape[1]} words, expected at most {self.model.config.prefix}.")
        return F.pad(features, (0, 0, missing, 0)), F.pad(real, (missing, 0))

    def grid_rope(self) -> Tensor:
        return self.model.rope_table(self.model.device)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.head(hidden)
