"""Static trees of drafts (LANTERN++): a fixed shape with tokens sampled without replacement.

Sorting the Gumbel-perturbed log-law gives samples without replacement, so one Gumbel vector per position gives all
siblings of a node, and a sibling's law is the node's law without the earlier siblings. Nodes of the same depth share
the numbers of their position, because at most one of them is reached.

Shapes: B rows, N nodes, W frontier width, M nodes of a level, K children, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from visspec import tree as trees
from visspec.laws import Categorical
from visspec.types import Draft, Tree

MOST_CHILDREN = 32  # limit of the acceptance rules' random numbers per position
SHARE = 0.6  # assumed probability ratio of adjacent siblings, for assigning children


def parse(shape: str | int) -> tuple[int, ...]:
    """ "5-13-16" -> (5, 13, 16): nodes of each depth. Raises ValueError for anything else."""
    counts = tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in str(shape).split("-"))
    room = 1
    for count in counts:
        room *= MOST_CHILDREN
        if not 0 < count <= room:
            raise ValueError(
                f"shape: got {shape!r}, expected nodes of each depth, like '4-6-6', {MOST_CHILDREN} a node"
            )
        room = count
    return counts


@dataclass(frozen=True)
class Level:
    """Nodes of one depth, by parent and rank, and which of them have children."""

    parent: Tensor  # (M,) index in the frontier above
    rank: Tensor  # (M,) siblings before it
    children: int  # most children of a node of the frontier above
    open: Tensor  # (W,) the nodes that are the next frontier


@lru_cache(maxsize=64)
def plan(counts: tuple[int, ...], device: str) -> tuple[Tree, list[Level]]:
    """The tree of so many nodes a depth. Children are assigned to the most likely (parent, rank), if every rank is
    SHARE times as likely as the one before.
    """
    parents, above = [-1], [(0, 1.0)]  # above: node and chances of each node of the depth before
    levels: list[dict[str, list[int]]] = []
    for count in counts:
        offers = [
            (-chance * SHARE**rank, place, rank)
            for place, (_, chance) in enumerate(above)
            for rank in range(MOST_CHILDREN)
        ]
        chosen = sorted((place, rank, -worth) for worth, place, rank in sorted(offers)[:count])
        wanted = sorted({place for place, _, _ in chosen})
        if levels:
            levels[-1]["open"] = wanted
        spot = {place: i for i, place in enumerate(wanted)}
        ranks = [rank for _, rank, _ in chosen]
        levels.append({"parent": [spot[place] for place, _, _ in chosen], "rank": ranks, "open": []})
        first = len(parents)
        parents += [above[place][0] for place, _, _ in chosen]
        above = [(first + i, worth) for i, (_, _, worth) in enumerate(chosen)]
    made = []
    for x in levels:
        parent, rank = (torch.tensor(x[k], dtype=torch.long, device=device) for k in ("parent", "rank"))
        opened = torch.tensor(x["open"], dtype=torch.long, device=device)
        made.append(Level(parent, rank, max(x["rank"]) + 1, opened))
    return trees.static(tuple(parents), device), made


class Planned:
    """Builds a static tree; methods as in `trees.Growing`. Without random numbers: the most likely children."""

    def __init__(self, pending_B: Tensor, counts: tuple[int, ...], gumbel_BTV: Tensor | None):
        self.tree, self.levels = plan(counts, str(pending_B.device))
        self.tokens, self.gumbel, self.done = [pending_B[:, None]], gumbel_BTV, 0
        self.laws: list[Tensor] = []
        self.real = [torch.ones_like(pending_B[:, None], dtype=torch.bool)]

    def grow(self, logp_BWV: Tensor) -> tuple[Tensor, Tensor]:
        """Add a level. Returns the new frontier's tokens (B, W) and which old frontier node each hangs from."""
        level = self.levels[self.done]
        ranking = logp_BWV
        if self.gumbel is not None:
            ranking = logp_BWV + self.gumbel[:, self.done, None, : logp_BWV.shape[-1]]
        missing = max(level.children - logp_BWV.shape[-1], 0)
        value_BWK, child_BWK = ranking.topk(level.children - missing, dim=-1)
        value_BWK = F.pad(value_BWK, (0, missing), value=float("-inf"))
        child_BWK = F.pad(child_BWK, (0, missing))
        token_BM = child_BWK[:, level.parent, level.rank]
        self.tokens.append(token_BM)
        self.real.append((value_BWK > float("-inf"))[:, level.parent, level.rank])
        if self.gumbel is not None:
            self.laws.append(_conditional(logp_BWV, child_BWK)[:, level.parent, level.rank])
        self.done += 1
        hangs = level.parent[level.open]
        return token_BM[:, level.open], hangs.expand(len(token_BM), -1)

    def finish(self, nodes: int) -> Draft:
        """The draft. `nodes` is ignored."""
        q = None
        if self.laws:
            q = Categorical(p=torch.cat([torch.zeros_like(self.laws[0][:, :1]), *self.laws], dim=1))
        return Draft(torch.cat(self.tokens, dim=1), self.tree, q, torch.cat(self.real, dim=1))


def _conditional(logp_BWV: Tensor, child_BWK: Tensor) -> Tensor:
    """The law of each child given the siblings before it, (B, W, K, V); zero if no mass is left."""
    laws, rest = [], logp_BWV
    for rank in range(child_BWK.shape[-1]):
        laws.append(rest.softmax(dim=-1).nan_to_num(0.0))
        rest = rest.scatter(-1, child_BWK[..., rank : rank + 1], float("-inf"))
    return torch.stack(laws, dim=2)
