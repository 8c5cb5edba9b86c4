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
from visspec.accept.exact import Exact
from visspec.kernels import displacement
from visspec.tree import above, branch, kept
from visspec.types import ABSENT, Capabilities, Draft, Scores, Tree, Verdict

SIBLINGS = 32  # coins kept for each position; a node has at most this many children
COLUMNS = SIBLINGS + 2  # the coins, the draw of the residual, the drafter's own draw (`sampling.propose`)


class Rejection:
    """Exact rejection sampling. Subclasses relax it by adding probability mass to a drafted token (`mass`)."""

    guarantee = "exact"
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset({"q"})
    codes: Tensor | None = None  # (K, E): where a relaxed rule knows the codebook, it measures the displacement
    space: Tensor | None = None  # that codebook as `kernels.displacement` reads it

    def bind(self, capabilities: Capabilities) -> None:
        """Called once, when the rule is paired with a target."""
        if self.guarantee != "exact" and capabilities.codebook is not None:
            self.codes = capabilities.codebook.detach().float()
            self.space = displacement.coordinates(self.codes)

    @property
    def lazy(self) -> bool:
        """Whether the rule has no need of the laws after nodes that nobody reaches."""
        return type(self) is Rejection

    def make_noise(self, generators: Sequence[torch.Generator], vocab: int) -> sampling.Noise:
        return sampling.Noise(generators, COLUMNS, "uniform")

    def mass(self, draft: Draft, p_BNV: Tensor) -> Tensor | None:
        """(B, N) mass added to each node's probability under its parent's law; None for the exact rule."""
        return None

    def relaxation(self, draft: Draft, p_BNV: Tensor) -> dict[str, Any]:
        """What `kernels.accept_tree` is told of the rule."""
        return {"mass": self.mass(draft, p_BNV)}

    def greedy(self, draft: Draft, scores: Scores) -> Verdict:
        return Exact()(draft, scores, None)

    def __call__(self, draft: Draft, scores: Scores, noise: sampling.Noise | None) -> Verdict:
        if noise is None:
            return self.greedy(draft, scores)
        window_BTU = noise.window(draft.levels + 1)
        law_BNV = scores.logits if self.lazy else scores.p
        coins_BN, draw_B = toss(draft.tree, window_BTU), window_BTU[:, 0, SIBLINGS].contiguous()
        return self.judge(draft, law_BNV, coins_BN, draw_B, logs=self.lazy)

    def judge(self, draft: Draft, p_BNV: Tensor, coins_BN: Tensor, draw_B: Tensor, logs: bool = False) -> Verdict:
        """The verdict under laws p, or with `logs` (a lazy rule) under the softmax of p."""
        tree = draft.tree
        told = self.relaxation(draft, p_BNV) if tree.size > 1 else {}
        metered = self.guarantee != "exact" and self.space is not None and tree.size > 1
        path, length, following, drift, *displaced = kernels.accept_tree(
            draft.tokens.clamp(min=0),
            torch.where(draft.tokens == ABSENT, -1, tree.parent),
            p_BNV,
            draft.q,
            coins_BN,
            draw_B,
            depth=draft.levels,
            branch=branch(tree),
            space=self.space if metered else None,
            scores=logs,
            **told,
        )
        return Verdict(path, length, following, None if self.guarantee == "exact" else drift, *displaced)


def drafted(draft: Draft, p_BNV: Tensor) -> Tensor:
    """(B, N): each node's probability under its parent's law; the root's entry means nothing."""
    rows = torch.arange(p_BNV.shape[0], device=p_BNV.device)[:, None]
    return p_BNV[rows, above(draft.tree), draft.tokens.clamp(min=0)]


def toss(tree: Tree, window_BTU: Tensor) -> Tensor:
    """Each node's coin (B, N): its position's own, by rank among its siblings."""
    return window_BTU.flatten(1).gather(1, kept(tree, coins).expand(len(window_BTU), -1))


def coins(tree: Tree) -> Tensor:
    """(1|B, N) the place of each node's coin among the numbers of a window."""
    return place(tree) * COLUMNS + ranks(tree).clamp(max=SIBLINGS - 1)


def place(tree: Tree) -> Tensor:
    """(1|B, N) levels between a node and the first drafted position."""
    return (tree.depth - 1).clamp(min=0)


def ranks(tree: Tree) -> Tensor:
    """How many siblings stand before each node, (1|B, N)."""
    twins = tree.parent[..., :, None] == tree.parent[..., None, :]
    return twins.tril(-1).sum(dim=-1)
