"""The budget rule: declared laws enumerated, the budget kept, transports against linear programs, its limits."""

import itertools

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributions import context_law, output_law, plain_law, total_variation
from tests.doubles import drafted
from tests.kernels.test_accept_law import first_token_law
from tests.tables import Table, TableDrafter, TableTarget, TableTree, decoded
from visspec import tree
from visspec.accept import codebook
from visspec.accept.budget import Budget, Clusters, transport, within
from visspec.accept.graphed_rule import GraphedRule
from visspec.accept.rejection import Rejection
from visspec.distributions import Categorical, residual
from visspec.types import Capabilities, Scores

K = 6
CODES = torch.randn(K, 2, generator=torch.Generator().manual_seed(3))
SIBLINGS = tree.static((-1, 0, 0, 0))


def bound(drift=0.2, codes=CODES, vocab=K, **options):
    rule = Budget(drift, **options)
    rule.bind(Capabilities(vocab=vocab, codebook=codes))
    return rule


def left(value, rows=1):
    return torch.full((rows,), value, dtype=torch.float64)


def chain_of(p, q, codes):
    """A sampled chain with the laws behind it and those it was drawn from."""
    distribution = torch.stack([p(codes[:n]) for n in range(len(codes) + 1)])[None]
    draws = torch.stack([q(codes[: max(n - 1, 0)]) for n in range(len(codes) + 1)])[None]
    return drafted(torch.tensor([[0, *codes]]), tree.chain(len(codes)), draws), distribution


def one_round(rule, p, q, levels, reserve):
    """A round of sampled chains: rejection under the declared laws by formula. Its rounds; E[drift]."""
    rounds, drift = [], 0.0
    for codes in itertools.product(range(K), repeat=levels):
        draft, distribution = chain_of(p, q, codes)
        declared = rule.declare(draft, distribution, left(reserve))
        above = float(torch.stack([q(codes[:n])[x] for n, x in enumerate(codes)]).prod())
        for n, x in enumerate(codes):
            drift += above * float(declared.drift[0, n])
            rest = residual(declared.p[0, n], q(codes[:n]))
            f = min(1.0, float(declared.p[0, n, x] / q(codes[:n])[x]))
            rounds += [(above * (1 - f) * float(rest[z]), (*codes[:n], z)) for z in range(K)]
            above *= f
        rounds.append((above, codes))
    return rounds, drift


def declared_law(rule, p, q, levels, reserve):
    """Joint law of codes by the declared laws, each given those above it; plain where nothing more is drafted."""
    joint = torch.zeros((K,) * levels, dtype=torch.float64)
    for codes in itertools.product(range(K), repeat=levels):
        declared = rule.declare(*chain_of(p, q, codes), left(reserve))
        joint[codes] = float(torch.stack([declared.p[0, n, x] for n, x in enumerate(codes)]).prod())
    return joint


@pytest.mark.parametrize("reserve", [0.0, 0.3, 5.0])
def test_the_law_of_a_round_is_the_declared_one(reserve):
    """Of the first code to 1e-12, where its total variation is the drift; of three, within the expected drift."""
    rule, p, q = bound(), context_law(K, 1), context_law(K, 2, 0.8)
    for levels in (1, 2, 3):
        rounds, drift = one_round(rule, p, q, levels, reserve)
        joint = output_law(p, rounds, K, levels)
        first = declared_law(rule, p, q, levels, reserve).flatten(1).sum(1) if levels > 1 else None
        if first is None:
            first = declared_law(rule, p, q, 1, reserve)
            assert abs(total_variation(first, p(())) - drift) < 1e-12
        assert total_variation(joint.flatten(1).sum(1) if levels > 1 else joint, first) < 1e-12
        assert 1e-3 < total_variation(joint, plain_law(p, K, levels)) <= drift + 1e-12
        exact = 1 - sum(w for w, codes in rounds if codes[:1] == ()) if levels > 1 else 1.0
        assert abs(sum(w for w, _ in rounds) - exact) < 1e-12


