"""FLy: greedy verdicts against its description, its drift against the enumerated law, and controls that must fail."""

import itertools

import pytest
import torch

from tests.distributions import context_law, output_law, plain_law, total_variation
from tests.doubles import drafted
from tests.tables import ORDER, Steady, Table, TableDrafter, TableTarget, decoded
from tests.test_block_rule import chains
from tests.test_law import chi_square
from visspec import tree
from visspec.accept.fly import Fly
from visspec.accept.rejection import Rejection
from visspec.distributions import Categorical, residual
from visspec.sampling import SIBLINGS, AcceptanceNoise
from visspec.types import Scores

V, LEVELS, SIZE = 5, 4, 10
UNDECIDED, DECIDED = [0.1, 0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0, 0.0]


def described(kinds, agreed, window):
    """(drafts kept, mismatches among them), by the description. kinds: of each position."""
    kept = 0
    for i, (kind, fits) in enumerate(zip(kinds, agreed)):
        behind = agreed[i + 1 : i + 1 + window]
        if not fits and not (kind == "undecided" and len(behind) == window and all(behind)):
            return i, kept
        kept += not fits
    return LEVELS, kept


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_greedy_verdicts_are_those_of_the_description(window):
    """All patterns of agreement, and of positions that are decided, undecided, or give the mismatch no probability."""
    cases = list(itertools.product(itertools.product(["undecided", "decided", "impossible"], repeat=LEVELS),
                                   itertools.product([True, False], repeat=LEVELS)))  # fmt: skip
    logits, tokens = torch.empty(len(cases), LEVELS + 1, V), torch.zeros(len(cases), LEVELS + 1, dtype=torch.long)
    for n, (kinds, agreed) in enumerate(cases):
        for i, (kind, fits) in enumerate(zip((*kinds, "decided"), (*agreed, True))):
            logits[n, i] = torch.tensor(DECIDED if kind == "decided" else UNDECIDED).roll(i)  # the target wants i
            if kind == "impossible":
                logits[n, i, (i + 1) % V] = -torch.inf
            if i < LEVELS:
                tokens[n, i + 1] = (i + (not fits)) % V
    verdict = Fly(0.3, window)(drafted(tokens, tree.chain(LEVELS)), Scores(Categorical(logits)), None)
    want = [described(kinds, agreed, window) for kinds, agreed in cases]
    assert [(n - 1, d) for n, d in zip(verdict.length.tolist(), verdict.drift.tolist())] == want
    assert verdict.next.tolist() == [n for n, _ in want] and any(d for _, d in want) == (window < LEVELS)


@pytest.mark.parametrize("noisy", [False, True])
def test_an_absent_draft_is_neither_kept_nor_agreed_with(noisy):
    rule = Fly(0.0, 1)
    logits = torch.zeros(1, 4, V)
    logits[..., 0] = 1.0
    noise = AcceptanceNoise.of(torch.full((1, 4, SIBLINGS + 2), 0.99)) if noisy else None
    if noisy:
        noise.window = lambda positions: noise.ahead[0][None, :positions]
        logits[:, 1:] = torch.tensor([0.0, *[-torch.inf] * 4])  # what follows is certain
    for tokens, length in (([0, 1, 0, 0], 4), ([0, 1, -1, 0], 1), ([0, -1, 0, 0], 1), ([0, 1, 0, -1], 3)):
        verdict = rule(drafted(torch.tensor([tokens]), tree.chain(3)), Scores(Categorical(logits)), noise)
        assert verdict.length.item() == length, tokens


def test_the_entropy_is_a_share_of_the_largest_or_that_of_the_top_ones():
    p = torch.tensor([[[0.5, 0.2, 0.1, 0.1, 0.1]] * 2])
    draft, agreed = drafted(torch.zeros(1, 3).long(), tree.chain(2)), torch.ones(1, 2).bool()
    share = float(torch.special.entr(p[0, 0]).sum() / torch.tensor(V).log())
    top = float(torch.special.entr(p[0, 0, :3]).sum())
    for count, entropy in ((0, share), (3, top), (9, share * float(torch.tensor(V).log()))):
        for theta, kept in ((entropy - 1e-4, True), (entropy + 1e-4, False)):
            assert Fly(theta, 1, count).deferred(draft, p.repeat(1, 2, 1)[:, :3], agreed)[0, 0].item() == kept


