"""The draft-length policy on a simulated clock, where a plain pass takes one second: what drafting costs and gains."""

import itertools
import re
from random import Random
from types import SimpleNamespace as Bag

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visspec
from tests.doubles import Double
from tests.tiny import model_of, prompt
from visspec.loop import draft_length
from visspec.loop.draft_length import AdaptiveLength, DraftLengthPolicy, FixedLength
from visspec.types import OWN, DrafterTraits, Round, Structure

TOKENS = 1500
LEVELS = 8


def decoded(accepted, verify, draft, seed=0, tokens=TOKENS, noise=0.0, length_policy=None, request=96, observe=0.0):
    """(seconds, rounds that drafted, all rounds) of `tokens` tokens in requests of so many.

    accepted(n): acceptance rate of every level at token n; verify, draft: seconds by levels; observe: of each round.
    noise: of the clock.
    """
    random, length_policy = Random(seed), length_policy or AdaptiveLength(LEVELS)
    seconds, drafted, rounds, made = 0.0, 0, 0, 0
    while made < tokens:
        state = Bag(budget=request - made % request, rows=[0], trace=Bag(gave_up=0, context=40))
        asked = length_policy.depth(state)
        gained = 1
        while gained <= asked and random.random() < accepted(made):
            gained += 1
        times = {"verify": verify(asked), "accept": 0.0, "draft": draft(asked) if asked else 0.0, "observe": observe}
        times = {k: v * random.uniform(1 - noise, 1 + noise) for k, v in times.items()}
        more = {"context": 40, "requested": asked, "structure": OWN, "counted": False, "nodes": asked + 1}
        trace = Bag(rounds=[Round(asked, [gained], [gained <= asked])], latest=times, **more)
        length_policy.observe(trace)
        seconds, rounds, drafted, made = seconds + sum(times.values()), rounds + 1, drafted + (asked > 0), made + gained
    return seconds / made, drafted, rounds


COSTS = {  # verify and draft by levels
    "free drafts": (lambda n: 1 + 0.1 * n, lambda n: 0.01),
    "a second node costs a pass": (lambda n: 1 + (n > 0) + 0.1 * n, lambda n: 0.01),
    "dear drafts": (lambda n: 1 + 0.05 * n, lambda n: 0.3 * n),
    "cheap passes, first level dear": (lambda n: 1 + 0.02 * n, lambda n: 1.0),
}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_drafting_cost_bound(costs, rate):
    """Whatever is accepted. The first look (`slack` and two rounds of warm-up) is a part of it."""
    seconds, _, _ = decoded(lambda n: rate, *COSTS[costs])
    assert seconds <= 1.03


@given(
    turns=st.lists(st.tuples(st.integers(20, 400), st.sampled_from([0.0, 0.2, 0.5, 0.8, 0.95])), min_size=1),
    slope=st.floats(0.0, 0.5), step=st.floats(0.0, 1.0), price=st.floats(0.0, 0.4), seed=st.integers(0, 99),
)  # fmt: skip
def test_so_it_does_where_acceptance_turns(turns, slope, step, price, seed):
    ends = [sum(size for size, _ in turns[: n + 1]) for n in range(len(turns))]

    def accepted(n):
        place = n % ends[-1]
        return next(rate for end, (_, rate) in zip(ends, turns) if place < end)

    verify, draft = (lambda n: 1 + step * (n > 0) + slope * n), (lambda n: price * n)
    most = (verify(LEVELS) + draft(LEVELS)) * 3 / TOKENS  # two rounds of warm-up, and one that overdraws the account
    bound = 1 + AdaptiveLength().share + draft_length.SLACK / TOKENS + most + 0.01
    assert decoded(accepted, verify, draft, seed, noise=0.2)[0] <= bound


class Stubborn(AdaptiveLength):
    def best(self, limit, costs=None):
        return limit, OWN


def test_control_without_account():
    """A negative control: not quite half accepted, at a price of one pass for any draft, where the account is alone."""
    rate, costs = (lambda n: 0.45), COSTS["cheap passes, first level dear"]
    assert decoded(rate, *costs, length_policy=Stubborn(LEVELS))[0] <= 1.03
    assert decoded(rate, *costs, length_policy=Stubborn(LEVELS, share=1e9))[0] > 1.03