@pytest.mark.parametrize("levels", [1, 2])
def test_the_kernel_draws_from_the_declared_law(levels):
    """The first code with the uniform numbers integrated out, through the verification itself: sampled and point
    masses.
    """
    rule, (p, q) = bound(reach=9.0), (context_law(K, s)(()) for s in (1, 2))
    codes = torch.tensor([[0, *c] for c in itertools.product(range(K), repeat=levels)])
    shape = tree.chain(levels)
    distribution = p.expand(levels + 1, K)

    def verify(tokens, parent, p, q, uniforms, draw):
        draft = drafted(tokens, shape, q)
        verdict = rule.within_budget(draft, rule.declare(draft, p, left(1.0, len(draw))), uniforms, draw)
        return verdict.path, verdict.length, verdict.next, verdict.drift

    for drawn in (q.expand(len(codes), levels + 1, K), None):
        found = first_token_law(verify, codes, torch.arange(-1, levels), distribution, drawn)
        declared = rule.declare(
            drafted(codes, shape, drawn), distribution.expand(len(codes), -1, -1), left(1.0, len(codes))
        )
        weight = q[codes[:, 1:]].prod(1)
        if drawn is None:  # each draft has its own law
            assert (found - declared.p[:, 0]).abs().max() < 1e-12
            assert (found - p).abs().max() > 0.01
        else:
            assert (declared.p[:, 0] - declared.p[0, 0]).abs().max() == 0, "one law, whatever was drafted"
            assert total_variation(weight @ found, declared.p[0, 0]) < 1e-12
            assert abs(total_variation(weight @ found, p) - float(declared.drift[0, 0])) < 1e-12
            acceptance = float(torch.minimum(declared.p[0, 0], q).sum())
            gained = 1 - total_variation(p, q) + float(declared.drift[0, 0])
            assert abs(acceptance - gained) < 1e-12, "all of the drift becomes acceptance"


def test_what_is_drafted_below_does_not_change_a_law():
    rule, p, q, found = bound(), context_law(K, 1), context_law(K, 2), {}
    for codes in itertools.product(range(3), repeat=3):
        declared = rule.declare(*chain_of(p, q, codes), left(0.1))
        for n in range(4):
            first = found.setdefault(codes[:n], (declared.p[0, n], declared.drift[0, n]))
            assert torch.equal(first[0], declared.p[0, n]) and torch.equal(first[1], declared.drift[0, n])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.05, 0.6]))
def test_no_path_spends_more_than_its_codes_have_earned(seed, reserve):
    g = torch.Generator().manual_seed(seed)
    parent = [-1, *(int(torch.randint(max(0, n - 3), n, (), generator=g)) for n in range(1, 8))]
    shape, rule = tree.static(tuple(parent)), bound(drift=0.05, reach=9.0)
    p = torch.softmax(2 * torch.randn(1, 8, K, generator=g, dtype=torch.float64), -1)
    tokens = torch.randint(K, (1, 8), generator=g)
    spent = rule.declare(drafted(tokens, shape), p, left(reserve)).drift[0]
    along = (shape.ancestor[0].double() @ spent).tolist()
    assert all(total <= reserve + 0.05 * (d + 1) + 1e-9 for total, d in zip(along, shape.depth[0].tolist()))
    free = rule.declare(drafted(tokens, shape), p, left(100.0)).drift[0]
    assert (spent <= free + 1e-9).all()


def test_allowances_by_hand():
    """Wanted 3, 1, 4 along a chain that may have spent 2, 5, 6: 2, 1, 3; a sibling has its parent's past only."""
    shape = tree.static((-1, 0, 1, 0))
    wanted, allowed = torch.tensor([[3.0, 1.0, 4.0, 4.0]]), torch.tensor([[2.0, 5.0, 6.0, 5.0]])
    assert within(wanted, allowed, shape.ancestor, shape.parent).tolist() == [[2.0, 1.0, 3.0, 3.0]]


def cheapest(need, spare, far, mass):
    """The least cost of moving so much mass, by linear programming."""
    rows, columns = len(need), len(spare)
    sums = np.concatenate([np.kron(np.eye(rows), np.ones(columns)), np.kron(np.ones(rows), np.eye(columns))])
    found = scipy.optimize.linprog(
        far.ravel(), sums, np.concatenate([need, spare]), np.ones((1, rows * columns)), [mass], method="highs"
    )
    return found.fun


