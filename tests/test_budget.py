"""The budget rule: its declared laws enumerated, the budget kept, transports against linear programs, and its limits."""

import itertools

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles import drafted
from tests.kernels.test_accept_law import first_token_law
from tests.laws import context_law, output_law, total_variation
from tests.tables import Table, TableDrafter, TableTarget, decoded
from visspec import tree
from visspec.accept.budget import Budget, Clusters, Purse, transport, within
from visspec.accept.captured import Captured
from visspec.accept.rejection import Rejection
from visspec.api import zoo
from visspec.laws import Categorical, residual
from visspec.types import Capabilities, Scores

K = 6
CODES = torch.randn(K, 2, generator=torch.Generator().manual_seed(3))
CHAIN, TREE = tree.chain(3), tree.static((-1, 0, 0, 1, 1, 2, 3))


def bound(drift=0.2, codes=CODES, vocab=K):
    rule = Budget(drift)
    rule.bind(Capabilities(vocab=vocab, codebook=codes))
    return rule


def seeded(rule, rows, start=0):
    return rule.make_noise([torch.Generator().manual_seed(start + b) for b in range(rows)], K)


def reserve(value, rows=1):
    return torch.full((rows,), value, dtype=torch.float64)


def distances(codes=CODES):
    return torch.cdist(codes, codes).double()


def chain_round(rule, p, q, levels, left):
    """A round of a sampled chain by formula: exact rejection under the declared laws. Returns its rounds and E[drift]."""
    rounds, drift, shape = [], 0.0, tree.chain(levels)
    for codes in itertools.product(range(K), repeat=levels):
        law = torch.stack([p(codes[:n]) for n in range(levels + 1)])[None]
        draws = torch.stack([q(codes[: max(n - 1, 0)]) for n in range(levels + 1)])[None]
        declared = rule.declare(drafted(torch.tensor([[0, *codes]]), shape, draws), law, reserve(left))
        weight = 1.0
        for n, x in enumerate(codes):
            weight *= float(q(codes[:n])[x])
        above = 1.0
        for n, x in enumerate(codes):
            drift += weight * above * float(declared.drift[0, n])
            f = min(1.0, float(declared.p[0, n, x] / draws[0, n + 1, x]))
            rest = residual(declared.p[0, n], draws[0, n + 1])
            rounds += [(weight * above * (1 - f) * float(rest[z]), (*codes[:n], z)) for z in range(K)]
            above *= f
        rounds += [(weight * above * float(law[0, levels, z]), (*codes, z)) for z in range(K)]
    return rounds, drift


def declared_law(rule, p, q, levels, left):
    """Joint law of the first `levels` codes by the declared laws alone, each given the codes above it."""
    joint = torch.zeros((K,) * levels, dtype=torch.float64)
    for codes in itertools.product(range(K), repeat=levels):
        law = torch.stack([p(codes[:n]) for n in range(levels + 1)])[None]
        draws = torch.stack([q(codes[: max(n - 1, 0)]) for n in range(levels + 1)])[None]
        declared = rule.declare(drafted(torch.tensor([[0, *codes]]), tree.chain(levels), draws), law, reserve(left))
        joint[codes] = float(torch.stack([declared.p[0, n, x] for n, x in enumerate(codes)]).prod())
    return joint


@pytest.mark.parametrize("left", [0.0, 0.3, 5.0])
def test_declared_law_of_codes_drafted_below_is_the_same(left):
    """A node's law and drift depend on the codes above it only."""
    rule, p, q = bound(), context_law(K, 1), context_law(K, 2)
    found = {}
    for codes in itertools.product(range(3), repeat=3):
        law = torch.stack([p(codes[:n]) for n in range(4)])[None]
        draws = torch.stack([q(codes[: max(n - 1, 0)]) for n in range(4)])[None]
        declared = rule.declare(drafted(torch.tensor([[0, *codes]]), CHAIN, draws), law, reserve(left))
        for n in range(4):
            before = found.setdefault(codes[:n], (declared.p[0, n], declared.drift[0, n]))
            assert torch.equal(before[0], declared.p[0, n]) and torch.equal(before[1], declared.drift[0, n])


@pytest.mark.parametrize("left", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("levels", [1, 2])
def test_enumerated_law_is_the_declared_one(levels, left):
    """Of a sampled chain; and its distance from the model's own law is at most the expected drift."""
    rule, p, q = bound(), context_law(K, 1), context_law(K, 2, 0.8)
    rounds, drift = chain_round(rule, p, q, levels, left)

    def follow(context):  # what plain sampling behind a rejection draws: not judged, so the declared law there
        raise AssertionError

    joint = torch.zeros((K,) * levels, dtype=torch.float64)
    declared = declared_law(rule, p, q, levels, left)
    first = torch.zeros(K, dtype=torch.float64)
    for weight, codes in rounds:
        first[codes[0]] += weight
    assert total_variation(first, declared.flatten(1).sum(1) if levels > 1 else declared) < 1e-12
    joint = output_law(p, rounds, K, levels)
    plain = output_law(p, [(1.0, ())], K, levels)
    assert total_variation(joint, plain) <= drift + 1e-12
    if levels == 1:
        assert abs(total_variation(joint, plain) - drift) < 1e-12, "the drift of one code is its total variation"
    assert drift > 0.02, "the control: something is moved"
