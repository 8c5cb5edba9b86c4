"""Speculative rejection sampling with coins of its own: exact for really sampled drafts and for point masses.

A node x drawn from q is accepted with probability min(1, p(x)/q(x)); after a rejection p becomes the residual law
[p - q]+ and the next sibling is tried; the last law yields the bonus or corrected token (Leviathan et al. 2023,
Chen et al. 2023; trees: SpecInfer, Miao et al. 2023). A point mass has q = 1 at x. Greedy decoding tosses no coins.

Relaxed rules accept with f = min(1, (p(x) + mass)/q(x)), never below the exact probability f*, and keep the residual.
Their drift is the sum of f - f* over the tried nodes. Tossed with the same coins, the relaxed and the exact round part
only at a node whose coin lies between f* and f, so the expected drift bounds the total variation of the output; for one
draft at a node the two are equal, and acceptance = (1 - TV(p, q)) + TV(output, p).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visspec import kernels, sampling
from visspec.accept import displacement
from visspec.accept.exact import Exact
from visspec.tree import above, kept
from visspec.types import ABSENT, Capabilities, Draft, Scores, Tree, Verdict

SIBLINGS = 32  # coins kept for each position; a node has at most this many children
COLUMNS = SIBLINGS + 2  # the coins, the draw of the residual, the drafter's own draw (`sampling.propose`)


class Rejection:
    """Exact rejection sampling. Subclasses relax it by adding probability mass to a drafted token (`mass`)."""

    guarantee = "exact"
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset({"q"})
    codes: Tensor | None = None  # (K, E): where a relaxed rule knows the codebook, it measures the displacement

    def bind(self, capabilities: Capabilities) -> None:
        """Called once, when the rule is paired with a target."""
        if self.guarantee != "exact" and capabilities.codebook is not None:
            self.codes = capabilities.codebook.detach().float()

    def make_noise(self, generators: Sequence[torch.Generator], vocab: int) -> sampling.Noise:
        return sampling.Noise(generators, COLUMNS, "uniform")

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor | None:
        """(B, N) mass added to each node's probability under its parent's law; None for the exact rule."""
        return None

    def relaxation(self, draft: Draft, p_BNV: Tensor) -> dict[str, Any]:
        """What `kernels.accept_tree` is told of the rule."""
        return {"mass": self.mass(draft, p_BNV)}

    def lent(self, draft: Draft, p_BNV: Tensor, told: dict[str, Any], path_BD: Tensor) -> Tensor:
        """(B, D - 1) mass added to the nodes of a path below its root."""
        return told["mass"].gather(1, path_BD[:, 1:].clamp(min=0))

    def greedy(self, draft: Draft, scores: Scores) -> Verdict:
        return Exact()(draft, scores, None)

    def __call__(self, draft: Draft, scores: Scores, noise: sampling.Noise | None) -> Verdict:
        if noise is None:
            return self.greedy(draft, scores)
        window_BTU = noise.window(draft.levels + 1)
        return self.judge(draft, scores.p, toss(draft.tree, window_BTU), window_BTU[:, 0, SIBLINGS].contiguous())

    def judge(self, draft: Draft, p_BNV: Tensor, coins_BN: Tensor, draw_B: Tensor) -> Verdict:
        tree = draft.tree
        told = self.relaxation(draft, p_BNV) if tree.size > 1 else {}
        path, length, following, drift = kernels.accept_tree(
            draft.tokens.clamp(min=0),
            torch.where(draft.tokens == ABSENT, -1, tree.parent),
            p_BNV,
            draft.q,
            coins_BN,
            draw_B,
            depth=draft.levels,
            branch=1 if tree.chain else None,
            **told,
        )
        if self.guarantee == "exact":
            return Verdict(path, length, following)
        if tree.size == 1 or self.codes is None:
            return Verdict(path, length, following, drift)
        mass_BD = self.lent(draft, p_BNV, told, path)
        return Verdict(path, length, following, drift, displacement.expected(draft, p_BNV, mass_BD, path, self.codes))


def drafted(draft: Draft, p_BNV: Tensor) -> Tensor:
    """(B, N): each node's probability under its parent's law; the root's entry means nothing."""
    rows = torch.arange(p_BNV.shape[0], device=p_BNV.device)[:, None]
    return p_BNV[rows, above(draft.tree), draft.tokens.clamp(min=0)]


def toss(tree: Tree, window_BTU: Tensor) -> Tensor:
    """Each node's coin (B, N): its position's own, by rank among its siblings."""
    rows = torch.arange(window_BTU.shape[0], device=window_BTU.device)[:, None]
    return window_BTU[rows, *kept(tree, coins)]


def coins(tree: Tree) -> tuple[Tensor, Tensor]:
    """The position and the place among its coins of each node's coin, (1|B, N) both."""
    return place(tree), ranks(tree).clamp(max=SIBLINGS - 1)


def place(tree: Tree) -> Tensor:
    """(1|B, N) levels between a node and the first drafted position."""
    return (tree.depth - 1).clamp(min=0)


def ranks(tree: Tree) -> Tensor:
    """How many siblings stand before each node, (1|B, N)."""
    twins = tree.parent[..., :, None] == tree.parent[..., None, :]
    return twins.tril(-1).sum(dim=-1)
