"""What a model is asked when it is wrapped: models that can't be verified are caught without naming them."""

import gc
import time
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

import visspec
from tests.doubles import NEW, TreeOracle, new_tokens, one_sentence
from tests.test_rotary import MAKE
from tests.test_targets import SIZES, refused
from tests.tiny import FAMILIES, TEXT, TOWER, built, enliven, llama, mistral, prompt
from tests.tiny_classes import tiny_model
from visspec.api.loading import load
from visspec.models.attention import masks
from visspec.models.decoder import probe
from visspec.models.decoder.target import HFDecoder

VISION = {**TOWER, "patch_size": 4}


def gpt_neo(window=8, positions=512):
    """Windows that live in a buffer of every other layer's attention."""
    config = tf.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=window,
        max_position_embeddings=positions, **SIZES,
    )  # fmt: skip
    return built(tf.GPTNeoForCausalLM, config, attention="eager")


def mllama():
    text = tf.models.mllama.MllamaTextConfig(**{**TEXT, "num_hidden_layers": 3}, cross_attention_layers=[1])
    vision = tf.models.mllama.MllamaVisionConfig(
        hidden_size=16, attention_heads=2, num_hidden_layers=1, num_global_layers=1, intermediate_size=24,
        image_size=8, patch_size=4, vision_output_dim=32, intermediate_layers_indices=[0],
        supported_aspect_ratios=[[1, 1]], max_num_tiles=1,
    )  # fmt: skip
    config = tf.MllamaConfig(text_config=text, vision_config=vision, image_token_index=90)
    return tf.MllamaForConditionalGeneration(config).eval()


def xlm():
    config = tf.XLMConfig(emb_dim=32, n_layers=2, n_heads=4, vocab_size=96, n_words=96, mask_token_id=3, lang_id=0)
    return tf.XLMWithLMHeadModel(config).eval()


def idefics():
    config = tf.IdeficsConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
        additional_vocab_size=0, cross_layer_interval=1, use_resampler=False,
        vision_config={"embed_dim": 16, **VISION}, perceiver_config={"resampler_n_heads": 2},
    )  # fmt: skip
    return tf.IdeficsForVisionText2Text(config).eval()


def kosmos2():
    text = {
        "vocab_size": 96, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4,
        "max_position_embeddings": 128,
    }  # fmt: skip
    return tf.Kosmos2ForConditionalGeneration(
        tf.Kosmos2Config(text_config=text, vision_config=VISION, latent_query_num=4)
    ).eval()


def unnamed_window():
    model = gpt_neo(256, 2048)
    model.config.window_size = 1
    return model


