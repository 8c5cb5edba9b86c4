"""Shared parts of drafters that run a network level by level.

The structure of their drafts is a value: chains, trees grown from the drafter's distributions (EAGLE-2, OPT-Tree), and
static trees (EAGLE-1, node counts per depth). `loop.draft_length` chooses the number of levels of a round.
Drafters on the target's features queue their inputs per request until they process them (`PendingInputs`).

Shapes: B rows, T levels or elements, V vocabulary, D accepted nodes, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from visspec import tree as trees
from visspec.cache import gather_rows, to_device
from visspec.distributions import Categorical
from visspec.models.drafting import static_tree as feature_tree
from visspec.sampling import propose, warp
from visspec.types import OWN, Draft, Drafter, Outcome, Scores, State, Structure, Verdict

TREES = ("chain", "dynamic", "opt", "eagle")


class Chain:
    """Builds a chain level by level, in the form that the request's rule expects.

    Args:
        confidence: From the second level on, a row's chain ends where the product of the acceptance rates predicted by
            a trained head falls below this value. The nodes after it are marked as not real, on the device.
    """

    def __init__(self, state: State, confidence: float = 0.0):
        self.state, self.confidence = state, confidence
        self.noise, self.pending = state.noise, state.pending
        self.greedy = self.noise is None  # warping does not change the argmax
        self.tokens: list[Tensor] = []
        self.distributions: list[Categorical] = []
        self.rates: list[Tensor] = []  # (B,) predicted by the head

    def add(self, logits_BV: Tensor, expected_B: Tensor | None = None) -> Tensor:
        """Add a level by the logits of its distribution and return its tokens (B,).

        expected: acceptance probability predicted by a trained head from earlier tokens only. If it depended on the
        level's own token, a kept token would not be a sample of its distribution, and rejection sampling not exact.
        """
        if expected_B is not None:
            self.rates.append(expected_B)
        if self.greedy:
            self.tokens.append(logits_BV.argmax(dim=-1))
            return self.tokens[-1]
        token_B, q = propose(logits_BV, self.state, len(self.tokens))
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
        """Return the draft, or its first levels."""
        tokens, distributions = self.tokens[:levels], self.distributions[:levels]
        real = None
        if self.rates:
            product_BD = torch.stack(self.rates[:levels], dim=1).cumprod(dim=1)
            going_BD = (product_BD >= self.confidence)[:, 1:]
            real = nn.functional.pad(going_BD, (2, 0), value=True)  # the root and the first level
        q = Categorical.chain(distributions) if distributions else None
        return trees.chain_draft(self.pending, torch.stack(tokens, dim=1), q, real)


class StructuredDrafter(Drafter):
    """Base class of drafters whose draft structure is a value."""

    width = 1  # frontier width; 1 means chains
    nodes = 0  # maximum number of nodes of a grown tree; 0: it grows none
    paths: feature_tree.Paths = ()  # shape of a static tree

    def shaped(self, tree: str | int = "") -> Self:
        """Set the structure of drafts and return the drafter. Call it before pairing with a target.

        Raises ValueError for anything else.

        Args:
            tree: "chain"; "dynamic", grown best-first with the drafter's `width` (EAGLE-2); "opt", the tree of `nodes`
                nodes that maximizes the expected accepted nodes under its own distributions (OPT-Tree, arXiv
                2406.17276); "eagle", EAGLE-1's static tree; node counts per depth, "4-8-8". Default: chains, or
                "dynamic" for a `width` above 1.
        """
        if tree != "":
            self._grow(str(tree))
        return self

    def _grow(self, tree: str) -> None:
        if not self.nodes:
            raise ValueError(f"tree: got {tree!r} for {type(self).__name__}, expected a drafter that builds trees.")
        if tree == "dynamic" and self.width == 1:
            raise ValueError("tree: got 'dynamic' with width 1, expected a width of 2 or more.")
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
        """The drafter's own structure, and smaller ones: a chain and, for grown trees, one of a third of the nodes."""
        if self.width == 1:
            return (OWN,)
        third = -(-self.width // 3)
        smaller = [] if self.paths or third in (1, self.width) else [Structure(third, -(-self.nodes // 3))]
        return Structure(1, 0), *smaller, Structure(self.width, len(self.paths) or self.nodes)

    def structure(self, state: State) -> Structure:
        own = self.width == 1 or state.structure == OWN
        return Structure(self.width, self.nodes) if own else state.structure

    def tree_builder(self, state: State, depth: int) -> trees.TreeBuilder | feature_tree.StaticTreeBuilder:
        """Return a tree builder: `trees.TreeBuilder`, or an object with its methods."""
        if not self.paths:
            return trees.TreeBuilder(state.pending, self.structure(state).width)
        return feature_tree.StaticTreeBuilder(
            state.pending, tuple(path for path in self.paths if len(path) <= depth), None
        )

    def block_tree(
        self, state: State, logits_BKV: Tensor, below: Callable[[int, Tensor], Tensor] | None = None
    ) -> Draft:
        """Build a tree over a block's distributions, which depend only on the depth (DDTree, arXiv 2604.12989).

        Raises ValueError for rules that judge draws.

        Args:
            below: Function that returns the logits (B, W, V) below the tokens (B, W) of the previous level, if they
                depend on these.
        """
        if state.noise is not None and state.noise.samples:
            raise ValueError("acceptance: got a rule that judges draws, expected point masses for a block's tree.")
        tree_builder, token_BW = self.tree_builder(state, logits_BKV.shape[1]), state.pending[:, None]
        for level in range(logits_BKV.shape[1]):
            logits_BWV = logits_BKV[:, level : level + 1] if below is None else below(level, token_BW)
            token_BW, _ = tree_builder.grow(ranking_logits(logits_BWV, state, level).expand(-1, token_BW.shape[1], -1))
        return tree_builder.finish(self.structure(state).nodes)

    def levels(self, state: State, depth: int) -> int:
        """Return how many of `depth` levels to draft: at most the depth of a static tree."""
        return min(depth, len(self.paths[-1])) if self.paths else depth


def see_ancestors(seen_BWM: Tensor | None, parent_BW: Tensor) -> Tensor:
    """Return which nodes of a tree those of its next level see: their ancestors and themselves, (B, W, M).

    Args:
        seen_BWM: What this function returned for the level above, or None for the first level.
        parent_BW: Parents in the level above.
    """
    rows, width = parent_BW.shape
    own_BWW = torch.eye(width, dtype=torch.bool, device=parent_BW.device).expand(rows, width, width)
    return own_BWW if seen_BWM is None else torch.cat([gather_rows(seen_BWM, parent_BW), own_BWW], dim=2)


def ranking_logits(logits_BWV: Tensor, state: State, level: int) -> Tensor:
    """Return log-distributions (B, W, V) by which a tree ranks a level's children. With noise they are conditioned on
    the noise of their position.
    """
    logits_BWV = warp(logits_BWV, state.request.sampling)
    if state.noise is not None:
        logits_BWV = state.noise.perturb(logits_BWV, level)
    return logits_BWV.log_softmax(dim=-1)


def static(tree: str) -> feature_tree.Paths:
    """Return the static tree of a name or of counts, see `StructuredDrafter.shaped`."""
    if tree == "eagle":
        return feature_tree.EAGLE
    if all(part.isascii() and part.isdigit() for part in tree.split("-")):
        return feature_tree.spread(feature_tree.parse(tree))
    raise ValueError(f"tree: got {tree!r}, expected one of {', '.join(TREES)}, or counts like '4-8-8'.")


class PendingInputs:
    """Base class of a request's memory for drafters on the target's features: queued elements, in blocks of (tokens
    (B, T) or vectors, features (B, T, F), counts), with counts[b] in row b, padded on the right.
    """

    def __init__(self) -> None:
        self.pending_inputs: list[tuple[Tensor, Tensor, list[int]]] = []

    def pop_pending(self) -> tuple[Tensor, Tensor, list[int]]:
        """Remove and return all queued elements as one block, each row packed to the left."""
        blocks, self.pending_inputs = self.pending_inputs, []
        if len(blocks) == 1:
            return blocks[0]
        tokens, features, parts = zip(*blocks)
        token, feature, widths = torch.cat(tokens, dim=1), torch.cat(features, dim=1), [x.shape[1] for x in tokens]
        totals = [sum(c[b] for c in parts) for b in range(token.shape[0])]
        if all(min(c) == width for c, width in zip(parts, widths)):
            return token, feature, totals
        starts = [sum(widths[:i]) for i in range(len(widths))]
        places = [[s + j for s, c in zip(starts, parts) for j in range(c[b])] for b in range(token.shape[0])]
        longest = max(totals)
        index = to_device([k + [0] * (longest - len(k)) for k in places], token.device)
        rows = torch.arange(token.shape[0], device=token.device)[:, None]
        return token[rows, index], feature[rows, index], totals

    def select_pending(self, keep: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.pending_inputs = [(t[keep], f[keep], [c[b] for b in keep]) for t, f, c in self.pending_inputs]

    def join_pending(self, other: PendingInputs, take: list[int]) -> None:
        """Add rows of another request."""
        self.pending_inputs, other.pending_inputs = [self.pop_pending()], [other.pop_pending()]
        (token, feature, counts), (new_token, new_feature, new_counts) = self.pending_inputs[0], other.pending_inputs[0]
        pairs = (token, new_token[take]), (feature, new_feature[take])
        tokens, features = (pad_sequence([x for part in pair for x in part], batch_first=True) for pair in pairs)
        self.pending_inputs = [(tokens, features, counts + [new_counts[b] for b in take])]


def prompt_first(token_BT: Tensor, feature_BTF: Tensor, real_BT: Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
    """Move a prompt's padding (where `real_BT` is false) behind its elements. None means that there is no padding."""
    if real_BT is None:
        return token_BT, feature_BTF, [token_BT.shape[1]] * len(token_BT)
    order = (~real_BT).long().argsort(dim=1, stable=True)
    return token_BT.gather(1, order), gather_rows(feature_BTF, order), real_BT.sum(dim=1).tolist()


def accepted_nodes(scores: Scores, verdict: Verdict, outcome: Outcome) -> tuple[Tensor, Tensor, list[int]]:
    """Return a round's accepted nodes: indices (B, D), the target's features (B, D, F), and each row's count."""
    assert scores.features is not None
    counts = [len(path) for path in outcome.path]
    path_BD = verdict.path[:, : max(counts)].clamp(min=0)
    return path_BD, gather_rows(scores.features, path_BD), counts


def next_tokens(draft: Draft, path_BD: Tensor, verdict: Verdict) -> Tensor:
    """Return the token after each node of a round's accepted paths, (B, D)."""
    shifted_BD = torch.cat([path_BD[:, 1:], path_BD[:, -1:]], dim=1)
    return draft.value.gather(1, shifted_BD).scatter(1, verdict.length[:, None] - 1, verdict.next[:, None])