def test_control_extrapolated_price(monkeypatch):
    """The other: the second node costs a pass, and no line through drafts of several levels shows it."""
    turning, costs = (lambda n: 0.9 if n % 60 < 30 else 0.0), COSTS["a second node costs a pass"]
    assert decoded(turning, *costs)[0] <= 1.03
    monkeypatch.setattr(draft_length.Costs, "step", property(lambda costs: 2.0))
    unbounded = AdaptiveLength(LEVELS, share=1e9)
    assert decoded(turning, *costs, tokens=6000, length_policy=unbounded)[0] > 1.03


@pytest.mark.parametrize("costs", ["free drafts", "dear drafts"])
def test_drafts_that_pay_are_made(costs):
    verify, draft = COSTS[costs]
    best = min((verify(d) + draft(d)) / sum(0.9**i for i in range(d + 1)) for d in range(1, LEVELS + 1))
    seconds, drafted, rounds = decoded(lambda n: 0.9, verify, draft)
    assert drafted > 0.9 * rounds and seconds < 1.1 * best


def test_best_depth_on_noisy_clock():
    """The deepest of twelve levels is best, and the clock errs by three tenths: within a third of it."""
    verify, draft = (lambda n: 1 + 0.01 * n), (lambda n: 0.02 * n)
    best = (verify(12) + draft(12)) / sum(0.95**i for i in range(13))
    for seed in range(12):
        policy = AdaptiveLength(12)
        seconds, _, _ = decoded(lambda n: 0.95, verify, draft, seed, tokens=600, noise=0.3, length_policy=policy)
        assert seconds < 1.35 * best


def test_costs_at_longer_contexts():
    """The costs of a new context begin with those of the nearest: no levels are drafted there only to learn."""
    length_policy = AdaptiveLength(12)
    decoded(lambda n: 0.7, lambda n: 1 + 0.05 * n, lambda n: 0.03 * n, length_policy=length_policy, tokens=600)
    state = Bag(budget=99, rows=[0], trace=Bag(gave_up=0, context=draft_length.SHORT))
    length_policy.at(1, draft_length.SHORT).next_probe = 10**6
    assert 0 < length_policy.depth(state) == length_policy.best(12)[0] < 6


def test_empty_search_is_charged():
    """A drafter that takes a fifth of a pass to find nothing to draft: it is asked less and less."""
    length_policy, seconds, asked, rounds = AdaptiveLength(LEVELS), 0.0, 0, 1500
    for _ in range(rounds):
        state = Bag(budget=99, rows=[0], trace=Bag(gave_up=0, context=40, nodes=1))
        levels = length_policy.depth(state)
        times = {"verify": 1.0, "accept": 0.0, "draft": 0.2 if levels else 0.0, "observe": 0.0}
        state.trace.rounds, state.trace.latest = [Round(0, [1], [False])], times
        length_policy.observe(state.trace)
        seconds, asked = seconds + sum(times.values()), asked + (levels > 0)
    assert seconds <= 1.02 * rounds and 0 < asked < 0.1 * rounds


def test_what_begins_to_pay_later_is_found():
    length_policy = AdaptiveLength(LEVELS)
    decoded(lambda n: 0.0, *COSTS["free drafts"], tokens=1000, length_policy=length_policy)
    seconds, _, _ = decoded(lambda n: 0.95, *COSTS["free drafts"], tokens=3000, length_policy=length_policy)
    assert seconds < 0.5


def test_plain_passes_are_measured_rarely():
    """A drafter that always pays: the price of a plain pass is known from plain passes, one round in a hundred."""
    length_policy = AdaptiveLength(LEVELS)
    costs, more = COSTS["a second node costs a pass"], {"tokens": 6000, "request": 6000}
    _, drafted, rounds = decoded(lambda n: 0.9, *costs, length_policy=length_policy, **more)
    assert 4 <= rounds - drafted <= 0.03 * rounds
    assert length_policy.at().step == pytest.approx(1.0, abs=0.01)


