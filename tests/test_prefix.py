"""Prefix cache: rows that reuse a prompt equal a fresh prefill with every drafter, and memory is bounded."""

import dataclasses
import functools
import hashlib
from inspect import signature

import pytest
import torch
from transformers import LlavaForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

import visspec
from tests.doubles import fast, raises_line
from tests.test_adapters import adapted
from tests.test_eagle import make
from tests.tiny import FAMILIES, IMAGE, llama, model_of, prompt, shapes
from visspec.api.text.queueing import RequestBuilder, add_to_digest
from visspec.loop.decode import open_request
from visspec.models.block.trained import BlockDrafter
from visspec.models.decoder.prefix import PrefixCache
from visspec.models.decoder.small_model import SmallModel
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.drafter import EagleDrafter

SIZES = (2, 1, 4, 3, 2)  # ids of five questions
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}


def behind(name, inputs, ids):
    """A prompt with these ids (n,) behind it."""
    types = FAMILIES[name].types
    result = inputs | {"input_ids": torch.cat([inputs["input_ids"], ids[None]], dim=1)}
    result["attention_mask"] = torch.ones_like(result["input_ids"])
    return result | ({types: torch.nn.functional.pad(inputs[types], (0, len(ids)))} if types else {})


def questions(name, count=2, **common):
    """Five questions of different length about each of some images, in turn."""
    rows = shapes(name)["one"][:1] if FAMILIES[name].visual else ["20"]
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(5, 88, (size,), generator=generator) for size in SIZES]
    images = [prompt(name, rows, seed) for seed in range(count)]
    result = [behind(name, image, ids) for ids in texts for image in images]
    return [p | {"max_new_tokens": 5 + i % 4, "seed": 100 + i} | common for i, p in enumerate(result)]


def streamed(quick, entries, cache, slots=6, **options):
    """Of each prompt: tokens, accepted of each round, and the tokens of the prompt that were reused."""
    result = sorted(quick.stream(entries, slots=slots, prefix_cache=cache, **options), key=lambda a: a.id)
    assert [a.error for a in result] == [None] * len(entries)
    return [(a.tokens, [r.committed for r in a.rounds]) for a in result], [a.reused for a in result]


@pytest.mark.parametrize("name", ["llama", "mistral", "llava", "qwen2_5_vl", "gemma3", "paligemma", "smolvlm"])
def test_rows_as_alone(name):
    quick, entries, cache = fast(name, "ngram"), questions(name), PrefixCache()
    result, reused = streamed(quick, entries, cache)
    assert [tokens for tokens, _ in result] == [quick.run(**entry).state.tokens[0] for entry in entries]
    if name == "paligemma":  # its prompts see themselves both ways
        assert not any(reused) and cache.refused and len(cache) == cache.hits == 0
    else:
        assert reused[:2] == [0, 0] and min(reused[2:]) >= entries[0]["input_ids"].shape[1] - SIZES[0]
        assert (cache.hits, cache.misses, len(cache), cache.refused) == (8, 2, 2, "")


def widened(drafter):
    drafter.width, drafter.nodes, drafter.traits = 3, 8, dataclasses.replace(drafter.traits, trees=True)
    return drafter


DRAFTERS = {
    "feature": make,
    "tree": lambda name: widened(make(name)),
    "eagle": lambda name: EagleDrafter.for_model(model_of(name), seed=3),
    "flash": lambda name: EagleDrafter.for_model(model_of(name), seed=3, images="latents", image_latents=2),
    "block": lambda name: BlockDrafter.for_model(model_of(name), layers=1, block=4),
    "small": lambda name: SmallModel(model_of("qwen2"), model_of(name)),
    "seeing": lambda name: SmallModel(model_of(name), model_of(name)),
    "layers": lambda name: "layers:exit=1", "context": lambda name: "context:shared=false",
}  # fmt: skip


@functools.cache
def plain(name, **options):
    """Tokens of each question about one image without a drafter, which exact decoding leaves as they are."""
    quick = fast(name, None)
    return [quick.run(**entry, **options).state.tokens[0] for entry in questions(name, 1)]


