"""Adapters and quantised weights: the tokens of transformers' generate under the same weights, whichever drafter."""

import functools
import itertools
import warnings
from contextlib import nullcontext

import pytest
import torch
import transformers as tf

import visspec
from tests.replays import recording
from tests.tiny import llama, prompt
from visspec.models.decoder.layer_skip import LayerSkip
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.runner import buffer_pool, compiled

GREEDY = {"max_new_tokens": 12, "do_sample": False}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}  # in groups of 32
DRAFTERS = {
    "ngram": lambda model: "ngram", "context": lambda model: "context", "layers": lambda model: LayerSkip(),
    "eagle": lambda model: EagleDrafter.for_model(model), "small model": lambda model: llama(seed=5),
    "eagle3": lambda model: EagleDrafter.for_model(model, fusion="split", feature_layers=(1, 0, -1), draft_vocab=40),
}  # fmt: skip


def adapted(model, heads=True):
    """Two adapters, of which the first is in use."""
    peft = pytest.importorskip("peft")
    parts = ["q_proj", "down_proj", *["lm_head"] * heads]
    config = peft.LoraConfig(r=2, target_modules=parts, lora_alpha=16, init_lora_weights=False, task_type="CAUSAL_LM")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config, adapter_name="first")
        model.add_adapter("second", config)
    return model.eval()


def states_of(model):
    yield from (("first", nullcontext()), ("off", model.disable_adapter()))
    model.set_adapter("second")
    yield "second", nullcontext()
    model.merge_adapter()
    yield "second merged", nullcontext()
    model.unmerge_adapter()
    model.set_adapter("first")
    yield "first again", nullcontext()


@pytest.fixture
def quick(monkeypatch):
    """Compiled without code, or recorded without a GPU, from the first request on."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(compiled, "WORTH", 1)
    monkeypatch.setattr(buffer_pool, "MIN_NEW_TOKENS", 1)
    recording(monkeypatch)
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("drafter, passes", [
    *((name, "graphs") for name in DRAFTERS if name != "context"), ("ngram", "eager"), ("eagle", "eager"),
    *(pytest.param(drafter, "compile", marks=pytest.mark.nightly) for drafter in DRAFTERS),
])  # fmt: skip
def test_adapters_switched_between_calls(drafter, passes, quick):
    """The passes that graphs record first run eager; without graphs, with and without a head of the drafter's own."""
    model, inputs = adapted(llama(3)), prompt("llama", ["9", "5"])
    options = {"compile": passes == "compile", "graphs": passes == "graphs"}
    fast = visspec.accelerate(model, DRAFTERS[drafter](model.get_base_model()), adaptive=False, **options)
    answers = {}
    for name, use in states_of(model):
        with use:
            answers[name] = model.generate(**inputs, **GREEDY)
            assert torch.equal(fast.generate(**inputs, **GREEDY), answers[name]), name
    for made in filter(None, (fast.target.passes, fast.target.recorder)):
        assert made.graphs >= 5 and not made.refused
    first, off, second, merged, again = answers.values()
    assert torch.equal(first, again) and torch.equal(second, merged)
    assert not torch.equal(first, off) and not torch.equal(first, second) and not torch.equal(second, off)


@pytest.mark.parametrize("passes", [pytest.param("compile", marks=pytest.mark.nightly), "graphs"])
def test_adapter_added_to_a_recorded_head(passes, quick):
    peft, model, inputs = pytest.importorskip("peft"), llama(3), prompt("llama", ["9"])
    fast = visspec.accelerate(model, "ngram", adaptive=False, **{passes: True})
    before = fast.generate(**inputs, **GREEDY)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(fast.generate(**inputs, **GREEDY), expected) and not torch.equal(before, expected)


def test_adapter_on_head():
    model = adapted(llama(3)).get_base_model()
    drafter, feature = EagleDrafter.for_model(model), torch.randn(2, 32)
    assert torch.allclose(drafter.layer.logits(feature), model.lm_head(feature), atol=1e-5)


def bits(package, make):
    def made():
        pytest.importorskip(package)
        return make()

    return made


def torchao(name):
    def make():
        from torchao import quantization
        from torchao.quantization.granularity import PerGroup

        own = {"weight_dtype": torch.int4, "granularity": PerGroup(32)} if name == "IntxWeightOnlyConfig" else {}
        return tf.TorchAoConfig(getattr(quantization, name)(**own))

    return bits("torchao", make)


nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
ALIKE = {  # a token's result does not depend on those beside it, but for rounding in float32
    "bitsandbytes int8": bits("bitsandbytes", lambda: tf.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)),
    "bitsandbytes nf4": bits(
        "bitsandbytes", lambda: tf.BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=torch.float32)
    ),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int4": torchao("IntxWeightOnlyConfig"),
    "quanto int8": bits("optimum.quanto", lambda: tf.QuantoConfig(weights="int8")),
}
OTHERWISE = {
    "bitsandbytes int8, outliers apart": bits("bitsandbytes", lambda: tf.BitsAndBytesConfig(load_in_8bit=True)),
    "torchao int8 activations": torchao("Int8DynamicActivationInt8WeightConfig"),
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    where, plain = tmp_path_factory.mktemp("plain"), llama(3, **SIZES)
    plain.save_pretrained(where)

    @functools.cache
    def load(name):
        config = {**ALIKE, **OTHERWISE}[name]()
        with torch.random.fork_rng(devices=[]):
            options = {"device_map": "cpu", "dtype": torch.float32, "local_files_only": True}
            model = tf.AutoModelForCausalLM.from_pretrained(where, quantization_config=config, **options)
        model.generation_config = plain.generation_config
        return model

    return load


@pytest.mark.slow
@pytest.mark.parametrize("drafter, name", [
    *itertools.product(("layers", "eagle"), ALIKE),  # they run quantised layers themselves, and the head
    ("ngram", "bitsandbytes nf4"), ("context", "torchao int8"), ("eagle3", "bitsandbytes nf4"),
    ("small model", "torchao int8"),
])  # fmt: skip
def test_quantised_weights(drafter, name, quantised, recwarn):
    model, inputs = quantised(name), prompt("llama", ["9", "5"])
    fast = visspec.accelerate(model, DRAFTERS[drafter](model), adaptive=False)
    assert torch.equal(fast.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    assert not [said for said in recwarn if "visspec" in said.filename or "differently" in str(said.message)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERWISE)
def test_quantised_arithmetic_warns(name, quantised):
    """One pass against one by one. The probe's few tokens show it where columns of a pass are treated apart."""
    model, ids = quantised(name), torch.randint(5, 88, (1, 40))
    with torch.no_grad():
        once, cache = model(ids).logits, tf.DynamicCache()
        steps = torch.cat([model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(40)], dim=1)
    assert ((once - steps).norm(dim=-1) / steps.norm(dim=-1)).max() > 1e-3
    seen = "outliers" in name
    with pytest.warns(RuntimeWarning, match="differently in a batch of nodes") if seen else nullcontext():
        visspec.accelerate(model, "ngram")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_an_adapter_on_quantised_weights(drafter, quantised):
    model, inputs = adapted(quantised("bitsandbytes nf4"), heads=False), prompt("llama", ["9", "5"])
    try:
        fast = visspec.accelerate(model, DRAFTERS[drafter](model.get_base_model()), adaptive=False)
        for adapter in ("first", "second"):
            model.set_adapter(adapter)
            assert torch.equal(fast.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    finally:
        model.unload()
