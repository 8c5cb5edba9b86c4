"""Drafters with numbers that belong to a position keep the law over many rounds, by enumeration.

A position is drafted anew in every round until it is committed, each time with the same number. That is sound as long
as nothing judged so far depends on the number: then the law of the draft, given all that happened, is the q it reports.
The drafters' own code (`sampling.propose`, `feature_tree.StaticTreeBuilder`) makes the drafts, in float64.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributions import SIZE, PositionalChain, context_law, plain_law, process_law, total_variation
from visspec.models.drafting import static_tree as feature_tree

pytestmark = pytest.mark.usefixtures("unwarped")


class Planned(PositionalChain):
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


DRAFTERS = {
    "chain": PositionalChain,
    "static 1-2-1": lambda q: Planned(q, (1, 2, 1)),
    "static 2-2": lambda q: Planned(q, (2, 2)),
    "static 1-1-2": lambda q: Planned(q, (1, 1, 2)),
}


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
