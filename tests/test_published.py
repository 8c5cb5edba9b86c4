"""Published checkpoints: random tensors by published names load, draft as `published.py` says, and export again."""

import copy
import itertools
import json
import re
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GptOssConfig, GptOssForCausalLM

import visspec
from tests.doubles import raises_line
from tests.published import NEW, Weights, begun, check_drafts, dflash_hidden, edges, known, one_round, walked
from tests.test_assistants import block_assistant, muse_glimmer
from tests.test_drafter_checkpoints import Largest
from tests.test_eagle_heads import make
from tests.tiny import TEXT, built, llama, model_of, prompt, qwen3, shapes, single_row
from visspec import registry
from visspec.api.training.drafter import request_of
from visspec.distributions import draw
from visspec.loop.decode import open_request
from visspec.models import published
from visspec.models.block.drafter import BlockModel, DFlashVariant
from visspec.models.block.trained import BlockDrafter
from visspec.models.decoder.target import HFDecoder
from visspec.models.drafting.base import Chain
from visspec.models.eagle.config import EagleConfig
from visspec.models.published import form_of
from visspec.testing import check_drafter

D, V, MIDDLE, HEADS, SIZE = 32, 96, 40, 4, 8
FEW = 36
IDS = torch.randperm(90, generator=torch.Generator().manual_seed(3))[:FEW].sort().values


def drawn(shapes, seed=0, size=1.3):
    """Random tensors of these shapes. size: of matrices, less where no norm bounds what they write (rounding)."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in shapes.items():
        scale = size * shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        base = 1.0 if "norm" in name else 0.0
        result[name] = base + scale * torch.randn(shape, generator=generator)
    return result


def mlp(prefix):
    return {f"{prefix}mlp.gate_proj.weight": (MIDDLE, D), f"{prefix}mlp.up_proj.weight": (MIDDLE, D),
            f"{prefix}mlp.down_proj.weight": (D, MIDDLE)}  # fmt: skip


def attention(prefix, read, kv, size=SIZE):
    named = f"{prefix}self_attn."
    return {f"{named}q_proj.weight": (HEADS * size, read), f"{named}k_proj.weight": (kv * size, read),
            f"{named}v_proj.weight": (kv * size, read), f"{named}o_proj.weight": (D, HEADS * size)}  # fmt: skip


def llama_config(**more):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": MIDDLE,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": V,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "rope_scaling": None, **more,
    }  # fmt: skip


def eagle_2(**more):
    """EAGLE-1 and 2, and MSD."""
    tensors = {"embed_tokens.weight": (V, D), "fc.weight": (D, 2 * D), "fc.bias": (D,),
               "layers.0.post_attention_layernorm.weight": (D,)}  # fmt: skip
    return llama_config(**more), drawn(tensors | attention("layers.0.", D, HEADS) | mlp("layers.0."), size=1.0)


def vispec(queries=2):
    config, tensors = eagle_2(qkv_bias=True)
    more = {"imadpt.q": (queries, HEADS, SIZE), "imadpt.o_proj.weight": (D, D), "img_fc.weight": (D, 2 * D),
            "img_fc.bias": (D,)}  # fmt: skip
    for name in ("k", "v"):
        more |= {f"imadpt.{name}_proj.weight": (D, D), f"imadpt.{name}_proj.bias": (D,)}
    more |= {f"layers.0.self_attn.{name}_proj.bias": (D,) for name in "qkv"}
    return config, tensors | drawn(more, 1)


LLAVA = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "pad_token_id": 0, "pretraining_tp": 1,
         "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float16"}  # fmt: skip
QWEN = {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "max_window_layers": 28, "rope_theta": 5000.0,
        "sliding_window": 32768, "torch_dtype": "bfloat16", "use_sliding_window": False}  # fmt: skip


def of_a_trainer(layout, name, kind, **more):
    """A layout under the configuration that a trainer of MSD or ViSpec stores with it; sizes are ours."""
    data, tensors = layout()
    for key in ("rope_theta", "rope_scaling", "qkv_bias"):
        data.pop(key, None)
    return data | {"architectures": [name], "model_type": kind} | more, tensors


def vispec_of_qwen():
    return of_a_trainer(vispec, "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", **QWEN, qkv_bias=True)


def vispec_of_llava():
    data, tensors = of_a_trainer(vispec, "LlavaNextForConditionalGeneration", "llava_next", **LLAVA, rope_scaling=None)
    return data, {name: tensor for name, tensor in tensors.items() if not name.endswith("_proj.bias")}


def of_target(model, **more):
    """The configuration of a target's decoder, written whole, with the entries that a trainer sets in it."""
    config = copy.deepcopy(model.config.get_text_config())
    for name, value in more.items():
        setattr(config, name, value)
    return json.loads(config.to_json_string(use_diff=False))


def automodel_eagle(kind, name, queries=3, size=SIZE, **more):
    """NeMo Automodel's EAGLE-1 and 2, and its ViSpec: all heads have keys; the number of layers is the target's."""
    data = of_target(
        model_of(kind), architectures=[name], draft_num_hidden_layers=1, vispec_num_query_tokens=queries, fc_bias=True,
        num_key_value_heads=HEADS, qkv_bias=True, intermediate_size=MIDDLE, **more,
    )  # fmt: skip
    tensors = attention("layers.0.", D, HEADS, size) | {"layers.0.input_layernorm.weight": (D,), "norm.weight": (D,)}
    tensors |= {f"layers.0.self_attn.{n}_proj.bias": (HEADS * size,) for n in "qkv"}
    tensors = vispec(queries)[1] | drawn(tensors, 5)
    if name == "LlamaEagleDraftModel":
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("im")}
    theirs = {key: key.replace("imadpt", "img_adaptor").replace("adaptor.q", "adaptor.query") for key in tensors}
    return data, {theirs[key]: tensor for key, tensor in tensors.items()}


def msd_of_llava():
    """Its vocabulary is that of LLaVA's own checkpoint, to which transformers' conversion adds ids of padding."""
    more = {"mm_projector_type": "mlp2x_gelu", "mm_vision_select_layer": -2, "vocab_size": 90, "rope_scaling": None}
    data, tensors = of_a_trainer(eagle_2, "LlavaLlamaForCausalLM", "llava", **LLAVA, **more)
    return data, tensors | {"embed_tokens.weight": tensors["embed_tokens.weight"][:90].clone()}


def msd_of_qwen():
    """Its layer is Qwen2-VL's: fewer heads of keys, biases, and an input norm."""
    more = {"vision_config": {"depth": 32}, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    layout, kind = of_a_trainer(eagle_2, "Qwen2VLForConditionalGeneration", "qwen2_vl", **QWEN, **more), "layers.0."
    more = attention(kind, D, 2) | {f"{kind}self_attn.{n}_proj.bias": (SIZE * c,) for n, c in zip("qkv", (HEADS, 2, 2))}
    more = drawn(more | {f"{kind}input_layernorm.weight": (D,)}, 5)
    return layout[0] | {"num_key_value_heads": 2}, layout[1] | more


def vocabulary():
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[IDS] = True
    return {"d2t": IDS - torch.arange(FEW), "t2d": t2d}


def eagle_3(**more):
    """EAGLE-3 as its authors and SpecForge write it, without an embedding of its own."""
    tensors = {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (FEW, D)}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"midlayer.{name}.weight": (D,) for name in norms}
    tensors |= attention("midlayer.", 2 * D, 2) | mlp("midlayer.")
    data = llama_config(architectures=["LlamaForCausalLMEagle3"], num_key_value_heads=2, draft_vocab_size=FEW)
    data |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0], "use_aux_hidden_state": True}, **more}
    return data, drawn(tensors) | vocabulary()


def speculators_eagle_3(**more):
    tensors = {"fc.weight": (D, 2 * D), "norm.weight": (D,), "lm_head.weight": (FEW, D), "embed_tokens.weight": (V, D),
               "fc_norm.0.weight": (D,), "fc_norm.1.weight": (D,)}  # fmt: skip
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"layers.0.{name}.weight": (D,) for name in norms}
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": (12,) for name in "qk"}
    tensors |= attention("layers.0.", 2 * D, 2, 12) | mlp("layers.0.")
    layer = llama_config(model_type="qwen3", num_key_value_heads=2, head_dim=12)
    del layer["architectures"], layer["rope_theta"], layer["rope_scaling"]
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    data = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": FEW, "norm_before_residual": True, "fc_norm": True, "norm_output": True,
        "norm_before_fc": False, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 0],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": None, "architectures": ["LlavaForConditionalGeneration"]},
        }, **more,
    }  # fmt: skip
    return data, drawn(tensors, 2) | vocabulary()


