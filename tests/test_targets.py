"""Which models are refused, in one sentence, and what is known of those that are taken."""

import warnings

import pytest
import torch
import transformers as tf

import visspec
from tests.doubles import NEW, TreeOracle, new_tokens, raises_line
from tests.tiny import (
    BOS,
    EOS,
    FAMILIES,
    IMAGE,
    PAD,
    TEXT,
    VIDEO,
    VIDEOS,
    VISUAL,
    built,
    llama,
    model_of,
    prompt,
    qwen2_5_vl,
)
from visspec.models.attention.pass_inputs import CACHE, align_mask, nearby
from visspec.models.decoder.target import HFDecoder, describe
from visspec.tree import static


def refused(model, sentence):
    with raises_line(sentence):
        visspec.accelerate(model, "ngram")


@pytest.mark.parametrize(
    "attention", ["flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/x"]
)
def test_attention_without_masks_is_refused(attention):
    for make in (llama, qwen2_5_vl):
        model = make()
        model.config.get_text_config()._attn_implementation = attention
        refused(model, f"attn_implementation: got '{attention}', expected 'sdpa' or 'eager'")


SIZES = {"vocab_size": 96, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


@pytest.mark.parametrize("name", FAMILIES)
def test_capabilities(name):
    result = describe(model_of(name))
    assert (result.vocab, result.trees) == (96, True)
    assert (IMAGE in result.never_drafted) == (name in VISUAL) and (VIDEO in result.never_drafted) == (name in VIDEOS)


def test_prompt_ending_in_picture():
    inputs = prompt("qwen2_vl", ["5 i 3"])
    end = int((inputs["input_ids"][0] == IMAGE).nonzero()[-1])
    whole = {
        k: v[:, : end + 1] if k in ("input_ids", "attention_mask", "mm_token_type_ids") else v
        for k, v in inputs.items()
    }
    with pytest.raises(ValueError, match="input_ids: got a prompt that ends inside an image"):
        visspec.accelerate(model_of("qwen2_vl"), None).generate(**whole, max_new_tokens=3)


def test_features_are_the_hidden_states():
    model, inputs = model_of("llava"), prompt("llava", ["5 i 7"])
    target, kept = HFDecoder(model, (0, 1, -1), embeddings=True), []

    def take(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        own = logits_processor, stopping_criteria, generation_config
        request = visspec.api.text.requests.build(input_ids, *own, model_kwargs)
        with torch.no_grad():
            kept.append(target.prefill(request)[1])
        return input_ids

    model.generate(**inputs, custom_generate=take, max_new_tokens=4)
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states
    torch.testing.assert_close(kept[0].features, torch.cat([expected[i] for i in (0, 1, -1)], -1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept[0].aux["embeddings"], expected[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"features: got layer 9, expected one of -3\.\.3"):
        HFDecoder(model, (9,))


class Before(tf.LlamaForCausalLM):
    """Written for a transformers that calls a cache `past_key_values`."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        return super().forward(input_ids, attention_mask, **{CACHE: past_key_values}, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **{CACHE: past_key_values}, **kwargs)
        return {"past_key_values": inputs.pop(CACHE, None), **inputs}


class After(tf.LlamaForCausalLM):
    """Written for one that calls it `cache`."""

    def forward(self, input_ids=None, attention_mask=None, cache=None, **kwargs):
        return super().forward(input_ids, attention_mask, **{CACHE: cache}, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, cache=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **{CACHE: cache}, **kwargs)
        return {"cache": inputs.pop(CACHE, None), **inputs}


class Between(Before):
    """Takes a cache by a name that is not the one that it prepares inputs with."""

    def prepare_inputs_for_generation(self, input_ids, cache=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, cache, **kwargs)
        return {"cache": inputs.pop("past_key_values"), **inputs}


@pytest.mark.parametrize("kind", [Before, After, Between])
def test_a_cache_by_another_versions_name(kind):
    """Models from elsewhere keep the name of the transformers for which they were written."""
    model, stock = (built(k, tf.LlamaConfig(**TEXT)) for k in (kind, tf.LlamaForCausalLM))
    inputs = prompt("llama", ["19", "12"])
    expected = new_tokens(stock.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = visspec.accelerate(model, TreeOracle(expected, 0.3))
        assert new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_alignment(dtype):
    """A view into the shared buffer has any address; SDPA chooses wide loads by the strides alone."""
    buffer = torch.randn(1, 1, 5, 32).to(dtype)
    for first in range(1, 16):
        view = buffer[..., first:]
        result = align_mask(view)
        assert torch.equal(result, view)
        assert result.data_ptr() % 16 == 0 and result.stride(2) % 8 == 0


def test_windows_count_along_the_path():
    tree = static((-1, 0, 0, 1, 3))  # depths 0 1 1 2 3
    seen = nearby(tree.depth, [10], 15, window=4)[0]
    assert seen[0].nonzero()[:, 0].tolist() == [*range(7, 15)]  # the draft's own part is the tree's matter
    assert seen[4].tolist()[:10] == [False] * 10 and seen[4].tolist()[10:] == [True] * 5
    assert seen[3].tolist()[:10] == [False] * 9 + [True]
