"""The rules for drafted scales, against laws enumerated in float64, and the noise of maps.

Toy: below the pending scale, A has one code, B two, C one, of V = 3 ids; each scale's law depends on those before.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.distributions import context_law
from tests.doubles import generators
from visspec import tree as trees
from visspec.accept import scales as rules
from visspec.distributions import Maps, residual
from visspec.sampling import ScaleAcceptanceNoise, ScaleGumbel
from visspec.types import Capabilities, Draft

V, SIZES = 3, (1, 2, 1)  # A, B, C
WIDE = max(SIZES)
P = [[context_law(V, 10 * k + code, sharpness=1.0) for code in range(size)] for k, size in enumerate(SIZES)]
Q = [[context_law(V, 100 + 10 * k + code, sharpness=1.0) for code in range(size)] for k, size in enumerate(SIZES)]


def distributions(table, context, scale):
    """Laws (size, V) of a scale's codes after the codes before."""
    return torch.stack([distribution(context) for distribution in table[scale]])


def every(scale):
    return list(itertools.product(range(V), repeat=SIZES[scale]))


def joint(rounds):
    """The law of all codes of A, B and C when a round gives these scales and plain drawing goes on."""
    distribution = torch.zeros((V,) * sum(SIZES), dtype=torch.float64)
    for weight, given in rounds:
        spread(distribution, weight, given)
    return distribution


def spread(distribution, weight, given):
    context = tuple(code for scale in given for code in scale)
    if len(given) == len(SIZES):
        distribution[context] += weight
        return
    here = distributions(P, context, len(given))
    for codes in every(len(given)):
        spread(distribution, weight * float(here[range(len(codes)), codes].prod()), [*given, codes])


PLAIN = joint([(1.0, [])])


def padded(parts, batch):
    """Laws (size, V) of the three nodes as `Maps` of a batch."""
    logits = torch.zeros(batch, len(parts), WIDE, V, dtype=torch.float64)
    for n, part in enumerate(parts):
        logits[:, n, : len(part)] = part.log()
    return Maps(logits, torch.tensor([SIZES]).expand(batch, -1))


def draft_of(a, b, batch, point=False):
    value = torch.zeros(batch, 3, WIDE, dtype=torch.long)
    value[:, 1, :1], value[:, 2, :2] = torch.tensor(a), torch.tensor(b)
    q = None
    if not point:
        own = padded([distributions(Q, (), 0), distributions(Q, a, 1), distributions(Q, (*a, *b), 2)], batch)
        q = Maps(own.logits.roll(1, dims=1), own.count.roll(1, dims=1))
    return Draft(value, trees.chain(2, "cpu"), q)


def after(a, b, batch):
    return padded([distributions(P, (), 0), distributions(P, a, 1), distributions(P, (*a, *b), 2)], batch)


def emitted(verdict, draft):
    for row, length in enumerate(verdict.length.tolist()):
        maps = [*draft.value[row, 1:length], verdict.next[row]]
        yield [tuple(codes[:size].tolist()) for codes, size in zip(maps, SIZES)]


def total_variation(rounds):
    distribution = joint(rounds)
    assert abs(float(distribution.sum()) - 1) < 1e-12
    return 0.5 * float((distribution - PLAIN).abs().sum())


# --- the target's own noise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a, b", [((0,), (1, 2)), ((2,), (0, 0))])
def test_scales_law(a, b):
    """Each of the target's codes is one draw: all combinations, by point masses."""
    choices = list(itertools.product(every(0), every(1), every(2)))
    one_hot = torch.full((len(choices), 3, WIDE, V), -torch.inf, dtype=torch.float64)
    one_hot[..., 0] = 0.0  # padding
    for row, maps in enumerate(choices):
        for n, codes in enumerate(maps):
            one_hot[row, n, : len(codes)] = torch.where(torch.eye(V).bool()[list(codes)], 0.0, -torch.inf)
    draft, distribution = draft_of(a, b, len(choices), point=True), after(a, b, 1)
    rule = rules.Scales()
    scores = type("S", (), {"distribution": Maps(one_hot, distribution.count.expand(len(choices), -1))})
    verdict = rule(draft, scores, None)
    p = distribution.p[0]
    weights = [
        float(torch.stack([p[n, i, code] for n, codes in enumerate(maps) for i, code in enumerate(codes)]).prod())
        for maps in choices
    ]
    given = list(emitted(verdict, draft))
    assert total_variation(zip(weights, given)) < 1e-12
    assert {len(maps) for maps in given} == {1, 2, 3}
    # negative control: what follows a scale that differs is kept
    kept = [list(maps) for maps in choices]
    assert total_variation(zip(weights, kept)) > 0.01