def facts(**more):
    """What the checkpoints above say, read by hand."""
    return EagleConfig(**{
        "family": "llava", "vocab": V, "hidden": D, "target_hidden": D, "target_layers": 2, "heads": HEADS,
        "kv_heads": HEADS, "head_size": SIZE, "intermediate": MIDDLE, "eps": 1e-5, "rope_theta": 5000.0,
        "image_ids": (90,), "own_embedding": True, "positions": "index", "levels": 5, **more,
    })  # fmt: skip


SPLIT = {"fusion": "split", "positions": "target", "draft_vocab": FEW, "fc_bias": False, "kv_heads": 2,
         "images": "placeholders"}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0}
AUTOMODEL = {"rope_theta": 10000.0, "qkv_bias": True, "norm_input": True, "norm_output": True, "image_ids": (90, 91)}
MROPE = {"family": "qwen2_5_vl", "image_ids": (90, 91), "own_embedding": False, "levels": 7}
DEEP = {"family": "qwen3_vl", "target_layers": 3}
LAYOUTS = {  # what is written, its options, what that says, and the form it is written in again, if there is one
    "eagle": (eagle_2, {"images": "slots"}, facts(images="slots"), "eagle"),
    "msd": (eagle_2, {"images": "embeddings"}, facts(images="embeddings"), "eagle"),
    "vispec": (vispec, {}, facts(images="latents", image_latents=1, qkv_bias=True), "eagle"),
    "vispec-qwen2.5-vl": (
        vispec_of_qwen, {},
        facts(family="qwen2_5_vl", image_ids=(90, 91), images="latents", image_latents=1, qkv_bias=True), "eagle",
    ),
    "vispec-llava-next": (
        vispec_of_llava, {}, facts(family="llava_next", images="latents", image_latents=1, rope_theta=10000.0), "eagle",
    ),
    "msd-llava": (msd_of_llava, {"images": "embeddings"}, facts(images="embeddings", rope_theta=10000.0), "eagle"),
    "msd-qwen2-vl": (
        msd_of_qwen, {"images": "embeddings"},
        facts(family="qwen2_vl", image_ids=(90, 91), images="embeddings", qkv_bias=True, kv_heads=2, norm_input=True),
        None,
    ),
    "vispec-automodel-qwen2.5-vl": (
        lambda: automodel_eagle("qwen2_5_vl", "VispecDraftModel"), {},
        facts(family="qwen2_5_vl", images="latents", image_latents=2, **AUTOMODEL), None,
    ),
    "vispec-automodel-qwen3-vl": (
        lambda: automodel_eagle("qwen3_vl", "VispecDraftModel", 2, 12, head_dim=12), {},
        facts(images="latents", image_latents=1, head_size=12, eps=1e-6, **AUTOMODEL | DEEP), None,
    ),
    "eagle-automodel-qwen2.5-vl": (
        lambda: automodel_eagle("qwen2_5_vl", "LlamaEagleDraftModel"), {"images": "slots"},
        facts(family="qwen2_5_vl", images="slots", **AUTOMODEL), None,
    ),
    "eagle3-automodel-qwen2.5-vl": (
        lambda: automodel_eagle3(model_of("qwen2_5_vl")), {"layers": "1-0-1"},
        facts(
            **SPLIT | MROPE | {"positions": "index", "own_embedding": True, "rope_theta": 10000.0},
            feature_layers=(1, 0, 1),
        ), None,
    ),
    "eagle3-specforge-qwen2.5-vl": (
        lambda: eagle_3(target_model_type="qwen2_5_vl", rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}), {},
        facts(**SPLIT | MROPE, feature_layers=(1, 1, 1), mrope_section=(2, 1, 1)), "eagle3",
    ),
    "eagle3-angelslim-qwen3-vl": (
        lambda: eagle_3(architectures=["Eagle3LlamaForCausalLM"], modal_type="VLM", rope_scaling={
            "type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [3, 1, 0],
        }), {},
        facts(**SPLIT | MROPE | DEEP, feature_layers=(1, 1, 1), mrope_section=(3, 1, 0), mrope_interleaved=True),
        "eagle3",
    ),
    "eagle3": (
        eagle_3, {}, facts(**SPLIT, feature_layers=(1, 1, 1), own_embedding=False, levels=7), "eagle3",
    ),
    "eagle3-yarn": (
        lambda: eagle_3(rope_parameters={**YARN, "rope_theta": 5000.0, "partial_rotary_factor": 0.5}), {},
        facts(**SPLIT, feature_layers=(1, 1, 1), own_embedding=False, levels=7, rope_scaling=YARN,
              partial_rotary_factor=0.5), "eagle3",
    ),
    "speculators": (
        speculators_eagle_3, {},
        facts(**SPLIT, feature_layers=(1, 0), head_size=12, qk_norm=True, norm_before_residual=True, fc_norm=True,
              norm_output=True, levels=3),
        "speculators",
    ),
}  # fmt: skip


