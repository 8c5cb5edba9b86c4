"""A captured rule decides as the rule itself does: buffers, shapes and copies, with a recording that needs no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.doubles import drafted
from tests.registry_cases import ROWS, drawn, janus_pair, tiny_drafter
from tests.replays import Standin
from visspec import registry
from visspec import tree as trees
from visspec.accept.cool import Cool
from visspec.accept.graphed_rule import GraphedRule
from visspec.distributions import Categorical
from visspec.types import Scores, Verdict

TREE, CHAIN = "image-eagle:tree=static,shape=3-3-3", "jacobi:window=5"


def written(verdict: Verdict, again: Verdict) -> None:
    for field in dataclasses.fields(Verdict):
        if (old := getattr(verdict, field.name)) is not None:
            old.copy_(getattr(again, field.name))


def rerun(call):
    """A recording that runs the call again and writes its verdict where the first one stood."""
    rerun.count += 1
    verdict = Verdict(*(None if x is None else x.clone() for x in vars(call()).values()))
    return verdict, lambda: written(verdict, call())


def draw(rule, spec, temperature=1.0):
    tokens, state = drawn(janus_pair(tiny_drafter(spec), rule), ROWS, 7, temperature)
    return tokens, None if state.drift is None else state.drift.tolist(), len(state.trace.rounds)


@pytest.mark.parametrize("rule, spec, temperature", [
    ("exact", CHAIN, 1.0), ("exact", CHAIN, 0.0), ("rejection", TREE, 1.0), ("lantern:k=5,delta=0.4", TREE, 1.0),
    ("lantern:k=5,delta=0.4", CHAIN, 0.0), ("grouped:group=3", f"{CHAIN},redraw=maximal", 1.0),
])  # fmt: skip
def test_decisions_are_the_rules_own(rule, spec, temperature):
    rerun.count = 0
    captured = GraphedRule(registry.rule(rule), record=rerun)
    result = draw(captured, spec, temperature)
    assert result == draw(registry.rule(rule), spec, temperature)
    assert captured.traits == registry.rule(rule).traits
    assert 0 < rerun.count == len(captured.recordings) < result[2]


def test_control_empty_replay():
    def stale(call):
        return call(), lambda: None

    assert draw(GraphedRule(registry.rule("rejection"), record=stale), TREE) != draw(registry.rule("rejection"), TREE)


def test_uncaptured_shapes_and_devices():
    expected = draw(registry.rule("exact"), CHAIN)
    rerun.count = 0
    assert draw(GraphedRule(registry.rule("exact"), most=1, record=rerun), CHAIN) == expected
    assert rerun.count == 1

    def refusing(call):
        raise RuntimeError("no graphs here")

    with pytest.warns(RuntimeWarning, match="not captured, the rule runs without a graph: no graphs here") as told:
        assert draw(GraphedRule(registry.rule("exact"), record=refusing), CHAIN) == expected
    assert len(told) == 1
    captured = GraphedRule(registry.rule("exact"))  # laws are not on a GPU
    assert draw(captured, CHAIN) == expected and not captured.recordings


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point"])
def test_trees_of_one_shape(drawn):
    """What the host knows of a tree goes into the recording's key; all else is read from its buffers."""
    vocab, g = 6, torch.Generator().manual_seed(0)
    rule = Cool(omega=3.0)
    captured, drift = GraphedRule(rule, record=rerun), 0.0
    rerun.count = 0
    for seed in range(40):
        for parent in ((-1, 0, 0, 1, 2), (-1, 0, 0, 0, 1), (-1, 0, 1, 1, 0)):
            logits = torch.randn(1, 5, vocab, generator=g)
            q = (0.5 * torch.randn(1, 5, vocab, generator=g)).softmax(-1)
            tokens = torch.multinomial(q[0], 1, generator=g)[:, 0][None]
            draft, scores = drafted(tokens, trees.static(parent), q if drawn else None), Scores(Categorical(logits))
            noise = rule.make_noise([torch.Generator().manual_seed(seed)], vocab)
            result, expected = captured(draft, scores, noise), rule(draft, scores, noise)
            for name, value in vars(expected).items():
                same = getattr(result, name) is None if value is None else torch.equal(getattr(result, name), value)
                assert same, (seed, parent, name)
            drift += float(expected.drift)
    assert drift > 1.0 and rerun.count == len(captured.recordings) == 2  # the first and the last tree share one


def test_recordings_share_pool(monkeypatch):
    seen, device = [], [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, device[0]))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # on a GPU its current stream is of this class
    monkeypatch.setattr(torch.cuda, "Stream", lambda: f"stream of {device[0]}")
    monkeypatch.setattr("visspec.replay.cuda_graph", lambda call, *shared: seen.append(shared) or rerun(call))
    captured = GraphedRule(registry.rule("exact"))
    rerun.count = 0
    captured.record = captured._graph
    draw(captured, CHAIN)
    assert seen == [((0, 0), "stream of 0")] * len(captured.recordings) and len(seen) > 1
    device[0] = 1
    captured._graph(lambda: Verdict(*[torch.zeros(1)] * 3))
    assert seen[-1] == ((0, 1), "stream of 1")


def test_control_freed_memory():
    kept, buffer = torch.ones(3), torch.ones(3)

    def record():
        gone = torch.ones(3)
        return Standin()(lambda: kept + buffer + gone)

    _, replay = record()
    with pytest.raises(AssertionError, match=r"memory of \(3,\) that was freed"):
        replay()
    output, replay = Standin()(lambda: kept + buffer.view(3, 1)[:, 0])
    buffer += 1
    replay()
    assert output.tolist() == [3.0] * 3