# --- uniform numbers of their own
# -----------------------------------------------------------------------------------------------


def cells(p, q, drafted):
    """Cells of one code's (coin, draw): each a point and its size; the rule is constant in it. q None: not drafted."""
    spans = [(0.0, 1.0)]
    if q is not None:
        keep = min(1.0, float(p[drafted] / q[drafted]))
        spans = [(low, high) for low, high in ((0.0, keep), (keep, 1.0)) if high > low]
    for low, high in spans:
        rest = p if q is None or low == 0.0 else residual(p, q)
        edges = [0.0, *rest.cumsum(0).tolist()[:-1], 1.0] if q is None or low > 0 else [0.0, 1.0]
        for left, right in itertools.pairwise(edges):
            if right > left:
                yield (low + high) / 2, (left + right) / 2, (high - low) * (right - left)


class Given:
    """Noise of given numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def codes(self, nodes):
        return self.numbers


def repaired_rounds(rule, point=None):
    """All results of a round with probabilities, over drafts (or one point) and cells of uniform numbers."""
    drafts = [point] if point else [(a, b) for a in every(0) for b in every(1)]
    for a, b in drafts:
        if point:
            drawn, given = 1.0, [torch.eye(V, dtype=torch.float64)[list(codes)] for codes in (a, b)]
        else:
            given = [distributions(Q, (), 0), distributions(Q, a, 1)]
            drawn = float(given[0][0, a[0]] * given[1][[0, 1], list(b)].prod())
        p = [distributions(P, (), 0), distributions(P, a, 1), distributions(P, (*a, *b), 2)]
        parts = [list(cells(p[0][0], given[0][0], a[0]))]
        parts += [list(cells(p[1][i], given[1][i], b[i])) for i in range(2)]
        parts += [list(cells(p[2][0], None, 0))]
        combined = list(itertools.product(*parts))
        numbers = torch.full((len(combined), 3, WIDE, 3), 0.5, dtype=torch.float64)
        for row, cell in enumerate(combined):
            for (n, i), (uniform, fresh, _) in zip(((0, 0), (1, 0), (1, 1), (2, 0)), cell):
                numbers[row, n, i, :2] = torch.tensor([uniform, fresh], dtype=torch.float64)
        draft, distribution = draft_of(a, b, len(combined), point is not None), after(a, b, len(combined))
        weights = torch.tensor([[part[2] for part in cell] for cell in combined], dtype=torch.float64).prod(1) * drawn
        yield from zip(weights.tolist(), rule(draft, distribution, Given(numbers)))


def judged(draft, distribution, noise):
    return emitted(rules.Repaired()(draft, type("S", (), {"distribution": distribution}), noise), draft)


@pytest.mark.parametrize("point", [None, ((1,), (2, 0))])
def test_repaired_law(point):
    rounds = list(repaired_rounds(judged, point))
    assert total_variation(rounds) < 1e-12
    assert {len(maps) for _, maps in rounds} == {1, 2, 3}


def test_kept_after_repair_is_seen():
    def keeps(draft, distribution, noise):
        chosen = rules.Repaired().target_maps(draft, distribution, noise)
        return [[tuple(codes[:size].tolist()) for codes, size in zip(row, SIZES)] for row in chosen]

    assert total_variation(repaired_rounds(keeps)) > 0.01


def test_whole_law_redraw_is_seen(monkeypatch):
    monkeypatch.setattr(rules, "residual", lambda p, q: p)
    assert total_variation(repaired_rounds(judged)) > 0.01


def test_codes_agree_as_often_as_can_be():
    p, q = distributions(P, (), 0)[0], distributions(Q, (), 0)[0]
    agreed = 0.0
    for x in range(V):
        for *numbers, weight in cells(p, q, x):
            uniform, fresh = torch.tensor(numbers, dtype=torch.float64)
            agreed += weight * float(q[x]) * (int(rules.repair_codes(torch.tensor(x), p, q, uniform, fresh)) == x)
    assert abs(agreed - float(torch.minimum(p, q).sum())) < 1e-12


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda g: ScaleGumbel(g, 5, (1, 4, 30)), lambda g: ScaleAcceptanceNoise(g, (1, 4, 30))]
)
def test_numbers_belong_to_codes(make):
    whole = make(generators(2)).codes(3)
    assert whole.shape[:3] == (2, 3, 30) and not whole[:, 1, 4:].any() and bool(whole[:, 2].any(-1).all())
    stepwise = make(generators(2))
    for k, size in enumerate((1, 4, 30)):
        assert torch.equal(stepwise.codes(1)[:, 0, :size], whole[:, k, :size])
        stepwise.advance([1, 1])
    ragged = make(generators(2))
    ragged.codes(2)
    ragged.advance([0, 2])
    assert torch.equal(ragged.codes(1)[0, 0, :1], whole[0, 0, :1])
    assert torch.equal(ragged.codes(1)[1, 0], whole[1, 2])
    ragged.select([1])
    assert torch.equal(ragged.codes(1)[0, 0], whole[1, 2])
    assert ragged.codes(3).shape[2] == 30, "behind the last scale there are no codes"
    with pytest.raises(ValueError, match="stream: Models that generate maps"):
        ragged.join(stepwise, [0])


def test_drafts_are_checked():
    limits = Maps.limits(Capabilities(vocab=V, scales=SIZES), "cpu")
    value = torch.tensor([[[0, 0], [1, 0], [2, V]]])
    safe, possible, _ = Maps.check_drafted(value, (1, 3), limits)
    assert possible.tolist() == [[True, True, False]] and int(safe.max()) == V - 1
    for wrong in (value[..., :1], value.float(), value[0]):
        with pytest.raises(ValueError, match="value: got"):
            Maps.check_drafted(wrong, (1, 3), limits)
    logits = torch.zeros(1, 3, WIDE, V)
    logits[0, 1, 0, 1], logits[0, 2, 1, 0] = -torch.inf, torch.nan
    q, lawful = Maps(logits, torch.tensor([[1, 1, 2]])).sanitize(safe, limits)
    assert lawful.tolist() == [[True, False, False]] and bool(q.logits.isfinite().all())
    q, lawful = Maps(logits, torch.tensor([[1, 1, 1]])).sanitize(safe, limits)
    assert lawful.tolist() == [[True, False, True]], "padding is not judged"
    with pytest.raises(ValueError, match=r"q.logits: got shape"):
        Maps(logits[..., :2], torch.tensor([[1, 1, 2]])).sanitize(safe, limits)


@pytest.mark.parametrize("point", [True, False])
def test_an_absent_scale_is_not_judged(point):
    """Coins that keep any code: what stands at a node that is not real changes nothing, and is never accepted."""
    numbers = torch.full((1, 3, WIDE, 3), 0.5, dtype=torch.float64)
    numbers[..., 0] = 0.0
    real, result = torch.tensor([[True, False, True]]), []
    for a in every(0):
        draft = replace(draft_of(a, (1, 2), 1, point), real=real)
        scores = type("S", (), {"distribution": after((0,), (1, 2), 1)})
        verdict = rules.Repaired()(draft, scores, Given(numbers))
        assert verdict.length.tolist() == [1]
        result.append(verdict.next)
    assert all(torch.equal(result[0], other) for other in result)