def saved(folder, data, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file(tensors, folder / "model.safetensors")
    return folder


def named(folder, options):
    return ":".join([str(folder), ",".join(f"{k}={v}" for k, v in options.items())]).rstrip(":")


def whole(table, model):
    """A table of embeddings, with the target's rows behind its own."""
    return torch.cat([table, model.get_input_embeddings().weight.detach()[len(table) :]])


def check_described(drafter, model, kind, config, tensors):
    """A checkpoint's drafter drafts as its description says."""
    weights = {renamed(key): value for key, value in tensors.items()}
    table = whole(weights.get("embed_tokens.weight", torch.empty(0, D)), model)
    check_drafts(drafter, model, kind, config, weights, table)


def renamed(key):
    """The name that descriptions give a tensor."""
    key = key.removeprefix("model.").replace("midlayer.", "layers.0.")
    return key.replace("img_adaptor.query", "imadpt.q").replace("img_adaptor.", "imadpt.")


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layout(tmp_path, name):
    """And it is exact in ragged batches."""
    layout, options, config, form = LAYOUTS[name]
    data, tensors = layout()
    kind = config.family
    model, inputs = model_of(kind), prompt(kind, shapes(kind)["ragged"])
    drafter, _ = registry.drafter(named(saved(tmp_path / "head", data, tensors), options), model)
    assert drafter.config == config
    check_described(drafter, model, kind, config, tensors)
    assert check_drafter(drafter, model, inputs, NEW).drafter.traits.levels == config.levels
    if form is None:
        with pytest.raises(ValueError, match=r"got a drafter with (norm_input True|norm_output True|positions index)"):
            drafter.export(tmp_path / "again", "eagle" if config.fusion == "sum" else "eagle3")
    else:
        drafter.export(tmp_path / "again", form, "somewhere/target")
        stored = load_file(tmp_path / "again" / "model.safetensors")
        tensors |= {key: whole(tensors[key], model) for key in tensors if key == "embed_tokens.weight"}
        assert stored.keys() == tensors.keys() and all(torch.equal(stored[key], tensors[key]) for key in tensors)
        again, _ = registry.drafter(named(tmp_path / "again", options), model)
        assert again.config == replace(config, levels=again.config.levels)
    drafter.save_pretrained(tmp_path / "ours", {})
    assert registry.drafter(tmp_path / "ours", model)[0].config == config


@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_rotary_sections_exported(tmp_path, form):
    for name, interleaved in (("qwen2_5_vl", False), ("qwen3_vl", True)):
        drafter = make(name, "eagle3", feature_layers=(1,) if form == "eagle3" else (1, 0))
        assert drafter.config.mrope_section
        drafter.export(tmp_path / name, form, verifier="somewhere/target")
        data = json.loads((tmp_path / name / "config.json").read_text())
        layer = data.get("transformer_layer_config", data)
        assert layer["rope_scaling"]["mrope_section"] == list(drafter.config.mrope_section)
        assert layer["rope_scaling"].get("mrope_interleaved", False) is interleaved
        if form == "speculators":
            assert data["speculators_config"]["verifier"]["name_or_path"] == "somewhere/target"
        again, _ = registry.drafter(str(tmp_path / name), model_of(name))
        assert again.config == replace(drafter.config, levels=again.config.levels)
        for a, b in zip(drafter.head.state_dict().items(), again.head.state_dict().items()):
            assert a[0] == b[0] and torch.equal(a[1], b[1])


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dflash2", "dspark", "dspark-ours"])
def test_speculators_itself_loads(tmp_path, name):
    """The package reads every tensor, and the target by the name that stands there."""
    speculators = pytest.importorskip("speculators")
    model, form = model_of("qwen2_5_vl"), {"feature_layers": (1, 0)}
    model.save_pretrained(tmp_path / "target")
    if name == "eagle3":
        drafter = make("qwen2_5_vl", "eagle3", **form)
    elif name == "dspark-ours":
        drafter = BlockDrafter.for_model(model, layers=1, block=4, markov=3, confidence=True, feature_layers=(1,))
    else:
        layouts = {"dflash": speculators_dflash, "dflash2": speculators_dflash2}
        data, tensors = layouts[name]() if name in layouts else speculators_dspark(kind="rnn")
        data["speculators_config"]["verifier"]["architectures"] = [type(model).__name__]
        drafter, _ = registry.drafter(str(saved(tmp_path / "head", data, tensors)), model)
    drafter.export(tmp_path / "out", "speculators", verifier=str(tmp_path / "target"))
    result = speculators.SpeculatorModel.from_pretrained(tmp_path / "out")
    theirs = result.state_dict()
    for key, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(theirs[key].to(value.dtype), value), key
    assert not any(value.isnan().any() for value in theirs.values() if value.is_floating_point())


@pytest.mark.parametrize(("kind", "form", "architecture"), [
    ("eagle3", "eagle3", "LlamaForCausalLMEagle3"), ("eagle3", "speculators", "Eagle3LlamaForCausalLM"),
    ("dflash", "dflash", "DFlashDraftModel"), ("dflash", "speculators", "DFlashDraftModel"),
    ("dflash2", "dflash2", "DFlash2DraftModel"), ("dflash2", "speculators", "DFlash2DraftModel"),
    ("dspark", "dspark", "Qwen3DSparkModel"),
])  # fmt: skip
def test_vllm_itself_reads_what_is_written(tmp_path, kind, form, architecture):
    """Its configuration classes: the name that its registry has, and sizes where its networks look for them."""
    eagle = pytest.importorskip("vllm.transformers_utils.configs.eagle").EAGLEConfig
    nested = pytest.importorskip("vllm.transformers_utils.configs.speculators").SpeculatorsConfig
    model = model_of("qwen2_5_vl")
    if kind == "eagle3":
        drafter = make("qwen2_5_vl", "eagle3", feature_layers=(1,) if form == kind else (1, 0))
    else:
        heads = {"dflash2": {"selector": 3, "group": 8}, "dspark": {"markov": 3, "confidence": True}}
        drafter = BlockDrafter.for_model(model, layers=1, block=4, feature_layers=(1,), **heads.get(kind, {}))
    drafter.export(tmp_path, form, verifier="somewhere/target")
    method, data = "dflash" if kind == "dflash2" else kind, json.loads((tmp_path / "config.json").read_text())
    if form == kind != "dspark":
        result = eagle(AutoConfig.from_pretrained(tmp_path), method=method, model_type="eagle")
    else:
        result, told = nested.from_pretrained(tmp_path), nested.extract_vllm_speculative_config(data)
        assert told == {"method": method, "num_speculative_tokens": drafter.traits.levels}
        assert result.eagle_aux_hidden_state_layer_ids == list(drafter.traits.feature_layers)
    assert result.architectures == [architecture] and result.hidden_size == D
    if form == "eagle3":  # outputs of layers; vLLM takes them for inputs
        assert result.eagle_config["eagle_aux_hidden_state_layer_ids"] == [0]
    if kind == "dspark":
        assert (result.markov_rank, result.block_size, result.mask_token_id) == (3, 4, drafter.mask)
    if method == "dflash":
        own = result.dflash_config
        assert own["target_layer_ids"] == [0] and own["mask_token_id"] == drafter.mask
        sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 16}
        assert {name: own[name] for name in sizes if name in own} == (sizes if kind == "dflash2" else {})


def test_default_states(tmp_path):
    data, tensors = eagle_3(eagle_config=None)
    model = llama(num_hidden_layers=8)
    drafter, _ = registry.drafter(str(saved(tmp_path / "head", data, tensors)), model)
    assert drafter.config.feature_layers == (2, 4, 5) and drafter.config.images == "none"
    with pytest.raises(ValueError, match="names no eagle_aux_hidden_state_layer_ids for a target of 2 layers"):
        registry.drafter(str(tmp_path / "head"), llama())


@pytest.mark.parametrize("asked", [None, True, False])
def test_norm_output_of_specforge(tmp_path, asked):
    """Levels behind the first read the normed state, or not; which, no key of the file says."""
    data, tensors = eagle_3(norm_output=True)
    spec = named(saved(tmp_path / "head", data, tensors), {} if asked is None else {"norm_output": asked})
    model = model_of("llava")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drafter, _ = registry.drafter(spec, model)
    message = [w for w in caught if "norm_output" in str(w.message)]
    assert ["head:norm_output=false" in str(w.message) for w in message] == [True] * (asked is None)
    config = facts(**SPLIT, feature_layers=(1, 1, 1), own_embedding=False, levels=7, norm_output=asked is not False)
    assert drafter.config == config
    check_described(drafter, model, "llava", config, tensors)
    with pytest.raises(AssertionError):
        check_described(drafter, model, "llava", replace(config, norm_output=not config.norm_output), tensors)
    for options in ({"norm_output": 3}, {"norm_output": "x"}):
        with pytest.raises(ValueError, match="norm_output: got"):
            registry.drafter(named(tmp_path / "head", options), model)


AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(("changes", "asked", "read", "warned"), [
    ({"eagle_config": {AUX: [1, 3, 5]}}, None, (2, 4, 6), False), ({AUX: [1, 3, 5]}, None, (2, 4, 6), False),
    ({"eagle_config": {AUX: [2, 4, 6]}}, None, (2, 4, 6), True), ({AUX: [2, 4, 6]}, None, (2, 4, 6), True),
    ({"eagle_config": {AUX: [0, 3, 5]}}, None, (1, 4, 6), True), ({AUX: []}, None, (2, 4, 5), False),
    ({"dflash_config": {AUX: [1, 2, 3]}}, None, (2, 3, 4), False),
    ({"eagle_config": {AUX: []}}, None, (2, 4, 5), False),
    ({AUX: [3, 4, 5], "eagle_config": {AUX: [1, 2, 3]}}, None, (3, 4, 5), True),
    ({"eagle_config": {AUX: [2, 4, 6]}}, "0-3-7", (0, 3, 7), False), ({}, (1, 2, 3), (1, 2, 3), False),
])  # fmt: skip
def test_state_conventions(tmp_path, caplog, changes, asked, read, warned):
    """An error by one layer costs acceptance and nothing else: a line says what is read, and an option overrides it."""
    data, tensors = eagle_3(**{"eagle_config": None} | changes)
    folder, model = saved(tmp_path / "head", data, tensors), llama(num_hidden_layers=8)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO", "visspec"):
        warnings.simplefilter("always")
        if isinstance(asked, tuple):
            drafter = published.load(folder, model, layers=asked)
        else:
            drafter, _ = registry.drafter(named(folder, {"layers": asked} if asked else {}), model)
    assert drafter.config.feature_layers == read
    assert [f"reads hidden states {list(read)}" in r.message for r in caplog.records] == [True]
    assert [f"head:layers={'-'.join(map(str, read))}" in str(w.message) for w in caught] == [True] * warned
    if read[0]:
        drafter.export(tmp_path / "again", "eagle3")
        assert registry.drafter(str(tmp_path / "again"), model)[0].config.feature_layers == read


# --- hub ids ----------------------------------------------------------------------------------------------------------


def cached(hub, name, data, tensors):
    """A repository as huggingface_hub stores it: links into `blobs`."""
    root = hub / f"models--{name.replace('/', '--')}"
    blobs = saved(root / "blobs", data, tensors)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    snapshot = root / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in list(blobs.iterdir()):
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot


