"""Every configuration that SpecForge ships, made small: random weights by its published names are read, for a tiny
target of its kind, and draft; the one that is refused is refused by name.

`specforge_configs.json` has the entries that a reader looks at, as they stood in August 2026 (sgl-project/SpecForge).
Sizes are scaled down (`scaled`), every key stays.
"""

import functools
import json
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers as tf

from tests import tiny_classes
from tests.test_published import drawn, saved
from tests.tiny import TEXT, built
from visspec.models.decoder.target import describe
from visspec.testing import check_drafter

CONFIGS = json.loads(Path(__file__).with_name("specforge_configs.json").read_text())
READ = {"LlamaForCausalLMEagle3": 27, "DFlashDraftModel": 8, "DSparkDraftModel": 6, "DominoDraftModel": 3}
D, V, HEADS, INNER, FEW, LAYERS = 64, 96, 4, 48, 36, 8
NEW = 6
TARGETS = {  # by how a configuration is called: the class of its target, None where a Llama stands in for it
    "deepseek-v2": "DeepseekV2ForCausalLM", "deepseek-v3": "DeepseekV3ForCausalLM", "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM", "lfm2.5": "Lfm2ForCausalLM", "llama3": "LlamaForCausalLM",
    "longcat": "LongcatFlashForCausalLM", "phi4": "Phi3ForCausalLM", "qwen2-5-vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2.5-vl": "Qwen2_5_VLForConditionalGeneration", "qwen2.5": "Qwen2ForCausalLM", "qwq": "Qwen2ForCausalLM",
    "qwen3-30B": "Qwen3MoeForCausalLM", "qwen3-235B": "Qwen3MoeForCausalLM", "qwen3-coder-next": "Qwen3NextForCausalLM",
    "qwen3-coder": "Qwen3MoeForCausalLM", "qwen3-next": "Qwen3NextForCausalLM", "qwen3-": "Qwen3ForCausalLM",
    "qwen3.5-35b": "Qwen3_5MoeForConditionalGeneration", "qwen3.": "Qwen3_5ForConditionalGeneration",
    "glm-5.2": None, "inkling": None, "llama4": None,  # whose own attention is refused
    "kimi-k3": None, "ling-flash": None,  # not in transformers
}  # fmt: skip
REFUSED = {"glm-5.2": "GlmMoeDsaForCausalLM", "llama4": "Llama4ForCausalLM", "inkling": "InklingForCausalLM"}


def first(table, name):
    return next(value for key, value in table.items() if name.startswith(key))


@functools.cache
def target(kind):
    """A tiny random model of a class, with eight layers."""
    with torch.inference_mode(False), mock.patch.object(tiny_classes, "LAYERS", LAYERS):
        if kind == "Lfm2ForCausalLM":
            kinds = ["conv", "conv", "full_attention", "conv"] * 2
            sizes = {**TEXT, "hidden_size": D, "num_hidden_layers": LAYERS}
            return built(tf.Lfm2ForCausalLM, tf.Lfm2Config(**sizes, layer_types=kinds, conv_L_cache=3))
        return tiny_classes.tiny_model(kind or "LlamaForCausalLM")


# --- small configurations ---------------------------------------------------------------------------------------------


def spread(ids, depth, low):
    """As many ids of a target of eight layers, as far behind the first and before the last as they can be."""
    start, end = min(ids[0], low), LAYERS - min(depth - ids[-1], 3)
    return [round(start + i * (end - start) / (len(ids) - 1)) for i in range(len(ids))]


