"""A captured rule decides as the rule itself does: buffers, shapes and copies, with a recording that needs no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.test_image_targets import made
from visspec import zoo
from visspec.accept.captured import Captured
from visspec.api import check_pairing
from visspec.engine import decode
from visspec.guard import Guarded
from visspec.models.drafters.jacobi import Jacobi
from visspec.models.targets.image_ar import ImageAR
from visspec.pace import Pace
from visspec.types import Request, Sampling, Verdict

TREE = {"window": 5, "redraw": "maximal", "branch": 2}


def written(verdict: Verdict, again: Verdict) -> None:
    """Overwrite a verdict in place, as a replay does."""
    for field in dataclasses.fields(Verdict):
        if (old := getattr(verdict, field.name)) is not None:
            old.copy_(getattr(again, field.name))


def rerun(call):
    """A recording that runs the call again and writes its verdict where the first one stood."""
    rerun.count += 1
    verdict = Verdict(*(None if x is None else x.clone() for x in vars(call()).values()))
    return verdict, lambda: written(verdict, call())


def draw(rule, options, temperature=1.0, rows=(0, 1, 2)):
    case, rows = made("janus"), list(rows)
    target, prompt, drafter = ImageAR(case.family), case.prompt(rows), Jacobi(**options)
    check_pairing(drafter, rule, target.capabilities)
    request = Request(prompt, prompt.ids, 16, Sampling(temperature=temperature, guidance=3.0), grid=(4, 4))
    if temperature:
        request.generators = [torch.Generator().manual_seed(7 + r) for r in rows]
    state = decode(target, Guarded(drafter, target.capabilities), rule, request, Pace(drafter.levels, adaptive=False))
    return state.tokens, {name: meter.tolist() for name, meter in state.meters.items()}, len(state.trace.rounds)


@pytest.mark.parametrize(
    "rule, options, temperature",
    [
        ("exact", {"window": 5}, 1.0),
        ("exact", {"window": 5}, 0.0),
        ("rejection", TREE, 1.0),
        ("lantern:k=5,delta=0.4", TREE, 1.0),
        ("lantern:k=5,delta=0.4", {"window": 5}, 0.0),
        ("grouped:group=3", {"window": 5, "redraw": "maximal"}, 1.0),
        ("run_product:alpha=0.1", {"window": 5, "redraw": "maximal"}, 1.0),
    ],
)
def test_decisions_are_the_rules_own(rule, options, temperature):
    rerun.count = 0
    captured = Captured(zoo.acceptance(rule), record=rerun)
    found = draw(captured, options, temperature)
    assert found == draw(zoo.acceptance(rule), options, temperature)
    assert captured.guarantee == zoo.acceptance(rule).guarantee
    assert 0 < rerun.count == len(captured.recordings) < found[2]


def test_a_replay_that_does_nothing_is_noticed():
    def stale(call):
        return call(), lambda: None

    assert draw(Captured(zoo.acceptance("rejection"), record=stale), TREE) != draw(zoo.acceptance("rejection"), TREE)


def test_further_shapes_and_devices_that_refuse_run_the_rule_itself():
    expected = draw(zoo.acceptance("exact"), {"window": 5})
    rerun.count = 0
    assert draw(Captured(zoo.acceptance("exact"), most=1, record=rerun), {"window": 5}) == expected
    assert rerun.count == 1

    def refusing(call):
        raise RuntimeError("no graphs here")

    with pytest.warns(RuntimeWarning, match="not captured, the rule runs as it is: no graphs here") as told:
        assert draw(Captured(zoo.acceptance("exact"), record=refusing), {"window": 5}) == expected
    assert len(told) == 1
    captured = Captured(zoo.acceptance("exact"))  # laws are not on a GPU
    assert draw(captured, {"window": 5}) == expected and not captured.recordings
    with pytest.raises(ValueError, match="most: got 0, expected at least 1"):
        Captured(zoo.acceptance("exact"), most=0)
