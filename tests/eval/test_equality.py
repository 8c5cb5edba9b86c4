"""Equality tiers: the arithmetic by hand, pass shapes of tiny models, and controls that must be caught."""

import copy
import functools
from dataclasses import replace

import pytest
import torch

import visspec
from tests.doubles import Oracle
from tests.tiny import model_of, prompt
from visspec import tree as trees
from visspec.api import requests
from visspec.cli import bench_caption as bench
from visspec.eval.bench import equality
from visspec.eval.bench.equality import Gap, Tiers, divergence, forced_logits, in_words
from visspec.models.decoder.target import HFDecoder
from visspec.types import Draft

ROWS = {"llama": ["19", "12", "3"], "llava": ["3 i 4 i 9", "6 i 5", "12"]}
NEW = 24
CHAIN, TREE = trees.chain(5), trees.static((-1, 0, 0, 1, 1, 2, 3, 3))
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@functools.cache
def case(name: str, dtype: torch.dtype, ties: float = 0.0):
    """(model, inputs, request, plain output). `ties` gives every other token a twin, that far from it."""
    model = copy.deepcopy(model_of(name))
    if ties:
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            noise = torch.randn(head[::2].shape, generator=torch.Generator().manual_seed(0))
            head[1::2] = head[::2] + ties * noise * head.std()
    model = model.to(dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in prompt(name, ROWS[name]).items()}
    plain = visspec.accelerate(model, None)
    plain.generate(**inputs, **GREEDY)
    return model, inputs, requests.of_generate(model, inputs, **GREEDY), [list(t) for t in plain.last_state.tokens]


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_margin_at_the_divergence_is_that_of_the_two_tokens():
    distribution = torch.tensor([[0.0, 1.0, 2.0], [3.0, 2.5, 0.0]])
    assert divergence([2, 0], [2, 1], distribution, row=3) == {"row": 3, "index": 1, "margin": 0.5}
    assert divergence([2, 0], [2, 0], distribution) is None
    assert divergence([2, 0], [2], distribution) == {"index": 1, "margin": None}


def test_gap_by_hand():
    one = torch.tensor([[1.0, 0.75, -4.0], [0.0, 3.0, 1.0]])
    other = torch.tensor([[0.75, 1.0, -4.0], [0.0, 3.0, 1.0]])
    gap = Gap()
    gap.add(one, other, prompt=7)
    assert (gap.largest, gap.total, gap.count, gap.scale, gap.positions) == (0.25, 0.5, 6, 4.0, 2)
    assert gap.shift == 0.5, "one logit down, the other up: the margin moved by the sum"
    assert gap.flips == [{"prompt": 7, "index": 0, "margin": 0.25}]
    assert gap.in_eps(torch.bfloat16) == 0.25 / (4 * 2**-7)
    gap.add(torch.tensor([[1.0, float("-inf")]]), torch.tensor([[1.0, float("-inf")]]))
    assert gap.largest == 0.25 and gap.scale == 4.0, "a forbidden token moves nothing"


def tiers_with(margin: float | None, dtype=torch.bfloat16, greedy: bool = True, scale: float = 10.0) -> dict:
    """The record of two prompts, one of which differs at a margin, where rounding moves margins by half a logit."""
    tiers = Tiers(dtype, greedy)
    tiers.gap.add(torch.tensor([[scale, 0.25]]), torch.tensor([[scale - 0.25, 0.5]]))
    tiers.forced = 2
    assert not tiers.add([[1]], [[1]]) and tiers.add([[1]], [[2]])
    tiers.divergences = [{"prompt": 1, "row": 0, "index": 0, "margin": margin}]
    return tiers.record()


