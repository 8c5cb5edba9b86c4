"""A causal model of continuous tokens as a target of the loop: drafts are chains of vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visspec.distributions import Denoising
from visspec.loop.output import VectorBuffer
from visspec.models.image_codes.target import ImageAR, _twice
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


class ContinuousAR(ImageAR):
    """A family of vectors as a target: it has `steps`, `size` and `distributions`. Drafts are chains of vectors."""

    family: Any

    def __init__(self, family: Any, features: bool = False, compile: bool = False):
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
        return self._inputs(state, draft.value, index)

    def _inputs(self, state: State, values: Tensor, index: Tensor, features: Tensor | None = None) -> Tensor:
        """Inputs of vectors at positions `index`; features: see `ContinuousImageModel.embed`."""
        model = self.family.model
        return model.embed(values.to(model.z_proj.weight.dtype), index - state.request.inputs.ids.shape[1], features)

    def _scores(self, state: State, draft: Draft, last: Tensor, hidden: Tensor) -> Scores:
        return Scores(
            self.family.distributions(last, state.request, state.trace.calls), self._drafter_features(state, hidden)
        )

    def read(self, state: State, draft: Draft, features_RNF: Tensor | None) -> Tensor:
        """Hidden states (R, N, C) of a drafter's own pass over a chain; features: the target's, where known."""
        index, twice = state.position[:, None] + draft.tree.depth, _twice(state)
        embeds = self._inputs(state, draft.value.repeat(twice, 1, 1), index.repeat(twice, 1), features_RNF)
        return self._attend(state, draft.tree, embeds)
