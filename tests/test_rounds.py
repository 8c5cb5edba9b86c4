"""Records of a round, row by row: origins of tokens, tau by depth, what the policy learns, and draft positions."""

import copy
import itertools
import math
import pickle
from random import Random
from types import SimpleNamespace as Bag

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visspec
from tests.doubles import THREADS, Oracle, chain_of, compact, drafted, fast, new_tokens, stock, together
from tests.test_eagle import make, opened
from tests.tiny import VOCAB, llama, model_of, prompt, shapes, single_row
from visspec import tree as trees
from visspec.api.training.drafter import request_of
from visspec.loop import draft_length
from visspec.loop.draft_length import AdaptiveLength
from visspec.loop.stats import acceptance_by_depth, by_depth
from visspec.models.decoder.small_model import SmallModel
from visspec.types import OWN, Round

GREEDY = {"do_sample": False, "max_new_tokens": 9}


class Scripted(Oracle):
    """Drafts once, in the first round: tokens by a function of (answers ahead, state)."""

    def __init__(self, answers, write):
        super().__init__(answers)
        self.write, self.done = write, False

    def propose(self, state, depth):
        if self.done:
            return trees.empty_draft(state.pending)
        self.done = True
        return self.write(torch.tensor(self.ahead(state, depth)), state)


def decoded(shape, write):
    """The first round and the origins of a text batch whose first draft is written by `write`."""
    inputs, answers = prompt("llama", shapes("llama")[shape]), stock("llama", shape, 9)
    model = fast("llama", Scripted(answers, write))
    assert new_tokens(model.generate(**inputs, **GREEDY), inputs) == answers and model.last_stats.faults == 0
    trace = model.last_state.trace
    return trace.rounds[0], [row[1:] for row in trace.origin], trace.rounds  # the first token is the prefill's


# --- where tokens came from -------------------------------------------------------------------------------------------


def test_bonus_beside_longer_row():
    def write(right, state):
        tokens = right.clone()
        tokens[0, 1:] = -1  # all of one
        tokens[1, 2] = (tokens[1, 2] + 1) % VOCAB  # two of five
        tokens[2] = -1  # nothing
        return chain_of(state.pending, tokens)

    first, origin, rounds = decoded("ragged", write)
    assert first == Round(5, [2, 3, 1], [False, True, False])
    assert [row[:3] for row in origin] == [
        ["drafted", "bonus", "plain"], ["drafted", "drafted", "corrected"], ["plain"] * 3
    ]  # fmt: skip
    assert by_depth(rounds) == ([2, 1, 1, 0, 0], [2, 1, 0, 0, 0])
    assert acceptance_by_depth(rounds) == [1.0, 1.0, 0.0]


def test_all_and_nothing_of_a_chain():
    def write(right, state):
        right[0, 0] = (right[0, 0] + 1) % VOCAB
        return trees.chain_draft(state.pending, right)

    first, origin, _ = decoded("even", write)
    assert first == Round(5, [1, 6], [True, False])
    assert origin[0][0] == "corrected" and origin[1][:6] == ["drafted"] * 5 + ["bonus"]


@pytest.mark.parametrize("per_row", [False, True])
def test_shallow_leaf_bonus(per_row):
    """Below the root: a leaf, and a node with two below it. The leaf is right in row 0, the node in row 1."""
    parent = (-1, 0, 0, 2, 3)

    def write(right, state):
        wrong = (right + 1) % VOCAB
        first = [0, right[0, 0], wrong[0, 0], right[0, 1], right[0, 2]]
        rows = [first, [0, wrong[1, 0], right[1, 0], wrong[1, 1], right[1, 2]]]
        tree = trees.from_parents(torch.tensor([parent] * 2), 3) if per_row else trees.static(parent)
        return drafted(torch.tensor(rows), tree)

    first, origin, rounds = decoded("even", write)
    assert first == Round(3, [2, 2], [False, True])
    assert origin[0][:2] == ["drafted", "bonus"] and origin[1][:2] == ["drafted", "corrected"]
    assert by_depth(rounds) == ([2, 1, 0], [2, 0, 0])