@pytest.mark.parametrize("seed", range(4))
def test_point_masses_are_moved_at_the_least_cost(seed):
    """For every reach: no plan moves as much to the children for less."""
    g = torch.Generator().manual_seed(seed)
    codes, p = torch.randn(12, 2, generator=g), torch.softmax(torch.randn(12, generator=g, dtype=torch.float64), -1)
    rule, tokens = bound(codes=codes, vocab=12), torch.tensor([[0, 3, 7, 9]])
    far = torch.cdist(codes, codes).double()[:, [3, 7, 9]]
    for reach in (0.5, 1.0, 2.0, 9.0):
        draft = drafted(tokens, SIBLINGS)
        moves = rule.move_to_nearest(draft, p.expand(1, 4, 12), torch.full((1, 4), reach, dtype=torch.float64))
        others = [y for y in range(12) if y not in (3, 7, 9)]
        mass, cost = float(moves.drift[0, 0]), float(moves.cost[0, 0])
        least = cheapest(p[others].numpy(), np.full(3, 9.0), far[others].numpy(), mass)
        assert abs(cost - least) < 1e-5 and abs(float(moves.mass[0, 0].sum())) < 1e-12
        assert abs(mass - sum(float(p[y]) for y in others if far[y].min() <= reach)) < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_transport_is_a_plan_and_its_cost_an_upper_bound(seed):
    """Without a limit p' = q; the cost is at least that of the best plan, and in a cluster of two it is that."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randn(13, 3, generator=g)  # three short of a power of two
    p, q = torch.softmax(torch.randn(2, 13, generator=g, dtype=torch.float64), -1)
    clusters = Clusters.of(codes)
    assert sorted(clusters.order.tolist()) == list(range(16))
    far = torch.cdist(codes.double(), codes.double()).numpy()
    last = 0.0
    for reach in (0.0, 0.8, 1.5, 99.0):
        moves = transport((q - p)[None, None], clusters, torch.tensor([[reach]], dtype=torch.float64))
        moved, mass = moves.mass[0, 0], float(moves.drift[0, 0])
        assert abs(float(moved.sum())) < 1e-12 and mass >= last - 1e-12
        between = (moved * (q - p) >= -1e-12) & (moved.abs() <= (q - p).abs() + 1e-12)
        assert between.all(), "nobody receives who has too much, nor more than is missing"
        least = cheapest(moved.clamp(min=0).numpy(), (-moved).clamp(min=0).numpy(), far, mass * (1 - 1e-9))
        assert float(moves.cost[0, 0]) >= least - 1e-6
        last = mass
    assert torch.allclose(p + moved, q, atol=1e-12)
    one = Clusters.of(codes[:2])
    gap = torch.tensor([[[0.25, -0.5]]], dtype=torch.float64)
    moves = transport(gap, one, torch.full((1, 1), 99.0, dtype=torch.float64))
    assert abs(float(moves.cost) - 0.25 * far[0, 1]) < 1e-6 and moves.mass.tolist() == [[[0.25, -0.25]]]


def test_clusters_are_nearer_than_chance():
    codes = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    near, chance = (Clusters.of(c).levels for c in (codes, codes[:, :0].expand(64, 0)))
    radii = [float(radius.mean()) for *_, radius in near]
    assert radii == sorted(radii) and radii[0] < 0.6 * radii[-1] and len(chance) == len(near) == 6
    assert codebook.hierarchy(codes) is codebook.hierarchy(codes.clone()), "one table for a codebook"


@pytest.mark.parametrize("kind", [TableDrafter, TableTree])
def test_decoded_images_keep_their_budget(kind):
    """Batches of rows of different ends: drift per code at most `drift` in each row, and most of it spent."""
    target, other = Table(K, 1, 2.0), Table(K, 2, 0.5)
    drafter = TableDrafter(other) if kind is TableDrafter else TableTree(other, (2, 2))
    spent = {}
    for drift in (0.0, 0.02, 0.1):
        rule = Budget(drift, reach=9.0)
        rule.bind(Capabilities(vocab=K, codebook=CODES))
        state = decoded(TableTarget(target), drafter, rule, rows=8, length=30)
        spent[drift] = state.meters["drift"] / 30
        assert (spent[drift] <= drift + 1e-6).all(), "in every image"
    assert float(spent[0.0].max()) == 0 and float(spent[0.1].mean()) > 0.04 > 0.02 >= float(spent[0.02].mean()) > 0.01


def law_of(logits, g):
    """Laws to draw from that are not far from those of the nodes above."""
    return (logits.roll(1, 1) + 0.7 * torch.randn(logits.shape, generator=g)).softmax(-1)


def seeded(rule, rows, start=0):
    return rule.make_noise([torch.Generator().manual_seed(start + b) for b in range(rows)], K)


def test_without_a_budget_it_is_exact_bit_for_bit_and_greedy_decoding_too():
    g = torch.Generator().manual_seed(0)
    logits, shape = torch.randn(20, 5, K, generator=g) * 2, tree.chain(4)
    draft = drafted(torch.randint(K, (20, 5), generator=g), shape, law_of(logits, g))
    rule, exact = bound(drift=0.0), Rejection()
    scores = Scores(Categorical(logits))
    for noises in ((seeded(rule, 20), seeded(exact, 20)), (None, None)):
        found, plain = rule(draft, scores, noises[0]), exact(draft, scores, noises[1])
        assert torch.equal(found.path, plain.path) and torch.equal(found.next, plain.next)
    loose = bound(drift=0.2)(draft, scores, seeded(rule, 20))
    assert float(loose.drift.sum()) > 0 and float(loose.displacement.sum()) > 0, "the control"


def test_rows_are_alone_also_after_some_have_left_and_others_come():
    g = torch.Generator().manual_seed(0)
    rule, shape = bound(drift=0.1), tree.chain(3)
    rounds = []
    for _ in range(3):
        logits = torch.randn(4, 4, K, generator=g)
        draft = drafted(torch.randint(K, (4, 4), generator=g), shape, law_of(logits, g))
        rounds.append((draft, logits))

    def through(rows):
        noise, found = seeded(rule, 4), []
        noise.select(rows)
        for draft, logits in rounds:
            own = drafted(draft.value[rows], shape, draft.q.p[rows])
            verdict = rule(own, Scores(Categorical(logits[rows])), noise)
            noise.advance(verdict.length.tolist())
            found.append((verdict.next, verdict.drift, noise.reserve))
        return found, noise

    together, noise = through([0, 1, 2, 3])
    alone, other = through([2])
    for whole, single in zip(together, alone):
        assert all(torch.allclose(w[2:3], s) for w, s in zip(whole, single))
    assert float(sum(drift.sum() for _, drift, _ in together)) > 0, "the control"
    before = noise.reserve.clone()
    noise.select([1, 3])
    noise.join(other, [0])
    assert torch.equal(noise.reserve, torch.cat([before[[1, 3]], before[2:3]])) and float(before.min()) >= 0


def test_it_is_not_recorded():
    """A recording has static buffers; the reserve of a row is in its noise."""
    rule, g = bound(drift=0.1), torch.Generator().manual_seed(0)
    captured = GraphedRule(rule, record=lambda call: pytest.fail("recorded"))
    logits = torch.randn(3, 4, K, generator=g)
    draft = drafted(torch.randint(K, (3, 4), generator=g), tree.chain(3), law_of(logits, g))
    found, plain = (each(draft, Scores(Categorical(logits)), seeded(rule, 3)) for each in (captured, rule))
    assert torch.equal(found.next, plain.next) and torch.equal(found.drift, plain.drift)


def test_a_leaf_keeps_its_law():
    """Nothing is drafted below it, so there is no law that its mass could move to: not that of another node either."""
    rule, (p, q) = bound(reach=99.0), (context_law(K, s)(()) for s in (1, 2))
    draft = drafted(torch.tensor([[0, 1, 2, 3, 2]]), tree.static((-1, 0, 0, 1, 3)), q.expand(1, 5, K))
    declared = rule.declare(draft, p.expand(1, 5, K), left(5.0))
    moved = (declared.p[0] - p).abs().sum(-1) > 1e-3
    assert moved.tolist() == [True, True, False, True, False] and float(declared.drift[0, 2]) == 0.0


def test_grammar_ids_and_absent_nodes_move_nothing():
    rule, g = bound(vocab=K + 2, reach=9.0), torch.Generator().manual_seed(1)
    p = torch.softmax(torch.randn(1, 4, K + 2, generator=g), -1)
    for tokens in ([0, K, K + 1, -1], [0, -1, -1, -1]):
        declared = rule.declare(drafted(torch.tensor([tokens]), SIBLINGS), p, left(1.0))
        assert torch.equal(declared.p, p) and float(declared.drift.abs().max()) == 0
    twins = rule.declare(drafted(torch.tensor([[0, 2, 2, 4]]), SIBLINGS), p, left(1.0))
    assert torch.equal(twins.p[..., K:], p[..., K:]) and float(twins.drift[0, 0]) > 0.1
    assert abs(float(twins.p[0, 0].sum()) - 1) < 1e-6


def test_what_it_needs_is_said():
    with pytest.raises(ValueError, match="Budget needs the target's codebook, got a target without one"):
        Budget().bind(Capabilities(vocab=K))
    draft = drafted(torch.tensor([[0, 1]]), tree.chain(1))
    with pytest.raises(ValueError, match="Budget has no codebook"):
        Budget().declare(draft, torch.full((1, 2, K), 1 / K), left(0.0))