def test_hub_id_from_cache(cache):
    data, tensors = eagle_3()
    cached(cache, "someone/llava-eagle3", data, tensors)
    fast = visspec.accelerate(model_of("llava"), "someone/llava-eagle3")
    assert fast.name == "llava-eagle3" and fast.drafter.traits.levels == 7
    slots, name = registry.drafter("someone/llava-eagle3:images=slots,width=3", model_of("llava"))
    assert name == "llava-eagle3" and slots.config.images == "slots" and slots.width == 3


def test_hub_ids_that_cannot_be_read(cache, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with pytest.raises(ValueError, match="checkpoint: no/where is not in the cache, and the hub could not be reached"):
        registry.drafter("no/where", model_of("llava"))
    for error, message in (
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "is not on the hub, or is private"),
        (GatedRepoError.__new__(GatedRepoError), "needs a login with access to it"),
        (OSError("disk\nfull"), r"could not be fetched \(disk\)"),
    ):

        def raised(*_, **__):
            raise error  # noqa: B023

        monkeypatch.setattr(huggingface_hub, "snapshot_download", raised)
        with raises_line(message):
            registry.drafter("no/where", model_of("llava"))


def test_foreign_links_refused(cache, tmp_path):
    snapshot = cached(cache, "someone/bad", *eagle_3())
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "other.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match="expected a file inside the folder"):
        registry.drafter("someone/bad", model_of("llava"))


# --- block drafters ---------------------------------------------------------------------------------------------------


def dflash_tensors(layers=2, states=2):
    tensors = {"fc.weight": (D, states * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for n in range(layers):
        named = f"layers.{n}."
        tensors |= attention(named, D, 2) | mlp(named)
        tensors |= {f"{named}{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{named}self_attn.{name}_norm.weight": (SIZE,) for name in "qk"}
    return drawn(tensors, 4)


def dflash_layer(**more):
    return llama_config(
        architectures=["DFlashDraftModel"], model_type="qwen3", num_hidden_layers=2, num_key_value_heads=2,
        head_dim=SIZE, layer_types=["full_attention", "full_attention"], **more,
    )  # fmt: skip


def z_lab(**more):
    own = {"target_layer_ids": [1, 0], "mask_token_id": 4}
    return dflash_layer(block_size=4, num_target_layers=2, dflash_config=own) | more, dflash_tensors()


def speculators_dflash(anchor=False, few=True, **more):
    layer = dflash_layer()
    del layer["architectures"]
    data = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
        "draft_vocab_size": FEW if few else V, "block_size": 4, "mask_token_id": 4, "sample_from_anchor": anchor,
        "aux_hidden_state_layer_ids": [1], "transformer_layer_config": layer | more,
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy", "proposal_methods": [],
            "verifier": {"name_or_path": None, "architectures": ["LlavaForConditionalGeneration"]},
        },
    }  # fmt: skip
    own = {"lm_head.weight": torch.randn(FEW, D), **vocabulary()} if few else {}
    return data, dflash_tensors(states=1) | own


RANK = 3
SPARK = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
         "confidence_head_with_markov": True}  # fmt: skip
DOMINO = {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 5, "pure_draft_prefix_len": 1,
          "shift_label": True}  # fmt: skip


def spark(kind="vanilla", few=V, beside=True, confidence=True):
    """Tensors of DSpark's heads."""
    sizes = {"markov_w1.weight": (V, RANK), "markov_w2.weight": (few, RANK)}
    more = {"gated": ("gate_proj", RANK, D + RANK), "rnn": ("joint_proj", 3 * RANK, D + 2 * RANK)}
    for name, rows, width in [more[kind]] if kind in more else []:
        sizes |= {f"{name}.weight": (rows, width), f"{name}.bias": (rows,)}
    tensors = {f"markov_head.{name}": tensor for name, tensor in drawn(sizes, 5).items()}
    last = {"confidence_head.proj.weight": (1, D + RANK * beside), "confidence_head.proj.bias": (1,)}
    return tensors | (drawn(last, 6) if confidence else {})


def specforge_dspark(kind="vanilla", **more):
    data, tensors = z_lab(architectures=["DSparkDraftModel"], **more)[0], dflash_tensors(states=1)
    own = {"projector_type": "dspark", "attention_mode": "gqa", "markov_head_type": kind}
    data["dflash_config"] |= SPARK | {"target_layer_ids": [0]} | own
    return data, tensors | spark(kind)


def domino(**more):
    data, tensors = z_lab(architectures=["DominoDraftModel"])
    data["dflash_config"] |= DOMINO | more
    sizes = {"prefix_gru.weight_ih_l0": (15, D), "prefix_gru.weight_hh_l0": (15, 5), "embed_proj.0.weight": (6, D + 5),
             "embed_proj.2.weight": (V, 6)}  # fmt: skip
    return data, tensors | drawn(sizes, 5)


def deepspec(rank=RANK, own=False):
    """Its copies of the target's embeddings and head, or trained ones."""
    data = of_target(
        qwen3(intermediate_size=MIDDLE, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 5000.0}), num_target_layers=2,
        architectures=["Qwen3DSparkModel"], target_layer_ids=[0], block_size=4, mask_token_id=4, num_anchors=512,
        tie_word_embeddings=False, **SPARK if rank else {"markov_rank": 0, "enable_confidence_head": False},
    )  # fmt: skip
    model, tensors = model_of("llava"), dflash_tensors(states=1)
    table, head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    if own:
        table, head = drawn({"table": (V, D), "head": (V, D)}, 7).values()
    copies = {"embed_tokens.weight": table.clone(), "lm_head.weight": head.clone()}
    return data, tensors | (spark() if rank else {}) | copies


