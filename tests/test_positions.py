"""Drafters with numbers that belong to a position keep the law over many rounds, by enumeration.

A position is drafted anew in every round until it is committed, each time with the same number. That is sound as long
as nothing judged so far depends on the number: then the law of the draft, given all that happened, is the q it reports.
A branch of the enumeration is (committed tokens, where each position's u may still lie); the drafters' own code
(`sampling.propose`, `feature_tree.StaticTreeBuilder`) makes the drafts, in float64. Two tokens, so that one u decides a
draw.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.distributions import context_law, plain_law, split, total_variation, verdicts
from visspec import sampling
from visspec import tree as trees
from visspec.distributions import Categorical
from visspec.models.drafting import static_tree as feature_tree
from visspec.sampling import Uniform
from visspec.types import Sampling

SIZE = 5  # tokens


class Chain:
    """Chains of three through `sampling.propose`: token 0 is drawn where u is below its probability."""

    depth = 3

    def __init__(self, q):
        self.q = q

    def cuts(self, committed, numbers, level):
        drafted = self.draft(committed, numbers, level).value[0, 1:].tolist() if level else []
        return [float(self.q((*committed, *drafted))[0])]

    def draft(self, committed, numbers, depth):
        window = torch.tensor(numbers, dtype=torch.float64)[None, :, None]
        state = SimpleNamespace(noise=Uniform.of(window), request=SimpleNamespace(sampling=Sampling(temperature=1.0)))
        pending, tokens, distributions = torch.tensor([committed[-1]]), [], []
        for level in range(depth):
            logits = self.q((*committed, *(int(t) for t in tokens))).log()[None]
            token, distribution = sampling.propose(logits, state, level)
            tokens.append(token)
            distributions.append(distribution)
        return trees.chain_draft(pending, torch.stack(tokens, 1), Categorical.chain(distributions))


class Planned(Chain):
    """Static trees of so many nodes a depth, with Gumbel numbers: token 1 is first where u is below its probability."""

    def __init__(self, q, counts):
        super().__init__(q)
        self.counts, self.depth = counts, len(counts)

    def cuts(self, committed, numbers, level):
        _, frontier = self.grown(committed, numbers, level)
        return [float(self.q((*committed, *path))[1]) for path in frontier]

    def draft(self, committed, numbers, depth):
        return self.grown(committed, numbers, depth)[0].finish(0)

    def grown(self, committed, numbers, depth):
        u = torch.tensor(numbers or [0.5], dtype=torch.float64)
        gumbel = torch.stack([torch.zeros_like(u), ((1 - u) / u).log()], dim=-1)[None]
        # The plan always has its full depth: only then does it know who of the last level drawn here gets children.
        planned = feature_tree.StaticTreeBuilder(torch.tensor([committed[-1]]), self.counts[: max(depth, 1)], gumbel)
        paths = [()]
        if depth < len(self.counts):
            planned.levels = feature_tree.plan(self.counts, "cpu")[1]
        for _ in range(depth):
            logp = torch.stack([self.q((*committed, *path)).log() for path in paths])[None]
            tokens, above = planned.grow(logp)
            paths = [(*paths[a], t) for t, a in zip(tokens[0].tolist(), above[0].tolist())]
        return planned, paths


def process_law(drafter, p, shift=lambda gained: gained, verdicts=verdicts):
    """Joint law of SIZE tokens. shift: by how far numbers move after so many tokens. verdicts: what the rule can do."""
    distribution, branches = torch.zeros((2,) * SIZE, dtype=torch.float64), {}
    fresh = ((0.0, 1.0),) * drafter.depth
    for y in range(2):
        branches[(y,), fresh] = float(p(())[y])
    while branches:
        new = {}
        for (committed, spans), weight in branches.items():
            if len(committed) == SIZE:
                distribution[committed] += weight
                continue
            depth = min(drafter.depth, SIZE - len(committed) - 1)
            for parts, likely in narrowed(drafter, committed, spans, depth):
                numbers = [(a + b) / 2 for a, b in parts]
                none = trees.empty_draft(torch.tensor(committed[-1:]))
                draft = drafter.draft(committed, numbers, depth) if depth else none
                for gained, share in verdicts(p, committed, draft):
                    after = ((*parts, *fresh)[shift(len(gained)) :])[: drafter.depth]
                    key = ((*committed, *gained), after if len(committed) + len(gained) < SIZE else None)
                    new[key] = new.get(key, 0.0) + weight * likely * share
        branches = new
    return distribution


def narrowed(drafter, committed, spans, depth, level=0):
    """Where the numbers lie, so far as the draft depends on them, with the probability of each case."""
    if level == depth:
        yield tuple(spans), 1.0
        return
    numbers = [(a + b) / 2 for a, b in spans]
    for parts, likely in split(spans, {level: drafter.cuts(committed, numbers, level)}):
        for further, share in narrowed(drafter, committed, parts, depth, level + 1):
            yield further, likely * share


DRAFTERS = {
    "chain": Chain,
    "static 1-2-1": lambda q: Planned(q, (1, 2, 1)),
    "static 2-2": lambda q: Planned(q, (2, 2)),
    "static 1-1-2": lambda q: Planned(q, (1, 1, 2)),
}


@pytest.fixture(autouse=True)
def _float64(monkeypatch):
    monkeypatch.setattr(sampling, "warp", lambda logits, sampling: logits)  # it has nothing to do here but to round


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", list(DRAFTERS))
def test_numbers_of_a_position_keep_the_law(name, seed):
    p, drafter = context_law(2, seed), DRAFTERS[name](context_law(2, seed + 7))
    distribution = process_law(drafter, p)
    assert abs(float(distribution.sum()) - 1) < 1e-12
    assert total_variation(distribution, plain_law(p, 2, SIZE)) < 1e-12


@pytest.mark.parametrize("name", ["chain", "static 1-1-2"])
def test_kept_numbers_are_seen(name):
    p, drafter = context_law(2, 0), DRAFTERS[name](context_law(2, 7))
    distribution = process_law(drafter, p, shift=lambda gained: gained - 1)
    assert total_variation(distribution, plain_law(p, 2, SIZE)) > 1e-3
