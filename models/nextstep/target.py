"""NextStep-1 on `visspec.models.nextstep.network`: prompts, guidance and pixels as in the authors' first pipeline.

A prompt's words are followed by the size of the image in tokens and the id that begins it. The unconditional prompt has
no words, or those of the negative prompt. Guidance is constant over an image. (arXiv 2508.10711)

Shapes: B requests, R = B or 2 B rows, N nodes, d size of a token, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visspec.distributions import Denoising
from visspec.loop.decode import VectorBuffer
from visspec.models.folders import unpack
from visspec.models.image_codes.family import EncodedPrompt, ImageLayout, grid_of
from visspec.models.image_codes.target import ImageAR
from visspec.models.nextstep.flow import flow_schedule, flow_schedule_v11
from visspec.models.nextstep.layout import NextStepImageModel
from visspec.models.nextstep.network import GUIDANCE, NextStep
from visspec.models.vectors.diffusion_head import Schedule
from visspec.models.vectors.head_distribution import HeadDistributions
from visspec.models.vectors.target import VectorFamily
from visspec.types import Draft, Request, Scores, State

STEPS, SIDE = 50, 512  # from the authors' examples
STEPS_V11 = 30  # from those for version 1.1
AREA = "<|image_area|>"


class NextStepImages(VectorFamily):
    """processor: the model's tokenizer, padding on the left. autoencoder:
    `visspec.models.nextstep.layout.load_nextstep_vae`, or the folder's. plan: steps of the chains
    (`visspec.models.nextstep.flow`); by default those of the release's examples, with noise in the last.
    """

    name = "nextstep"
    load = staticmethod(NextStepImageModel.read)

    def __init__(
        self,
        model: NextStep | NextStepImageModel,
        processor: Callable[..., Any],
        autoencoder: Any = None,
        plan: Schedule | None = None,
    ):
        net, autoencoder, guidance = unpack(model, autoencoder)
        self.model, self.decoder, self.processor = net, net.model, processor
        self.default_guidance = GUIDANCE if guidance is None else guidance
        plan = plan or (flow_schedule(STEPS) if net.normalised else flow_schedule_v11(STEPS_V11))
        self.chains = HeadDistributions(net.head, plan)
        self.steps, self.size, self.patch = self.chains.steps, net.config.size, net.config.patch
        self.factor = 8 * self.patch
        self.use_autoencoder(autoencoder, self.size, "visspec.models.nextstep.layout.load_nextstep_vae")

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

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        return super().pixels(self.model.as_values(tokens), layout)


class NextStepTarget(ImageAR):
    """`NextStepImages` as a target of the loop. Drafts are chains of vectors."""

    family: NextStepImages

    def __init__(self, family: NextStepImages, features: bool = False, compile: bool = False):
        super().__init__(family, features, compile)
        self.capabilities = replace(
            self.capabilities, trees=False, distribution=Denoising, steps=family.steps, size=family.size, codebook=None
        )

    def fix_widths(self) -> None:
        """Do nothing: images are then drawn one at a time, and drafts keep the distribution, not the vectors."""

    def _open_buffer(self, request: Request) -> tuple[Tensor, VectorBuffer]:
        self.family.check_sampling(request.sampling)
        rows = len(request.inputs.ids)
        return torch.zeros(rows, self.family.size, device=self.device), VectorBuffer(request, rows)

    def _embed(self, state: State, draft: Draft, index: Tensor) -> Tensor:
        return self.family.model.embed(draft.value)

    def _scores(self, state: State, draft: Draft, last: Tensor, hidden: Tensor) -> Scores:
        """Return distributions after nodes from hidden states (R, N, C), under guidance the unconditional ones last."""
        request, sampling = state.request, state.request.sampling
        index_BN = state.position[:, None] + draft.tree.depth + (1 - request.inputs.ids.shape[1])
        condition = self.family.model.conditions(last, index_BN.repeat(len(last) // len(index_BN), 1))
        scale = None if sampling.guidance == 1.0 else sampling.guidance
        distribution = self.family.chains(
            condition.flatten(0, 1), tuple(index_BN.shape), scale, sampling.temperature, state.trace.calls
        )
        return Scores(distribution, self._drafter_features(state, hidden))


NextStepImages.target = NextStepTarget
