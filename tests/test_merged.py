"""A trained drafter combined with the context."""

from dataclasses import replace
from types import SimpleNamespace as Bag

import pytest
import torch

import visspec
from tests.doubles import Oracle
from tests.tiny import model_of, prompt, shapes
from visspec import registry
from visspec import tree as trees
from visspec.api import loading
from visspec.api.captions import prepare
from visspec.io import included
from visspec.loop.draft_length import AdaptiveLength, FixedLength
from visspec.models.lookup.context import ContextDrafter
from visspec.models.lookup.merged import MergedDrafter
from visspec.testing import check_drafter
from visspec.types import OWN, Draft

SPEC = "vispec:copies=true"


@pytest.fixture(scope="module")
def captioner():
    return loading.load("captioner", device="cpu", dtype="float32")


@pytest.fixture
def inputs(captioner):
    pictures = included.scenes("shapes").images(2)
    return prepare(captioner[1], [[picture] for picture in pictures], "Describe the image.", captioner[0])


def test_contract(captioner, inputs):
    assert isinstance(check_drafter(SPEC, captioner[0], inputs, 24).drafter, MergedDrafter)


def test_stream_equals_generate(captioner, inputs):
    model, _ = captioner
    rows = [{name: value[b : b + 1] for name, value in inputs.items()} for b in (0, 1, 0)]
    fast = visspec.accelerate(model)
    assert fast.length_policy.copies == 16, "the default of a model with a trained drafter copies, too"
    answers = {answer.id: answer for answer in fast.stream(rows, slots=2, max_new_tokens=24, do_sample=False)}
    for number, row in enumerate(rows):
        expected = model.generate(**row, max_new_tokens=24, do_sample=False)[0, row["input_ids"].shape[1] :]
        assert answers[number].error is None and answers[number].tokens == expected.tolist()


class Promised(FixedLength):
    """Offers the trained drafter's drafts, unless the context expects three tokens."""

    def depth(self, state):
        state.offer = self.limit(state), OWN, 1.0
        state.worth = lambda expected: len(expected) if expected[-1] > 3 else 1
        return super().depth(state)


def test_known_answers_are_copied(captioner, inputs):
    """The second time, the trained drafter is not asked where the first answer is repeated."""
    fast = visspec.accelerate(captioner[0], SPEC, length=Promised())
    asked, propose = [], fast.drafter.trained.propose
    fast.drafter.trained.propose = lambda state, depth: asked.append(depth) or propose(state, depth)
    fast.run(**inputs, max_new_tokens=24, do_sample=False)
    first = len(asked)
    fast.run(**inputs, max_new_tokens=24, do_sample=False)
    assert first > 0 and len(asked) - first < first / 2


def test_copies_pay():
    policy = AdaptiveLength(8)
    policy.copies, policy.rounds = 16, 99
    costs = policy.at()
    costs.passes.seconds, costs.rounds, costs.next_probe = {1: 1.0, 2: 1.05, 4: 1.1}, 99, 999
    for accepted in (1, 9):
        for _ in range(50):
            policy.acceptance().learn(8, [accepted], [accepted < 9])
        state = Bag(budget=99, rows=[0], trace=Bag(gave_up=0, context=0))
        assert policy.depth(state) == 16 and (state.offer[0] == 0) == (accepted == 1)
        assert (state.worth([1.0, 1.3, 1.4, 1.5]) > 1) == (accepted == 1)


def test_union():
    pending = torch.tensor([5, 6])
    chain = trees.ragged_draft(pending, [[1, 2], [3]])
    parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 2]])
    tree = Draft(torch.tensor([[5, 1, 4, 7], [6, 3, 8, 9]]), trees.from_parents(parents, 3))
    both = trees.union(chain, tree)
    trees.check(both.tree)
    assert both.tree.parent.tolist() == [[-1, 0, 1, 0, 0, 4], [-1, 0, 1, 0, 3, 4]] and both.levels == 3
    assert both.value.tolist() == [[5, 1, 2, 1, 4, 7], [6, 3, 0, 3, 8, 9]]
    assert both.real.tolist() == [[True] * 6, [True, True, False, True, True, True]]


class Halves(Oracle):
    """Right only in every other round."""

    def propose(self, state, depth):
        draft = super().propose(state, depth)
        wrong = replace(draft, value=draft.value.where(draft.tree.depth == 0, 3))
        return draft if len(state.trace.rounds) % 2 else wrong


@pytest.mark.parametrize("target", ["llama", "qwen2_vl"])
def test_context_fills_in(target):
    """One tree holds the drafts of both, so the context's nodes are accepted where the trained drafter is wrong."""
    model, inputs = model_of(target), prompt(target, shapes(target)["ragged"])
    arguments = {**inputs, "max_new_tokens": 16, "do_sample": False}
    answers = model.generate(**arguments)[:, inputs["input_ids"].shape[1] :]
    taus, alone = [], ContextDrafter()
    alone.restrict_to_chains()  # adds no nodes
    for context in (ContextDrafter(), alone):
        fast = visspec.accelerate(model, MergedDrafter(Halves(answers.tolist()), context), length="fixed", debug=True)
        for _ in range(2):
            result = fast.run(**arguments)
        assert torch.equal(result.output[:, -16:], answers)
        taus.append(result.stats.tau)
    assert taus[0] > taus[1]


def test_trained_drafter_without_repeats():
    model, inputs = model_of("llama"), prompt("llama", shapes("llama")["ragged"])
    answers = model.generate(**inputs, max_new_tokens=16, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    fast = visspec.accelerate(model, MergedDrafter(Oracle(answers.tolist()), ContextDrafter()))
    result = fast.run(**inputs, max_new_tokens=16, do_sample=False)
    assert torch.equal(result.output[:, -16:], answers) and result.stats.tau > 2


def test_copies_of_drafters_that_copy_anyway(tmp_path):
    model = model_of("llama")
    assert not isinstance(registry.drafter("ngram:copies=true", model)[0], MergedDrafter)
    assert registry.drafter("none:copies=true", model)[0] is None
    with pytest.raises(ValueError, match=r"^copies: got maybe, expected true or false"):
        registry.drafter("ngram:copies=maybe", model)
    (home := tmp_path / "a:b").mkdir()
    assert registry.split(f"{home}:copies=true,width=2") == (str(home), {"copies": True, "width": 2})
    assert registry.joined(home, {"copies": True, "width": 2}) == f"{home}:copies=true,width=2"