def speculators_dspark(anchor=True, few=True, kind="vanilla", beside=True):
    data, tensors = speculators_dflash(anchor, few)
    data |= SPARK | {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark",
                     "markov_head_type": kind, "confidence_head_with_markov": beside}  # fmt: skip
    data["speculators_config"]["algorithm"] = "dspark"
    return data, tensors | spark(kind, FEW if few else V, beside)


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def selector_tensors(taps=2):
    named = "candidate_selector."
    tensors = {f"{named}{side}_codebook": (V, 6) for side in ("predecessor", "successor")}
    tensors[f"{named}hidden_projection.weight"] = (6, D)
    for conv in (f"layers.{n}.{name}_conv." for n in range(2) for name in ("attention", "mlp")):
        tensors |= {f"{conv}base_kernel": (2, taps, D), f"{conv}kernel_projection.weight": (2 * taps * D // 8, D)}
    return drawn(tensors, 5)


def z_lab_2(taps=2, **more):
    own = SELECTOR | {"block_size": 4, "target_layer_ids": [1, 0], "mask_token_id": 4, "conv_kernel_size": taps}
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}
    data, tensors = z_lab(**windows, is_causal=False, dflash_config=own, architectures=["DFlash2DraftModel"], **more)
    del data["block_size"]
    return data, tensors | selector_tensors(taps)


def speculators_dflash2(**more):
    data, tensors = speculators_dflash(few=False, **more.pop("layer", {}))
    data["speculators_config"]["algorithm"] = data["speculators_model_type"] = "dflash2"
    return data | SELECTOR | {"architectures": ["DFlash2DraftModel"]} | more, tensors | selector_tensors()


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
BLOCKS = {
    "z-lab": (z_lab, "dflash"),
    "z-lab-yarn": (lambda: z_lab(rope_scaling=YARN), "dflash"),
    "z-lab-windows": (lambda: z_lab(**WINDOWS), "dflash"),
    "z-lab-both-ways": (
        lambda: z_lab(**WINDOWS, is_causal=False, dflash_config={
            "target_layer_ids": [1, 0], "mask_token_id": 4, "input_embedding_scale": 1.5, "output_multiplier": 0.5,
            "final_logit_softcapping": 3.0,
        }), "dflash",
    ),
    "speculators": (speculators_dflash, "speculators"),
    "speculators-anchor": (lambda: speculators_dflash(anchor=True, few=False), "speculators"),
    "speculators-windows": (lambda: speculators_dflash(**WINDOWS), "speculators"),
    "angelslim": (lambda: z_lab(architectures=["QwenDFlashDraftModel"]), "dflash"),
    "deepspec-dflash": (lambda: deepspec(rank=0), "speculators"),
    "dspark-deepspec": (deepspec, "dspark"),
    "dspark-deepspec-own": (lambda: deepspec(own=True), None),
    "dspark-gated": (lambda: specforge_dspark("gated"), "dspark"),
    "dspark-windows": (lambda: specforge_dspark("rnn", **WINDOWS), None),
    "dspark-speculators": (speculators_dspark, "dspark"),
    "dspark-speculators-rnn": (lambda: speculators_dspark(False, False, "rnn", False), "speculators"),
    "domino": (domino, "domino"),
    "domino-unshifted": (lambda: domino(shift_label=False, pure_draft_prefix_len=0), "domino"),
    "z-lab-2": (z_lab_2, "dflash2"),
    "z-lab-2-taps": (lambda: z_lab_2(taps=3), "dflash2"),
    "speculators-2": (lambda: speculators_dflash2(layer=WINDOWS), "speculators"),
    "speculators-2-anchor": (lambda: speculators_dflash2(sample_from_anchor=True), "speculators"),
}  # fmt: skip


def first_predicts(data):
    """Whether the pending token's place predicts."""
    message = {**data, **data.get("dflash_config", {})}
    spark = "markov_rank" in message
    return message.get("shift_label" if "shift_label" in message else "sample_from_anchor", spark)


def block_states(data, tensors, model, whole):
    """The hidden states of a block as z-lab and speculators describe them, (K - 1, d) or (K, d)."""
    ids, _, features, _ = whole
    own = "speculators_model_type" in data
    layer = data["transformer_layer_config"] if own else data
    more = data.get("dflash_config", {})
    count, block = len(features), torch.tensor([int(ids[-1]), 4, 4, 4])
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    embedded = table[block] * more.get("input_embedding_scale", 1.0)
    query, key = torch.arange(4)[:, None] + count, torch.arange(count + 4)[None]
    hidden = {}
    for n, kind in enumerate(layer["layer_types"]):
        far, later = query - key, torch.zeros(4, count + 4, dtype=torch.bool)
        if kind == "sliding_attention" and own:
            both = data.get("sliding_window_non_causal", data["speculators_model_type"] == "dflash2")
            later = (key < count - 6) | ((key >= count) & (key > query) & (not both))
        elif kind == "sliding_attention":
            later = (far >= 6) | ((far <= -6) if data.get("is_causal") is False else (far < 0))
        hidden[n] = later.expand(4, -1)
    x = dflash_hidden(tensors, (SIZE, 1e-5, 5000.0, layer.get("rope_scaling")), features, embedded, hidden)
    return x if first_predicts(data) else x[1:]


def block_logits(data, tensors, model, x):
    """The laws of places with these hidden states, before a sequential head."""
    more = data.get("dflash_config", {})
    if "d2t" in tensors:
        few = x @ tensors["lm_head.weight"].T
        return torch.full((len(x), V), float("-inf")).index_copy(1, IDS, few)
    logits = x @ tensors.get("lm_head.weight", model.lm_head.weight).T * more.get("output_multiplier", 1.0)
    cap = more.get("final_logit_softcapping")
    return torch.tanh(logits / cap) * cap if cap else logits


@pytest.mark.parametrize(("said", "asked", "causal"), [
    ({}, None, True), ({}, True, True), ({}, False, False), ({"is_causal": False}, None, False),
    ({"is_causal": False}, True, True),
    ({"dflash_config": {"target_layer_ids": [1, 0], "mask_token_id": 4, "causal": False}}, None, False),
])  # fmt: skip
def test_causal_windows(tmp_path, said, asked, causal):
    """A file of SpecForge and one of z-lab are the same; a warning names the option where nothing is said."""
    folder = saved(tmp_path / "head", *z_lab(**WINDOWS, **said))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drafter, _ = registry.drafter(named(folder, {} if asked is None else {"causal": asked}), model_of("llava"))
    assert drafter.form.causal is causal
    assert ["head:causal=false" in str(w.message) for w in caught] == [True] * (not said and asked is None)
    with pytest.raises(ValueError, match="causal: got 3, expected true or false"):
        registry.drafter(f"{folder}:causal=3", model_of("llava"))


def test_default_layers_of_z_lab(tmp_path):
    data, _ = z_lab(dflash_config={"mask_token_id": 4}, num_target_layers=8)
    model = llama(num_hidden_layers=8)
    for count, read in ((1, (5,)), (2, (2, 6)), (4, (2, 3, 5, 6))):
        layers = {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}
        tensors = dflash_tensors(count, count)
        drafter, _ = registry.drafter(str(saved(tmp_path / f"head-{count}", data | layers, tensors)), model)
        assert drafter.traits.feature_layers == read


@torch.inference_mode()
def check_block(drafter, data, tensors, model, inputs, rows):
    """What a block drafter drafts for ragged rows is what its description makes of its tensors, in three rounds."""
    target, state, answer = begun(drafter, model, inputs, NEW)
    for _ in range(3):
        got = drafter._laws(hidden := drafter._hidden(state))
        for b in range(len(rows)):
            whole = known(target, model, single_row("llava", rows, inputs, b), answer[b, : len(state.tokens[b])])
            states = block_states(data, tensors, model, whole)
            want = block_logits(data, tensors, model, states)
            torch.testing.assert_close(got[b].log_softmax(-1), want.log_softmax(-1), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(hidden[b], states, rtol=1e-3, atol=1e-3)
        one_round(target, drafter, state, answer)


@torch.inference_mode()
@pytest.mark.parametrize("name", [name for name in BLOCKS if name.startswith("d") and name != "deepspec-dflash"])
def test_sequential_head(tmp_path, name, monkeypatch):
    """The laws that a chain's tokens are drawn from, and that it reports; confidence ends it where the product says."""
    data, tensors = BLOCKS[name][0]()
    message, table = {**data, **data.get("dflash_config", {})}, model_of("llava").get_input_embeddings().weight
    model, rows, laws = model_of("llava"), shapes("llava")["ragged"], []
    options = "" if name.startswith("domino") else ":confidence=0.2"
    drafter, _ = registry.drafter(f"{saved(tmp_path / 'head', data, tensors)}{options}", model)
    add = Chain.add
    monkeypatch.setattr(Chain, "add", lambda self, law, *more: laws.append(law) or add(self, law, *more))
    _, state, _ = begun(drafter, model, prompt("llava", rows), NEW)
    hidden = drafter._hidden(state)
    drafter._hidden = lambda state: hidden
    draft, base = drafter.propose(state, 4), drafter._laws(hidden)
    for b in range(len(rows)):
        tokens = draft.value[b, : len(laws)]
        want, weights = walked(tensors, message, base[b], hidden[b], table, tokens), Weights(tensors)
        torch.testing.assert_close(torch.stack(laws, 1)[b].softmax(-1), want.softmax(-1), rtol=1e-4, atol=1e-4)
        assert torch.equal(draft.value[b, 1:], want.argmax(-1))
        if name.startswith("domino"):
            continue
        product, real, beside = 1.0, [True], weights["markov_head.markov_w1.weight"][tokens]
        seen = torch.cat([hidden[b], beside] if message["confidence_head_with_markov"] else [hidden[b]], dim=-1)
        for level, rate in enumerate(weights.linear(seen, "confidence_head.proj").sigmoid()[:, 0].tolist()):
            product *= rate
            real.append(real[-1] and (level == 0 or product >= 0.2))
        assert draft.real[b].tolist() == real


def test_sequential_head_sampling(tmp_path):
    for name in ("dspark-speculators-rnn", "dspark-gated", "domino", "z-lab-2"):
        folder = saved(tmp_path / name, *BLOCKS[name][0]())
        fast = visspec.accelerate(model_of("llava"), str(folder), acceptance="rejection", adaptive=False)
        fast.generate(**prompt("llava", shapes("llava")["ragged"]), max_new_tokens=NEW, do_sample=True, seed=1)
        assert fast.last_stats.faults == 0


def test_early_domino_files(tmp_path):
    wrapped = {f"logit_head.{k}" if k.startswith(("prefix", "embed_p")) else k: v for k, v in domino()[1].items()}
    data = z_lab()[0]
    data["dflash_config"] |= DOMINO
    drafter, _ = registry.drafter(str(saved(tmp_path / "early", data, wrapped)), model_of("llava"))
    assert type(drafter.form.sequential).__name__ == "Domino"


@pytest.mark.parametrize(("name", "width"), [
    *((name, 1) for name in BLOCKS), ("z-lab", 2), ("speculators", 2), ("z-lab-2", 3), ("dspark-gated", 2),
    ("dspark-speculators", 2),
])  # fmt: skip
def test_published_block_drafter(tmp_path, name, width):
    """It drafts as its description says, is exact, and comes back from the form that it is written in again."""
    layout, form = BLOCKS[name]
    (data, tensors), rows = layout(), shapes("llava")["ragged"]
    model, inputs = model_of("llava"), prompt("llava", rows)
    spec = f"{saved(tmp_path / 'head', data, tensors)}:width={width}"
    check_drafter(spec, model, inputs, NEW)
    if width > 1:
        return
    drafter, _ = registry.drafter(spec, model)
    ids = {**data, **data.get("dflash_config", {})}.get("target_layer_ids", [0])
    assert drafter.traits.feature_layers == tuple(i + 1 for i in ids)
    assert drafter.traits.levels == (4 if first_predicts(data) else 3)
    check_block(drafter, data, tensors, model, inputs, rows)
    if form:
        copies = () if "d2t" in tensors else ("embed_tokens.weight", "lm_head.weight")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
        drafter.export(tmp_path / "again", form, "somewhere/target")
        stored = load_file(tmp_path / "again" / "model.safetensors")
        assert stored.keys() == tensors.keys() and all(torch.equal(stored[key], tensors[key]) for key in tensors)
        again, _ = registry.drafter(str(tmp_path / "again"), model)
        assert again.assistant.config.to_dict() == drafter.assistant.config.to_dict()
        if form == "dflash2":
            told = json.loads((tmp_path / "again" / "config.json").read_text())
            assert told["dflash_config"] == data["dflash_config"] and told["architectures"] == data["architectures"]
        skipped = {"head", "ids", "sequential"}
        skipped |= set() if drafter.kinds & {"sliding_attention"} else {"reach", "from_anchor"}
        one, two = ({k: v for k, v in vars(d.form).items() if k not in skipped} for d in (drafter, again))
        assert one == two and type(again.form.sequential) is type(drafter.form.sequential)


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["z-lab-2", "speculators-2-anchor"])
def test_selector_law(tmp_path, name, temperature):
    """Each place by the token drawn before it; with a rule that judges draws, q is what was drawn from."""
    (data, tensors), held = BLOCKS[name][0](), []
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    drafter, _ = registry.drafter(str(saved(tmp_path / "head", data, tensors)), model)
    request = request_of(model, inputs, temperature=temperature, max_new_tokens=NEW, seed=3)
    target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True)
    state, scores = open_request(target, visspec.Rejection(), request)
    drafter.start(state, scores)
    drafter._laws = lambda hidden: held.append(hidden) or BlockModel._laws(drafter, hidden)
    draft, unary = drafter.propose(state, 3), BlockModel._laws(drafter, held[0])
    plain = unary[:, :3].argmax(-1)
    for b, level in itertools.product(range(len(plain)), range(3)):
        want = edges(tensors, unary[b, level], held[0][b, level], int(draft.value[b, level]), 5)
        if temperature:
            p = (want / temperature).softmax(-1)
            torch.testing.assert_close(draft.q.p[b, level + 1], p)
            assert (draft.q.p[b, level + 1] > 0).sum() == 5
            assert draft.value[b, level + 1] == draw(p[None], state.noise.window(level + 1)[b, level, -1:])
        else:
            assert draft.value[b, level + 1] == want.argmax()
    assert temperature or (draft.value[:, 1:] != plain).any(), "the selector changes something"


