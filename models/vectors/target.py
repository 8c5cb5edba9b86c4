"""Images of continuous tokens: vectors that a diffusion head draws, and latents of a KL autoencoder.

Shapes: B images, R = B or 2 B rows, N nodes, T tokens, d size of a token, C hidden size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from visspec.distributions import Denoising, DenoisingSteps
from visspec.loop.output import VectorBuffer
from visspec.models.image_codes.target import Family, ImageAR, ImageLayout, _twice
from visspec.models.vectors.head_distribution import HeadDistributions
from visspec.types import Draft, Request, Sampling, Scores, State

COLDEST = 1e-6  # squares of what couplings divide by deviations are finite in float32


class VectorFamily(Family):
    """Base class of families whose tokens are vectors. patch: latents along a side of a token."""

    codes = 0
    draws = "vectors"
    default_drafter, default_rule = "none", "coupled"
    chains: HeadDistributions
    steps: DenoisingSteps
    autoencoder: AutoencoderKL | None = None
    patch = 1

    def check_sampling(self, sampling: Sampling) -> None:
        for name, value, usual in (("top_k", sampling.top_k, 0), ("top_p", sampling.top_p, 1.0)):
            if value != usual:
                raise ValueError(f"{name}: got {value}, expected {usual}: vectors have no ranks to cut")
        if sampling.greedy:
            raise ValueError("temperature: got 0, expected a positive number: a vector is a draw, none is likeliest")
        if sampling.temperature < COLDEST:
            raise ValueError(
                f"temperature: got {sampling.temperature}, expected at least {COLDEST}: chains need variance"
            )

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        if self.autoencoder is None:
            return super().pixels(tokens, layout)
        config, latents = self.autoencoder.config, unpatchify(tokens, layout.grid, self.patch)
        latents = latents / config.scaling_factor + (config.shift_factor or 0.0)  # as the generator has them
        decoded = self.autoencoder.decode(latents.to(self.autoencoder.dtype)).sample
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


def unpatchify(values_BTd: Tensor, grid: tuple[int, int], patch: int = 1) -> Tensor:
    """Latents (B, channels, rows patch, columns patch) of tokens in raster order: d = channels patch^2, as MAR and
    NextStep-1 have them.
    """
    values = values_BTd.unflatten(2, (-1, patch, patch)).unflatten(1, grid)  # B, rows, columns, channels, patch, patch
    return values.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


class CausalVectorFamily(VectorFamily):
    """Base class of those with a causal decoder, which draws the tokens in raster order."""

    size: int  # of a token

    def inputs(self, values: Tensor, index: Tensor, features: Tensor | None = None) -> Tensor:
        """Inputs of the decoder for tokens number `index`; features: see `ContinuousImageModel.embed`."""
        raise NotImplementedError

    def conditions(self, hidden: Tensor, index: Tensor | None) -> Tensor:
        """Conditions of the head for tokens number `index`, from hidden states of those before them."""
        return hidden

    def distributions(
        self,
        hidden_RNC: Tensor,
        index_RN: Tensor | None,
        sampling: Sampling,
        calls: Counter[str],
        name: str = "head",
        skip: float = 0.0,
    ) -> Denoising:
        """Laws of tokens number `index`, from hidden states of those before them, of the unconditional rows last under
        guidance.
        """
        condition = self.conditions(hidden_RNC, index_RN)
        guided = sampling.guidance != 1.0
        shape = condition.shape[0] // (1 + guided), condition.shape[1]
        scale = sampling.guidance if guided else None
        return self.chains(condition.flatten(0, 1), shape, scale, sampling.temperature, calls, name, skip)


class ContinuousAR(ImageAR):
    """A `CausalVectorFamily` as a target of the loop. Drafts are chains of vectors."""

    family: CausalVectorFamily

    def __init__(self, family: CausalVectorFamily, features: bool = False, compile: bool = False):
        super().__init__(family, features, compile)
        self.capabilities = replace(
            self.capabilities, trees=False, distribution=Denoising, steps=family.steps, size=family.size, codebook=None
        )

    def _open_buffer(self, request: Request) -> tuple[Tensor, VectorBuffer]:
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
        return self.family.inputs(draft.value, index - state.request.inputs.ids.shape[1])

    def _scores(self, state: State, draft: Draft, last: Tensor, hidden: Tensor) -> Scores:
        request = state.request
        index_BN = state.position[:, None] + draft.tree.depth + (1 - request.inputs.ids.shape[1])
        index_RN = index_BN.repeat(len(last) // len(index_BN), 1)
        distribution = self.family.distributions(last, index_RN, request.sampling, state.trace.calls)
        return Scores(distribution, self._drafter_features(state, hidden))

    def read(self, state: State, draft: Draft, features_RNF: Tensor | None) -> Tensor:
        """Hidden states (R, N, C) of a drafter's own pass over a chain; features: the target's, where known."""
        index, twice = state.position[:, None] + draft.tree.depth - state.request.inputs.ids.shape[1], _twice(state)
        embeds = self.family.inputs(draft.value.repeat(twice, 1, 1), index.repeat(twice, 1), features_RNF)
        return self._attend(state, draft.tree, embeds)