def scaled(data):
    """The same keys, with the sizes of a tiny drafter; what is equal or divided stays so."""
    heads, size = data["num_attention_heads"], data.get("head_dim")
    share = data.get("num_key_value_heads", heads)
    small = {"hidden_size": D, "intermediate_size": INNER, "num_attention_heads": HEADS, "vocab_size": V}
    small["num_key_value_heads"] = 1 if share == 1 else HEADS if share == heads else 2
    small["num_hidden_layers"] = count = min(data["num_hidden_layers"], 2)
    small["head_dim"] = side = 16 if size is None or heads * size == data["hidden_size"] else 32
    small["draft_vocab_size"] = V if data.get("draft_vocab_size") == data["vocab_size"] else FEW
    small |= {"num_target_layers": LAYERS, "emb_dim": 6, "layer_types": data.get("layer_types", [])[-count:]}
    small["block_size"] = 5 if data.get("block_size") == 16 else 4
    if data.get("use_sliding_window"):
        small |= {"sliding_window": 6, "layer_types": [data["layer_types"][0], data["layer_types"][-1]]}
    found = {key: small.get(key, value) for key, value in data.items()}
    if section := (data.get("rope_scaling") or {}).get("mrope_section"):
        part = [n * side // 128 for n in section]
        found["rope_scaling"] = data["rope_scaling"] | {"mrope_section": [side // 2 - part[1] - part[2], *part[1:]]}
    own = {"mask_token_id": 4, "markov_rank": 3, "emb_dim": 6, "gru_hidden_dim": 5}
    if "dflash_config" in data:
        own["target_layer_ids"] = spread(data["dflash_config"]["target_layer_ids"], data["num_target_layers"], 1)
        found["dflash_config"] = {key: own.get(key, value) for key, value in data["dflash_config"].items()}
    if "eagle_config" in data:
        ids = data["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        found["eagle_config"] = data["eagle_config"] | {"eagle_aux_hidden_state_layer_ids": spread(ids, ids[-1] + 3, 2)}
    return found


# --- tensors by published names ---------------------------------------------------------------------------------------


def layer(prefix, data, read):
    size, kv = data.get("head_dim") or D // HEADS, data.get("num_key_value_heads", HEADS)
    rows = {"q_proj": HEADS * size, "k_proj": kv * size, "v_proj": kv * size}
    shapes = {f"{prefix}self_attn.{name}.weight": (count, read) for name, count in rows.items()}
    shapes |= {f"{prefix}self_attn.o_proj.weight": (D, HEADS * size), f"{prefix}mlp.down_proj.weight": (D, INNER)}
    shapes |= {f"{prefix}mlp.{name}_proj.weight": (INNER, D) for name in ("gate", "up")}
    return shapes | {f"{prefix}{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}


def eagle3(data):
    few = data["draft_vocab_size"]
    shapes = {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (few, D)}
    shapes |= {"midlayer.hidden_norm.weight": (D,), **layer("midlayer.", data, 2 * D)}
    shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(3) if data.get("fc_norm")}
    ids = torch.arange(few) if few == V else torch.arange(few) * 2 + 5
    return drawn(shapes) | {
        "d2t": ids - torch.arange(few),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, 1),
    }


def dflash(data):
    states = len(data["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (D, states * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for n in range(data["num_hidden_layers"]):
        shapes |= layer(f"layers.{n}.", data, D)
        shapes |= {f"layers.{n}.self_attn.{name}_norm.weight": (data["head_dim"],) for name in "qk"}
    return drawn(shapes)


def dspark(data):
    rank = data["dflash_config"]["markov_rank"]
    shapes = {"markov_head.markov_w1.weight": (V, rank), "markov_head.markov_w2.weight": (V, rank)}
    shapes |= {"confidence_head.proj.weight": (1, D + rank), "confidence_head.proj.bias": (1,)}
    return dflash(data) | drawn(shapes, 1)


def domino(data):
    state, middle = (data["dflash_config"][name] for name in ("gru_hidden_dim", "emb_dim"))
    shapes = {"prefix_gru.weight_ih_l0": (3 * state, D), "prefix_gru.weight_hh_l0": (3 * state, state)}
    shapes |= {"embed_proj.0.weight": (middle, D + state), "embed_proj.2.weight": (V, middle)}
    return dflash(data) | drawn(shapes, 1)


TENSORS = dict(zip(READ, (eagle3, dflash, dspark, domino)))


# --- what becomes of each ---------------------------------------------------------------------------------------------


DISTINCT = {  # of those that are the same when they are small, the last
    (json.dumps(scaled(data)), first(TARGETS, name)): name
    for name, data in CONFIGS.items()
    if data["architectures"][0] in READ
}


KINDS = {CONFIGS[name]["architectures"][0]: name for name in DISTINCT.values()}.values()


@pytest.mark.filterwarnings("ignore:drafter:RuntimeWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n not in KINDS)) for n in DISTINCT.values()]
)
def test_a_configuration_is_read_and_drafts(tmp_path, name):
    """What is drafted is compared with descriptions in `test_published`."""
    data, model = scaled(CONFIGS[name]), target(first(TARGETS, name))
    assert data.keys() == CONFIGS[name].keys()
    form = data["architectures"][0]
    spec = str(saved(tmp_path / "head", data, TENSORS[form](data)))
    quick = check_drafter(spec, model, tiny_classes.text(model)["3"], NEW)
    drafter = quick.drafter
    if form == "LlamaForCausalLMEagle3":
        read, levels = (data.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids", [1, 3, 4]), 7
    else:
        own = data["dflash_config"]
        walks = {"DSparkDraftModel": "Spark", "DominoDraftModel": "Domino"}.get(form, "NoneType")
        assert type(drafter.form.sequential).__name__ == walks
        read, levels = own["target_layer_ids"], data["block_size"] - (not (walks == "Spark" or own.get("shift_label")))
    assert drafter.traits.feature_layers == tuple(i + 1 for i in read)
    assert drafter.traits.levels == levels and max(r.levels for r in quick.last_state.trace.rounds) > 1


@pytest.mark.parametrize("name", REFUSED)
def test_stand_in_targets_refused(name):
    kind = getattr(tf, REFUSED[name])
    with torch.device("meta"), pytest.raises(ValueError, match="expected full or sliding attention"):
        describe(kind._from_config(tiny_classes.tiny_config(kind)))


def test_all_of_them_are_judged():
    result = Counter(data["architectures"][0] for data in CONFIGS.values())
    assert result == READ | {"PEagleDraftModel": 1} and sum(READ.values()) == 44