CAUGHT = {
    "a window that nothing names": (unnamed_window, "other laws than the same tokens one by one"),
    "gpt-neo": (gpt_neo, "other laws than the same tokens one by one"),
    "gpt-neo as trained": (lambda: gpt_neo(256, 2048), "other laws than the same tokens one by one"),
    "openai-gpt": (
        lambda: tf.OpenAIGPTLMHeadModel(tf.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, **SIZES)).eval(),
        "keeps no cache",
    ),
    "xlm": (xlm, "keeps no cache"),
    "mllama": (mllama, r"wrote keys and values in 2 of 3 layers \(not in layer 1\)"),
    "imagegpt": (
        lambda: tf.ImageGPTForCausalImageModeling(
            tf.ImageGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)
        ).eval(),
        "expected a decoder of ids",
    ),
    "idefics": (idefics, "can't run a draft"),
    "kosmos-2": (kosmos2, "can't run a draft"),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_models_that_cannot_be_verified_are_refused(name):
    make, sentence = CAUGHT[name]
    refused(make(), sentence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_arithmetic_is_no_fault(dtype):
    for name in ("llama", "gemma2", "qwen3_vl"):
        visspec.accelerate(FAMILIES[name].make().to(dtype), None)
    refused(gpt_neo().to(dtype), "other laws")


def test_the_probe_can_be_switched_off():
    visspec.accelerate(gpt_neo(window=16), None, probe=False)


def test_layers_without_keys_are_found_at_the_prompt_too():
    inputs = prompt("llama", ["9"])
    with pytest.raises(ValueError, match="wrote keys and values in 2 of 3 layers"):
        visspec.accelerate(mllama(), None, probe=False).generate(**inputs, max_new_tokens=2, do_sample=False)


def test_it_sees_a_node_that_sees_its_sibling(monkeypatch):
    """Control: our own masks, one node off."""

    def careless(ancestor, *rest):
        return visibility(ancestor | ancestor.new_ones(ancestor.shape).tril(), *rest)

    visibility = masks.visibility
    monkeypatch.setattr(masks, "visibility", careless)
    with pytest.raises(ValueError, match="other laws"):
        HFDecoder(llama(rms_norm_eps=1.1e-6))


@pytest.mark.parametrize("other", [7, 9])
def test_it_sees_a_window_that_is_one_off(other):
    """Control: 8 is right."""
    model = mistral()
    target = HFDecoder(model)
    target.masks.window = other
    with probe.restore_after(model):
        assert "other laws" in probe._probe(target).fault


def test_an_error_is_told_in_spreads_of_what_is_right():
    right = torch.tensor([[[-1.0, 1.0]]])
    assert probe._difference(right + 4, right, exact=True)[0] == pytest.approx(4.0)


def test_an_answer_is_kept(monkeypatch):
    model, passes = llama(rms_norm_eps=1.2e-6), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    visspec.accelerate(model, None)
    assert len(passes) == 2
    visspec.accelerate(model, None)
    visspec.accelerate(llama(seed=5, rms_norm_eps=1.2e-6), None)
    assert len(passes) == 2


def _picture(model):
    """Everything of a model that a pass might change."""
    modules = {name: {k: v for k, v in vars(m).items() if not isinstance(v, dict)} for name, m in model.named_modules()}
    hooks = {name: [*m._forward_hooks, *m._forward_pre_hooks] for name, m in model.named_modules()}
    return modules, hooks, {k: v.clone() for k, v in model.named_buffers()}


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_the_probe_leaves_everything_as_it_was(rope):
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


def test_the_probe_is_cheap():
    """CPU seconds of a cold one on the embedded captioner, beside four passes of the model over eight tokens; the
    least of a few, by turns, as machines are busy and differ.
    """
    model, _ = load()
    visspec.accelerate(model, None)
    ids = torch.arange(5, 13)[None]

    def probed():
        probe._answers.clear()
        visspec.accelerate(model, None)

    def passes():
        with torch.inference_mode():
            for _ in range(4):
                model(input_ids=ids)

    def seconds(call):
        began = time.process_time()
        call()
        return time.process_time() - began

    gc.collect()
    gc.disable()  # what other tests have left is not the probe's
    try:
        taken, plain = zip(*((seconds(probed), seconds(passes)) for _ in range(6)))
    finally:
        gc.enable()
    assert min(taken) < 2 * min(plain), (taken, plain)


def test_quantised_heads_are_measured_and_warned_of():
    """Weights packed by torch.ao are behind a method; a token's law depends on what else is in the pass."""
    model = torch.ao.quantization.quantize_dynamic(llama(seed=1), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.warns(RuntimeWarning, match="differently beside others"):
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
def test_models_that_are_causal_in_their_own_way_equal_stock(name):
    model, inputs = DECODES[name](), prompt("llama", ["19", "12", "3"])
    expected = new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    fast = visspec.accelerate(model, TreeOracle(expected, 0.3), adaptive=False)
    assert new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected


def opt():
    return tf.OPTConfig(
        hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=128, **SIZES,
    )  # fmt: skip


QFORMER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "encoder_hidden_size": 16, "vocab_size": 96,
}  # fmt: skip


def inner_driven(kind, config):
    torch.manual_seed(0)
    parts = {"vision_config": VISION, "qformer_config": QFORMER, "text_config": opt().to_dict()}
    model = kind(config(**parts, num_query_tokens=4, image_token_index=90)).eval()
    enliven(model.language_model, 0)
    return model


def git():
    torch.manual_seed(0)
    config = tf.GitConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=128, vision_config=VISION, **SIZES,
    )  # fmt: skip
    return tf.GitForCausalLM(config).eval()


DRIVEN = {
    "blip-2": (lambda: inner_driven(tf.Blip2ForConditionalGeneration, tf.Blip2Config), 4),
    "instructblip": (lambda: inner_driven(tf.InstructBlipForConditionalGeneration, tf.InstructBlipConfig), 4),
    "git": (git, 0),
}


@pytest.mark.parametrize("name", DRIVEN)
def test_images_in_front_of_the_prompt(name):
    """Models whose generate calls an inner language model, and one whose image takes slots but no ids."""
    make, image = DRIVEN[name]
    model, ids = make(), prompt("llama", ["9", "9"])["input_ids"]
    ids[:, :image] = 90
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))}
    if name == "instructblip":
        inputs["qformer_input_ids"] = ids[:, 5:]
    limit = {"max_new_tokens": NEW, "do_sample": False}
    sequences = model.generate(**inputs, **limit)
    expected = sequences[:, ids.shape[1] :].tolist()
    assert len(expected[0]) == NEW
    for drafter in (None, "ngram", TreeOracle(expected, 0.3)):
        fast = visspec.accelerate(model, drafter, adaptive=False)
        assert torch.equal(fast.generate(**inputs, **limit), sequences)
    assert fast.last_stats.tau > 1.5


class StandIn(torch.nn.Module):
    """A `PeftModel` by its attributes: a model in a tuner, which is called through it. `tokens`: before the prompt."""

    def __init__(self, model, tokens=0):
        super().__init__()
        self.base_model = model if tokens else torch.nn.ModuleDict({"model": model})
        self.active_peft_config = SimpleNamespace(is_prompt_learning=tokens > 0)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.get_base_model(), name)

    def get_base_model(self):
        return self.base_model if self.active_peft_config.is_prompt_learning else self.base_model["model"]

    def generate(self, *args, **kwargs):
        return self.get_base_model().generate(*args, **kwargs)