def test_an_absent_child_was_not_tried():
    def write(right, state):
        tokens = torch.stack([torch.zeros(2, dtype=torch.long), right[:, 0], torch.tensor([-1, 5])], dim=1)
        return drafted(tokens, trees.from_parents(torch.tensor([[-1, 0, 1]]), 2))

    first, origin, _ = decoded("even", write)
    assert first.had_rejection == [False, True] and [row[1] for row in origin] == ["bonus", "corrected"]


def test_rows_draft_as_alone():
    """A row with n tokens to go drafts n - 1 of them: the last is the target's."""
    inputs, answers = prompt("llama", shapes("llama")["even"]), stock("llama", "even", 9)
    late = [answers[0], [(t + 1) % VOCAB for t in answers[1]]]  # row 0 runs ahead of row 1
    model, seen = fast("llama", Oracle(late)), []
    verify = model.target.verify

    def watch(state, draft):
        for row, tokens in zip(state.rows, compact(draft).tolist()):
            there = sum(t != -1 for t in tokens[1:])
            seen.append((there, min(draft.levels, 9 - len(state.tokens[row]) - 1)))
        return verify(state, draft)

    model.target.verify = watch
    assert new_tokens(model.generate(**inputs, **GREEDY), inputs) == answers
    assert all(there == room for there, room in seen) and len({there for there, _ in seen}) > 3


# --- draft-length policy -----------------------------------------------------------------------------------------


def to_device(length_policy, rounds, verify=1e-3, draft=1e-4, context=0):
    """A draft-length policy that has seen rounds; times: seconds as functions of the levels."""
    verify, draft = (f if callable(f) else lambda levels, f=f: f for f in (verify, draft))
    for each in rounds:
        latest = {"verify": verify(each.levels), "accept": 0.0, "draft": draft(each.levels), "observe": 0.0}
        more = {
            "context": context, "requested": each.levels, "structure": OWN, "counted": False, "nodes": each.levels + 1,
        }  # fmt: skip
        length_policy.observe(Bag(rounds=[each], latest=latest, **more))
    return length_policy


def test_rates_are_accepted_over_reached():
    """Half of what is drafted at each depth is kept: 100 rounds by hand, every second of them kept to the end."""
    length_policy = to_device(AdaptiveLength(3), [Round(3, [4], [False]), Round(3, [1], [True])] * 300)
    assert length_policy.acceptance().rates() == pytest.approx([0.5, 1.0, 1.0], abs=0.05)
    length_policy = to_device(AdaptiveLength(3), [Round(3, [2], [True])] * 300)
    assert length_policy.acceptance().rates() == pytest.approx([1.0, 0.0, 0.5], abs=0.05), "that of all depths"


def test_short_row_is_no_rejection():
    """Beside a row that keeps five of five, one with a node and no more: rate 1 at depth 2, offered half."""
    seen = to_device(AdaptiveLength(5), [Round(5, [6, 2], [False, False])] * 300).acceptance()
    assert seen.rates() == pytest.approx([1.0] * 5, abs=0.03)
    assert seen.offer_rates() == pytest.approx([1.0, 0.5, 1.0, 1.0, 1.0], abs=0.05)


def test_costs_by_context():
    """Behind a short prompt a level costs nothing to verify, behind a long one as much as three plain passes."""
    rounds = [Round(levels, [levels + 1], [False]) for levels in (1, 2, 3, 4)] * 20 + [Round(0, [1], [False])] * 20
    length_policy = to_device(AdaptiveLength(4), rounds, draft=1e-5)

    def best(context):
        return length_policy.best(4, length_policy.at(1, context))[0]

    assert best(40) == best(9000) == 4, "what is known of short ones is the start"
    rounds = rounds[:4] * 3 + rounds[-1:]
    to_device(length_policy, rounds, verify=lambda levels: 1e-2 + 3e-2 * levels, draft=1e-5, context=9000)
    assert best(40) == 4 and best(9000) == 0
    assert best(20000) == 0, "9,000 tokens are nearer than 40"


