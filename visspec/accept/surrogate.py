"""The published acceptance ratio for drafted vectors (CSpD, arXiv 2411.11925), approximate, for reproduction.

The target's chain runs with the drafted chain's noise. With x_1 the last point before the value, p_0 and q_0 the
Gaussians of the last step, a drafted value y is accepted with probability

    min(1, Sigma p_0(y) / q_0(y)),    Sigma = prod over the earlier steps and dimensions of sigma_q / sigma_p,

and after a rejection the value is the first of some candidates from p_0 that belongs to the residual [Sigma p_0 -
q_0]+, or the first candidate if none does. Given the earlier noise, y is a draw from q_0, so with Sigma = 1 the result
is an exact draw from p_0, for any number of candidates (`denoise.candidate_coupling`). Sigma, meant as the ratio of
the earlier steps, makes it only approximate. Everything is computed in log space.

The drift is the number of tested nodes whose value is not the one that the same random numbers give with Sigma = 1,
residual included. A node's expected count is the probability that a coupling of its distribution with the target's
differs, so the expected sum is an upper bound of the total variation of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from visspec.accept import denoise
from visspec.accept.coupled import accepted_path
from visspec.accept.denoise import candidate, log_ratios, select_candidate
from visspec.distributions import Denoising
from visspec.sampling import Normals
from visspec.types import Acceptance, Draft, RuleTraits, Scores, Verdict


class Surrogate(Acceptance):
    """The ratio of CSpD, approximate.

    Args:
        tries: Number of candidates for a residual.
    """

    traits = RuleTraits("approximate", judges_draws=True, chains_only=True, distribution=Denoising)

    def __init__(self, tries: int = 32):
        if tries < 1:
            raise ValueError(f"tries: got {tries}, expected at least 1.")
        self.tries = tries

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> Normals:
        return Normals(generators, *self.capabilities.chains, (1, self.tries))

    def __call__(self, draft: Draft, scores: Scores, noise: Normals | None) -> Verdict:
        assert noise is not None
        distribution, nodes = cast(Denoising, scores.distribution), draft.tree.size
        numbers, drafted = noise.numbers(nodes), denoise.child_trajectories(draft)
        if drafted is None:
            own = distribution.value(numbers.start, numbers.steps)
            nothing = torch.zeros_like(own[:, 0], dtype=torch.bool)
            return self.verdict(draft, own, nothing, nothing)
        there, y = drafted.there, drafted.points[:, -1]
        shared = (drafted.points[:, 1:] - drafted.mean) * (-drafted.log_sigma).exp()
        path = distribution.sample(
            torch.where(there[:, None], drafted.points[:, 0], numbers.start),
            torch.where(there[:, None, None], shared, numbers.steps),
        )
        own = path.points[:, -1]
        log_q, log_p = (part.log_sigma.expand_as(part.mean) for part in (drafted, path))
        log_product = (log_q - log_p)[:, :-1].sum(dim=2).sum(dim=1)  # log Sigma
        last_q, last_p = (drafted.mean[:, -1], log_q[:, -1]), (path.mean[:, -1], log_p[:, -1])
        mean_p, log_sigma = (part[:, None] for part in last_p)
        draws = torch.addcmul(mean_p, log_sigma.exp(), numbers.candidates[:, 0])
        uniform, chances = numbers.uniforms[:, -1, 0], numbers.chances[:, 0]
        ratio, ratios = log_ratios(y, draws, *last_q, *last_p)
        accepted, place = select_candidate(uniform <= ratio + log_product, chances <= ratios - log_product[:, None])
        ends = torch.where(accepted[:, None], y, candidate(draws, place))
        same, index = select_candidate(uniform <= ratio, chances <= ratios)  # with Sigma = 1
        drift = (ends != torch.where(same[:, None], y, candidate(draws, index))).any(dim=1) & there
        ends = torch.where(there[:, None], ends, own)
        return self.verdict(draft, ends, accepted & there, drift)

    def verdict(self, draft: Draft, ends: Tensor, accepted: Tensor, drift: Tensor) -> Verdict:
        """Return the verdict for M = B N tested nodes, given their values and which of them are the drafted ones."""
        path = accepted_path(draft, ends, accepted)
        tested = torch.arange(draft.tree.size, device=ends.device) < path.length[:, None]
        return replace(path, drift=(drift.float().view(tested.shape) * tested).sum(dim=1))