def adapted(kind, model, tokens=0):
    if kind == "stand-in":
        return StandIn(model, tokens)
    peft = pytest.importorskip("peft")
    if tokens:
        config = peft.PromptTuningConfig(num_virtual_tokens=tokens, task_type="CAUSAL_LM")
    else:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("kind", ["stand-in", "peft"])
def test_a_model_with_an_adapter(kind):
    """In its layers; tokens before the prompt would be left out."""
    model, inputs = adapted(kind, llama(3)), prompt("llama", ["9", "5"])
    limit = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**inputs, **limit)
    for drafter in ("ngram", TreeOracle(expected[:, inputs["input_ids"].shape[1] :].tolist(), 0.3)):
        fast = visspec.accelerate(model, drafter, adaptive=False)
        assert torch.equal(fast.generate(**inputs, **limit), expected)
    assert fast.last_stats.tau > 1.5 and fast.model is model
    ids = inputs["input_ids"][:1]
    assert torch.equal(fast.generate(ids, **limit), model.generate(ids, **limit))
    with pytest.raises(ValueError, match="adapter_names: got list, expected None"):
        fast.generate(**inputs, **limit, adapter_names=["a", "b"])
    with pytest.raises(ValueError, match=r"model: got an adapter of \w+, expected one in the layers"):
        visspec.accelerate(adapted(kind, llama(3), tokens=3))


def test_padding_that_is_continued_otherwise_is_refused():
    inputs = prompt("llama", ["9", "5"])
    with pytest.raises(ValueError, match="attention_mask: got padding, expected rows of one length"):
        visspec.accelerate(git(), None).generate(**inputs, max_new_tokens=3, do_sample=False)


def test_states_that_every_pass_attends_to_are_refused():
    text = {
        "vocab_size": 96, "hidden_size": 32, "encoder_hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 2,
    }  # fmt: skip
    model = tf.BlipForConditionalGeneration(
        tf.BlipConfig(text_config=text, vision_config=VISION, projection_dim=16)
    ).eval()
    inputs = {"input_ids": prompt("llama", ["5"])["input_ids"], "pixel_values": torch.zeros(1, 3, 8, 8)}
    with pytest.raises(ValueError, match="encoder_hidden_states: got states that every pass attends to"):
        visspec.accelerate(model, None).generate(**inputs, max_new_tokens=3, do_sample=False)


class CountsItself(tf.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("position_ids", None)
        return inputs


def test_positions_that_a_model_counts_itself_are_refused():
    """Kosmos-2.5 takes them away and starts behind its padding id: where to go on is not known."""
    model = built(CountsItself, tf.LlamaConfig(**TEXT))
    with pytest.raises(ValueError, match="CountsItself counts positions itself"):
        visspec.accelerate(model, None).generate(**prompt("llama", ["9"]), max_new_tokens=3, do_sample=False)


class OwnLoop(tf.LlamaForCausalLM):
    def _sample(self, *args, **kwargs):
        return super()._sample(*args, **kwargs)


class OwnGenerate(tf.LlamaForCausalLM):
    def generate(self, *args, **kwargs):
        return args[0]


@pytest.mark.parametrize(
    "kind,sentence", [(OwnLoop, "decodes in a loop of its own"), (OwnGenerate, "a generate of its own")]
)
def test_other_loops_are_refused(kind, sentence):
    refused(built(kind, tf.LlamaConfig(**TEXT)), sentence)


def test_a_model_that_generate_does_not_hand_over_is_refused():
    other = visspec.accelerate(llama(), None)
    other.model = mistral()
    with pytest.raises(ValueError, match="model: got a call of MistralForCausalLM, expected LlamaForCausalLM"):
        other.generate(**prompt("llama", ["9"]), max_new_tokens=3)


def test_sampled_rows_of_a_driven_model_keep_their_seeds():
    model, ids = git(), prompt("llama", ["6", "6"])["input_ids"]
    inputs = {"input_ids": ids, "pixel_values": torch.zeros(2, 3, 8, 8)}
    sampling = {"do_sample": True, "max_new_tokens": NEW, "seed": [3, 4]}
    expected = new_tokens(visspec.accelerate(model, None).generate(**inputs, **sampling), inputs)
    found = visspec.accelerate(model, TreeOracle(expected, 0.3)).generate(**inputs, **sampling)
    assert new_tokens(found, inputs) == expected


def test_a_model_whose_every_prompt_would_be_refused_is_refused_at_once():
    model = tiny_model("HyperCLOVAXVisionV2ForConditionalGeneration")
    for _ in range(2):
        with one_sentence("model: HyperCLOVAXVisionV2ForConditionalGeneration counts positions itself"):
            visspec.accelerate(model, None)
