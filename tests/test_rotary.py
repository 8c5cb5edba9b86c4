"""Models whose frequencies or caches depend on how long the sequence has become: identical to stock, or refused."""

from types import SimpleNamespace

import pytest
import torch
import transformers as tf

import visspec
from tests.doubles import NEW, TreeOracle, new_tokens
from tests.tiny import TEXT, built, llama, prompt
from visspec.models.decoder.target import HFDecoder, content_ids

LIMIT = 32
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 4,
    "long_factor": [4.0, 8.0, 2.0, 16.0], "original_max_position_embeddings": LIMIT,
}  # fmt: skip
MAKE = {
    "dynamic": lambda **more: llama(max_position_embeddings=LIMIT, rope_parameters=DYNAMIC, **more),
    "longrope": lambda **more: llama(rope_parameters=LONGROPE, **more),
}
PROMPTS = {  # BOS is one more
    "crossing": ["13"], "at the limit": ["30"], "on it": ["31"], "above": ["39"], "ragged": ["19", "12", "3"],
    "ragged above": ["39", "12", "33"],
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, shape", [*(("dynamic", shape) for shape in PROMPTS), ("longrope", "crossing"), ("longrope", "ragged above")]
)
def test_frequencies_follow_each_node(kind, shape):
    """A fresh stock model's tokens, whatever is drafted and whoever used the module before."""
    inputs = prompt("llama", PROMPTS[shape])
    expected = new_tokens(MAKE[kind]().generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    model = MAKE[kind]()
    for drafter in (None, "ngram", TreeOracle(expected, 0.3, per_row=len(expected) > 1)):
        model(torch.arange(5, 85)[None])  # a longer pass than any of ours
        fast = visspec.accelerate(model, drafter, adaptive=False)
        assert new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected
        assert fast.last_stats.faults == 0
    assert fast.last_stats.tau > 1.7


@pytest.mark.parametrize("new", [NEW, LIMIT - 13], ids=["crossing", "ending on the limit"])
@pytest.mark.parametrize("kind", MAKE)
def test_request_between_passes(kind, new):
    inputs = prompt("llama", PROMPTS["crossing"])
    expected = new_tokens(MAKE[kind]().generate(**inputs, max_new_tokens=new, do_sample=False), inputs)
    model = MAKE[kind]()

    class Intruder(TreeOracle):
        def propose(self, state, depth):
            model(torch.arange(5, 75)[None])
            return super().propose(state, min(depth, 2))

    fast = visspec.accelerate(model, Intruder(expected, 0.3), adaptive=False)
    assert new_tokens(fast.generate(**inputs, max_new_tokens=new, do_sample=False), inputs) == expected


def test_short_requests_pay_nothing():
    """Below the limit, or above it from the first, passes run without hooks."""
    for kind, shape, new, moves in (
        ("dynamic", "crossing", 10, False), ("longrope", "above", NEW, False), ("longrope", "crossing", NEW, True),
    ):  # fmt: skip
        fast = visspec.accelerate(MAKE[kind](), None)
        fast.generate(**prompt("llama", PROMPTS[shape]), max_new_tokens=new, do_sample=False)
        assert fast.last_state.cache.moves == moves


def phi3(**changes):
    """Preparation takes its cache away once the ids are longer than `original_max_position_embeddings`."""
    return built(tf.Phi3ForCausalLM, tf.Phi3Config(**{**TEXT, "original_max_position_embeddings": 16, **changes}))


LONG_PHI = {**LONGROPE, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": LONG_PHI}], ids=["default", "longrope"])
@pytest.mark.parametrize("rows", [["16"], ["19"], ["19", "12", "17"]], ids=["one more", "long", "ragged"])
def test_cache_of_long_prompt(changes, rows):
    model, inputs = phi3(**changes), prompt("llama", rows)
    expected = new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    for drafter in (None, TreeOracle(expected, 0.3)):
        fast = visspec.accelerate(model, drafter, adaptive=False)
        assert new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected


def test_answer_across_cache_limit():
    model, inputs = phi3(), prompt("llama", ["9"])
    fast, passes = visspec.accelerate(model, None), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match="max_new_tokens: got 8 after a prompt of 10") as caught:
        fast.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert ". " not in str(caught.value) and not passes
    expected = model.generate(**inputs, max_new_tokens=7, do_sample=False)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=7, do_sample=False), expected)
    behind, before = fast.stream([prompt("llama", ["19"]), inputs], slots=2, max_new_tokens=8, do_sample=False)
    answers = {answer.id: answer for answer in (behind, before)}
    assert answers[0].error is None and "after a prompt of 10" in str(answers[1].error)  # as alone


def offloaded(model):
    """Weights that stand on no device between passes, as accelerate keeps them for `device_map` with a disk."""
    for module in model.modules():
        if own := {k: p for k, p in module._parameters.items() if p is not None}:
            gone = {k: torch.nn.Parameter(p.to("meta"), requires_grad=False) for k, p in own.items()}
            module._parameters.update(gone)
            module.register_forward_pre_hook(lambda m, _, own=own: m._parameters.update(own))
            module.register_forward_hook(lambda m, *_, gone=gone: m._parameters.update(gone))
    model._hf_hook = SimpleNamespace(execution_device="cpu")
    return model


def test_weights_on_a_disk():
    inputs = prompt("llama", ["14", "5"])
    expected = new_tokens(llama(seed=1).generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    model = offloaded(llama(seed=1))
    assert model.device.type == "meta" and HFDecoder(model).device.type == "cpu"
    for drafter in (None, "ngram", TreeOracle(expected, 0.3)):
        fast = visspec.accelerate(model, drafter)
        assert new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected


def test_content_ids_of_parts():
    config = tf.LlavaConfig(text_config=tf.LlamaConfig(**TEXT), image_token_index=90)
    config.vision_config.video_token_id = 91
    config.audio_config = tf.PretrainedConfig(audio_token_id=92)
    assert content_ids(config) == {90, 91, 92}