@pytest.mark.parametrize(("made", "form", "sentence"), [
    ("vispec", "eagle3", "got a drafter with fusion sum for 'eagle3', expected split"),
    ("eagle3", "eagle", "got a drafter with fusion split for 'eagle', expected sum"),
    ("eagle-normed", "eagle", "got a drafter with norm_output True"),
    ("eagle3-normed", "eagle3", "got a drafter with qk_norm True"),
    ("eagle3-blind", "speculators", "got a drafter with images blind"),
    ("eagle3", "onnx", "form: got 'onnx', expected one of eagle, eagle3, speculators"),
    ("eagle3", "speculators", "expected different ones of 0..1"),
    (domino, "dflash", "a Domino head"), (domino, "dspark", "a Domino head"),
    (lambda: deepspec(own=True), "dspark", "got a drafter with embed for 'dspark', expected one without"),
    (z_lab, "dspark", "with no sequential head"), (z_lab, "speculators", "reads the state after the last layer"),
    (z_lab, "dflash2", "no sequential head, which 'dflash2'"),
    (z_lab_2, "dflash", "a CandidateSelector head, which 'dflash'"),
])  # fmt: skip
def test_forms_that_cannot_hold_a_drafter(tmp_path, made, form, sentence):
    if isinstance(made, str):
        drafter = make("llava", made)
    else:
        drafter, _ = registry.drafter(str(saved(tmp_path / "head", *made())), model_of("llava"))
    with raises_line(re.escape(sentence)):
        drafter.export(tmp_path / "x", form, "somewhere/target")
    assert not (tmp_path / "x").exists()


