"""Random numbers of a batch: one stream a row, addressed by the position of the node they decide.

`Gumbel` numbers belong to positions. Token t of a row is argmax(log p_t + G_t), with G_t a vector of Gumbel numbers
that depends on the row's generator and on t alone; that is a draw from p_t (Gumbel-max), whatever was drafted, in
whatever batch. A drafter that ranks with the same G_t is coupled to the target and agrees with it with probability at
least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, "Coupling without communication", 2024).

`Coins` belong to a rule that accepts and rejects draws from a reported law.

Shapes: B rows, T positions, N nodes, V vocabulary, U numbers of a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visspec.laws import Categorical, draw
from visspec.tree import kept
from visspec.types import Tree

CHUNK = 16  # positions drawn at a time: a constant, so that a row's stream does not depend on how it is consumed
SIBLINGS = 32  # coins of a position; a node has at most this many children


class Noise:
    """Base class. samples: drafts are to be draws from a law that they report, independent of these numbers."""

    samples = False

    def __init__(self, generators: Sequence[torch.Generator], width: int):
        self.generators, self.width = list(generators), width
        self.ahead = [self._chunk(g) for g in self.generators]  # (T, width), starting at each row's next position

    @classmethod
    def of(cls, numbers_BTU: Tensor) -> Noise:
        """Noise of given numbers, without generators: for one round that is recorded."""
        made = cls.__new__(cls)
        made.generators, made.width, made.ahead = [], numbers_BTU.shape[-1], list(numbers_BTU)
        return made

    def _chunk(self, generator: torch.Generator) -> Tensor:
        return torch.rand(CHUNK, self.width, generator=generator, device=generator.device)

    def window(self, positions: int) -> Tensor:
        """(B, positions, width): the numbers of each row's next positions. Reading them does not consume them."""
        for b, generator in enumerate(self.generators):
            while self.ahead[b].shape[0] < positions:
                self.ahead[b] = torch.cat([self.ahead[b], self._chunk(generator)])
        return torch.stack([a[:positions] for a in self.ahead])

    def advance(self, counts: Sequence[int]) -> None:
        """Consume positions: counts[b] nodes of row b are now final."""
        self.window(max(counts))
        self.ahead = [a[n:] for a, n in zip(self.ahead, counts)]

    def select(self, keep: Sequence[int]) -> None:
        self.generators = [self.generators[i] for i in keep]
        self.ahead = [self.ahead[i] for i in keep]

    def draft(self, law: Categorical, level: int) -> tuple[Tensor, Categorical | None]:
        """A drafted value for each row (B,), `level` positions after the next one, and the law it was drawn from; None
        where drafts are point masses to the rule.
        """
        raise NotImplementedError

    def perturbed(self, logits_BWV: Tensor, level: int) -> Tensor:
        """Logits of W nodes of a level as a tree ranks them."""
        raise NotImplementedError


class Gumbel(Noise):
    """`width` Gumbel numbers a position. Drafts are coupled to the target's own draw."""

    def _chunk(self, generator: torch.Generator) -> Tensor:
        u = super()._chunk(generator)
        tiny = torch.finfo(u.dtype).tiny
        return -torch.log((-torch.log(u.clamp_(min=tiny))).clamp_(min=tiny))

    def draft(self, law: Categorical, level: int) -> tuple[Tensor, None]:
        numbers_BV = self.window(level + 1)[:, level, : law.width]
        return (law.logits + numbers_BV).argmax(dim=-1), None

    def perturbed(self, logits_BWV: Tensor, level: int) -> Tensor:
        return logits_BWV + self.window(level + 1)[:, level, None, : logits_BWV.shape[-1]]


class Uniform(Noise):
    """`width` numbers in [0, 1) a position, for draws that a law is reported of; the last of them draws the draft."""

    samples = True

    def draft(self, law: Categorical, level: int) -> tuple[Tensor, Categorical]:
        return draw(law.p, self.window(level + 1)[:, level, -1]), law

    def perturbed(self, logits_BWV: Tensor, level: int) -> Tensor:
        return logits_BWV


class Coins(Uniform):
    """Of each position: a coin for each sibling, the draw of the residual, and the drafter's own draw."""

    def __init__(self, generators: Sequence[torch.Generator]):
        super().__init__(generators, SIBLINGS + 2)

    def toss(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """(each node's coin (B, N), by its depth and its rank among its siblings; the residual's draw (B,))."""
        window_BTU = self.window(tree.levels + 1)
        coins_BN = window_BTU.flatten(1).gather(1, kept(tree, _coin).expand(len(window_BTU), -1))
        return coins_BN, window_BTU[:, 0, SIBLINGS].contiguous()


def _coin(tree: Tree) -> Tensor:
    """(1|B, N) where each node's coin stands among the numbers of a window."""
    return place(tree) * (SIBLINGS + 2) + ranks(tree).clamp(max=SIBLINGS - 1)


def place(tree: Tree) -> Tensor:
    """(1|B, N) levels between a node and the first drafted position."""
    return (tree.depth - 1).clamp(min=0)


def ranks(tree: Tree) -> Tensor:
    """How many siblings stand before each node, (1|B, N)."""
    twins = tree.parent[..., :, None] == tree.parent[..., None, :]
    return twins.tril(-1).sum(dim=-1)


def derived(parent: torch.Generator) -> torch.Generator:
    """A generator seeded by the next number of `parent`, on its device: for numbers that are not the rule's."""
    seed = torch.randint(2**62, (), generator=parent, device=parent.device)
    return torch.Generator(parent.device).manual_seed(int(seed))
