"""Static draft trees: a fixed shape in which every node is a rank among the candidates of its parent.

A shape is a tuple of paths of ranks: (0, 2) is the third candidate below the first one. `EAGLE` is a published shape,
and `spread` makes a shape from node counts per depth (LANTERN++).

Children are the most likely tokens, or sampled without replacement: sorting the Gumbel-perturbed log-distribution gives
samples without replacement, so one Gumbel vector per position gives all siblings of a node, and a sibling's
distribution is the node's distribution without the earlier siblings. Nodes of the same depth share the numbers of their
position, because at most one of them is reached.

Shapes: B rows, N nodes, W frontier width, M nodes of a level, K children, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visspec import tree as trees
from visspec.distributions import Categorical, topk
from visspec.types import Draft, Tree

MOST_CHILDREN = 32  # limited by the acceptance rules' random numbers per position
SHARE = 0.6  # assumed probability ratio of adjacent siblings, for assigning children
Paths = tuple[tuple[int, ...], ...]
EAGLE: Paths = (  # the 25 nodes of EAGLE-1's code (arXiv 2401.15077)
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


def parse(shape: str | int) -> tuple[int, ...]:
    """Parse "5-13-16" into (5, 13, 16), the nodes per depth. Raises ValueError for anything else."""
    counts = tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in str(shape).split("-"))
    room = 1
    for count in counts:
        room *= MOST_CHILDREN
        if not 0 < count <= room:
            raise ValueError(
                f"shape: got {shape!r}, expected nodes per depth, at most {MOST_CHILDREN} children a node."
            )
        room = count
    return counts


@dataclass(frozen=True)
class TreeLevel:
    """Nodes of one depth, with their parents and ranks, and which of them have children."""

    parent: Tensor  # (M,) index in the previous frontier
    rank: Tensor  # (M,) number of earlier siblings
    children: int  # maximum number of children of a node in the previous frontier
    open: Tensor  # (W,) nodes of the next frontier


@lru_cache(maxsize=64)
def spread(counts: tuple[int, ...]) -> Paths:
    """Build a shape from node counts per depth. Children are assigned to the most likely (parent, rank), assuming that
    every rank is SHARE times as likely as the one before.
    """
    level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    nodes: list[tuple[int, ...]] = []
    for count in counts:
        offers = [
            (-chance * SHARE**rank, place, rank)
            for place, (_, chance) in enumerate(level)
            for rank in range(MOST_CHILDREN)
        ]
        best = sorted((place, rank, -worth) for worth, place, rank in sorted(offers)[:count])
        level = [((*level[place][0], rank), worth) for place, rank, worth in best]
        nodes += [path for path, _ in level]
    return tuple(nodes)


@lru_cache(maxsize=256)
def plan(shape: tuple[int, ...] | Paths, device: str) -> tuple[Tree, list[TreeLevel]]:
    """Build the tree of a shape, or of counts as in `spread`. Raises ValueError if a node's parent is missing."""
    paths: Any = spread(shape) if isinstance(shape[0], int) else sorted(shape, key=lambda path: (len(path), path))
    place: dict[tuple[int, ...], int] = {(): 0} | {path: n for n, path in enumerate(paths, 1)}
    for path in paths:
        if path[:-1] not in place:
            raise ValueError(f"tree: got node {path} without its parent, expected the parents of all nodes.")
    tree = trees.static((-1, *(place[path[:-1]] for path in paths)), device)
    opened = {path[:-1] for path in paths}
    levels: list[TreeLevel] = []
    level_above: list[tuple[int, ...]] = [()]
    for depth in range(1, len(paths[-1]) + 1):
        level_paths = [path for path in paths if len(path) == depth]
        spot = {path: i for i, path in enumerate(path for path in level_above if path in opened)}
        inner = [i for i, path in enumerate(level_paths) if path in opened]
        parent, rank = [spot[path[:-1]] for path in level_paths], [path[-1] for path in level_paths]
        numbers = (torch.tensor(x, dtype=torch.long, device=device) for x in (parent, rank, inner))
        of_parent, of_rank, of_open = numbers
        levels.append(TreeLevel(of_parent, of_rank, max(rank) + 1, of_open))
        level_above = level_paths
    return tree, levels


class StaticTreeBuilder:
    """Builds a static tree; methods as in `trees.TreeBuilder`. Without random numbers, children are the likeliest."""

    def __init__(self, pending_B: Tensor, shape: tuple[int, ...] | Paths, gumbel_BTV: Tensor | None):
        self.tree, self.levels = plan(shape, str(pending_B.device))
        self.tokens, self.gumbel, self.done = [pending_B[:, None]], gumbel_BTV, 0
        self.distributions: list[Tensor] = []
        self.real = [torch.ones_like(pending_B[:, None], dtype=torch.bool)]

    def grow(self, logp_BWV: Tensor) -> tuple[Tensor, Tensor]:
        """Add a level. Returns the new frontier's tokens (B, W) and the index of each one's parent in the old one."""
        level = self.levels[self.done]
        ranking = logp_BWV
        if self.gumbel is not None:
            ranking = logp_BWV + self.gumbel[:, self.done, None, : logp_BWV.shape[-1]]
        missing = max(level.children - logp_BWV.shape[-1], 0)
        value_BWK, child_BWK = topk(ranking, level.children - missing)
        value_BWK = F.pad(value_BWK, (0, missing), value=float("-inf"))
        child_BWK = F.pad(child_BWK, (0, missing))
        token_BM = child_BWK[:, level.parent, level.rank]
        self.tokens.append(token_BM)
        self.real.append((value_BWK > float("-inf"))[:, level.parent, level.rank])
        if self.gumbel is not None:
            self.distributions.append(_conditional(logp_BWV, child_BWK)[:, level.parent, level.rank])
        self.done += 1
        hangs = level.parent[level.open]
        return token_BM[:, level.open], hangs.expand(len(token_BM), -1)

    def finish(self, nodes: int) -> Draft:
        """Return the draft. `nodes` is ignored."""
        q = None
        if self.distributions:
            q = Categorical(p=torch.cat([torch.zeros_like(self.distributions[0][:, :1]), *self.distributions], dim=1))
        return Draft(torch.cat(self.tokens, dim=1), self.tree, q, torch.cat(self.real, dim=1))


def _conditional(logp_BWV: Tensor, child_BWK: Tensor) -> Tensor:
    """Return the distribution of each child given its earlier siblings, (B, W, K, V); zero if no mass is left."""
    distributions, rest = [], logp_BWV
    for rank in range(child_BWK.shape[-1]):
        distributions.append(rest.softmax(dim=-1).nan_to_num(0.0))
        rest = rest.scatter(-1, child_BWK[..., rank : rank + 1], float("-inf"))
    return torch.stack(distributions, dim=2)
