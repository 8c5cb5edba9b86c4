"""Shapes of drafts: chains, static trees and trees grown from any per-node distribution.

Shapes: B rows, N nodes, W frontier width, V vocabulary. The root is node 0; parents come before children.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from visspec import kernels
from visspec.cache import to_device
from visspec.distributions import Distribution, topk
from visspec.types import Draft, Tree

_branches: WeakKeyDictionary[Tree, int] = WeakKeyDictionary()
_derived: WeakKeyDictionary[Tree, dict[Callable, Any]] = WeakKeyDictionary()  # values derived from trees of `static`


@lru_cache(maxsize=512)
def static(parent: tuple[int, ...], device: str = "cpu") -> Tree:
    """Return a static tree from its parents (-1, 0, 0, 1, ...), shared by all rows and cached. Raises ValueError if a
    parent does not come before its child.

    Args:
        parent: Index of each node's parent, -1 for the root, which comes first.
        device: Where the tree's tensors are.
    """
    if not parent or parent[0] != -1:
        raise ValueError(f"parent: got {parent!r}, expected a tuple that starts with the root's -1.")
    depth, ancestor = [0], torch.eye(len(parent), dtype=torch.bool)
    for n, p in enumerate(parent[1:], start=1):
        if not 0 <= p < n:
            raise ValueError(f"parent: node {n} has parent {p}, expected an earlier node.")
        depth.append(depth[p] + 1)
        ancestor[n] |= ancestor[p]
    tree = Tree(
        parent=torch.tensor([parent], device=device),
        depth=torch.tensor([depth], device=device),
        ancestor=ancestor[None].to(device),
        levels=max(depth),
        chain=all(p == n - 1 for n, p in enumerate(parent)),
    )
    _derived[tree] = {}
    return limit_children(tree, max(map(parent.count, parent)))


def limit_children(tree: Tree, branch: int) -> Tree:
    """Set the maximum number of children per node."""
    _branches[tree] = branch
    return tree


def branch(tree: Tree) -> int:
    """Return an upper bound on the number of children per node: the value set by `limit_children`, else the size."""
    return _branches.get(tree, tree.size - 1)


def tree_cache(tree: Tree, derive: Callable[[Tree], Any]) -> Any:
    """Return derive(tree), cached for trees from `static`. `derive` must be a module-level function. Other trees are
    not cached, because they may be buffers that change between replays (`accept.graphed_rule`).
    """
    derived = _derived.get(tree)
    if derived is None:
        return derive(tree)
    if derive not in derived:
        with torch.inference_mode(False):  # so that the result can be used in training
            derived[derive] = derive(tree)
    return derived[derive]


def cached_by_tree(derive: Callable[[Tree], Tensor]) -> Callable[[Tree], Tensor]:
    """Decorate a function of a tree by `tree_cache`."""
    return wraps(derive)(lambda tree: tree_cache(tree, derive))


@cached_by_tree
def parents_of(tree: Tree) -> Tensor:
    """Return each node's parent (1|B, N); the root is its own parent.

    Args:
        tree: The tree.
    """
    return tree.parent.clamp(min=0)


@cached_by_tree
def roots(tree: Tree) -> Tensor:
    """Return a mask (1|B, N) that is true at node 0."""
    return tree.parent < 0


def chain(levels: int, device: str = "cpu") -> Tree:
    """Return a tree of the root and `levels` nodes, one below the other.

    Args:
        levels: Nodes below the root.
        device: Where the tree's tensors are.
    """
    return static(tuple(range(-1, levels)), device)


def empty_draft(pending: Tensor) -> Draft:
    """Return a draft that holds only the pending node, for plain decoding."""
    return Draft(pending[:, None], static((-1,), str(pending.device)))


def chain_draft(pending: Tensor, proposed: Tensor, q: Distribution | None = None, real: Tensor | None = None) -> Draft:
    """Return a chain below the pending node, from values (B, T, *X) of its levels. q and real include the root.

    Args:
        pending: The pending values, (B, *X).
        proposed: Values of the levels, (B, T, *X).
        q: Distributions that they were sampled from, with one for the root; None for point masses.
        real: Whether a node exists, (B, T + 1) bool; None if all do.
    """
    value = torch.cat([pending[:, None], proposed], dim=1)
    return Draft(value, chain(proposed.shape[1], str(pending.device)), q, real)


def ragged_draft(pending_B: Tensor, proposed: list[list[int]]) -> Draft:
    """Return a chain from lists of ids of different lengths.

    Args:
        pending_B: The pending ids.
        proposed: Ids of each row's chain.
    """
    width = max(map(len, proposed))
    if width == 0:
        return empty_draft(pending_B)
    padded = to_device([ids + [0] * (width - len(ids)) for ids in proposed], pending_B.device)
    if all(len(ids) == width for ids in proposed):
        return chain_draft(pending_B, padded)
    count_B1 = to_device([[len(ids)] for ids in proposed], pending_B.device)
    return chain_draft(pending_B, padded, real=torch.arange(width + 1, device=pending_B.device) <= count_B1)


def real_nodes(draft: Draft) -> Tensor:
    """Return which nodes are real, (B, N) bool, also for a draft whose nodes all are."""
    if draft.real is not None:
        return draft.real
    return torch.ones(draft.value.shape[:2], dtype=torch.bool, device=draft.value.device)


def pad(draft: Draft, size: int, levels: int) -> Draft:
    """Append unreal nodes up to `size` nodes. A chain stays a chain if it may have that many levels."""
    tree, value, more = draft.tree, draft.value, size - draft.tree.size
    if more <= 0 or draft.q is not None or (tree.chain and size > levels + 1):
        return draft
    real = real_nodes(draft)
    if tree.chain:
        longer = chain(size - 1, str(value.device))
    else:
        longer = from_parents(torch.cat([tree.parent, tree.parent.new_zeros(len(tree.parent), more)], 1), tree.levels)
    fill = value.new_zeros(len(value), more, *value.shape[2:])
    return Draft(torch.cat([value, fill], 1), longer, real=torch.cat([real, real.new_zeros(len(value), more)], 1))


def union(first: Draft, second: Draft) -> Draft:
    """Return one draft with the nodes of two drafts of point masses that have the same root. Siblings may be equal.

    Args:
        first: A draft, whose nodes keep their indices.
        second: A draft, whose nodes except the root come after them.
    """
    rows, size = first.value.shape[:2]
    own_BN, parent_BN = (draft.tree.parent.expand(rows, -1) for draft in (first, second))
    moved_BN = torch.where(parent_BN > 0, parent_BN + size - 1, 0)[:, 1:]
    real = None
    if first.real is not None or second.real is not None:
        real = torch.cat([real_nodes(first), real_nodes(second)[:, 1:]], dim=1)
    value_BN = torch.cat([first.value, second.value[:, 1:]], dim=1)
    levels = max(first.levels, second.levels)
    return Draft(value_BN, from_parents(torch.cat([own_BN, moved_BN], dim=1), levels), real=real)


@cached_by_tree
def paths(tree: Tree) -> Tensor:
    """Return the indices of each node's ancestors from the root to itself, (1|B, N, levels + 1), padded with -1.

    Args:
        tree: The tree.
    """
    size = tree.size
    index = torch.arange(size, device=tree.parent.device)
    ordered = torch.where(tree.ancestor, index, size).sort(dim=-1).values[..., : tree.levels + 1]
    return torch.where(ordered == size, -1, ordered)


class TreeBuilder:
    """Builds a dynamic tree level by level, best-first by summed log-probability (EAGLE-2).

    `grow` takes the distributions of a frontier and returns the next frontier: every frontier node proposes `width`
    children, and the best `width` of all children become the next frontier. `finish` keeps the best `nodes` of all
    proposals. Any distribution works; distributions perturbed by the noise of their position give coupled trees.
    """

    def __init__(self, pending_B: Tensor, width: int):
        self.width, self.device = width, pending_B.device
        rows = pending_B.shape[0]
        self.tokens = [pending_B[:, None]]
        self.total = [torch.zeros(rows, 1, device=self.device)]
        self.frontiers = [torch.zeros(rows, 1, dtype=torch.long, device=self.device)]  # indices of expanded nodes
        self.frontier_total = self.total[0]
        self.children, self.levels, self.size = 0, 0, 1

    def grow(self, logp_BWV: Tensor) -> tuple[Tensor, Tensor]:
        """Add a level, given the log-distributions after the frontier's nodes. Returns the tokens (B, width) of the new
        frontier, and the index of each one's parent in the old frontier.

        Args:
            logp_BWV: Log-distributions after the W nodes of the frontier.
        """
        self.children = min(self.width, logp_BWV.shape[2])  # children of each node
        likely_BWC, token_BWC = topk(logp_BWV, self.children)
        total_BM = (self.frontier_total[..., None] + likely_BWC.float()).flatten(1)
        token_BM = token_BWC.flatten(1)
        best_BK = total_BM.topk(min(self.width, total_BM.shape[1]), dim=-1).indices
        self.tokens.append(token_BM)
        self.total.append(total_BM)
        self.frontiers.append(best_BK + self.size)
        self.frontier_total = total_BM.gather(1, best_BK)
        self.size += total_BM.shape[1]
        self.levels += 1
        return token_BM.gather(1, best_BK), best_BK // self.children

    def finish(self, nodes: int) -> Draft:
        """Return the best `nodes` proposals as a draft. They form a tree, as a child never ranks above its parent.

        Args:
            nodes: Number of proposals to keep.
        """
        total, tokens = torch.cat(self.total, dim=1), torch.cat(self.tokens, dim=1)
        parent = torch.cat(self.frontiers[:-1], dim=1).repeat_interleave(self.children, dim=1)
        parent = torch.cat([torch.full_like(parent[:, :1], -1), parent], dim=1)
        nodes = min(nodes, total.shape[1] - 1)
        ranked = total[:, 1:].sort(dim=-1, descending=True, stable=True).indices
        keep = ranked[:, :nodes].sort(dim=-1).values + 1
        keep = torch.cat([torch.zeros_like(keep[:, :1]), keep], dim=1)
        renamed = torch.zeros_like(parent).scatter_(
            1, keep, torch.arange(nodes + 1, device=self.device).expand_as(keep)
        )
        parent = parent.gather(1, keep)
        parent = torch.where(parent < 0, parent, renamed.gather(1, parent.clamp(min=0)))
        return Draft(tokens.gather(1, keep), from_parents(parent, self.levels))


def from_parents(parent_BN: Tensor, levels: int) -> Tree:
    """Build a tree per row from parents on the device, without synchronising. `levels` bounds the depth.

    Args:
        parent_BN: Index of each node's parent, -1 for the root.
        levels: Upper bound of the depth.
    """
    ancestor = kernels.ancestors(parent_BN, levels)
    return Tree(parent_BN, ancestor.sum(-1) - 1, ancestor, levels, chain=False)


def check(tree: Tree) -> None:
    """Raise ValueError unless depths, ancestors, `levels` and `chain` agree with the parents. Synchronises.

    Args:
        tree: The tree.
    """
    index = torch.arange(tree.size, device=tree.parent.device)
    if not bool(((tree.parent < index) & ((tree.parent >= 0) == (index > 0))).all()):
        raise ValueError("tree.parent: The root needs the parent -1, and every other node an earlier node.")
    expected = from_parents(tree.parent, tree.size - 1)
    agree = torch.equal(expected.ancestor, tree.ancestor) and torch.equal(expected.depth, tree.depth)
    in_line = not tree.chain or bool((tree.parent == index - 1).all())
    if not (agree and in_line and int(expected.depth.max()) <= tree.levels):
        raise ValueError("tree: depth, ancestor, levels or chain disagree with parent.")