def outcomes(rule, p, draft, metered=lambda rule, kept, accepted: kept):
    """What the rule can do with a chain, whichever drafts the exact rule accepts: (probability, tokens, drift)."""
    tokens, levels = draft.value[0, 1:].tolist(), draft.levels
    laws = torch.stack([p(tuple(tokens[:n])) for n in range(levels + 1)])
    q = draft.q.p[0, 1:]
    exact = [min(1.0, float(laws[t, x] / q[t, x])) for t, x in enumerate(tokens)]
    for accepted in itertools.product([True, False], repeat=levels):
        weight = float(torch.tensor([f if a else 1 - f for f, a in zip(exact, accepted)], dtype=torch.float64).prod())
        kept = rule.deferred(draft, laws[None], torch.tensor([accepted]))[0].tolist()
        end = next((t for t in range(levels) if not (accepted[t] or kept[t])), levels)
        meter = metered(rule, kept, accepted)
        drift = sum((1 - exact[t]) * meter[t] for t in range(end))
        rest = residual(laws[end], q[end]) if end < levels else laws[end]
        for y in range(laws.shape[-1] if weight else 0):
            yield weight * float(rest[y]), (*tokens[:end], y), drift


def mismatches(rule, kept, accepted):
    """A control: a meter that counts the drafts which the exact rule would have rejected."""
    return [k and not a for k, a in zip(kept, accepted)]


def measured(rule, levels, seed, metered=lambda rule, kept, accepted: kept):
    """(mean drift, total variation) of a round of chains of so many levels."""
    p, rounds, drift = context_law(3, seed, 1.0), [], 0.0
    for draft, likely in chains(context_law(3, seed + 1, 1.0), levels):
        for weight, gained, cost in outcomes(rule, p, draft, metered):
            rounds.append((likely * weight, gained))
            drift += likely * weight * cost
    size = levels + 1
    return drift, total_variation(output_law(p, rounds, 3, size), plain_law(p, 3, size))


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("window", [1, 2])
def test_the_drift_is_the_total_variation_where_one_draft_may_be_kept(window, seed):
    drift, tv = measured(Fly(0.5, window), window + 1, seed)
    assert tv > 0.01 and abs(drift - tv) < 1e-12
    assert abs(measured(Fly(0.5, window), window + 1, seed, mismatches)[0] - tv) > 1e-3


@pytest.mark.parametrize("seed", range(1, 4))
def test_the_drift_bounds_the_total_variation_of_longer_rounds(seed):
    drift, tv = measured(Fly(0.5, 1), 3, seed)
    assert 0.02 < tv < drift + 1e-12
    assert measured(Fly(0.5, 1), 3, seed, mismatches)[0] < tv


def process(rule, levels, seed, metered=lambda rule, kept, accepted: kept):
    """(joint law of SIZE tokens, mean drift) of a token and rounds of chains of up to so many levels behind it."""
    p, q = (Table(2, n, sharpness).distribution() for n, sharpness in ((seed, 1.0), (seed + 7, 1.5)))
    law, drift, weights = torch.zeros((2,) * SIZE, dtype=torch.float64), 0.0, {(y,): float(p(())[y]) for y in range(2)}
    rounds = {}
    while weights:
        context = min(weights, key=len)
        weight, depth = weights.pop(context), min(levels, SIZE - len(context) - 1)
        if depth < 0:
            law[context] = weight
            continue
        newest = ((0,) * ORDER + context)[-ORDER:]  # all that a law depends on
        if (newest, depth) not in rounds:
            after, drawn = (lambda more, of=of, known=newest: of((*known, *more)) for of in (p, q))
            found = [(float(share), (y,), 0.0) for y, share in enumerate(after(()))]
            if depth:
                each = ((draft, w, outcomes(rule, after, draft, metered)) for draft, w in chains(drawn, depth, 2))
                found = [(w * share, gained, cost) for _, w, kept in each for share, gained, cost in kept]
            rounds[newest, depth] = found
        for share, gained, cost in rounds[newest, depth]:
            weights[*context, *gained] = weights.get((*context, *gained), 0.0) + weight * share
            drift += weight * share * cost
    return law, drift


