"""The choice among several drafters: finds the fastest, says which it took, and changes no token."""

import math
from random import Random

import pytest
import torch

import visspec
from tests.doubles import NEW, Double, new_tokens, stock
from tests.tiny import llama, model_of, prompt, shapes
from visspec.loop import bandit as bandits
from visspec.loop.bandit import Arm, Arms, Bandit


def run(speeds, requests, seed=0, noise=0.1, bandit=None):
    """How often each arm is taken; speeds(n) are those of request n."""
    draw, bandit = Random(seed), bandit or Bandit(len(speeds(0)))
    taken = []
    for n in range(requests):
        arm = bandit.choose()
        taken.append(arm)
        bandit.learn(arm, math.log(speeds(n)[arm] * draw.uniform(1 - noise, 1 + noise)))
    return taken


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_is_found_and_others_are_seldom_tried(seed):
    taken = run(lambda n: (1.0, 1.3, 1.1), 400, seed)
    assert taken[:3] == [0, 1, 2] and taken.count(1) > 280
    mean = sum((1.0, 1.3, 1.1)[arm] for arm in taken) / len(taken)
    assert mean > 0.95 * 1.3


def test_another_one_that_becomes_the_fastest_is_found():
    taken = run(lambda n: (1.0, 1.5) if n < 150 else (1.5, 1.0), 500)
    assert taken[50:150].count(1) > 85 and taken[350:].count(0) > 120


def test_one_that_becomes_faster_unseen_is_found_by_trying():
    taken = run(lambda n: (1.0, 1.3) if n < 100 else (2.0, 1.3), 500)
    assert taken[50:100].count(1) > 40 and taken[400:].count(0) > 80


def test_old_rewards_that_are_kept_for_ever_hide_it(monkeypatch):
    monkeypatch.setattr(bandits, "DISCOUNT", 1.0)
    taken = run(lambda n: (1.0, 1.5) if n < 150 else (1.5, 1.0), 500)
    assert taken[150:250].count(0) < run_discounted()


def run_discounted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandits, "DISCOUNT", 0.98)
        return run(lambda n: (1.0, 1.5) if n < 150 else (1.5, 1.0), 500)[150:250].count(0)


def test_the_choice_is_a_function_of_the_rewards():
    assert run(lambda n: (1.0, 1.1, 1.2), 100, 3) == run(lambda n: (1.0, 1.1, 1.2), 100, 3)
    waiting = Bandit(3)
    assert [waiting.choose() for _ in range(6)] == [0, 1, 2, 0, 1, 2], "requests at once, before any has ended"


class Slow(Double):
    """Takes its time and proposes nothing that is right."""

    def propose(self, state, depth):
        torch.randn(600, 600) @ torch.randn(600, 600)
        return super().propose(state, depth)


@pytest.mark.parametrize("family", ["llama", "llava"])
def test_no_choice_changes_a_token(family):
    """Greedy as stock, sampled as plain; every drafter is taken, of which one runs layers and one has a tree."""
    inputs = prompt(family, shapes(family)["ragged"])
    names = ["ngram", None, "recycling", "layers", "suffix"]
    fast, plain = visspec.accelerate(model_of(family), names), visspec.accelerate(model_of(family), None)
    taken = []
    for n in range(len(names)):
        if n % 2:
            out = fast.generate(**inputs, max_new_tokens=NEW, do_sample=False)
            assert new_tokens(out, inputs) == stock(family, "ragged")
        else:
            sampled = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "seed": [3, 4, 5]}
            assert torch.equal(fast.generate(**inputs, **sampled), plain.generate(**inputs, **sampled))
        taken.append(fast.last_stats.drafter)
    assert taken == ["ngram", "none", "recycling", "layers", "suffix"]
    counts = [count for count, *_ in fast.setup.bandit.sums]
    assert all(0.9 < count <= 1.0 for count in counts)
    assert len({id(arm.length_policy) for arm in fast.setup.arms}) == len(names)