def test_block_positions_with_mrope(tmp_path):
    data, tensors = z_lab()
    model, inputs = model_of("qwen2_5_vl"), prompt("qwen2_5_vl", shapes("qwen2_5_vl")["ragged"])
    drafter, _ = registry.drafter(str(saved(tmp_path / "head", data, tensors)), model)
    seen = []
    forward = drafter.assistant.forward
    drafter.assistant.forward = lambda **given: seen.append(given["position_ids"]) or forward(**given)
    fast = visspec.accelerate(model, drafter, adaptive=False)
    greedy = {"max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(fast.generate(**inputs, **greedy), model.generate(**inputs, **greedy))
    counts = inputs["attention_mask"].sum(1)
    assert seen[0][:, -4].tolist() == counts.tolist()


# --- what is refused --------------------------------------------------------------------------------------------------

ONE = torch.ones(1)
SLOTS, EMBEDDINGS = {"images": "slots"}, {"images": "embeddings"}
REFUSED = [  # layout, entries and tensors that are changed (None: left out), options, and what is said
    (eagle_2, {}, {}, {}, "does not say how it represents images"),
    (eagle_2, {}, {}, {"images": "latents"}, "does not say"),
    (eagle_2, {}, {}, {"layers": 1, "images": "none"}, "layers: got 1, expected none"),
    (vispec, {}, {}, SLOTS, "is a ViSpec head"),
    (eagle_2, {"hidden_size": 64}, {}, SLOTS, "made for a target of hidden size 64, got a model of 32"),
    (eagle_2, {"vocab_size": 97}, {}, SLOTS, "made for a target of vocabulary 97, got a model of 96"),
    (msd_of_llava, {"vocab_size": 97}, {}, EMBEDDINGS, "made for a target of vocabulary 97, got a model of 96"),
    (msd_of_llava, {"architectures": ["LlavaForConditionalGeneration"]}, {}, EMBEDDINGS, "a target of vocabulary 90"),
    (eagle_2, {"num_hidden_layers": 2}, {}, SLOTS, "num_hidden_layers of"),
    (eagle_2, {"hidden_act": "gelu"}, {}, SLOTS, "hidden_act of"),
    (eagle_2, {"num_attention_heads": None}, {}, SLOTS, "num_attention_heads of"),
    (eagle_2, {"rope_scaling": {"rope_type": "dynamic"}}, {}, SLOTS, "is 'dynamic', expected default, linear, llama3"),
    (eagle_2, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, SLOTS, "no 'original_max_position_embedd"),
    (eagle_2, {"rms_norm_eps": "x"}, {}, SLOTS, "eps: got 'x', expected a finite number above 0"),
    (eagle_2, {"architectures": ["DFlashDraftModel"]}, {}, SLOTS, "does not take {'images': 'slots'}"),
    (eagle_3, {"draft_vocab_size": 40}, {}, {}, "has shape (36,"),
    (eagle_3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, {}, {}, "a whole number from 0 to 2"),
    (eagle_3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, {}, {}, "names a state after layer 2"),
    (eagle_3, {"target_model_type": "qwen3_vl"}, {}, {}, "for a target of the model_type 'qwen3_vl', got 'llava'"),
    (eagle_3, {"target_hidden_size": 48}, {}, {}, "made for a target of hidden size 48"),
    (eagle_3, {"eagle_config": {"use_last_layernorm": False}}, {}, {}, "use_last_layernorm of"),
    (eagle_3, {"norm_before_fc": True}, {}, {}, "lacks tensor 'input_norm.weight'"),
    (eagle_3, {"use_sliding_window": True}, {}, {}, "use_sliding_window of"),
    (eagle_3, {}, {}, {"layers": "x"}, "got 'x', expected hidden states"),
    (eagle_3, {}, {}, {"layers": "0-2-1"}, "layers: got 2, expected a whole"),
    (eagle_3, {}, {}, {"layers": 1}, "has shape (32, 96), expected (32, 32)"),
    (eagle_3, {}, {"layers.1.more": ONE}, {}, "unknown tensor 'layers.1.more'"),
    (eagle_3, {"architectures": ["PEagleDraftModel"]}, {}, {}, "is a checkpoint of 'PEagleDraftModel', expected EAGLE"),
    (eagle_3, {}, {"d2t": IDS - torch.arange(FEW) + 90}, {}, "d2t of"),
    (eagle_3, {}, {"d2t": -torch.arange(FEW)}, {}, "d2t of"),
    (eagle_3, {}, {"t2d": torch.zeros(V, dtype=torch.bool)}, {}, "t2d of"),
    (speculators_eagle_3, {"speculators_config": {"algorithm": "dflash"}}, {}, {}, "algorithm of"),
    (speculators_eagle_3, {"speculators_config": {"verifier": {"architectures": ["Qwen2"]}}}, {}, {}, "of the class"),
    (speculators_eagle_3, {"speculators_model_type": "mtp"}, {}, {}, "is 'mtp', expected ['eagle3'"),
    (specforge_dspark, {"markov_head_type": "cond"}, {}, {}, "markov_head_type of"),
    (specforge_dspark, {"markov_rank": 4}, {}, {}, "tensor 'confidence_head.proj.weight' of"),
    (specforge_dspark, {"enable_confidence_head": False}, {}, {}, "unknown tensor 'confidence_head.proj"),
    (deepspec, {}, {"embed_tokens.weight": None}, {}, "tensor 'embed_tokens.weight'"),
    (z_lab, {"num_target_layers": 36}, {}, {}, "is made for a target of the number of layers 36, got 2"),
    (z_lab, {"vocab_size": 95}, {}, {}, "made for a target of vocabulary 95, got a model of 96"),
    (z_lab, {"block_size": 1}, {}, {}, "block_size: got 1, expected a whole number from 2"),
    (z_lab, {"target_layer_ids": None}, {}, {}, "target_layer_ids: got None"),
    (z_lab, {"target_layer_ids": [0, 2]}, {}, {}, "names layer 2, expected some of 0..1"),
    (z_lab, {"mask_token_id": 400}, {}, {}, "mask_token_id 400, expected an id"),
    (z_lab, {"layer_types": ["linear_attention"] * 2}, {}, {}, "layer_types of"),
    (z_lab, {"is_causal": True}, {}, {}, "is_causal of"),
    (z_lab, {"attention_bias": True}, {}, {}, "attention_bias of"),
    (z_lab, {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}, {}, "partial_rotary_factor of"),
    (z_lab, {}, {"layers.1.mlp_conv.base_kernel": ONE}, {}, "has the unknown tensor"),
    (domino, {}, {}, {"width": 2}, "width: got 2 for a head that depends on the whole chain, expected 1"),
    (z_lab_2, {"conv_group_size": 4}, {}, {}, "has shape"),
    (z_lab_2, {}, {}, {"width": 6}, "width: got 6, expected at most the 5 candidates of a place"),
    (speculators_dflash2, {"draft_vocab_size": FEW}, {}, {}, "is 36, expected 96 for a selector"),
    (speculators_dflash, {}, {}, {"tree": "opt", "nodes": 37}, "width: got 37, expected at most the 36 ids that the"),
    (speculators_dflash, {}, {"d2t": None}, {}, "lacks tensor 'd2t'"),
    (speculators_dflash, {"draft_vocab_size": 40}, {}, {}, "has shape (36"),
    (speculators_dflash, {"aux_hidden_state_layer_ids": [2]}, {}, {}, "names layer 2, expected some of 1..1"),
]
# entries of `dflash_config`
NESTED = {*"markov_head_type markov_rank enable_confidence_head conv_group_size target_layer_ids mask_token_id".split()}
LATE = ("mask_token_id", "width: got", "d2t", "t2d")  # found when the drafter is put together


@pytest.mark.parametrize(("layout", "entries", "tensors", "options", "sentence"), REFUSED)
def test_what_is_said_of_another_checkpoint(tmp_path, layout, entries, tensors, options, sentence):
    """In one sentence, before weights are read."""
    data, weights = layout()
    if entries.keys() & NESTED:
        entries = {"dflash_config": data["dflash_config"] | entries}
    weights = {name: value for name, value in (weights | tensors).items() if value is not None}
    folder, model = saved(tmp_path / "head", data | entries, weights), model_of("llava")
    with raises_line(re.escape(sentence)), Largest() as largest:
        registry.drafter(named(folder, options), model)
    assert largest.found < 200 or sentence.startswith(LATE)


def test_heads_for_text_and_pictures(tmp_path):
    registry.drafter(str(saved(tmp_path / "text", *eagle_2())), llama())
    registry.drafter(str(saved(tmp_path / "part", *eagle_3(target_model_type="llama"))), model_of("llava"))
    with raises_line("is a ViSpec head"):
        registry.drafter(str(saved(tmp_path / "vispec", *vispec())), llama())


@pytest.mark.parametrize(("layout", "prefix"), [(eagle_2, "module."), (eagle_3, "model."), (z_lab, "module.model.")])
def test_prefixes_of_wrappers_are_left_out(tmp_path, layout, prefix):
    """`model.` not of all: some write `lm_head` and the maps of a vocabulary beside it."""
    data, tensors = layout()
    model, options = model_of("llava"), {"images": "slots"} if layout is eagle_2 else {}
    plain, _ = registry.drafter(named(saved(tmp_path / "plain", data, tensors), options), model)
    outside = () if layout is eagle_2 else ("lm_head.weight", "d2t", "t2d")
    names = {name: name if name in outside else prefix + name for name in tensors}
    wrapped = {names[name]: tensor for name, tensor in tensors.items()}
    drafter, _ = registry.drafter(named(saved(tmp_path / "wrapped", data, wrapped), options), model)
    networks = [getattr(d, "head", None) or d.assistant for d in (plain, drafter)]
    for a, b in zip(*(network.state_dict().values() for network in networks), strict=True):
        assert torch.equal(a, b)
    if prefix == "model.":
        both = wrapped | {"fc.weight": tensors["fc.weight"].clone()}
        with raises_line("with and without 'model.'"):
            registry.drafter(str(saved(tmp_path / "both", data, both)), model)


def automodel_eagle3(model, **more):
    """The target's whole configuration, number and kinds of layers included; of Qwen 3 without norms of its heads."""
    data = of_target(
        model, architectures=["LlamaEagle3DraftModel"], draft_vocab_size=FEW, target_hidden_size=D,
        parallel_drafting=False, attn_implementation="eager", intermediate_size=MIDDLE,
        **{"fc_norm": False, "norm_output": False} | more,
    )  # fmt: skip
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle_3()[1].items()}
    tensors |= drawn({"embed_tokens.weight": (V, D)}, 5)
    tensors |= drawn({f"fc_norm.{i}.weight": (D,) for i in range(3)}, 6) if data["fc_norm"] else {}
    outside = ("lm_head.weight", "d2t", "t2d")
    return data, {name if name in outside else f"model.{name}": tensor for name, tensor in tensors.items()}