@pytest.mark.parametrize("changes, benign, words", [
    ({"margin": 0.5}, True, "all near ties"), ({"margin": 0.51}, False, "NOT BENIGN: 1 of 1"),
    ({"margin": None}, False, "NOT BENIGN: 1 of 1"),
    ({"margin": 0.1, "dtype": torch.float32}, False, "NOT BENIGN: 1 of 1"),
    ({"margin": 0.1, "scale": 0.5}, False, "SUSPECT"), ({"margin": 0.1, "greedy": False}, None, "not judged"),
])  # fmt: skip
def test_verdicts(changes, benign, words):
    record = tiers_with(**changes)
    assert record["benign"] is benign and words in in_words(record)
    assert (record["identical"], record["compared"]) == (1, 2)
    assert record["tier"] == ("token-exact" if changes.get("dtype") else "teacher-forced")


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["one", "chain", "tree"])
def test_forced_logits_are_the_models_own(name, shape):
    """Rows of different length, in float32: the whole text through the stock model in one pass, row by row."""
    model, _, request, plain = case(name, torch.float32)
    plain = [row[: NEW - 7 * b] for b, row in enumerate(plain)]
    found = forced_logits(HFDecoder(model), request, plain, shape)
    assert [distribution.argmax(-1).tolist() for distribution in found] == plain
    if name == "llama":
        for b, (row, distribution) in enumerate(zip(plain, found)):
            real = request.prompt[b][request.inputs["attention_mask"][b].bool()]
            whole = model(torch.cat([real, torch.tensor(row)])[None]).logits[0, len(real) - 1 : -1]
            assert torch.allclose(distribution, whole, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pass_shapes_round_differently_and_no_more(dtype):
    model, _, request, plain = case("llava", dtype)
    tiers = Tiers(dtype)
    tiers.add(plain, plain)
    tiers.force(HFDecoder(model), request, plain, plain, [CHAIN, TREE], prompt=0)
    record = tiers.record()
    assert 0 < record["gap"]["max"] and record["gap"]["in_eps"] < equality.SUSPECT / 4 and record["benign"] is True
    assert record["gap"]["positions"] == 2 * 3 * NEW and record["gap"]["nodes_per_pass"] == [6, 8]
    assert max((flip["margin"] for flip in record["gap"]["flips"]), default=0.0) <= record["gap"]["margin_shift"]


def drafted(model, inputs, plain) -> list[list[int]]:
    fast = visspec.accelerate(model, Oracle(plain), levels=5, adaptive=False)
    fast.generate(**inputs, **GREEDY)
    return [list(t) for t in fast.last_state.tokens]


def test_near_ties_fall_either_way_and_are_benign():
    """Twins among the tokens: in bfloat16 drafted decoding leaves the plain output, at margins that rounding moves."""
    tiers = Tiers(torch.bfloat16)
    for i, ties in enumerate((0.001, 0.003, 0.01, 0.03)):
        model, inputs, request, plain = case("llava", torch.bfloat16, ties)
        other = drafted(model, inputs, plain)
        tiers.add(plain, other)
        tiers.force(HFDecoder(model), request, plain, other, [CHAIN], prompt=i)
    record = tiers.record()
    assert record["identical"] < 4, "no tie was broken differently: this test compares nothing"
    assert record["benign"] is True and "all near ties" in in_words(record), in_words(record)


def test_a_perturbed_decoder_is_not_benign():
    """Control: a decoder that takes the third best token once, and goes on honestly from there."""
    model, _, request, plain = case("llava", torch.bfloat16)
    distribution = forced_logits(HFDecoder(model), request, plain)
    other = [list(row) for row in plain]
    other[1][9] = int(distribution[1][9].topk(3).indices[2])
    tiers = Tiers(torch.bfloat16)
    tiers.add(plain, other)
    tiers.force(HFDecoder(model), request, plain, other, [CHAIN], prompt=4)
    record = tiers.record()
    assert record["benign"] is False and "NOT BENIGN: 1 of 1" in in_words(record)
    entry = record["first_divergences"][0]
    assert (entry["prompt"], entry["row"], entry["index"], entry["benign"]) == (4, 1, 9, False)
    assert entry["margin"] > record["gap"]["margin_shift"]


class Broken(HFDecoder):
    """Looks at drafts of another tree than it is given."""

    def changed(self, tree) -> dict: ...

    def verify(self, state, draft):
        return super().verify(state, Draft(draft.value, replace(draft.tree, **self.changed(draft.tree))))


class Flat(Broken):
    def changed(self, tree):
        return {"depth": torch.zeros_like(tree.depth)}


class Blind(Broken):
    def changed(self, tree):
        return {"ancestor": torch.ones_like(tree.ancestor)}


@pytest.mark.parametrize("broken", [Flat, Blind])
def test_a_broken_draft_pass_does_not_excuse_itself(broken):
    """Control: a wrong pass moves the logits by so much that any margin would pass; it is called suspect instead."""
    model, _, request, plain = case("llama", torch.bfloat16)
    other = [[*plain[0][:5], (plain[0][5] + 1) % 80, *plain[0][6:]], *plain[1:]]
    tiers = Tiers(torch.bfloat16)
    tiers.add(plain, other)
    tiers.force(broken(model), request, plain, other, [CHAIN], prompt=0)
    record = tiers.record()
    assert record["gap"]["suspect"] and record["benign"] is False and "SUSPECT" in in_words(record)


@pytest.mark.parametrize("dtype, greedy", [(torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)])
def test_bench_writes_the_tier_of_its_dtype(dtype, greedy):
    model, inputs, _, _ = case("llava", dtype)
    options = GREEDY if greedy else GREEDY | {"do_sample": True, "temperature": 1.0}
    plain = bench.CaptionArm(visspec.accelerate(model, None), options, 0)
    ours = bench.CaptionArm(visspec.accelerate(model, "ngram", adaptive=False), options, 0)
    prompts = [(0, inputs), (1, inputs)]
    runs, failures = bench.speed.interleave({"plain": plain, "ours": ours}, prompts)
    assert failures == []
    record = bench.equality_tiers(ours.fast, prompts, runs, options, dtype)
    assert record["compared"] == 2 and record["benign"] in ((True,) if greedy else (True, None))
    assert (record["gap"] is None) == (dtype == torch.float32)
    if record["gap"]:
        assert record["gap"]["prompts"] == 2 and record["gap"]["positions"] > 0