@pytest.mark.parametrize(
    "name, kind", [("llava", kind) for kind in DRAFTERS] + [("qwen2_5_vl", k) for k in ("feature", "tree", "seeing")]
)
def test_rounds_with_every_drafter(name, kind):
    """Greedy and sampled."""
    quick, entries = fast(name, DRAFTERS[kind](name)), questions(name, 1)
    for options in ({}, SAMPLED):
        result, reused = streamed(quick, entries, PrefixCache(), slots=3, **options)
        assert result == streamed(quick, entries, 0, slots=3, **options)[0] and sum(map(bool, reused)) == 4
        assert [tokens for tokens, _ in result] == plain(name, **options)
    assert not quick.setup.drafter.warned


@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_5_vl", "gemma3"])
@torch.inference_mode()
def test_features_and_cache_as_fresh(name):
    """Rows of different length, one of them from a kept prompt, one with a prompt that was read whole before."""
    model = model_of(name)
    quick = fast(name, visspec.models.eagle.drafter.EagleDrafter.for_model(model))
    target = HFDecoder(model, quick.setup.target.capabilities.feature_layers, embeddings=FAMILIES[name].visual)
    setup = visspec.loop.setup.build_setup(None, "", visspec.Exact(), model, lambda traits: target)
    entries = [{k: v for k, v in e.items() if k != "seed"} for e in questions(name)]
    cache, states = PrefixCache(), {}
    for kind, prefixes in (("fresh", None), ("reused", cache)):
        builder = RequestBuilder(model, setup, {}, prefixes)
        rows = [builder.request(n, e) for n, e in enumerate(entries)]
        if prefixes is not None:
            for some in ([0], [0, 2]):
                target.prefill(builder.together([rows[b] for b in some]))
        request = builder.together([rows[b] for b in (2, 0, 3, 4, 5)])
        states[kind] = open_request(target, setup.rule, request)
    assert cache.hits == 2 + 4 and states["reused"][0].request.reused.count(0) == 1
    (fresh, expected), (state, scores) = states["fresh"], states["reused"]
    real = torch.ones_like(fresh.request.prompt, dtype=torch.bool)
    real = expected.aux["attention"] if expected.aux["attention"] is not None else real
    assert torch.equal(scores.aux["attention"], real) and torch.equal(state.position, fresh.position)
    positions = expected.aux["positions"].expand(*scores.aux["positions"].shape)
    assert torch.equal(scores.aux["positions"][..., real], positions[..., real])
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(scores.distribution.logits, expected.distribution.logits, **close)
    torch.testing.assert_close(scores.features[real], expected.features[real], **close)
    for part in ["embeddings"] if target.embeddings else []:
        torch.testing.assert_close(scores.aux[part][real], expected.aux[part][real], **close)
    state.cache.slots.padding, lengths = None, state.cache.slots.lengths
    for b, length in enumerate(lengths):
        for mine, theirs in zip(state.cache.slots.keys, fresh.cache.slots.keys):
            torch.testing.assert_close(mine[b, :, :length], theirs[b, :, : real.shape[1]][:, real[b]], **close)


def test_other_image_is_a_miss():
    entries = questions("llava", 1, max_new_tokens=3)[:2]
    entries[1]["pixel_values"] = entries[1]["pixel_values"].clone()
    entries[1]["pixel_values"][0, 1, 2, 3] += 1e-6
    cache, quick = PrefixCache(), fast("llava", None)
    streamed(quick, entries, cache)
    assert (cache.hits, cache.misses) == (0, 2)
    assert streamed(quick, questions("llava", 3)[2:3], cache)[1] == [0]  # another image, the text of the first
    assert streamed(quick, entries[:1], cache)[1] == [entries[0]["input_ids"].shape[1] - 1]


def encoded(seed):
    """A prompt whose picture was encoded before, as others are but for numbers in the middle."""
    inputs = prompt("llava", ["5 i 7"])
    slots = int((inputs["input_ids"] == IMAGE).sum())
    features = torch.zeros(1, slots, model_of("llava").config.text_config.hidden_size)
    features[:, 1:-1, 1:-1] = torch.randn(features[:, 1:-1, 1:-1].shape, generator=torch.Generator().manual_seed(seed))
    picture = BaseModelOutputWithPooling(pooler_output=tuple(features))
    ids = torch.cat([inputs["input_ids"], torch.tensor([[8, 9]])], dim=1)
    return {"input_ids": ids, "mm_encoder_outputs": {"image": picture}, "max_new_tokens": 6}