def deepspec_eagle3(model, ids=(2, 3, 4, 5, 6), **more):
    """One layer over outputs of five of the target's, with embeddings and a head of its own over all ids."""
    data = of_target(
        model, architectures=["Qwen3Eagle3Model"], num_target_layers=8, num_hidden_layers=1, ttt_length=6,
        layer_types=["full_attention"], target_layer_ids=list(ids), step_loss_decay=0.8, draft_num_hidden_layers=1,
        target_model_name_or_path="Qwen/Qwen3-4B", intermediate_size=MIDDLE, **more,
    )  # fmt: skip
    tensors = {"embed_tokens.weight": (V, D), "fc.weight": (D, len(ids) * D), "norm.weight": (D,),
               "lm_head.weight": (V, D)} | attention("layers.0.", 2 * D, 2) | mlp("layers.0.")  # fmt: skip
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return data, drawn(tensors | {f"layers.0.{name}.weight": (SIZE if "attn" in name else D,) for name in norms}, 3)


EAGLE_3_1 = {"fc_norm": True, "norm_output": True}
SLIDING = {"layer_types": ["sliding_attention"] * 8, "use_sliding_window": True}  # of the target alone


@pytest.mark.parametrize(("layout", "more", "says"), [
    (automodel_eagle3, {}, {"levels": 7, "feature_layers": (2, 4, 5)}),
    (automodel_eagle3, EAGLE_3_1 | SLIDING, {"levels": 7, "feature_layers": (2, 4, 5), **EAGLE_3_1}),
    (deepspec_eagle3, {}, {"levels": 6, "feature_layers": (3, 4, 5, 6, 7), "draft_vocab": V, "qk_norm": True}),
])  # fmt: skip
def test_eagle3_for_text_targets(tmp_path, layout, more, says):
    model = qwen3(num_hidden_layers=8)
    data, tensors = layout(model, **more)
    spec = str(saved(tmp_path / "head", data, tensors))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*norm_output")  # nothing is in doubt, as it is with SpecForge's
        drafter, _ = registry.drafter(spec, model)
    known = {"images": "none", "eps": 1e-6, "rope_theta": 10000.0, "family": "qwen3", "target_layers": 8}
    config = facts(**SPLIT | known | says, image_ids=())
    assert drafter.config == config
    check_described(drafter, model, "llama", config, tensors)
    assert check_drafter(spec, model, prompt("llama", shapes("llama")["ragged"]), NEW)
    several = data | {"num_hidden_layers": 2} if layout is deepspec_eagle3 else data | {"parallel_drafting": True}
    message = "num_hidden_layers" if layout is deepspec_eagle3 else "parallel_drafting"
    with pytest.raises(ValueError, match=f"{message} of .* is (2|True), expected (1|False)"):
        registry.drafter(str(saved(tmp_path / "other", several, tensors)), model)


def gpt_oss():
    sizes = {**TEXT, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    return built(GptOssForCausalLM, GptOssConfig(**sizes), attention="eager")


@pytest.mark.parametrize("make_model", [qwen3, gpt_oss])
def test_nvidia_layer_ids(tmp_path, make_model):
    """Of n layers, n is what the last one gives before the final norm; `eagle_config` may say `norm_before_fc`."""
    model, inputs = make_model(), prompt("llama", shapes("llama")["ragged"])
    n = model.config.num_hidden_layers
    data, tensors = eagle_3(eagle_config={AUX: [n, 0, n - 1], "norm_before_fc": True, "use_aux_hidden_state": True})
    spec = str(saved(tmp_path / "head", data, tensors | drawn({"input_norm.weight": (3 * D,)}, 7)))
    drafter, _ = registry.drafter(spec, model)
    assert (drafter.config.feature_layers, drafter.config.norm_before_fc) == ((n + 1, 0, n - 1), True)
    states = model(**inputs, output_hidden_states=True).hidden_states
    last, *others = HFDecoder(model, drafter.traits.feature_layers).prefill(
        request_of(model, inputs, temperature=0, max_new_tokens=NEW, seed=0))[1].features.split(D, dim=-1)  # fmt: skip
    real = inputs["attention_mask"].bool()
    for got, want in zip((model.model.norm(last), *others), (states[n], states[0], states[n - 1])):
        torch.testing.assert_close(got[real], want[real])
    assert not torch.allclose(last[real], states[n][real], atol=0.1)
    check_described(drafter, model, "llama", drafter.config, load_file(f"{spec}/model.safetensors"))
    check_drafter(spec, model, inputs, NEW)
    drafter.save_pretrained(tmp_path / "ours", {})
    assert registry.drafter(tmp_path / "ours", model)[0].config == drafter.config
    for form in ("eagle3", "speculators"):
        with pytest.raises(ValueError, match="feature_layers"):
            drafter.export(tmp_path / "again", form, "somewhere/target")
    with pytest.warns(RuntimeWarning, match="with a drafter that reads its last layer"):
        check_drafter(spec, model, inputs, NEW, compile=True)


def test_errors_use_file_names(tmp_path):
    for (data, tensors), name in ((eagle_3(), "midlayer.hidden_norm.weight"), (z_lab(), "hidden_norm.weight")):
        rest = {key: value for key, value in tensors.items() if key != name}
        for changed, sentence in (
            (rest, f"lacks tensor '{name}'"), (rest | {name: torch.ones(3)}, f"tensor '{name}' of .* has shape"),
            (rest | {name: torch.full((D,), torch.nan)}, f"tensor '{name}' of .* has values that are not finite"),
        ):  # fmt: skip
            with raises_line(sentence):
                registry.drafter(str(saved(tmp_path / name, data, changed)), model_of("llava"))


def test_transformers_assistant(tmp_path):
    target, assistant = muse_glimmer(), block_assistant()
    assistant.save_pretrained(tmp_path / "assistant")
    drafter, _ = registry.drafter(str(tmp_path / "assistant"), target)
    assert type(drafter) is BlockModel and drafter.form == DFlashVariant()
    for a, b in zip(drafter.assistant.state_dict().values(), assistant.state_dict().values()):
        assert torch.equal(a, b)
    drafter.export(tmp_path / "again", "transformers")
    assert (tmp_path / "again" / "model.safetensors").is_file()
    with pytest.raises(ValueError, match="got windows that are not those of 'speculators'"):
        drafter.export(tmp_path / "x", "speculators", "somewhere/target")
    with pytest.raises(ValueError, match="verifier: got None, expected the name or the path of the target"):
        drafter.export(tmp_path / "x", "speculators")
    drafter.export(tmp_path / "flat", "dflash")  # its window sees one place further than z-lab counts
    flat, _ = registry.drafter(str(tmp_path / "flat"), target)
    assert flat.reach == drafter.reach and not flat.form.causal
    small = llama(1)
    small.save_pretrained(tmp_path / "small")
    assert type(registry.drafter(str(tmp_path / "small"), llama())[0]).__name__ == "SmallModel"


def test_recognition_is_by_data(tmp_path):
    """No form is chosen where another name stands."""
    eagle, split = {"fc.weight", "layers.0.self_attn.q_proj.weight"}, {"fc.weight", "midlayer.hidden_norm.weight"}
    for data, names, form in (
        ({}, eagle, ("eagle", "eagle")),
        ({"architectures": ["LlamaForCausalLM"]}, eagle, ("eagle", "eagle")),
        ({"architectures": ["LlamaForCausalLM"]}, split, ("eagle", "eagle3")),
        ({"architectures": ["LlamaForCausalLM"]}, {"model.embed_tokens.weight"}, ("transformers", "")),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, eagle, ("eagle", "eagle")),
        ({"architectures": ["LlavaForConditionalGeneration"]}, {"model.fc.weight"}, ("transformers", "")),
        ({"speculators_model_type": "dflash"}, eagle, ("dflash", "speculators")),
        ({"speculators_model_type": "dflash2"}, eagle, ("dflash", "speculators")),
        ({"architectures": ["DFlash2DraftModel"]}, eagle, ("dflash", "dflash2")),
        ({"model_type": "gemma4_assistant"}, {"x"}, ("transformers", "")),
    ):
        assert form_of(tmp_path, data, names) == form
    for data, names in (
        ({}, {"x"}), ({"architectures": ["DFlash3DraftModel"]}, eagle), ({"architectures": [3]}, {"x"}),
        ({"dflash_config": {}}, eagle), ({"architectures": ["Qwen3ForCausalLM"]}, split),
        ({"architectures": "DFlashDraftModel"}, {"x"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is a checkpoint of"):
            form_of(tmp_path, data, names)