def test_a_reward_is_tokens_by_seconds_behind_the_prefill():
    fast = visspec.accelerate(model_of("llama"), [None, "ngram"])
    state = fast.run(**prompt("llama", ["9", "4"]), max_new_tokens=12, do_sample=False).state
    seconds = sum(s for stage, s in state.trace.times.items() if stage != "prefill")
    assert fast.setup.bandit.sums[0][1] == pytest.approx(math.log(sum(map(len, state.tokens)) / seconds))
    fast.generate(**prompt("llama", ["9"]), max_new_tokens=1, do_sample=False)
    assert fast.setup.bandit.sums[1][0] == 0.0, "one token is all of the prefill"


def test_a_slow_drafter_is_left_for_a_fast_one():
    fast = visspec.accelerate(model_of("llama"), [Slow(), None], adaptive=False)
    taken = []
    for seed in range(12):
        fast.generate(**prompt("llama", ["9"], seed), max_new_tokens=16, do_sample=False)
        taken.append(fast.last_stats.drafter)
    assert taken[:2] == ["Slow", "none"] and taken[4:].count("none") >= 6


def test_streams_copies_and_hooks():
    fast = visspec.accelerate(model_of("llama"), ["ngram", "suffix"])
    prompts = [prompt("llama", ["9"], seed) for seed in range(3)]
    found = {a.id: a.tokens for a in fast.stream(prompts, slots=2, max_new_tokens=6, do_sample=False)}
    assert found == {
        n: new_tokens(model_of("llama").generate(**p, max_new_tokens=6, do_sample=False), p)[0]
        for n, p in enumerate(prompts)
    }
    assert fast.setup.bandit.requested == [1, 0] and fast.setup.bandit.sums[0][0] == 1.0
    assert isinstance(fast.setup, Arms) and isinstance(fast.setup.select(), Arm)
    hook, model = visspec.speculative(["ngram", None]), model_of("llama")
    for name in ("ngram", "none"):
        model.generate(**prompts[0], max_new_tokens=6, do_sample=False, custom_generate=hook)
        assert hook.last_stats.drafter == name


def test_what_makes_no_sense_is_refused(tmp_path):
    model = llama(seed=3)
    with pytest.raises(ValueError, match="acceptance: got Rejection with several drafters, expected exact"):
        visspec.accelerate(model, ["ngram", "suffix"], acceptance="rejection")
    with pytest.raises(ValueError, match="acceptance: got Typical with several drafters"):
        visspec.accelerate(model, ["ngram", "suffix"], acceptance="typical")
    with pytest.raises(ValueError, match="drafter: got an empty list"):
        visspec.accelerate(model, [])
    with pytest.raises(ValueError, match="drafter: got 'nothing'"):
        visspec.accelerate(model, ["ngram", "nothing"])
    with pytest.raises(ValueError, match="drafter: got a Double, expected a name or None in a list"):
        visspec.accelerate(model, ["ngram", Double()]).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_where_nothing_was_made_for_a_model_the_fastest_that_needs_no_training_is_taken(tmp_path):
    """One target for all of them, the same tokens, and why is in the statistics; a list is saved as one."""
    model = model_of("llama")
    fast = visspec.accelerate(model)
    assert [setup.name for setup in fast.setup.each] == ["ngram", "suffix", "recycling"]
    assert len({id(setup.target) for setup in fast.setup.each}) == 1
    inputs = prompt("llama", shapes("llama")["ragged"])
    for name in ("ngram", "suffix", "recycling"):
        out = fast.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert new_tokens(out, inputs) == stock("llama", "ragged")
        assert fast.last_stats.drafter == name
        assert "because nothing was made for the model, and each request takes the fastest" in str(fast.last_stats)
    hook = visspec.speculative()
    model.generate(**inputs, max_new_tokens=NEW, do_sample=False, custom_generate=hook)
    assert hook.last_stats.why == fast.last_stats.why
    fast.save_pretrained(tmp_path)
    again = visspec.Accelerated.from_pretrained(tmp_path)
    assert [setup.name for setup in again.setup.each] == ["ngram", "suffix", "recycling"] and not again._why
    assert "names it" in visspec.accelerate(again.model)._why
    for options in ({"acceptance": "typical"}, {"acceptance": "rejection"}):
        assert [setup.name for setup in visspec.accelerate(model, **options).setup.each] == ["ngram"]