def test_rare_offers_do_not_pay():
    """What it offers is always kept, at half the cost of a plain pass: worth it for every row, not for one in ten."""
    seen = [Round(1, [2] * 10, [False] * 10)] * 20 + [Round(0, [1] * 10, [False] * 10)] * 20
    assert to_device(AdaptiveLength(1), seen, draft=5e-4).best(1)[0] == 1
    seen = [Round(1, [2] + [1] * 9, [False] * 10)] * 60 + [Round(0, [1] * 10, [False] * 10)] * 20
    assert to_device(AdaptiveLength(1), seen, draft=5e-4).best(1)[0] == 0


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_untried_depths(weight, monkeypatch):
    monkeypatch.setattr(draft_length, "PRIOR_WEIGHT", weight)
    untried = AdaptiveLength(2).acceptance()
    assert untried.rates() == pytest.approx([draft_length.PRIOR_RATE] * 2) and untried.offer_rates() == [1.0, 1.0]


@given(st.integers(1, 6), st.integers(0, 999))
def test_best_depth(levels, seed):
    """Of all depths, by the formula at the head of `draft_length`; drafting at all must promise two per cent."""
    random, length_policy = Random(seed), AdaptiveLength(levels)
    length_policy.rounds, seen, costs = 100, length_policy.acceptance(), length_policy.at()
    for d in range(levels):
        seen.reached[d] = random.uniform(1, 40)
        seen.attempts[d] = seen.reached[d] * random.uniform(0.3, 1)
        seen.accepted[d] = seen.attempts[d] * random.random()
    prices = random.uniform(0, 0.3), random.uniform(0, 0.3)
    costs.passes.seconds = {d + 1: 1 + prices[0] * d for d in range(levels + 1)}
    costs.draft(OWN).seconds = {d: prices[1] * d for d in range(levels + 1)}
    shares = [a * b for a, b in zip(seen.offer_rates(), seen.rates())]
    speed = [1.0]
    for d in range(1, levels + 1):
        speed.append(sum(math.prod(shares[:j]) for j in range(d + 1)) / (1 + sum(prices) * d))
    pays = [d for d in range(1, levels + 1) if speed[d] > 1.02]
    assert length_policy.best(levels)[0] == max(pays, key=speed.__getitem__, default=0)


def test_rests_double():
    length_policy = to_device(AdaptiveLength(2), [Round(2, [1], [True])] * 50 + [Round(0, [1], [False])], draft=1.0)
    costs, first = length_policy.at(), draft_length.FIRST_REST
    costs.next_probe, length_policy.overhead = 1000, 0.0
    state = Bag(budget=9, rows=[0], trace=Bag(gave_up=0, context=0))
    assert length_policy.depth(state) == 0 and (costs.resting, costs.rest) == (first, 2 * first)
    assert [length_policy.depth(state) for _ in range(first)] == [0] * first and costs.resting == 0
    assert state.trace.gave_up == first
    to_device(length_policy, [Round(2, [2], [True])])
    assert costs.rest == first


@pytest.mark.parametrize("levels", [0, -1, 1024, 300_000_000, 2.0, "3", None])
def test_impossible_depths_are_refused(levels):
    with pytest.raises(ValueError, match=r"levels: got .* expected a whole number from 1 to 1023"):
        AdaptiveLength(levels)


def test_threads_share_a_pace(hurried):
    """Nothing that eight threads tell it at once is lost, and a rest is taken once."""
    length_policy, each = AdaptiveLength(4), 250

    def work():
        for n in range(each):
            state = Bag(budget=9, rows=[0], trace=Bag(gave_up=0, context=0))
            assert 0 <= length_policy.depth(state) <= 4
            to_device(length_policy, [Round(4, [5], [False]) if n % 3 else Round(4, [1], [True])])

    together([work] * THREADS)
    assert length_policy.rounds == THREADS * each and length_policy.at().resting >= 0
    seen = length_policy.acceptance()
    assert all(k <= t <= o for k, t, o in zip(seen.accepted, seen.attempts, seen.reached))