# --- structures -------------------------------------------------------------------------------------------------------

CHAIN, SMALL, TREE = STRUCTURES = Structure(1, 0), Structure(4, 20), Structure(10, 60)
RATES = {  # acceptance of every level, by structure
    "siblings help": (0.6, 0.75, 0.82),
    "siblings seldom help": (0.9, 0.92, 0.93),
    "the small tree has what helps": (0.5, 0.8, 0.82),
}
PASSES = {  # seconds by nodes
    "nodes cost": lambda n: 1 + 0.2 * (n > 0) + 0.03 * n,
    "nodes are free": lambda n: 1 + 0.002 * n,
    "nodes cost a little": lambda n: 1 + 0.01 * n,
}
DRAFTS = dict(zip(STRUCTURES, (0.05, 0.07, 0.1)))  # seconds a level


def in_structures(rates, verify, seed=0, tokens=TOKENS, request=96, first=0.0, length_policy=None):
    """(seconds a token, levels and structure of each round) on a clock that errs by a tenth. A chain is the first path
    of the trees. first: seconds that the first draft of each structure takes longer.
    """
    random, length_policy = Random(seed), length_policy or AdaptiveLength(6)
    length_policy.structures = STRUCTURES
    seconds, made, picks, rates = 0.0, 0, [], dict(zip(STRUCTURES, rates))
    while made < tokens:
        state = Bag(budget=request - made % request, rows=[0], trace=Bag(gave_up=0, context=40))
        levels = length_policy.depth(state)
        structure, gained, chain = state.trace.structure, 1, None
        while gained <= levels:
            draw = random.random()
            chain = gained if chain is None and draw >= rates[CHAIN] else chain
            if draw >= rates[structure]:
                break
            gained += 1
        late = first * (levels > 0 and structure not in {s for _, s in picks})
        times = {"verify": verify(structure.size(levels)), "draft": levels and DRAFTS[structure] * levels + late}
        times = {k: t * random.uniform(0.9, 1.1) for k, t in times.items()} | {"accept": 0.0, "observe": 0.0}
        more = {"requested": levels, "counted": False, "structure": structure, "chain": [chain or gained]}
        more["nodes"] = structure.size(levels) + 1
        rounds = [Round(levels, [gained], [gained <= levels])]
        length_policy.observe(Bag(rounds=rounds, latest=times, context=40, **more))
        seconds, made = seconds + sum(times.values()), made + gained
        picks.append((levels, structure))
    return seconds / made, picks


def price(rates, verify, pick):
    levels, structure = pick
    rate = dict(zip(STRUCTURES, rates)).get(structure, 0.0)
    seconds = verify(structure.size(levels)) + (levels and DRAFTS[structure] * levels)
    return seconds / sum(rate**i for i in range(levels + 1))


def best_price(rates, verify):
    pairs = [(levels, structure) for levels in range(1, 7) for structure in STRUCTURES]
    return min(price(rates, verify, pick) for pick in [(0, OWN), *pairs])


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("rates", RATES)
def test_the_best_structure_is_found(rates, passes):
    """After 80 rounds, time per token is within 15 % of the best pair's, and 40 % at the worst of six seeds."""
    rates, verify = RATES[rates], PASSES[passes]
    best, means = best_price(rates, verify), []
    for seed in range(6):
        picks = in_structures(rates, verify, seed)[1][80:]
        means.append(sum(price(rates, verify, pick) for pick in picks) / len(picks) / best)
    assert sum(means) / 6 < 1.15 and max(means) < 1.4, means


def test_structures_pay_where_each_does():
    """The controls: none of the three is close to the best everywhere."""
    for structure in STRUCTURES:
        worst = 0.0
        for pair in itertools.product(RATES.values(), PASSES.values()):
            alone = min(price(*pair, (levels, structure)) for levels in range(1, 7))
            worst = max(worst, alone / best_price(*pair))
        assert worst > 1.2


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), (0.1, 0.15, 0.2), (0.3, 0.35, 0.4)])
def test_structures_cost_bound(rates, passes):
    for seed in range(4):
        assert in_structures(rates, PASSES[passes], seed)[0] <= 1.03


