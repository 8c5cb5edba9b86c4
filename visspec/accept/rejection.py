"""Speculative rejection sampling: exact for sampled drafts and for point masses.

A node x drawn from q is accepted with probability min(1, p(x)/q(x)). After a rejection p becomes the residual
distribution [p - q]+ and the next sibling is tested. The bonus or corrected token is sampled from the last distribution
(Leviathan et al. 2023, Chen et al. 2023; trees: SpecInfer, Miao et al. 2023). A point mass has q = 1 at x. Greedy
decoding needs no random numbers.

Relaxed rules accept with f = min(1, (p(x) + mass)/q(x)), never below the exact probability f*, and keep the residual.
Their drift is the sum of f - f* over the tested nodes. With the same random numbers, the relaxed and the exact round
differ only if a number is between f* and f, so the expected drift bounds the total variation of the output. For one
draft at a node the two are equal, and acceptance = (1 - TV(p, q)) + TV(output, p).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visspec import kernels
from visspec.accept.exact import Exact
from visspec.distributions import categorical
from visspec.sampling import AcceptanceNoise
from visspec.tree import branch, parents_of
from visspec.types import Acceptance, Draft, RuleTraits, Scores, Verdict


class Rejection(Acceptance):
    """Exact rejection sampling. Subclasses relax it by adding probability mass to a drafted token (`mass`)."""

    traits = RuleTraits("exact", judges_draws=True)

    @property
    def relaxed(self) -> bool:
        return self.traits.guarantee != "exact"

    @property
    def lazy(self) -> bool:
        """Return whether the rule only needs the distributions of reached nodes."""
        return type(self) is Rejection

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> AcceptanceNoise:
        return AcceptanceNoise(generators)

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor | None:
        """Return the mass (B, N) added to each node's probability given its parent; None for the exact rule.

        Args:
            draft: The draft.
            p_BNV: Warped distributions of the target after every node.
        """
        return None

    def relaxation(self, draft: Draft, p_BNV: Tensor) -> dict[str, Any]:
        """Return the arguments of `kernels.accept_tree` for this rule.

        Args:
            draft: The draft.
            p_BNV: Warped distributions of the target after every node.
        """
        return {"mass": self.mass(draft, p_BNV)}

    def greedy(self, draft: Draft, scores: Scores) -> Verdict:
        """Return the verdict of greedy decoding: accept the argmax at each node.

        Args:
            draft: The draft.
            scores: The target's distributions after every node.
        """
        verdict = Exact()(draft, scores, None)
        return replace(verdict, drift=torch.zeros_like(verdict.length, dtype=torch.float)) if self.relaxed else verdict

    def __call__(self, draft: Draft, scores: Scores, noise: AcceptanceNoise | None) -> Verdict:
        if noise is None:
            return self.greedy(draft, scores)
        distribution = categorical(scores.distribution)
        law_BNV = distribution.logits if self.lazy else distribution.p
        return self.judge(draft, law_BNV, *noise.accept_uniforms(draft.tree), logs=self.lazy)

    def judge(self, draft: Draft, p_BNV: Tensor, coins_BN: Tensor, draw_B: Tensor, logs: bool = False) -> Verdict:
        """Return the verdict under distributions p, or with `logs` (a lazy rule) under the softmax of p.

        Args:
            draft: The draft.
            p_BNV: Distributions after every node, or with `logs` their logits.
            coins_BN: Uniform numbers of the tests.
            draw_B: Uniform numbers of the final sample.
            logs: Whether p_BNV holds logits.
        """
        tree = draft.tree
        own = self.relaxation(draft, p_BNV) if tree.size > 1 else {}
        path, length, following, drift = kernels.accept_tree(
            draft.value,
            tree.parent.expand_as(draft.value) if draft.real is None else torch.where(draft.real, tree.parent, -1),
            p_BNV,
            None if draft.q is None else categorical(draft.q).p,
            coins_BN,
            draw_B,
            depth=draft.levels,
            branch=branch(tree),
            scores=logs,
            **own,
        )
        return Verdict(path, length, following, drift if self.relaxed else None)


def draft_probabilities(draft: Draft, p_BNV: Tensor) -> Tensor:
    """Return each node's probability under its parent's distribution, (B, N); undefined for the root."""
    rows = torch.arange(p_BNV.shape[0], device=p_BNV.device)[:, None]
    return p_BNV[rows, parents_of(draft.tree), draft.value]
