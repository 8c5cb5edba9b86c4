"""Structure and length of drafts as values, for drafters that build them level by level.

Structure (`StructuredDrafter.shaped(tree=...)`): chains, trees grown from the drafter's distributions (EAGLE-2,
OPT-Tree) and static ones (EAGLE-1, Sequoia, counts of nodes a depth). Length: `loop.draft_length` chooses the levels of
a round for all rows; `StopCriteria` ends the chain of a row earlier, by the drafter's own distribution. It does so on
the device, by marking nodes as not real. The host learns of it with the verdict, and drafts in the next round at most
one level more than the longest row, or twice as many where that was as long as it could be.

A level exists or not by the distributions and tokens above it, never by its own token: otherwise a drafted token, given
that it is there, would not be a draw from its distribution, and rejection sampling would not be exact
(`tests/test_shapes.py`). For the same reason the next round does not depend on the last one's levels where tokens are
draws: their numbers are used again until they are judged.

Shapes: B rows, T levels, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.distributions import Categorical
from visspec.io.checkpoint import read_json
from visspec.models.drafting import static_tree as feature_tree
from visspec.sampling import sample_distribution, warp
from visspec.types import MAX_NODES, OWN, Draft, Drafter, Outcome, State, Structure

TREES = ("chain", "dynamic", "opt", "eagle")
RANKS = "acceptance_by_rank"  # of a file: a list for every depth, of how often the child of each rank is accepted


@dataclass(frozen=True)
class StopCriteria:
    """Where a row's chain ends: behind the first level for which one of these is true; 0 is off.

    entropy: the square root of the entropy (nats) of the level's distribution is above it. 1 - sqrt(c H) bounds the
    acceptance rate from below where the cross-entropy of the target is in proportion to H (SVIP, arXiv 2411.18462).
    confidence: the product of the probabilities of all drafted tokens is below it (SpecDec++, arXiv 2405.19715, with
    the drafter's own probabilities in place of those of a trained head). Where a drafter has such a head (DSpark), it
    is the product of what the head expects, which knows of a level before its token is chosen: the chain ends before
    the first level, of those behind the first one, for which it is below.

    With the rule `exact`, distributions are those *given* the noise of their position, as for trees.
    """

    entropy: float = 0.0
    confidence: float = 0.0

    def __post_init__(self):
        if not (math.isfinite(self.entropy) and self.entropy >= 0):
            raise ValueError(f"entropy: got {self.entropy}, expected a number of at least 0")
        if not 0 <= self.confidence < 1:
            raise ValueError(f"confidence: got {self.confidence}, expected a probability below 1")

    def goes_on(
        self, logits_BV: Tensor, token_B: Tensor, product_B: Tensor, known: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(whether there is a level below (B,), the product of probabilities so far (B,)). known: the product has the
        level's own already, as a head expects it.
        """
        p_BV = logits_BV.softmax(dim=-1)
        if not known:
            product_B = product_B * p_BV.gather(-1, token_B[:, None])[:, 0]
        going_B = product_B >= self.confidence
        if self.entropy:
            going_B &= torch.special.entr(p_BV).sum(dim=-1).sqrt() <= self.entropy
        return going_B, product_B


class Chain:
    """Builds a chain level by level, in the form that the request's rule expects."""

    def __init__(self, state: State, stop: StopCriteria | None = None):
        self.state, self.stop = state, stop
        self.sampling, self.noise, self.pending = state.request.sampling, state.noise, state.pending
        self.greedy = self.noise is None and stop is None  # warping keeps the order
        self.tokens: list[Tensor] = []
        self.distributions: list[Categorical] = []
        if stop is not None:
            self.real = [torch.ones_like(self.pending, dtype=torch.bool)] * 2  # of the root and the first level
            self.product_B = torch.ones_like(self.pending, dtype=torch.float32)

    def add(self, logits_BV: Tensor, expected_B: Tensor | None = None) -> Tensor:
        """Add a level by the logits of its distribution. Returns its tokens (B,). expected: the probability of its
        acceptance by a trained head, from nothing but what stands above it.
        """
        if self.greedy:
            self.tokens.append(logits_BV.argmax(dim=-1))
            return self.tokens[-1]
        level = len(self.tokens)
        if self.stop is not None and expected_B is not None:
            self.product_B = self.product_B * expected_B
            if level:
                self.real[-1] = self.real[-1] & (self.product_B >= self.stop.confidence)
        distribution = Categorical(warp(logits_BV, self.sampling))
        token_B, q = sample_distribution(distribution, self.state, level)
        self.tokens.append(token_B)
        if q is not None:
            self.distributions.append(q)
        if self.stop is not None:
            given_BV = distribution.logits
            if self.noise is not None:
                given_BV = self.noise.perturb(given_BV[:, None], level)[:, 0]
            known = expected_B is not None
            going_B, self.product_B = self.stop.goes_on(given_BV, token_B, self.product_B, known)
            self.real.append(self.real[-1] & going_B)
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
        real = None if self.stop is None else torch.stack(self.real[: len(tokens) + 1], dim=1)
        q = Categorical.chain(distributions) if distributions else None
        return trees.chain_draft(self.pending, torch.stack(tokens, dim=1), q, real)


class StructuredDrafter(Drafter):
    """Base class of drafters with structure and length as values. Their `state.memory` has an attribute `limit`."""

    width = 1  # of a frontier; 1 is a chain
    nodes = 0  # most nodes of a grown tree; 0: none is grown
    paths: feature_tree.Paths = ()  # of a static tree
    stop: StopCriteria | None = None

    def shaped(self, tree: str | int = "", entropy: float = 0.0, confidence: float = 0.0) -> Self:
        """Set structure and length of drafts, and return the drafter. Before it is paired with a target.

        tree: "chain"; "dynamic", grown best-first with the drafter's `width` (EAGLE-2); "opt", the tree of its `nodes`
            nodes with the most expected accepted nodes by its own distributions (OPT-Tree, arXiv 2406.17276); "eagle",
            the static tree of EAGLE-1; a JSON file of acceptance by rank, as `visspec tune --trees` writes it, for the
            optimal tree of `nodes` nodes (Sequoia); counts of nodes a depth, "4-8-8". Default: chains, or "dynamic" for
            a `width` above 1.
        entropy, confidence: of chains, as in `StopCriteria`.

        Raises ValueError for anything else.
        """
        if tree != "":
            self._grow(str(tree))
        if entropy or confidence:
            if self.traits.trees or not self.traits.adaptive_depth:
                kind = "trees" if self.traits.trees else "windows"
                raise ValueError(f"entropy, confidence: got {entropy}, {confidence} for {kind}, expected chains")
            self.stop = StopCriteria(entropy, confidence)
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
            self.paths = static(tree, self.nodes)
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
        """Levels to draft of `depth` that are asked for: at most a static tree's own, and those that a stop allows."""
        if self.paths:
            return min(depth, len(self.paths[-1]))
        return depth if self.stop is None else min(depth, state.memory.limit)

    def learn(self, state: State, draft: Draft, outcome: Outcome) -> None:
        """To be called by `observe`."""
        draws = state.noise is not None and state.noise.samples
        if self.stop is not None and draft.levels and not draws:
            kept = max(outcome.draft_lengths)
            state.memory.limit = kept + 1 if kept < draft.levels else 2 * kept


def ranking(logits_BWV: Tensor, state: State, level: int) -> Tensor:
    """Log-distributions (B, W, V) by which a tree ranks the children of a level: with noise, those *given* the noise of
    their position.
    """
    logits_BWV = warp(logits_BWV, state.request.sampling)
    if state.noise is not None:
        logits_BWV = state.noise.perturb(logits_BWV, level)
    return logits_BWV.log_softmax(dim=-1)


def static(tree: str, nodes: int) -> feature_tree.Paths:
    """The static tree of a name, a file or counts, see `StructuredDrafter.shaped`."""
    if tree == "eagle":
        return feature_tree.EAGLE
    if tree.endswith(".json"):
        return optimal(read_ranks(tree), nodes)
    if all(part.isascii() and part.isdigit() for part in tree.split("-")):
        return feature_tree.spread(feature_tree.parse(tree))
    raise ValueError(f"tree: got {tree!r}, expected one of {', '.join(TREES)}, a JSON file or counts like '4-8-8'")


def optimal(rates: list[list[float]], nodes: int) -> feature_tree.Paths:
    """The static tree of at most `nodes` nodes with the most expected accepted ones. rates: a list for every depth, of
    how often the child of each rank is accepted.
    """
    ranked = [[(rate, rank) for rank, rate in enumerate(row)] for row in rates]
    paths = feature_tree.likeliest(nodes, lambda depth: ranked[depth] if depth < len(ranked) else [])
    if not paths:
        raise ValueError(f"tree: got rates {rates!r}, expected one above 0 at the first depth")
    return paths


def read_ranks(path: str) -> list[list[float]]:
    """Acceptance by rank of a file. Raises ValueError in a sentence."""
    found = read_json(Path(path).parent, Path(path).name).get(RANKS)
    rows = found if isinstance(found, list) else []
    wrong = [x for row in rows for x in (row if isinstance(row, list) else [row]) if type(x) not in (int, float)]
    lists = all(isinstance(row, list) and 0 < len(row) <= feature_tree.MOST_CHILDREN for row in rows)
    if wrong or not lists or not 0 < len(rows) < MAX_NODES or not all(0 <= x <= 1 for row in rows for x in row):
        raise ValueError(f"tree: {path} has no {RANKS!r} of probabilities, expected a list of ranks for every depth")
    return rows
