"""Accelerated models and pipelines under the habits of their owners: moved, cast, given new parts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import GenerationConfig

import visspec
from tests import tiny_images
from tests.doubles import new_tokens
from tests.tiny import llama, llava, prompt, shapes
from tests.tiny_images import Words
from visspec.api.images.pipeline import ImagePipeline
from visspec.api.text.accelerate import Speculative
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.image_drafter import ImageFeatureDrafter
from visspec.models.image_codes.family import family_of
from visspec.models.lowres.drafter import LowRes

GREEDY = {"do_sample": False, "max_new_tokens": 12}
DRAFTERS = {
    "none": lambda model: None,
    "ngram": lambda model: "ngram",
    "features": lambda model: EagleDrafter.for_model(model, seed=2),
    "small": lambda model: llama(seed=5),
}


@pytest.fixture
def ragged():
    return prompt("llava", shapes("llava")["ragged"])


def cast(inputs, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize(
    "call", [lambda m: m.eval(), lambda m: m.train(), lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(),
             lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double(), lambda m: m.requires_grad_(False),
             lambda m: m.to(torch.float32).eval()]
)  # fmt: skip
def test_chained_methods(call):
    fast = visspec.accelerate(llama())
    assert call(fast) is fast
    assert fast.get_input_embeddings() is fast.model.get_input_embeddings() and fast.eval.__name__ == "eval"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_cast_model(kind, ragged):
    """Masks, tables and drafters follow, to bfloat16 and back, whether the wrapper or the model itself is cast."""
    model = llava()
    expected = new_tokens(model.generate(**ragged, **GREEDY), ragged)
    fast = visspec.accelerate(model, DRAFTERS[kind](model), adaptive=False)
    assert new_tokens(fast.generate(**ragged, **GREEDY), ragged) == expected
    for move in (fast, model):
        move.bfloat16()
        given = cast(ragged, torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            result = fast.run(**given, **GREEDY)
        assert result.stats.faults == 0 and result.stats.tau >= 1 and fast.dtype == torch.bfloat16
        assert fast.target.masks.dtype == torch.bfloat16
        if kind == "features":
            assert fast.drafter.dtype == fast.drafter.layer.qkv.dtype == torch.bfloat16
        if kind == "none":
            assert torch.equal(result.output, model.generate(**given, **GREEDY))
        move.float()
        result = fast.run(**ragged, **GREEDY)
        assert torch.equal(result.output, model.generate(**ragged, **GREEDY)) and result.stats.faults == 0
    assert fast.setup is fast.setup, "built once"


def test_tables_move_with_the_model():
    fast = visspec.accelerate(llama(), "ngram", probe=False)  # without weights nothing runs
    assert fast.setup.drafter.limits.device.type == "cpu" and fast.to("meta") is fast
    assert fast.setup.drafter.limits.device.type == fast.device.type == "meta"


def test_attention_change_is_probed():
    fast = visspec.accelerate(llama())
    fast.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation: got 'flash_attention_2'"):
        fast.generate(**prompt("llama", ["5"]), **GREEDY)


def test_what_is_set_is_set_on_the_model():
    fast = visspec.accelerate(llama())
    fast.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
    assert fast.model.generation_config.max_new_tokens == 3 and "generation_config" not in vars(fast)
    inputs = prompt("llama", ["5"])
    assert fast.generate(**inputs, do_sample=False).shape[1] == inputs["input_ids"].shape[1] + 3
    fast.tokenizer = "mine"
    assert fast.tokenizer == "mine" and not hasattr(fast.model, "tokenizer")


def test_hook_of_the_calling_model():
    """Two models, one hook, also where the other one calls between the making of what accelerates and its use."""
    inputs, first, second = prompt("llama", ["9"]), llama(seed=1), llama(seed=2)
    expected = [m.generate(**inputs, **GREEDY) for m in (first, second)]

    class Interrupted(Speculative):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "fast" and value is not None and value.model is first:
                output = second.generate(**inputs, **GREEDY, custom_generate=self)
                assert torch.equal(output, expected[1])

    hook = Interrupted("ngram", {})
    for model, want in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        assert torch.equal(model.generate(**inputs, **GREEDY, custom_generate=hook), want)
        assert hook.last_stats.tokens == 12


# --- pipelines ------------------------------------------------------------------------------------------------------


def fresh() -> ImagePipeline:
    """A pipeline on a model of its own."""
    pipe = ImagePipeline(copy.deepcopy(tiny_images.janus()), Words(), drafter="jacobi:window=4")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tokens(pipe, **options):
    out = pipe(["a b", "c"], seed=3, output_type="latent", **options)
    assert sum(s.faults for s in out.stats) == 0
    return torch.stack(out.tokens)


@pytest.mark.parametrize("by", ["pipeline", "model"])
def test_a_cast_pipeline(by):
    pipe = fresh()
    learned = ImageFeatureDrafter.for_model(pipe.family, seed=3)
    methods = [{}, {"drafter": learned}, {"drafter": None, "acceptance": "lantern:k=4,delta=0.2"}]
    expected = [tokens(pipe, **m) for m in methods]
    weights = copy.deepcopy(pipe.model.state_dict())
    move = pipe if by == "pipeline" else pipe.model
    move.to(torch.bfloat16)
    drawn = [tokens(pipe, **m) for m in methods]
    assert pipe.setup(learned, "exact").target.masks.dtype == learned.dtype == learned.embed.weight.dtype == pipe.dtype
    assert pipe.dtype == torch.bfloat16 and torch.equal(drawn[0], drawn[1]), "still what plain drawing gives"
    move.to(torch.float32)
    pipe.model.load_state_dict(weights)
    pipe.to(torch.float32)
    for method, want in zip(methods, expected):
        assert torch.equal(tokens(pipe, **method), want)
    assert not learned.layer.qkv.is_inference() and not learned.embed.weight.is_inference()


def test_lowres_belongs_to_one_model():
    pipe, other = fresh(), fresh()
    drafter = LowRes(family_of(tiny_images.janus(), Words()))
    tokens(pipe, drafter=drafter)
    tokens(pipe.to(torch.float32), drafter=drafter)
    with pytest.raises(ValueError, match=r"^drafter: got a LowRes that drafts for another model, expected"):
        tokens(other, drafter=drafter)