def test_policy_copy_keeps_costs():
    length_policy = to_device(AdaptiveLength(3), [Round(3, [2], [True])] * 9)
    for other in (copy.deepcopy(length_policy), pickle.loads(pickle.dumps(length_policy))):
        assert other.accepted == length_policy.accepted and other.rounds == 9
        to_device(other, [Round(3, [4], [False])])
        assert other.rounds == 10 and length_policy.rounds == 9


# --- drafters draft for the place where the loop stands ---------------------------------------------------------------


@torch.inference_mode()
def test_trees_use_noise_of_positions():
    """Where all ids are as likely, the noise of a position alone says which of them are drafted there."""
    model, inputs, depth = model_of("llama"), prompt("llama", ["9"]), 3
    drafter = make("llama", 0)
    drafter.width, drafter.nodes = 2, 30
    _, _, state, _ = opened(drafter, request_of(model, inputs, temperature=1.0, max_new_tokens=30, seed=3))
    drafter._logits = lambda feature: torch.zeros(*feature.shape[:-1], VOCAB)
    draft = drafter.propose(state, depth)
    for level in range(depth):
        drafted = set(draft.value[0, draft.tree.depth[0] == level + 1].tolist())
        assert drafted == set(state.noise.window(depth)[0, level].topk(2).indices.tolist())


def near(seed=0):
    """A model that agrees with the tiny llama now and then."""
    small = copy.deepcopy(llama())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in small.parameters():
            weight.add_(0.08 * weight.std() * torch.randn(weight.shape, generator=generator))
    return small


@pytest.mark.parametrize(
    "shape, plain, reads", [("one", 0, 99), ("ragged", 0, 99), ("ragged", 2, 99), ("ragged", 0, 5)]
)
def test_small_model_drafts(shape, plain, reads):
    """In every round, after `plain` rounds, its own generate on the prompt (`reads` tokens at most) and the answer."""
    small, rows, seen = near(), shapes("llama")[shape], []
    inputs = prompt("llama", rows)
    alone = [single_row("llama", rows, inputs, b)["input_ids"] for b in range(len(rows))]
    assert reads > 9 or {len(ids[0]) > reads for ids in alone} == {False, True}
    alone = [ids if len(ids[0]) <= reads else torch.cat([ids[:, :1], ids[:, 1 - reads :]], dim=1) for ids in alone]

    class Watched(SmallModel):
        def propose(self, state, depth):
            draft = super().propose(state, depth)
            for b, row in enumerate(state.rows):
                ids = torch.cat([alone[row], torch.tensor([list(state.tokens[row])])], dim=1)
                message = small.generate(input_ids=ids, max_new_tokens=depth, do_sample=False)[0, ids.shape[1] :]
                assert draft.value[b, 1:].tolist() == message.tolist()
            return draft

        def observe(self, state, draft, scores, verdict, outcome):
            seen.extend(min(len(path) - 1, 4) for path in outcome.path)
            super().observe(state, draft, scores, verdict, outcome)

    model = visspec.accelerate(llama(), Watched(small, llama(), reads), adaptive=False, levels=4)
    turns, asked = itertools.count(), model.length_policy.depth
    model.length_policy.depth = lambda state: 0 if next(turns) < plain else asked(state)
    output = new_tokens(model.generate(**inputs, do_sample=False, max_new_tokens=24), inputs)
    assert output == stock("llama", shape, 24) and model.last_stats.faults == 0
    assert reads < 9 or {0, 1, 4} <= set(seen), "none, some and all of a draft were accepted"


@torch.inference_mode()
def test_request_keeps_rotations():
    """Two requests grow the table of a shared drafter at once, and the shorter one's is kept."""
    model, drafter = model_of("llama"), make("llama", 0)
    _, _, state, _ = opened(drafter, request_of(model, prompt("llama", ["9"]), temperature=0, max_new_tokens=9, seed=0))
    short, join, lost = drafter._turns[:8].clone(), drafter.layer.join, []
    expected = drafter.propose(copy.deepcopy(state), 3).value

    def interrupted(*given):
        drafter._turns = short
        lost.append(True)
        return join(*given)

    drafter.layer.join = interrupted
    assert torch.equal(drafter.propose(state, 3).value, expected) and lost
