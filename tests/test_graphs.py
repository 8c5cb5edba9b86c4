"""Passes recorded as graphs give the tokens and logits of passes that are not, with a stand-in that needs no GPU."""

from __future__ import annotations

import pytest

from tests.doubles import Grower, Hostile, Oracle, TreeOracle, fast, new_tokens, stock
from tests.replays import Standin, recording
from tests.tiny import prompt, shapes
from visspec.models.targets import graphs

NEW = 24


@pytest.fixture
def standin(monkeypatch) -> Standin:
    monkeypatch.setattr(graphs, "WORTH", 1)
    monkeypatch.setattr(graphs, "FIRST", 16)
    return recording(monkeypatch)


def greedy(model, name, shape, **options):
    inputs = prompt(name, shapes(name)[shape])
    return new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options), inputs)


DRAFTERS = {
    "none": lambda answers: None,
    "ngram": lambda answers: "ngram",
    "chain": lambda answers: Oracle(answers),
    "tree": lambda answers: TreeOracle(answers, wrong=0.3),
    "tree a row": lambda answers: TreeOracle(answers, wrong=0.3, per_row=True),
    "grown": lambda answers: Grower(answers, seed=1),
    "hostile": lambda answers: Hostile(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_tokens(kind, standin):
    for shape in ("one", "ragged", "even"):
        model = fast("llama", DRAFTERS[kind](stock("llama", shape)))
        assert greedy(model, "llama", shape) == stock("llama", shape)
        recorder = model.target.recorder
        assert recorder.graphs > 0 and not recorder.refused
        assert standin.replays > len(model.last_state.trace.rounds)
