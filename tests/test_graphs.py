"""Passes recorded as graphs give the tokens and logits of passes that are not, with a stand-in that needs no GPU."""

from __future__ import annotations

import pytest

from tests import test_image_targets as images
from tests.doubles import Grower, Hostile, Oracle, TreeOracle, fast, new_tokens, stock
from tests.replays import Standin, recording
from tests.tiny import FAMILIES, prompt, shapes
from visspec.accept.captured import Captured
from visspec.accept.exact import Exact
from visspec.models.drafters.jacobi import Jacobi
from visspec.models.targets import graphs
from visspec.models.targets.image_ar import ImageAR

NEW = 24
IMAGES = sorted(images.CASES)


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


def eager_passes(target) -> list[int]:
    """The sizes of a target's passes that are not recorded, from now on."""
    seen, inner = [], target._eager
    target._eager = lambda state, draft: seen.append(draft.tree.size) or inner(state, draft)
    return seen


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"gemma2"}))
def test_every_family_in_every_shape(name, standin):
    """Pictures, videos, padding and sliding windows. Eager passes are those that recordings are compared with."""
    for shape in shapes(name):
        model = fast(name, TreeOracle(stock(name, shape), wrong=0.3))
        seen, recorder = eager_passes(model.target), model.target.recorder
        assert greedy(model, name, shape) == stock(name, shape), shape
        assert len(seen) == recorder.graphs > 0 and not recorder.refused
        assert recorder in model.pairing.passes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_image_family(name, temperature, standin, monkeypatch):
    """Guidance, left padding, positions of their own; the rows as they are alone."""
    case, seen, used = images.made(name), [], []

    def recorded(family):
        target = ImageAR(family)
        target.record(None)
        seen.append(eager_passes(target))
        used.append(target.recorder)
        return target

    plain = images.draw(case, [0, 1, 2], Jacobi(5), temperature=temperature)[0]
    monkeypatch.setattr(images, "ImageAR", recorded)
    monkeypatch.setattr(case.family, "recorder", None)
    for rule in ("exact", Captured(Exact())):
        assert images.draw(case, [0, 1, 2], Jacobi(5), rule, temperature)[0] == plain
        assert images.draw(case, [2], Jacobi(5), rule, temperature)[0] == plain[2:]
    assert len(set(used)) == 1 and not used[0].refused  # the family's
    assert sum(map(len, seen)) == used[0].graphs > 0 and not seen[2]
