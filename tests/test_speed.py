"""The arithmetic of eval/bench/paired.py, every definition by hand-made runs."""

import math
import random

import pytest
import scipy.stats

from visspec.eval.bench import paired as speed
from visspec.eval.bench.paired import ArmRun
from visspec.types import Round


def run(seconds, count=4, first=0.0, stages=None, rounds=(), tokens=None):
    """A run of one row with `count` tokens."""
    return ArmRun(seconds, tokens or [list(range(count))], first, stages or {}, list(rounds))


@pytest.mark.parametrize(("slow", "fast", "options", "expected"), [
    # the arithmetic mean is 2.5
    ([run(4.0), run(1.0)], [run(1.0)] * 2, {}, {"ratios": [4.0, 1.0], "speedup": 2.0, "speedup_total_time": 2.5}),
    # decoding leaves the first token out, and pairs that end with it
    ([run(5.0, first=1.0)], [run(3.0, first=1.0)], {}, {"speedup": 5 / 3, "speedup_decode_only": 4 / 2}),
    ([run(1.0, first=1.0), run(3.0, first=1.0)], [run(1.0, first=1.0), run(2.0, first=1.0)], {},
     {"speedup_decode_only": 2.0, "compared": 2}),
    # 10 tokens in 5 s against 2 tokens in 2 s: half a second against one second a token
    ([run(5.0, 10)], [run(2.0, 2)], {"per_token": True}, {"speedup": 0.5}),
    ([run(5.0, 10)], [run(2.0, 2)], {}, {"speedup": 2.5}),
    # whole prompts are the same or not
    ([run(1, tokens=[[1, 2], [3]])] * 2, [run(1, tokens=[[1, 2], [3]]), run(1, tokens=[[1, 2], [4]])], {},
     {"identical": 1, "compared": 2}),
    # prompts of very different length, all twice as fast: the paired interval has no width
    ([run(2.0 * s) for s in (1, 10, 100)], [run(float(s)) for s in (1, 10, 100)], {}, {"speedup_ci95": [2.0, 2.0]}),
])  # fmt: skip
def test_compare_by_hand(slow, fast, options, expected):
    result = speed.compare(slow, fast, **options)
    assert {name: result[name] for name in expected} == {name: pytest.approx(value) for name, value in expected.items()}


@pytest.mark.parametrize(("rounds", "expected"), [
    # prompt 1: rounds of 3 and 1 tokens; prompt 2: one round of 5; passes are rounds and the prefill
    ([[(4, [3]), (4, [1])], [(4, [5])]], {"tau": 3.0, "tau_macro": 3.5, "tau_without_bonus": 2.0, "nfe": (3 + 2) / 2}),
    # two rows, then one: three row-passes gained 2 + 4 + 3 tokens; the target ran twice
    ([[(4, [2, 4]), (4, [3])]], {"tau": 3.0, "nfe": 3}),
])  # fmt: skip
def test_tau_by_hand(rounds, expected):
    result = speed.tau([run(1, rounds=each) for each in rounds])
    assert {name: result[name] for name in expected} == pytest.approx(expected)


def test_ideal_by_hand():
    """A plain pass takes 10 ms. A round of ours: 12 ms verification, 2 ms draft, 1 ms host, for 3 tokens."""
    plain = [run(0.04, stages={"prefill": 9.0, "verify": 0.04}, rounds=[(0, [1])] * 4)]
    ours = {"prefill": 9.0, "verify": 0.024, "draft": 0.003, "observe": 0.001, "accept": 0.0015, "commit": 0.0005}
    result = speed.ideal(plain, [run(0.03, stages=ours, rounds=[(4, [4]), (4, [2])])])
    assert result["verify_over_plain"] == pytest.approx(1.2)
    assert result["draft_over_plain"] == pytest.approx(0.2)
    assert result["host_over_plain"] == pytest.approx(0.1)
    assert result["ideal_speedup"] == pytest.approx(3 / 1.5)
    gap = {"tau": 3.0, "after_verify": 3 / 1.2, "after_draft": 3 / 1.4, "after_host": 3 / 1.5}
    assert result["gap"] == pytest.approx(gap)


def test_bootstrap_interval():
    rng = random.Random(1)
    ratios = [2.0 * math.exp(rng.gauss(0, 0.2)) for _ in range(64)]
    low, high = speed.bootstrap(ratios)
    assert low < speed.geometric_mean(ratios) < high
    assert speed.bootstrap(ratios) == (low, high) and speed.bootstrap(ratios, seed=1) != (low, high)
    # the log ratios are normal, so the interval is near the t interval of their mean
    logs = [math.log(r) for r in ratios]
    spread = scipy.stats.sem(logs) * scipy.stats.t.ppf(0.975, 63)
    centre = sum(logs) / 64
    assert math.log(low) == pytest.approx(centre - spread, abs=0.15 * spread)
    assert math.log(high) == pytest.approx(centre + spread, abs=0.15 * spread)


def arms_of(log, failing=()):
    """Three arms that log their calls; `failing` holds (arm, prompt) pairs that raise."""

    def make(name):
        def arm(prompt):
            log.append((name, prompt))
            if (name, prompt) in failing:
                raise RuntimeError(f"no {prompt}")
            return run(1.0, tokens=[[prompt]])

        return arm

    return {name: make(name) for name in "abc"}


def test_interleaved_order():
    log = []
    runs, failures = speed.interleave(arms_of(log), list(range(12)), [12, 13])
    assert log[:6] == [(name, p) for p in (12, 13) for name in "abc"], "every arm warms up on other prompts"
    orders = ["".join(n for n, p in log[6:] if p == prompt) for prompt in range(12)]
    assert all(sorted(order) == list("abc") for order in orders)
    for place in range(3):  # over a full cycle every arm stands at every place equally often
        assert sorted(order[place] for order in orders) == sorted("abc" * 4)
    assert failures == [] and all([r.tokens for r in result] == [[[p]] for p in range(12)] for result in runs.values())


def test_failing_prompts():
    """And listed, if they are not those of the warm-up."""
    runs, failures = speed.interleave(arms_of([], failing={("b", 1), ("a", 3)}), [0, 1, 2], [3])
    assert failures == ["prompt 1: RuntimeError: no 1"]
    assert all([r.tokens for r in result] == [[[0]], [[2]]] for result in runs.values())


def test_fastest_stock_arm():
    def arm(*seconds):
        left = list(seconds)

        def call(prompt):
            if not left:
                raise ValueError("not taken")
            return run(left.pop(0))

        return call

    slow, quick = arm(1.0, 3.0, 3.0), arm(50.0, 2.0, 2.0)  # the first call warms up and does not count
    assert speed.fastest([arm(), slow, quick], [0, 1]) is quick
    with pytest.raises(ValueError, match="not taken"):
        speed.fastest([arm(), arm()], [0])


def test_acceptance_by_depth_counts():
    """Three levels drafted, 2 tokens gained: depth 1 kept, depth 2 tried, depth 3 not reached. Then all, then none."""
    first = [Round(3, [2], [True])]
    second = [Round(3, [4], [False]), Round(3, [1], [True]), Round(0, [1], [False])]
    runs = [run(1, rounds=rounds) for rounds in (first, second)]
    result = speed.acceptance(runs)
    assert result["reached_by_depth"] == [3, 2, 1]
    assert result["acceptance_by_depth"] == pytest.approx([2 / 3, 1 / 2, 1.0])
