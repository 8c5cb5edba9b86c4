"""Structure of drafts as a value, for drafters that build them level by level: chains, trees grown from the drafter's
distributions (EAGLE-2, OPT-Tree) and static ones (EAGLE-1, counts of nodes a depth). `loop.draft_length` chooses the
levels of a round.

Shapes: B rows, T levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from visspec import tree as trees
from visspec.distributions import Categorical
from visspec.models.drafting import static_tree as feature_tree
from visspec.sampling import sample_distribution, warp
from visspec.types import OWN, Draft, Drafter, State, Structure

TREES = ("chain", "dynamic", "opt", "eagle")


class Chain:
    """Builds a chain level by level, in the form that the request's rule expects.

    confidence: from the second level on, the chain of a row ends where the product of the acceptance rates that a
    trained head expects is below it. The nodes behind are marked as not real, on the device.
    """

    def __init__(self, state: State, confidence: float = 0.0):
        self.state, self.confidence = state, confidence
        self.sampling, self.noise, self.pending = state.request.sampling, state.noise, state.pending
        self.greedy = self.noise is None  # warping keeps the order
        self.tokens: list[Tensor] = []
        self.distributions: list[Categorical] = []
        self.rates: list[Tensor] = []  # (B,) expected by the head

    def add(self, logits_BV: Tensor, expected_B: Tensor | None = None) -> Tensor:
        """Add a level by the logits of its distribution. Returns its tokens (B,). expected: the probability of its
        acceptance by a trained head, from nothing but what stands above it: of a level that is there or not by its own
        token, that token would not be a draw from its distribution, and rejection sampling would not be exact.
        """
        if expected_B is not None:
            self.rates.append(expected_B)
        if self.greedy:
            self.tokens.append(logits_BV.argmax(dim=-1))
            return self.tokens[-1]
        token_B, q = sample_distribution(Categorical(warp(logits_BV, self.sampling)), self.state, len(self.tokens))
        self.tokens.append(token_B)
        if q is not None:
            self.distributions.append(q)
        return token_B

    def extend(self, logits_BKV: Tensor) -> None:
        """Add levels whose distributions do not depend on each other's tokens."""
        if self.greedy:
            self.tokens += logits_BKV.argmax(dim=-1).unbind(1)
            return
        for logits_BV in logits_BKV.unbind(1):
            self.add(logits_BV)

    def finish(self, levels: int | None = None) -> Draft:
        """The draft, or its first levels."""
        tokens, distributions = self.tokens[:levels], self.distributions[:levels]
        real = None
        if self.rates:
            product_BD = torch.stack(self.rates[:levels], dim=1).cumprod(dim=1)
            going_BD = (product_BD >= self.confidence)[:, 1:]
            real = nn.functional.pad(going_BD, (2, 0), value=True)  # the root and the first level
        q = Categorical.chain(distributions) if distributions else None
        return trees.chain_draft(self.pending, torch.stack(tokens, dim=1), q, real)


class StructuredDrafter(Drafter):
    """Base class of drafters with the structure of their drafts as a value."""

    width = 1  # of a frontier; 1 is a chain
    nodes = 0  # most nodes of a grown tree; 0: none is grown
    paths: feature_tree.Paths = ()  # of a static tree

    def shaped(self, tree: str | int = "") -> Self:
        """Set the structure of drafts, and return the drafter. Before it is paired with a target.

        tree: "chain"; "dynamic", grown best-first with the drafter's `width` (EAGLE-2); "opt", the tree of its `nodes`
            nodes with the most expected accepted nodes by its own distributions (OPT-Tree, arXiv 2406.17276); "eagle",
            the static tree of EAGLE-1; counts of nodes a depth, "4-8-8". Default: chains, or "dynamic" for a `width`
            above 1.

        Raises ValueError for anything else.
        """
        if tree != "":
            self._grow(str(tree))
        return self

    def _grow(self, tree: str) -> None:
        if not self.nodes:
            raise ValueError(f"tree: got {tree!r} for {type(self).__name__}, expected a drafter that builds trees")
        if tree == "dynamic" and self.width == 1:
            raise ValueError("tree: got 'dynamic' with width 1, expected a width of 2 or more")
        self.paths = ()
        if tree == "chain":
            self.width = 1
        elif tree == "opt":
            self.width = self.nodes
        elif tree != "dynamic":
            self.paths = static(tree)
            depths = [len(path) for path in self.paths]
            self.width = max(map(depths.count, depths))
            self.traits = replace(self.traits, levels=depths[-1])
        self.traits = replace(self.traits, trees=self.width > 1)

    @property
    def structures(self) -> tuple[Structure, ...]:
        """Beside grown trees a chain, and trees of a third of their nodes; beside static ones a chain."""
        if self.width == 1:
            return (OWN,)
        third = -(-self.width // 3)
        smaller = [] if self.paths or third in (1, self.width) else [Structure(third, -(-self.nodes // 3))]
        return Structure(1, 0), *smaller, Structure(self.width, len(self.paths) or self.nodes)

    def structure(self, state: State) -> Structure:
        """The structure of this round's draft."""
        own = self.width == 1 or state.structure == OWN
        return Structure(self.width, self.nodes) if own else state.structure

    def tree_builder(self, state: State, depth: int) -> trees.TreeBuilder | feature_tree.StaticTreeBuilder:
        """A tree builder: `trees.TreeBuilder`, or one with its methods."""
        if not self.paths:
            return trees.TreeBuilder(state.pending, self.structure(state).width)
        return feature_tree.StaticTreeBuilder(
            state.pending, tuple(path for path in self.paths if len(path) <= depth), None
        )

    def block_tree(
        self, state: State, logits_BKV: Tensor, below: Callable[[int, Tensor], Tensor] | None = None
    ) -> Draft:
        """A tree over the distributions of a block, which are those of their depth whatever stands above (DDTree, arXiv
        2604.12989). below: the logits (B, W, V) of a level below the tokens above (B, W), if these change them. Raises
        ValueError for rules that judge draws.
        """
        if state.noise is not None and state.noise.samples:
            raise ValueError("acceptance: got a rule that judges draws, expected point masses for a block's tree")
        tree_builder, token_BW = self.tree_builder(state, logits_BKV.shape[1]), state.pending[:, None]
        for level in range(logits_BKV.shape[1]):
            logits_BWV = logits_BKV[:, level : level + 1] if below is None else below(level, token_BW)
            token_BW, _ = tree_builder.grow(ranking(logits_BWV, state, level).expand(-1, token_BW.shape[1], -1))
        return tree_builder.finish(self.structure(state).nodes)

    def levels(self, state: State, depth: int) -> int:
        """Levels to draft of `depth` that are asked for: at most a static tree's own."""
        return min(depth, len(self.paths[-1])) if self.paths else depth


def ranking(logits_BWV: Tensor, state: State, level: int) -> Tensor:
    """Log-distributions (B, W, V) by which a tree ranks the children of a level: with noise, those *given* the noise of
    their position.
    """
    logits_BWV = warp(logits_BWV, state.request.sampling)
    if state.noise is not None:
        logits_BWV = state.noise.perturb(logits_BWV, level)
    return logits_BWV.log_softmax(dim=-1)


def static(tree: str) -> feature_tree.Paths:
    """The static tree of a name or counts, see `StructuredDrafter.shaped`."""
    if tree == "eagle":
        return feature_tree.EAGLE
    if all(part.isascii() and part.isdigit() for part in tree.split("-")):
        return feature_tree.spread(feature_tree.parse(tree))
    raise ValueError(f"tree: got {tree!r}, expected one of {', '.join(TREES)}, or counts like '4-8-8'")
