"""A causal model of continuous tokens as a target: a stock decoder, and a diffusion head for the next vector.

The node of the loop is a vector of d numbers; its distribution after each node is a chain of the head's steps
(`Denoising`). The declared target samples all steps with noise, the last one included. Guidance mixes the head's
outputs.

Shapes: B requests, R = B or 2 B cache rows, L prompt, N nodes, M = B N chains, W points of each, S steps, d size of a
token, C hidden size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from visspec.distributions import Denoising
from visspec.loop.output import VectorBuffer
from visspec.models.continuous.model import ContinuousImageModel, Sampler
from visspec.models.image_codes.target import ImageAR, ImageLayout, _twice
from visspec.models.janus.target import ChatPromptFamily
from visspec.models.vectors.diffusion_head import schedule
from visspec.models.vectors.head_distribution import HeadLaws
from visspec.types import Draft, Request, Sampling, Scores, State

COLDEST = 1e-6  # squares of what couplings divide by deviations are finite in float32


def check_vectors(sampling: Sampling) -> None:
    """Raises ValueError for settings that have no meaning for vectors."""
    for name, value, usual in (("top_k", sampling.top_k, 0), ("top_p", sampling.top_p, 1.0)):
        if value != usual:
            raise ValueError(f"{name}: got {value}, expected {usual}: vectors have no ranks to cut")
    if sampling.greedy:
        raise ValueError("temperature: got 0, expected a positive number: a vector is a draw, none is likeliest")
    if sampling.temperature < COLDEST:
        raise ValueError(f"temperature: got {sampling.temperature}, expected at least {COLDEST}: chains need variance")


class ContinuousImages(ChatPromptFamily):
    """Prompts as Janus has them; tokens are vectors, in raster order. settings: a generation_config in place of the
    model's. denoising_steps: of a vector, in place of the model's; fewer make another distribution, faster.
    """

    draws = "vectors"
    default_drafter = "none"
    default_rule = "coupled"
    codes = 0

    def __init__(
        self,
        model: ContinuousImageModel,
        processor: Any,
        *,
        settings: Any = None,
        denoising_steps: int | None = None,
    ):
        grid = model.config.grid
        super().__init__(model, processor, grid, grid * model.factor, settings)
        self.decoder, self.size = model.decoder, model.config.token
        plan = schedule(model.config.denoising_steps if denoising_steps is None else denoising_steps)
        self.chains = HeadLaws(model.head, replace(plan, predicts="velocity"))
        self.steps = self.chains.steps.to(model.device)
        if model.config.autoencoder is None:
            self.no_pixels = "the model has no autoencoder"

    def embed_prompt(self, ids: Tensor) -> Tensor:
        return self.model.embed_prompt(ids)

    def distributions(
        self, hidden_RNC: Tensor, request: Request, calls: Counter[str], name: str = "head", skip: float = 0.0
    ) -> Denoising:
        """Laws after nodes with these hidden states, of the unconditional rows last under guidance."""
        sampling = request.sampling
        copies = 1 if sampling.guidance == 1.0 else 2
        shape = hidden_RNC.shape[0] // copies, hidden_RNC.shape[1]
        scale = None if copies == 1 else sampling.guidance
        return self.chains(hidden_RNC.flatten(0, 1), shape, scale, sampling.temperature, calls, name, skip)

    def check_sampling(self, sampling: Sampling) -> None:
        check_vectors(sampling)

    def stock(self, texts: list[str], sampling: Sampling, layout: ImageLayout, **options: Any) -> Tensor:
        if options.get("cache_implementation", "dynamic") != "dynamic":
            raise ValueError(f"cache_implementation: got {options['cache_implementation']!r}, expected 'dynamic'")
        self.check_sampling(sampling)
        prompt = self.prompt(texts, sampling.guidance != 1.0)
        draw = Sampler(self.model, sampling.guidance, sampling.temperature, len(self.steps))
        return draw(cast(Tensor, prompt.tokens), prompt.attention)

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        return self.model.pixels(tokens).float()


class ContinuousAR(ImageAR):
    """`ContinuousImages` as a target. Drafts are chains of vectors."""

    family: ContinuousImages

    def __init__(self, family: ContinuousImages, features: bool = False, compile: bool = False):
        super().__init__(family, features, compile)
        self.capabilities = replace(
            self.capabilities, trees=False, distribution=Denoising, steps=family.steps, size=family.size, codebook=None
        )

    def _opened(self, request: Request) -> tuple[Tensor, VectorBuffer]:
        self.family.check_sampling(request.sampling)
        rows, guidance = len(request.inputs.ids), request.sampling.guidance
        found, wanted = len(request.inputs.embeds), rows if guidance == 1.0 else 2 * rows
        if found != wanted:
            raise ValueError(
                f"guidance: got {guidance} and {found} rows of inputs for {rows} prompts, expected {wanted}: an"
                " unconditional one for each prompt under guidance, and else none"
            )
        return torch.zeros(rows, self.family.size, device=self.device), VectorBuffer(request, rows)

    def _embed(self, state: State, draft: Draft, index: Tensor) -> Tensor:
        return self._inputs(state, draft.value, index)

    def _inputs(self, state: State, values: Tensor, index: Tensor, features: Tensor | None = None) -> Tensor:
        """Inputs of vectors at positions `index`; features: see `ContinuousImageModel.embed`."""
        model = self.family.model
        return model.embed(values.to(model.z_proj.weight.dtype), index - state.request.inputs.ids.shape[1], features)

    def _scores(self, state: State, draft: Draft, last: Tensor, hidden: Tensor) -> Scores:
        return Scores(self.family.distributions(last, state.request, state.trace.calls), self._shown(state, hidden))

    def read(self, state: State, draft: Draft, features_RNF: Tensor | None) -> Tensor:
        """Hidden states (R, N, C) of a drafter's own pass over a chain; features: the target's, where known."""
        index, twice = state.position[:, None] + draft.tree.depth, _twice(state)
        embeds = self._inputs(state, draft.value.repeat(twice, 1, 1), index.repeat(twice, 1), features_RNF)
        return self._attend(state, draft.tree, embeds)


ContinuousImages.target = ContinuousAR
