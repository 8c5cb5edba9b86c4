"""The published ratio for drafted vectors (CSpD, arXiv 2411.11925): approximate, for reproduction.

The target's chain runs with the drafted chain's noise. With x_1 the last point before the value, p_0 and q_0 the
Gaussians of the last step, a drafted value y is accepted with probability

    min(1, Sigma p_0(y) / q_0(y)),    Sigma = prod over the earlier steps and dimensions of sigma_q / sigma_p,

and after a rejection a value is drawn from the residual [Sigma p_0 - q_0]+ by rejection sampling. The target's end of
the shared noise is an exact draw, and with Sigma = 1 so is the result; Sigma, meant as the ratio of the earlier steps,
makes it approximate. All in log space; where no candidate of a residual is accepted, the target's own end is taken,
which is exact, and counted (`Verdict.capped`).

drift: |f - f*| summed over the tested nodes, f* the acceptance with Sigma = 1. displacement: distance between the
result and the target's own end of the same noise, an upper bound of the Wasserstein distance of the two laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from visspec.accept import denoise
from visspec.accept.coupled import followed
from visspec.accept.couplings import half_square
from visspec.laws import Denoising, denoising
from visspec.sampling import Normals
from visspec.types import Acceptance, Capabilities, Draft, RuleTraits, Scores, Verdict


class Surrogate(Acceptance):
    """tries: candidates of a residual."""

    traits = RuleTraits("approximate", judges_draws=True, chains_only=True, law=Denoising)

    def __init__(self, tries: int = 32):
        if tries < 1:
            raise ValueError(f"tries: got {tries}, expected at least 1")
        self.tries = tries
        self.capabilities = Capabilities()

    def bind(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> Normals:
        return Normals(generators, *self.capabilities.chains, (1, self.tries))

    def ratio(self, log_product: Tensor, half_p: Tensor, half_q: Tensor, log_scale: Tensor) -> Tensor:
        """log of the acceptance probability, before it is capped at 1; all (M,).

        log_product: of sigma_q / sigma_p over the earlier steps. half_p, half_q: half squared distances of the value
        from the means of p_0 and q_0, in deviations. log_scale: of the last deviations' ratio, q over p.
        """
        return log_product + log_scale + half_q - half_p

    def weight(self, log_product: Tensor) -> Tensor:
        """log Sigma as the residual has it."""
        return log_product

    def replacement(self, own: Tensor) -> Tensor:
        """Values (M, d) where no candidate of the residual was accepted; `own` are the target's ends."""
        return own

    def __call__(self, draft: Draft, scores: Scores, noise: Normals | None) -> Verdict:
        assert noise is not None
        law, nodes = denoising(scores.law), draft.tree.size
        numbers, drafted = noise.numbers(nodes), denoise.below(draft)
        if drafted is None:
            own = law.value(numbers.start, numbers.steps)
            return followed(draft, own, torch.zeros_like(own[:, 0], dtype=torch.bool))
        there, y = drafted.there, drafted.points[:, -1]
        shared = (drafted.points[:, 1:] - drafted.mean) * (-drafted.log_sigma).exp()
        path = law.sample(
            torch.where(there[:, None], drafted.points[:, 0], numbers.start),
            torch.where(there[:, None, None], shared, numbers.steps),
        )
        own = path.points[:, -1]
        log_q, log_p = (part.log_sigma.expand_as(part.mean) for part in (drafted, path))
        log_scales = (log_q - log_p).sum(dim=2)  # (M, S)
        log_product, log_scale = log_scales[:, :-1].sum(dim=1), log_scales[:, -1]
        last_p, last_q = (path.mean[:, -1], log_p[:, -1]), (drafted.mean[:, -1], log_q[:, -1])
        half_p, half_q = half_square(y, *last_p), half_square(y, *last_q)
        log_f, exact = self.ratio(log_product, half_p, half_q, log_scale), log_scale + half_q - half_p
        accepted = (numbers.coins[:, -1, 0] <= log_f) & there
        (mean_p, sigma_p), (mean_q, sigma_q) = ([part[:, None] for part in last] for last in (last_p, last_q))
        candidates = torch.addcmul(mean_p, sigma_p.exp(), numbers.candidates[:, 0])
        log_share = half_square(candidates, mean_p, sigma_p) - half_square(candidates, mean_q, sigma_q)
        log_share = log_share - log_scale[:, None] - self.weight(log_product)[:, None]  # of q_0 in Sigma p_0
        taken = numbers.chances[:, 0].exp() < 1 - log_share.exp()
        first = taken.long().argmax(dim=1)[:, None, None].expand(-1, 1, law.size)
        found = taken.any(dim=1)
        drawn = torch.where(found[:, None], candidates.gather(1, first)[:, 0], self.replacement(own))
        ends = torch.where(accepted[:, None], y, torch.where(there[:, None], drawn, own))
        drift = (log_f.clamp(max=0).exp() - exact.clamp(max=0).exp()).abs() * there
        return self.verdict(draft, ends, accepted, drift, (ends - own).norm(dim=-1) * there, ~found & there & ~accepted)

    def verdict(
        self, draft: Draft, ends: Tensor, accepted: Tensor, drift: Tensor, moved: Tensor, missed: Tensor
    ) -> Verdict:
        """The verdict for M = B N tested nodes: their values, and which of them are the drafted ones."""
        found = followed(draft, ends, accepted)
        tested = torch.arange(draft.tree.size, device=ends.device) < found.length[:, None]
        drift, moved, missed = (part.view(tested.shape) * tested for part in (drift, moved, missed))
        return replace(found, drift=drift.sum(dim=1), displacement=moved.sum(dim=1), capped=missed.sum(dim=1))
