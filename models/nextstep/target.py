"""NextStep-1 on `visspec.models.nextstep.network`: prompts, guidance and pixels as in the authors' first pipeline.

A prompt's words are followed by the size of the image in tokens and the id that begins it; the unconditional prompt is
the same after no words, or negative ones. Guidance is constant over an image. (arXiv 2508.10711)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visspec.models.image_codes.target import EncodedPrompt, ImageLayout, grid_of
from visspec.models.nextstep.flow import flow_schedule
from visspec.models.nextstep.network import NextStep
from visspec.models.vectors.diffusion_head import Schedule
from visspec.models.vectors.head_distribution import HeadDistributions
from visspec.models.vectors.target import CausalVectorFamily, ContinuousAR

GUIDANCE, STEPS, SIDE = 7.5, 50, 512  # of the authors' examples
AREA = "<|image_area|>"


class NextStepImages(CausalVectorFamily):
    """processor: the model's tokenizer, padding on the left. autoencoder: `layouts_nextstep.load_nextstep_vae`. plan:
    steps of chains (`visspec.models.nextstep.flow`); default, 50 of the first release's sampler, with noise in the
    last.
    """

    name = "nextstep"
    default_guidance = GUIDANCE

    def __init__(
        self, model: NextStep, processor: Callable[..., Any], autoencoder: Any = None, plan: Schedule | None = None
    ):
        self.model, self.decoder, self.processor, self.autoencoder = model, model.model, processor, autoencoder
        self.chains = HeadDistributions(model.head, plan or flow_schedule(STEPS))
        self.steps, self.size, self.patch = self.chains.steps, model.config.size, model.config.patch
        self.factor = 8 * self.patch
        if autoencoder is None:
            self.no_pixels = "no autoencoder was given (visspec.models.nextstep.layout.load_nextstep_vae)"
            return
        channels = autoencoder.config.latent_channels
        if channels != model.config.channels:
            raise ValueError(f"autoencoder: got {channels} channels, expected the model's {model.config.channels}")
        self.factor = self.patch * 2 ** (len(autoencoder.config.block_out_channels) - 1)

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        return ImageLayout.plain(*grid_of(height or SIDE, width or SIDE, self.factor))

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> EncodedPrompt:
        tokenizer, layout = self.require_processor(), layout or self.layout()
        words = [*texts, *(negative or [""] * len(texts))] if guided else texts
        batch = tokenizer(words, padding=True, padding_side="left", return_tensors="pt")
        rows, columns = layout.grid
        area = tokenizer(f"{AREA}{rows}*{columns}", return_tensors="pt")["input_ids"][0]
        area = area[1:] if getattr(tokenizer, "bos_token", None) is not None else area
        ids, real = batch["input_ids"].long(), batch["attention_mask"].bool()
        end = torch.cat([area.long(), torch.tensor([self.model.config.image_start])]).expand(len(words), -1)
        ids = torch.cat([ids, end], dim=1).to(self.decoder.device)
        real = torch.cat([real, torch.ones_like(end, dtype=torch.bool)], dim=1).to(self.decoder.device)
        return EncodedPrompt(ids[: len(texts)], self.decoder.embed_tokens(ids), real, tokens=ids)

    def inputs(self, values: Tensor, index: Tensor, features: Tensor | None = None) -> Tensor:
        return self.model.embed(values)

    def conditions(self, hidden: Tensor, index: Tensor | None) -> Tensor:
        assert index is not None
        return self.model.conditions(hidden, index)

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        return super().pixels(self.model.as_values(tokens), layout)


NextStepImages.target = ContinuousAR
