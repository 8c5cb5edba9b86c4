"""What a model is asked when it is wrapped: models that can't be verified are caught without naming them."""

import pytest
import torch
import transformers as tf

import visspec
from tests.doubles import NEW, TreeOracle, new_tokens
from tests.test_rotary import MAKE
from tests.test_targets import SIZES, refused
from tests.tiny import FAMILIES, TEXT, built, llama, mistral, prompt
from tests.tiny_classes import tiny_model
from visspec.models.attention import pass_inputs
from visspec.models.decoder import probe
from visspec.models.decoder.target import HFDecoder


def gpt_neo(window=8, positions=512):
    """Windows that live in a buffer of every other layer's attention."""
    config = tf.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=window,
        max_position_embeddings=positions, **SIZES,
    )  # fmt: skip
    return built(tf.GPTNeoForCausalLM, config, attention="eager")


def unnamed_window():
    model = gpt_neo(256, 2048)
    model.config.window_size = 1
    return model


@pytest.mark.parametrize("make", [unnamed_window, lambda: gpt_neo(256, 2048)], ids=["unnamed", "as-trained"])
def test_long_windows_refused(make):
    refused(make(), "than for the same tokens one by one")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_arithmetic_is_no_fault(dtype):
    for name in ("llama", "gemma2", "qwen3_vl"):
        visspec.accelerate(FAMILIES[name].make().to(dtype), None)
    refused(gpt_neo().to(dtype), "different logits")


@pytest.mark.parametrize(("astray", "supported"), [(1, True), (100, False)])
def test_half_precision_draws(monkeypatch, astray, supported):
    """Rounding is amplified in some draws only; a difference in all of them is a fault."""
    measure, errors = probe._difference, iter(astray * [0.4])
    monkeypatch.setattr(probe, "_difference", lambda *given: (next(errors, measure(*given)[0]), 0.1))
    result = probe._probe(HFDecoder(llama().to(torch.bfloat16), check=False))
    assert (result.fault is None) == supported and result.padding


def test_missing_layers_at_prompt():
    inputs = prompt("llama", ["9"])
    with pytest.raises(ValueError, match="wrote keys and values in 1 of 2 layers"):
        fast = visspec.accelerate(tiny_model("MllamaForConditionalGeneration"), None, probe=False)
        fast.generate(**inputs, max_new_tokens=2, do_sample=False)


def test_control_sibling_visible(monkeypatch):
    """Control: our own masks, one node off."""

    def careless(ancestor, *rest):
        return visibility(ancestor | ancestor.new_ones(ancestor.shape).tril(), *rest)

    visibility = pass_inputs.visibility
    monkeypatch.setattr(pass_inputs, "visibility", careless)
    with pytest.raises(ValueError, match="different logits"):
        HFDecoder(llama(rms_norm_eps=1.1e-6))


@pytest.mark.parametrize("other", [7, 9])
def test_it_sees_a_window_that_is_one_off(other):
    """Control: 8 is right."""
    model = mistral()
    target = HFDecoder(model)
    target.masks.window = other
    with probe.restore_after(model):
        assert "different logits" in probe._probe(target).fault


def _picture(model):
    """Everything of a model that a pass might change."""
    modules = {name: {k: v for k, v in vars(m).items() if not isinstance(v, dict)} for name, m in model.named_modules()}
    hooks = {name: [*m._forward_hooks, *m._forward_pre_hooks] for name, m in model.named_modules()}
    return modules, hooks, {k: v.clone() for k, v in model.named_buffers()}


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_probe_restores_model(rope):
    model = MAKE[rope](attention_dropout=0.5)
    model(torch.arange(5, 55)[None])  # frequencies of a long pass
    model.model.layers[0].register_forward_hook(lambda *_: torch.rand(1) and None)  # a model that draws
    model.train()
    model.model.norm.eval()
    modules, hooks, buffers = _picture(model)
    torch.manual_seed(3)
    random = torch.get_rng_state()
    HFDecoder(model, (0, 1))
    after = _picture(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert after[1] == hooks and after[2].keys() == buffers.keys()
    assert all(torch.equal(after[2][k], v) for k, v in buffers.items())
    for name, attributes in modules.items():
        assert after[0][name].keys() == attributes.keys()
        assert all(after[0][name][k] is v for k, v in attributes.items() if not isinstance(v, set)), name
    assert model.training and not model.model.norm.training
    assert not any(b.is_inference() for b in model.buffers())


def test_quantised_heads():
    """Weights packed by torch.ao are behind a method; a token's law depends on what else is in the pass."""
    model = torch.ao.quantization.quantize_dynamic(llama(seed=1), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.warns(RuntimeWarning, match="differently in a batch of nodes"):
        fast = visspec.accelerate(model, None)
    assert fast.target.capabilities.vocab == 96
    inputs = prompt("llama", ["14"])
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), expected)


DECODES = {
    "a prompt that sees its own end": lambda: built(
        tf.BertLMHeadModel,
        tf.BertConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128, is_decoder=False, **SIZES,
        ),
    ),
    "a window that only stock's cache keeps": lambda: llama(sliding_window=8),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODES)
def test_causal_in_own_way(name):
    model, inputs = DECODES[name](), prompt("llama", ["19", "12", "3"])
    expected = new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    fast = visspec.accelerate(model, TreeOracle(expected, 0.3), adaptive=False)
    assert new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected


def test_adapters_that_are_refused():
    """One a row, and tokens before the prompt, which would be left out."""
    peft = pytest.importorskip("peft")
    in_layers = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    before = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    fast = visspec.accelerate(peft.get_peft_model(llama(3), in_layers), "ngram")
    with pytest.raises(ValueError, match="adapter_names: got list, expected None"):
        fast.generate(**prompt("llama", ["9", "5"]), max_new_tokens=NEW, adapter_names=["a", "b"])
    with pytest.raises(ValueError, match=r"model: got an adapter of \w+, expected one in the layers"):
        visspec.accelerate(peft.get_peft_model(llama(3), before))


class OwnGenerate(tf.LlamaForCausalLM):
    def generate(self, *args, **kwargs):
        return args[0]


def test_another_generate_is_refused():
    refused(built(OwnGenerate, tf.LlamaConfig(**TEXT)), "its own generate")


def test_another_models_call_refused():
    other = visspec.accelerate(llama(), None)
    other.model = mistral()
    with pytest.raises(ValueError, match="model: got a call of MistralForCausalLM, expected LlamaForCausalLM"):
        other.generate(**prompt("llama", ["9"]), max_new_tokens=3)


def test_sampled_rows_of_driven_model():
    model, ids = tiny_model("GitForCausalLM"), prompt("llama", ["6", "6"])["input_ids"]
    inputs = {"input_ids": ids, "pixel_values": torch.zeros(2, 3, 8, 8)}
    sampling = {"do_sample": True, "max_new_tokens": NEW, "seed": [3, 4]}
    expected = new_tokens(visspec.accelerate(model, None).generate(**inputs, **sampling), inputs)
    result = visspec.accelerate(model, TreeOracle(expected, 0.3)).generate(**inputs, **sampling)
    assert new_tokens(result, inputs) == expected