@pytest.mark.skipif(
    "mm_encoder_outputs" not in signature(LlavaForConditionalGeneration.forward).parameters, reason="transformers 5.24"
)
@pytest.mark.parametrize("room", [0, 1 << 24])
def test_encoded_pictures(room):
    quick, cache, entries = fast("llava", None), PrefixCache(room), [encoded(seed) for seed in (1, 2, 1)]
    expected = [quick.run(**entry).state.tokens[0] for entry in entries]
    assert expected[0] == expected[2] != expected[1]
    torch.set_printoptions(threshold=4, edgeitems=1)  # as of tensors of more than 1,000 numbers
    try:
        assert len({repr(entry["mm_encoder_outputs"]) for entry in entries}) == 1
        result, reused = streamed(quick, entries, cache)
    finally:
        torch.set_printoptions(profile="default")
    assert [tokens for tokens, _ in result] == expected
    assert [bool(n) for n in reused] == [False, False, room > 0]


class Opaque:
    def __repr__(self):
        return "Opaque()"


def test_digest_of_arguments():
    @dataclasses.dataclass(repr=False)
    class Parts:
        values: list

    def digest(value):
        result = hashlib.sha256()
        return result.hexdigest() if add_to_digest(result, value) else None

    other = torch.zeros(2000)
    other[1000] = 1e-6
    wraps = list, tuple, lambda x: {"a": x}, lambda x: Parts([x]), lambda x: [x[0].numpy()], lambda x: [{"b": (x,)}]
    for wrap in wraps:
        same, equal, different = ([torch.zeros(2000)], [torch.zeros(2000)], [other])
        assert digest(wrap(same)) == digest(wrap(equal)) != digest(wrap(different)) != None  # noqa: E711
    assert digest(Opaque()) is digest([Opaque()]) is digest({"a": Opaque()}) is None
    assert digest([[1], 2]) != digest([[1, 2]]) and digest("1") != digest(1)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_all_image_slots_have_to_be_shared(name):
    """Of prompts of two images; another one differs in front of them, and a third between them."""
    whole = prompt(name, ["3 i 4 i 9"])
    ids = whole["input_ids"]
    slots = (ids[0] == IMAGE).nonzero().flatten()
    between = next(n for n in range(int(slots[0]), int(slots[-1])) if ids[0, n] < IMAGE)
    entries = [whole | {"max_new_tokens": 6, "input_ids": ids.clone()} for _ in range(5)]
    for entry, place in zip(entries[1:], (1, between, -6, -5)):
        entry["input_ids"][0, place] = 88 - ids[0, place] // 2
    quick, cache = fast(name, "ngram"), PrefixCache()
    result, reused = streamed(quick, entries, cache)
    assert [tokens for tokens, _ in result] == [quick.run(**entry).state.tokens[0] for entry in entries]
    assert [bool(n) for n in reused] == [False, False, False, True, True] and not cache.refused


def test_padding_read_afresh():
    entry = questions("llava", 1)[0]
    padded = {k: torch.nn.functional.pad(entry[k], (1, 0)) for k in ("input_ids", "attention_mask")}
    other = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "strange_values": torch.ones(1, 2)}
    builder = RequestBuilder(model_of("llava"), fast("llava", None).setup, {}, PrefixCache())
    keys = [builder._key(visspec.types.Request(e, e["input_ids"], 4)) for e in (entry | padded, other, entry)]
    assert keys[:2] == [None, None] and keys[2] is not None
    builder.request(0, entry)
    (known,) = builder.known.values()
    assert set(known.inputs.values()) == {None}, "what is known of options holds no prompt"


