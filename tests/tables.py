"""Targets and drafters whose laws are tables of the three newest tokens. B rows, N nodes, V vocabulary, C contexts."""

from __future__ import annotations

import functools
import random

import torch
from torch import Tensor

from tests.distributions import Distribution, context_law
from tests.doubles import Double
from visspec import sampling
from visspec import tree as trees
from visspec.distributions import Categorical
from visspec.loop.decode import TokenBuffer, decode
from visspec.loop.draft_length import DraftLengthPolicy
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.drafting.static_tree import StaticTreeBuilder
from visspec.sampling import Gumbel
from visspec.types import Capabilities, Draft, DrafterTraits, Outcome, Request, Sampling, Scores, State

ORDER = 3  # tokens that a law depends on


class Table:
    """Log-laws (C, V) by the newest tokens, those before the first one taken for 0."""

    def __init__(self, vocab: int, seed: int, sharpness: float = 1.5):
        self.vocab, self.contexts = vocab, vocab**ORDER
        distribution, base = context_law(vocab, seed, sharpness), vocab ** torch.arange(ORDER - 1, -1, -1)
        every = torch.arange(self.contexts)[:, None] // base % vocab
        self.logp_CV = torch.stack([distribution(tuple(context)).log() for context in every.tolist()]).float()

    def after(self, code: Tensor, tokens: Tensor) -> Tensor:
        return (code * self.vocab + tokens.clamp(min=0)) % self.contexts

    def newest(self, state: State) -> Tensor:
        newest = [list(state.tokens[row][-ORDER:]) for row in state.rows]
        padded = torch.tensor([[0] * (ORDER - len(tokens)) + tokens for tokens in newest])
        return functools.reduce(self.after, padded.unbind(1), torch.zeros_like(padded[:, 0]))

    def distribution(self) -> Distribution:
        p_CV = self.logp_CV.double().softmax(-1)

        def of(context: tuple[int, ...]) -> Tensor:
            code = 0
            for token in context:
                code = (code * self.vocab + token) % self.contexts
            return p_CV[code]

        return of


class TableTarget:
    """Its cache is each row's context without the pending token."""

    def __init__(self, table: Table):
        self.table, self.capabilities = table, Capabilities(vocab=table.vocab)

    def prefill(self, request: Request) -> tuple[State, Scores]:
        rows = request.prompt.shape[0]
        before, position = torch.zeros(2, rows, dtype=torch.long)
        tokens = TokenBuffer(request, rows)
        state = State(request, request.prompt[:, -1], position, before, list(range(rows)), tokens)
        return state, Scores(Categorical(self.table.logp_CV[before][:, None]))

    def contexts(self, state: State, draft: Draft) -> Tensor:
        result = [self.table.after(state.cache, draft.value[:, 0])]
        parent = draft.tree.parent.expand_as(draft.value)
        for n in range(1, draft.tree.size):
            above = torch.stack(result, dim=1).gather(1, parent[:, n : n + 1])[:, 0]
            result.append(self.table.after(above, draft.value[:, n]))
        return torch.stack(result, dim=1)

    def verify(self, state: State, draft: Draft) -> Scores:
        logits = self.table.logp_CV[self.contexts(state, draft)]
        return Scores(Categorical(sampling.warp(logits, state.request.sampling)))

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        last = torch.tensor([path[-1:] for path in outcome.path])
        state.cache = self.contexts(state, draft).gather(1, last)[:, 0]

    def select(self, state: State, keep: list[int]) -> None:
        state.cache = state.cache[keep]


class TableDrafter(Double):
    """A chain of draws by `sampling.propose` from another table."""

    traits = DrafterTraits(levels=3)

    def __init__(self, table: Table):
        self.table = table

    def drawn(self, logits_BV: Tensor, state: State, level: int) -> tuple[Tensor, Categorical | None]:
        return sampling.propose(logits_BV, state, level)

    def propose(self, state: State, depth: int) -> Draft:
        code, tokens, distributions = self.table.newest(state), [], []
        for level in range(depth):
            token, q = self.drawn(self.table.logp_CV[code], state, level)
            code = self.table.after(code, token)
            tokens.append(token)
            distributions.append(q)
        q = None if distributions[0] is None else Categorical.chain(distributions)
        return trees.chain_draft(state.pending, torch.stack(tokens, dim=1), q)


class TableTree(TableDrafter):
    """A static tree of draws without replacement, by numbers of its own."""

    def __init__(self, table: Table, counts: tuple[int, ...]):
        super().__init__(table)
        self.counts, self.traits = counts, DrafterTraits(levels=len(counts))

    def start(self, state: State, scores: Scores) -> None:
        state.memory = Gumbel(state.noise.child_generators(), self.table.vocab)

    def propose(self, state: State, depth: int) -> Draft:
        tree_builder = StaticTreeBuilder(state.pending, self.counts[:depth], state.memory.window(depth))
        code = self.table.newest(state)[:, None]
        for _ in range(depth):
            tokens, above = tree_builder.grow(self.table.logp_CV[code])
            code = self.table.after(code.gather(1, above), tokens)
        return tree_builder.finish(0)

    def observe(self, state: State, draft, scores, verdict, outcome: Outcome) -> None:
        state.memory.advance([len(tokens) for tokens in outcome.tokens])

    def select(self, state: State, keep: list[int]) -> None:
        state.memory.select(keep)


class Steady(DraftLengthPolicy):
    """A draft-length policy that always asks for so many levels."""

    def depth(self, state: State) -> int:
        return min(self.levels, state.budget - 1)


class Wandering(Steady):
    """A draft-length policy that asks for a random depth in every round, 0 among them."""

    def __init__(self, levels: int, seed: int = 0):
        super().__init__(levels)
        self.random = random.Random(seed)

    def depth(self, state: State) -> int:
        return self.random.randint(0, super().depth(state))


def decoded(
    target: TableTarget, drafter, rule, rows: int, length: int, seed: int = 0, length_policy=None, **options
) -> State:
    """A finished batch of `rows` samples, `length` tokens each, in rounds of random depth where no pace is given."""
    request = Request(None, torch.zeros(rows, 1, dtype=torch.long), length, Sampling(temperature=1.0), **options)
    request.generators = [torch.Generator().manual_seed(seed * rows + b) for b in range(rows)]
    guarded = None if drafter is None else SafeDrafter(drafter, target.capabilities)
    length_policy = length_policy or Wandering(1 if drafter is None else drafter.traits.levels, seed)
    return decode(target, guarded, rule, request, length_policy)