def test_slow_first_draft(monkeypatch):
    """It takes five passes longer. Behind 200 rounds and by the best price: a quarter more, but for a second look."""
    rates, verify = RATES["the small tree has what helps"], PASSES["nodes are free"]

    def mean():
        result = [in_structures(rates, verify, seed, tokens=3000, first=5.0)[1][200:] for seed in range(6)]
        prices = [price(rates, verify, pick) for picks in result for pick in picks]
        return sum(prices) / len(prices) / best_price(rates, verify)

    assert mean() < 1.25
    monkeypatch.setattr(draft_length.CostTable, "forget_unused", lambda *_: None)
    assert mean() > 1.25


def test_a_tree_tells_what_a_chain_is_worth():
    """Paths of four nodes, of which the first is a first child and the others are not."""
    length_policy = AdaptiveLength(6)
    length_policy.structures = STRUCTURES
    times = dict.fromkeys(("verify", "accept", "draft", "observe"), 1.0)
    more = {"context": 40, "requested": 6, "counted": False, "structure": TREE, "chain": [2], "nodes": 61}
    for _ in range(40):
        length_policy.observe(Bag(rounds=[Round(6, [5], [True])], latest=times, **more))
    assert length_policy.acceptance(CHAIN).rates()[:2] == pytest.approx([1.0, 0.0], abs=0.06)
    assert length_policy.acceptance(TREE).rates()[3:5] == pytest.approx([1.0, 0.0], abs=0.07)


def test_short_first_answers():
    """48 tokens behind no other, eight tenths accepted: at least 0.92 of the tokens a round of the fixed length."""
    verify, draft = (lambda n: 1 + 0.03 * n), (lambda n: 0.02)

    def rounds(make):
        return sum(decoded(lambda n: 0.8, verify, draft, seed, 48, 0.1, make(6), 48)[2] for seed in range(100))

    assert rounds(FixedLength) > 0.92 * rounds(AdaptiveLength)


def test_hard_passage(monkeypatch):
    """Twelve tokens in a hundred are hardly drafted, at 2.3 passes a round: with nothing saved up, drafts rest."""
    hard, verify, draft = (lambda n: 0.1 if n % 100 < 12 else 0.8), (lambda n: 1 + 0.5 * (n > 0)), (lambda n: 0.8)

    def seconds():
        return sum(decoded(hard, verify, draft, seed, 3000, 0.1, AdaptiveLength(LEVELS))[0] for seed in range(6))

    saved = seconds()
    monkeypatch.setattr(draft_length, "SAVED", 0.0)
    assert saved < 0.97 * seconds()


def test_reading_while_resting_is_free():
    """It takes 2 % of a pass, more than the account may lose: an overdrawn account would grow by it for ever."""
    costs = (lambda n: 0.8), (lambda n: 1 + 0.1 * n), (lambda n: 0.1)
    length_policy = AdaptiveLength(LEVELS)
    decoded(*costs, length_policy=length_policy, observe=0.02, tokens=200)
    length_policy.overhead = 50.0
    seconds, drafted, rounds = decoded(*costs, length_policy=length_policy, observe=0.02, tokens=3000)
    assert drafted > rounds / 3 and seconds < 0.7, (seconds, drafted, rounds)


def overdrawn(overhead):
    """A policy behind ten rounds of a hundred passes' time, its costs, and a state. overhead: in passes."""
    length_policy = AdaptiveLength(2)
    length_policy.rounds, length_policy.elapsed, length_policy.overhead = 10, 100.0, overhead
    costs = length_policy.at()
    costs.rounds, costs.next_probe = 10, 10**6
    costs.passes.add(1, 1.0)
    return length_policy, costs, Bag(budget=9, rows=[0], trace=Bag(gave_up=0, context=0))