def test_least_recently_used():
    quick, entries = fast("llava", make("llava")), questions("llava", 4, max_new_tokens=6)
    expected, _ = streamed(quick, entries, 0)
    cache = PrefixCache()
    streamed(quick, entries[:4], cache)
    assert len(cache) == 4
    one = cache.bytes // 4
    small, most = PrefixCache(int(2.5 * one)), []
    answers = quick.stream(entries, slots=3, prefix_cache=small, on_tokens=lambda tokens: most.append(small.bytes))
    assert [(a.tokens, [r.committed for r in a.rounds]) for a in sorted(answers, key=lambda a: a.id)] == expected
    assert 0 < max(most) <= small.room and len(small) == 2
    assert sum(p.bytes for p in small._kept) == small.bytes
    kept = [e for e in questions("llava", 4, max_new_tokens=1)[:2]]
    lru = PrefixCache(int(2.5 * one))
    for entry in (kept[0], kept[1], kept[0], questions("llava", 4)[2]):  # the second is used least recently
        streamed(quick, [entry], lru)
    assert [bool(streamed(quick, [entry], lru)[1][0]) for entry in (kept[0], kept[1])] == [True, False]
    assert streamed(quick, entries[:5], PrefixCache(one // 2))[1][4] > 0  # rows of one batch share what is not kept


def test_chat_replaces_last_turn():
    quick, cache = fast("qwen2_5_vl", "ngram"), PrefixCache()
    entry, lengths = questions("qwen2_5_vl", 1, max_new_tokens=4)[0], []
    for turn in range(3):
        (answer,) = quick.stream([entry], prefix_cache=cache)
        assert answer.tokens == quick.run(**entry).state.tokens[0] and answer.reused == (lengths[-1] if turn else 0)
        lengths.append(entry["input_ids"].shape[1])
        entry = behind("qwen2_5_vl", entry, torch.tensor([*answer.tokens, 7, 9]))
    assert len(cache) == 1 and cache._kept[0].key.length == lengths[-1]


def test_one_model_and_no_dynamic_rope():
    cache, entries = PrefixCache(), questions("llama", 1)
    streamed(fast("llama", None), entries, cache)
    assert cache.hits == 4
    other = visspec.accelerate(llama(seed=1), None, adaptive=False)
    assert streamed(other, entries[:1], cache)[1] == [0]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    turning = visspec.accelerate(llama(rope_parameters=rope), None, adaptive=False)
    assert not any(streamed(turning, entries, cache)[1]) and cache.refused and not len(cache)
    cache = PrefixCache()
    streamed(fast("llama", None), entries, cache)
    cache.clear()
    assert cache.bytes == len(cache) == 0


def changes(model):
    """Names of changes of a model's weights, each made when its name is asked for."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1.5)
    yield "in place"
    model.load_state_dict(kept)
    yield "loaded"
    with torch.inference_mode():
        model.get_input_embeddings().weight.mul_(-1.5)
    yield "in place, in inference mode"
    weight = model.get_input_embeddings().weight
    weight.data = weight.data + 0.5
    yield "other data"


def adapters(model):
    yield "first"
    model.set_adapter("second")
    yield "second"
    with model.disable_adapter():
        yield "off"
    yield "second again"
    model.merge_adapter()
    model.set_adapter("first")
    yield "second merged, first in use"


@pytest.mark.parametrize("change", [changes, adapters])
def test_other_weights_not_reused(change):
    model = llama(seed=3)
    model = adapted(model) if change is adapters else model
    quick, entries, cache = visspec.accelerate(model, None, adaptive=False), questions("llama", 1)[:2], PrefixCache()
    seen = []
    for _ in change(model):
        expected = [quick.run(**entry).state.tokens[0] for entry in entries]
        answers, reused = streamed(quick, entries, cache)
        assert [tokens for tokens, _ in answers] == expected and not reused[0]
        assert all(streamed(quick, entries, cache)[1]), "of the same weights they are"
        seen.append(expected)
    assert len({str(each) for each in seen}) >= 3


@pytest.mark.parametrize("room", [-1, True, "1GB"])
def test_refusals(room):
    with raises_line(f"prefix_cache: got {room!r}, expected a number of bytes"):
        fast("llama", None).stream([], prefix_cache=room)
