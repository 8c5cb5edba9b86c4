"""Token recycling: drafts trees from what the target itself ranked highest after each token, in earlier passes (Luo et
al., "Turning trash into treasure", arXiv 2408.08696). Nothing is trained, no network is run.

A table holds for every id the ids that the target's newest distribution after it ranked highest, at accepted and
rejected nodes alike. A draft is a static tree below the pending token whose ranks are looked up level by level.

Shapes: R original rows, B live rows, N nodes, K candidates of an id, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from visspec.cache import to_device
from visspec.distributions import categorical
from visspec.models.drafting.static_tree import likeliest, plan
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Tree, Verdict

FIRST, FALL = 0.6, 0.35  # how often the best candidate is right, and each further one relative to the one before


class Recycling(Drafter):
    """Trees of `nodes` nodes, at most `width` candidates below a node; width 1 is a chain.

    shared: one table for all rows and requests instead of one per row, which helps where answers resemble each other.
    Drafts then depend on what was decoded before, and so do the tokens of a seed with rules that toss uniform numbers
    of their own (`rejection`, whose distribution stays the same, and the relaxed ones); with the rule `exact` tokens
    depend on no draft.
    """

    def __init__(self, nodes: int = 16, width: int = 4, shared: bool = False):
        if nodes < 1:
            raise ValueError(f"nodes: got {nodes}, expected a count of at least 1")
        if width < 1:
            raise ValueError(f"width: got {width}, expected a count of at least 1")
        self.nodes, self.width, self.shared = nodes, width, shared
        self.traits = DrafterTraits(levels=6, trees=width > 1, joins=True, observes="drafted")
        self._table: Tensor | None = None  # with `shared`: what requests leave for the next ones

    def start(self, state: State, scores: Scores) -> None:
        width, device = categorical(scores.distribution).width, state.pending.device
        rows = 1 if self.shared else len(state.request.prompt)
        table = self._table
        if table is None or table.device != device or table.shape[1] != width + 2:
            table = torch.full((rows, width + 2, self.width), -1, dtype=torch.long, device=device)
            if self.shared:
                self._table = table
        state.memory = _Table(table, self.shared)
        prompt = state.request.prompt.to(device)
        if prompt.shape[1]:
            state.memory.follow(prompt)
            state.memory.learn(list(range(len(prompt))), prompt[:, -1:], categorical(scores.distribution).logits)

    def propose(self, state: State, depth: int) -> Draft:
        memory: _Table = state.memory
        tree, ranks = _shape(depth, self.nodes, self.width, str(state.pending.device))
        index_B1 = memory.index(state.rows)[:, None]
        levels = [state.pending[:, None]]
        for above, rank in ranks:
            levels.append(memory.table[index_B1, levels[-1][:, above], rank])
        value = torch.cat(levels, dim=1)
        return Draft(value.clamp(min=0), tree, real=value >= 0)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        value = draft.value if draft.real is None else draft.value.masked_fill(~draft.real, -2)
        state.memory.learn(state.rows, value, categorical(scores.distribution).logits)

    def join(self, state: State, other: State, take: list[int]) -> None:
        state.memory.place(state.rows[-len(take) :], other.memory, [other.rows[b] for b in take])


class _Table:
    """(R, V + 2, K) candidates of every id, -1 where there is none. Row V takes what is to be forgotten, and the last
    one, which -1 reads, stays empty.
    """

    def __init__(self, table: Tensor, shared: bool):
        self.table, self.shared = table, shared

    def index(self, rows: list[int]) -> Tensor:
        return to_device([0] * len(rows) if self.shared else rows, self.table.device)

    def follow(self, prompt_RL: Tensor) -> None:
        """The id that follows each one in the prompt is its first candidate, until a distribution after it is known."""
        kept = prompt_RL.shape[0] if not self.shared else 1
        last = self.table.shape[1] - 2
        pair = (prompt_RL < last) & (prompt_RL >= 0)
        key_RL = torch.where(pair[:, :-1] & pair[:, 1:], prompt_RL[:, :-1], last)
        for row in range(kept):
            known = self.table[row, key_RL[row], 0] >= 0  # of earlier requests
            key = key_RL[row].masked_fill(known, last)
            self.table[row, :, 0].scatter_(0, key.flip(0), prompt_RL[row, 1:].flip(0))
        self.table[:, last] = -1

    def learn(self, rows: list[int], value_BN: Tensor, logits_BNV: Tensor) -> None:
        """Replace the candidates of these ids; negative ones have none."""
        best_BNK = logits_BNV.topk(min(self.table.shape[-1], logits_BNV.shape[-1]), dim=-1).indices
        last = self.table.shape[1] - 2
        key_BN = torch.where((value_BN < 0) | (value_BN >= last), last, value_BN)
        if self.shared and len(rows) > 1:
            key_BN, best_BNK = key_BN.flatten()[None], best_BNK.flatten(0, 1)[None]
            rows = rows[:1]
        if key_BN.shape[1] > 1:  # of equal ids the last one counts, on any device
            again = (key_BN[:, :, None] == key_BN[:, None, :]).triu(1).any(dim=-1)
            key_BN = key_BN.masked_fill(again, last)
        self.table[self.index(rows)[:, None], key_BN, : best_BNK.shape[-1]] = best_BNK

    def place(self, rows: list[int], other: _Table, theirs: list[int]) -> None:
        """Rows of another table become these rows; those that are not there yet are the next ones."""
        if self.shared:
            return
        new = max(rows) + 1 - len(self.table)
        if new > 0:
            self.table = torch.cat([self.table, self.table.new_empty(new, *self.table.shape[1:])])
        self.table[self.index(rows)] = other.table[other.index(theirs)]


@lru_cache(maxsize=256)
def _shape(depth: int, nodes: int, width: int, device: str) -> tuple[Tree, list[tuple[Tensor, Tensor]]]:
    """The tree of at most `nodes` nodes of which most are expected to be accepted, its nodes level by level, and for
    every level each node's parent within the level above and its rank among the candidates.
    """
    rates = [(FIRST * FALL**rank, rank) for rank in range(width)]
    tree, levels = plan(likeliest(nodes, lambda above: rates if above < depth else []), device)
    parents = [below.parent if n == 0 else levels[n - 1].open[below.parent] for n, below in enumerate(levels)]
    return tree, [(parent, level.rank) for parent, level in zip(parents, levels)]