def test_overdrawn_account():
    length_policy, costs, state = overdrawn(7.0)
    assert length_policy.depth(state) == 0 and state.trace.gave_up == 1
    assert costs.resting == 200, "two passes too many, at one per cent each"
    length_policy.elapsed += 201.0
    costs.resting = 0
    assert length_policy.depth(state) > 0 and costs.doubted
    times = {"verify": 1.0, "accept": 0.0, "draft": 0.01, "observe": 0.0}
    more = {"context": 0, "structure": OWN, "counted": False, "nodes": 3}
    length_policy.observe(Bag(rounds=[Round(2, [3], [False])], latest=times, **more))
    assert length_policy.depth(state) > 0 and not costs.doubted, "a draft was accepted"


def test_stall_does_not_end_drafting():
    """A hundred passes' time in one round, as soon as rounds count: drafting is back after one longest rest."""
    length_policy, _, state = overdrawn(100.0)
    asked = [length_policy.depth(state)]
    while not asked[-1] and len(asked) < 1000:
        length_policy.elapsed += 1.0
        asked.append(length_policy.depth(state))
    assert 200 < len(asked) <= 260


@pytest.mark.parametrize("stage", ["verify", "draft"])
@pytest.mark.parametrize("late", range(9))
def test_early_stall_does_not_end_drafting(stage, late):
    """Sixty passes' time in one of the first rounds, before it is known what a round takes."""
    count = 0

    def spike(seconds, of):
        nonlocal count
        count += of == stage
        return seconds + 60.0 * (of == stage and count == late + 1)

    verify, draft = lambda n: spike(1 + 0.02 * n, "verify"), lambda n: spike(0.4, "draft")
    _, drafted, rounds = decoded(lambda n: 0.9, verify, draft, length_policy=AdaptiveLength(15))
    assert drafted >= 0.9 * rounds


# --- policies by name -------------------------------------------------------------------------------------------------


class EverySecond(DraftLengthPolicy):
    def __init__(self, levels):
        super().__init__(levels)
        self.asked = []

    def depth(self, state):
        state.trace.requested = self.limit(state) if len(self.asked) % 2 else 0
        self.asked.append(state.trace.requested)
        return state.trace.requested


def test_policy_by_name_or_object():
    model, inputs = model_of("llama"), prompt("llama", ["5 7 5 7 5"])
    default = visspec.accelerate(model, "ngram").generate(**inputs, max_new_tokens=24)
    own = EverySecond(3)
    kinds = FixedLength, FixedLength, AdaptiveLength, EverySecond
    for length, kind in zip(("fixed", "fixed:levels=3", "adaptive:share=0.5", own), kinds):
        fast = visspec.accelerate(model, "ngram", length=length)
        assert type(fast.length_policy) is kind and torch.equal(fast.generate(**inputs, max_new_tokens=24), default)
    assert fast.length_policy.asked[:4:2] == [0, 0] and max(fast.length_policy.asked) == 3 and own.asked == []
    policy = visspec.accelerate(model, "ngram", levels=5, length="adaptive:share=0.5").length_policy
    assert (policy.levels, policy.share) == (5, 0.5)
    assert visspec.accelerate(model, "ngram", length="fixed:levels=3").length_policy.levels == 3
    assert type(visspec.accelerate(model, "ngram", adaptive=False).length_policy) is FixedLength


@pytest.mark.parametrize("length,message", [
    ("longest", "length: got 'longest', expected a name of `visspec list lengths`, such as "),
    ("fixed:share=1", "length: fixed does not take 'share', expected levels"),
    ("adaptive:share=-0.1", "share must be above 0, got -0.1."),
])  # fmt: skip
def test_policies_that_are_refused(length, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        visspec.accelerate(model_of("llama"), "ngram", length=length)


def test_fixed_depth_takes_no_policy():
    class Whole(Double):
        traits = DrafterTraits(levels=4, adaptive_depth=False)

    assert type(visspec.accelerate(model_of("llama"), Whole()).length_policy) is FixedLength
    with pytest.raises(ValueError, match="length: got AdaptiveLength for Whole, expected 'fixed'"):
        visspec.accelerate(model_of("llama"), Whole(), length="adaptive")
