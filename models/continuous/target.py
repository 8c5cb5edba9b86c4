"""A causal model of continuous tokens as a target: a stock decoder, and a diffusion head for the next vector.

The node of the loop is a vector of d numbers; its distribution after each node is a chain of the head's steps
(`Denoising`). The declared target samples all steps with noise, the last one included. Guidance mixes the head's
outputs.

Shapes: B requests, R = B or 2 B cache rows, L prompt, N nodes, M = B N chains, W points of each, S steps, d size of a
token, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from transformers import GenerationConfig

from visspec.models.continuous.model import ContinuousImageModel, Sampler
from visspec.models.image_codes.chat_prompt import ChatPromptFamily
from visspec.models.image_codes.target import ImageLayout
from visspec.models.vectors.diffusion_head import schedule
from visspec.models.vectors.head_distribution import HeadDistributions
from visspec.models.vectors.target import CausalVectorFamily, ContinuousAR
from visspec.types import Sampling


class ContinuousImages(CausalVectorFamily, ChatPromptFamily):
    """Prompts as Janus has them; tokens are vectors, in raster order. settings: a generation_config in place of the
    model's. denoising_steps: of a vector, in place of the model's; fewer make another distribution, faster.
    """

    def __init__(
        self,
        model: ContinuousImageModel,
        processor: Callable[..., Any] | None,
        *,
        settings: GenerationConfig | None = None,
        denoising_steps: int | None = None,
    ):
        grid = model.config.grid
        super().__init__(model, processor, grid, grid * model.factor, settings)
        self.decoder, self.size = model.decoder, model.config.token
        plan = schedule(model.config.denoising_steps if denoising_steps is None else denoising_steps)
        self.chains = HeadDistributions(model.head, replace(plan, predicts="velocity"))
        self.steps = self.chains.steps.to(model.device)
        if model.config.autoencoder is None:
            self.no_pixels = "the model has no autoencoder"

    def embed_prompt(self, ids: Tensor) -> Tensor:
        return self.model.embed_prompt(ids)

    def inputs(self, values: Tensor, index: Tensor, features: Tensor | None = None) -> Tensor:
        return self.model.embed(values.to(self.model.z_proj.weight.dtype), index, features)

    def stock(self, texts: list[str], sampling: Sampling, layout: ImageLayout, **options: Any) -> Tensor:
        if options.get("cache_implementation", "dynamic") != "dynamic":
            raise ValueError(f"cache_implementation: got {options['cache_implementation']!r}, expected 'dynamic'")
        self.check_sampling(sampling)
        prompt = self.prompt(texts, sampling.guidance != 1.0)
        draw = Sampler(self.model, sampling.guidance, sampling.temperature, len(self.steps))
        return draw(cast(Tensor, prompt.tokens), prompt.attention)

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        return self.model.pixels(tokens).float()


ContinuousImages.target = ContinuousAR