@pytest.mark.parametrize(("window", "levels", "seed"), [(1, 3, 0), (1, 2, 1), (2, 3, 3)])
def test_the_drift_bounds_the_total_variation_over_many_rounds(window, levels, seed):
    """Ten tokens take at least three rounds."""
    plain, rule = plain_law(Table(2, seed, 1.0).distribution(), 2, SIZE), Fly(0.95, window)
    law, drift = process(rule, levels, seed)
    tv = total_variation(law, plain)
    assert abs(float(law.sum()) - 1) < 1e-12 and 0.02 < tv < drift
    assert process(rule, levels, seed, mismatches)[1] < tv
    exact, none = process(Fly(1.01, window), levels, seed)
    assert none == 0 and total_variation(exact, plain) < 1e-12


class Reused(Fly):
    """A control: numbers that were looked at serve the next round."""

    def make_noise(self, generators, width):
        return AcceptanceNoise(generators)


@pytest.mark.parametrize("kind", [Fly, Reused])
def test_the_loop_has_the_law_and_the_drift_of_many_rounds(kind):
    rows, (law, drift) = 8000, process(Fly(0.5, 1), 3, 3)
    state = decoded(TableTarget(Table(2, 3, 1.0)), TableDrafter(Table(2, 10)), kind(0.5, 1), rows, SIZE, 0, Steady(3))
    index = torch.tensor(state.tokens) @ torch.tensor([2**i for i in reversed(range(SIZE))])
    likely = chi_square(torch.bincount(index, minlength=2**SIZE), law)
    found = torch.as_tensor(state.meters["drift"])
    near = abs(float(found.mean()) - drift) < 4 * float(found.std()) / rows**0.5
    assert (likely > 1e-3 and near) == (kind is Fly)


def test_verdicts_and_drift_occur_as_they_should():
    """The rule itself on one draft, its numbers and all."""
    rows, p, q, rule = 40_000, context_law(V, 3, 1.0), context_law(V, 4, 1.0), Fly(0.5, 1)
    tokens = (0, *(int(q((0,) * n).topk(2).indices[n % 2]) for n in range(3)))
    laws = torch.stack([p(tokens[1 : n + 1]) for n in range(4)]).float()
    drawn = torch.stack([torch.zeros(V), *(q(tokens[1 : n + 1]) for n in range(3))]).float()
    draft = drafted(torch.tensor([tokens]), tree.chain(3), drawn[None])
    noise = rule.make_noise([torch.Generator()], V)
    window = torch.rand(rows, 4, noise.width, generator=torch.Generator().manual_seed(0))
    noise.window = lambda positions: window[:, :positions]
    many = drafted(torch.tensor([tokens]).expand(rows, -1), tree.chain(3), drawn.expand(rows, -1, -1))
    verdict = rule(many, Scores(Categorical(laws.log().expand(rows, -1, -1))), noise)
    want, drift = torch.zeros(4, V), 0.0
    for weight, gained, cost in outcomes(rule, lambda context: laws[len(context)].double(), draft):
        want[len(gained) - 1, gained[-1]] += weight
        drift += weight * cost
    found = torch.zeros(4, V).index_put_((verdict.length - 1, verdict.next), torch.ones(rows), accumulate=True) / rows
    assert ((found - want).abs() < 4 * (want * (1 - want) / rows).sqrt() + 1e-9).all()
    assert drift > 0.01 and abs(float(verdict.drift.mean()) - drift) < 4 * float(verdict.drift.std()) / rows**0.5


@pytest.mark.parametrize("rule", [Fly(1.01, 1), Fly(0.0, 3)], ids=["never undecided", "short drafts"])
def test_what_can_not_be_kept_is_judged_exactly(rule):
    g = torch.Generator().manual_seed(0)
    scores = Scores(Categorical(torch.randn(500, 4, V, generator=g)))
    q = torch.randn(500, 4, V, generator=g).softmax(-1)
    draft = drafted(torch.randint(V, (500, 4), generator=g), tree.chain(3), q)
    noise = AcceptanceNoise.of(torch.rand(500, 4, SIBLINGS + 2, generator=g))
    noise.window = lambda positions: torch.stack(noise.ahead)[:, :positions]
    verdict, exact = rule(draft, scores, noise), Rejection()(draft, scores, noise)
    assert torch.equal(verdict.path, exact.path) and torch.equal(verdict.next, exact.next)
    assert verdict.drift.tolist() == [0.0] * 500
