"""Reading published checkpoints of one-layer drafters: their configurations and tensor names (`export` writes them).

Forms: "eagle" (EAGLE-1 and 2, MSD, ViSpec), "eagle3" (EAGLE-3 and SpecForge: `midlayer.*`) and "speculators" (a nested
configuration, `layers.0.*`). "eagle" has a Llama configuration, or one named after the target; `layers.0.*` without an
input norm (MSD for Qwen2-VL has one); and `fc` over [embedding; feature]. NeMo Automodel's checkpoints add the input
norm and a final norm whose output is the next feature. There are two ways to count the target states that a head reads:
speculators, vLLM and some others name hidden_states[i] itself, the input of layer i; ids that begin with 1 (SpecForge,
ModelOpt) or 0 name layers whose outputs are read, hidden_states[i + 1].
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec.io.checkpoint import check_wholes, shorten
from visspec.models.decoder.target import content_ids, vocabulary
from visspec.models.drafting.checkpoint import sentence_of
from visspec.models.drafting.published_config import (
    check_entries,
    check_ids,
    check_verifier,
    entry,
    list_of,
    object_of,
    read_stripped,
    rope_of,
)
from visspec.models.eagle.config import EagleConfig
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.export import IDS, LAYER, MIDLAYER, SIZES
from visspec.models.eagle.head import EagleHead
from visspec.models.layers import depth
from visspec.models.published_tensors import load_published

logger = logging.getLogger(__name__)
EMBEDDING = "embed_tokens.weight"
PREFIXES = ((MIDLAYER, LAYER), ("img_adaptor.query", "imadpt.q"), ("img_adaptor.", "imadpt."))  # theirs and ours
AUTOMODEL = ("LlamaEagleDraftModel", "VispecDraftModel", "LlamaEagle3DraftModel")  # with their target's configuration
ONE_ROW = (*AUTOMODEL, "Qwen3Eagle3Model")  # use slot numbers as positions even if the target has M-RoPE
SLOTS = {"positions": "index", "mrope_section": (), "mrope_interleaved": False}
LLAVA, PADDED = "LlavaLlamaForCausalLM", 64  # LLaVA's own class, and the most ids that transformers adds to it
OF_THE_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")  # target weights that speculators may also save
DEPTHS = {"eagle": 5, "eagle3": 7, "speculators": 5}  # default draft lengths of the original code
MODELOPT = {  # flags of its `eagle_config`, with their values for an EAGLE-3 head
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
SUPPORTED = {  # entries of a decoder layer, with the only supported values
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "swin_norm": False,
    "pretraining_tp": 1,
    "parallel_drafting": False,
}
Layers = str | int | list[int] | tuple[int, ...]  # type of the option `layers`: "2-14-29", one number, or a list


def read(
    folder: Path,
    form: str,
    data: dict,
    shapes: Mapping[str, tuple[int, ...]],
    model: PreTrainedModel,
    images: str | None = None,
    norm_output: bool | None = None,
    layers: Layers | None = None,
    **options: Any,
) -> EagleDrafter:
    """Load a published checkpoint as a drafter, in the target's dtype.

    Raises ValueError, before it reads weights, unless the tensors are exactly those of the form and of this target.

    Args:
        data, shapes: Its configuration and the headers of its tensors.
        images: How it represents images, if the checkpoint does not say (`eagle.config.IMAGES`). norm_output and layers
            override an EAGLE-3 head's configuration: whether it reads its own normed states, and which hidden states of
            the target it reads ("2-14-29").
    """
    prefixes = [pair for pair in PREFIXES if any(name.startswith(pair[0]) for name in shapes)]
    inverse = [(ours, theirs) for theirs, ours in prefixes]
    missing = _padding(data, model)
    if missing:
        data = {**data, "vocab_size": vocabulary(model)}
        shapes = {n: (s[0] + missing, *s[1:]) if n == EMBEDDING else s for n, s in shapes.items()}

    def tensors() -> dict[str, Tensor]:
        loaded = read_stripped(folder)
        if missing and EMBEDDING in loaded:
            rows = cast(Tensor, model.get_input_embeddings().weight)[config.vocab - missing : config.vocab].detach()
            loaded[EMBEDDING] = torch.cat([loaded[EMBEDDING], rows.to(loaded[EMBEDDING])])
        return loaded

    with sentence_of(folder), torch.device("meta"):
        data = _normed(folder, form, data, norm_output)
        own_shapes = {_renamed(name, prefixes): shape for name, shape in shapes.items()}
        config = config_of(folder, form, data, own_shapes, model, images, layers)
        EagleDrafter.check_target(config, model)
        head = EagleHead(config)
    whole = config.draft_vocab == config.vocab  # such heads may store id maps that change nothing
    ignored = (*OF_THE_TARGET, "d2t", "t2d") if whole else OF_THE_TARGET

    def published(own: str) -> str:
        return _renamed(own, inverse)

    head = load_published(head, shapes, tensors, folder, model.dtype, published, ignored)
    if head.ids is not None:
        check_ids(folder, head.ids, head.t2d, config.vocab)
    return EagleDrafter(head, model, **options)


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Replace the prefix of a tensor's name."""
    return next((new + name.removeprefix(old) for old, new in pairs if name.startswith(old)), name)


def _normed(folder: Path, form: str, data: dict, option: bool | None) -> dict:
    """Apply the option `norm_output` to the configuration. SpecForge wrote true for heads that it trained on states
    without the norm (until its pull request 879); EAGLE 3.1, and engines that serve it, mean normed ones.
    """
    if option is not None:
        if not isinstance(option, bool) or form == "eagle":
            raise ValueError(f"norm_output: got {shorten(option)}, expected true or false for an EAGLE-3 head.")
        return {**data, "norm_output": option}
    if form == "eagle3" and data.get("norm_output") and _architecture(data) not in AUTOMODEL:
        warnings.warn(
            f"drafter: norm_output of {folder} is true, so its states are normed as in EAGLE 3.1. If SpecForge trained"
            f" this head before September 2026, use {folder.name}:norm_output=false.",
            RuntimeWarning,
            stacklevel=2,
        )
    return data


def _padding(data: dict, model: PreTrainedModel) -> int:
    """Return how many ids transformers' conversion adds to LLaVA's own vocabulary, by which MSD's checkpoints count."""
    count = data.get("vocab_size")
    missing = vocabulary(model) - count if type(count) is int and LLAVA in list_of(data.get("architectures")) else 0
    return missing if 0 < missing <= PADDED else 0


# --- the configuration ------------------------------------------------------------------------------------------------


def config_of(
    folder: Path,
    form: str,
    data: dict,
    shapes: Mapping[str, tuple[int, ...]],
    model: PreTrainedModel,
    images: str | None = None,
    layers: Layers | None = None,
) -> EagleConfig:
    """Convert a checkpoint's configuration to ours. Raises ValueError if it needs something that is not supported."""
    layer = _layer_of(data) if form != "speculators" else entry(folder, data, "transformer_layer_config", dict)
    common = layer_fields(folder, layer, shapes)
    check_verifier(folder, data, model)
    common |= {
        "family": model.config.model_type,
        "target_layers": depth(model),
        "target_hidden": data.get("target_hidden_size") or common["hidden"],
        "image_ids": tuple(sorted(content_ids(model.config))),
        "levels": _levels(form, data),
    }
    if form == "eagle":
        if layers is not None:
            raise ValueError(f"layers: got {shorten(layers)}, expected none: the head reads the target's last state.")
        latents = shapes["imadpt.q"][0] - 1 if "imadpt.q" in shapes else 0
        image_form = _images(folder, "latents" if latents else None, images, bool(common["image_ids"]))
        return EagleConfig(
            **common | SLOTS,
            fusion="sum",
            images=image_form,
            image_latents=latents,
            norm_input=f"{LAYER}input_layernorm.weight" in shapes,
            norm_output=_architecture(data) in AUTOMODEL,
        )
    check_entries(folder, object_of(data.get("eagle_config")), MODELOPT)
    ids = _states(folder, form, data, depth(model), layers)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    entries = {**object_of(data.get("eagle_config")), **data}  # NVIDIA writes norm_before_fc into eagle_config
    common |= {name: bool(entries.get(name, False)) for name in flags}
    common |= SLOTS if common["mrope_section"] and _architecture(data) in ONE_ROW else {}
    return EagleConfig(
        **common,
        fusion="split",
        feature_layers=ids,
        draft_vocab=data.get("draft_vocab_size") or common["vocab"],
        images=(images or "placeholders") if common["image_ids"] else "none",
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in shapes),
    )


def _architecture(data: dict) -> object:
    """Return the first entry of a configuration's `architectures`, or None."""
    return next(iter(list_of(data.get("architectures"))), None)


def _layer_of(data: dict) -> dict:
    """Return the entries of the decoder layer. If the configuration is the target's, replace its number of layers and
    drop its attention windows.
    """
    if _architecture(data) not in AUTOMODEL:
        return data
    depth = 1 if _architecture(data) == "LlamaEagle3DraftModel" else data.get("num_hidden_layers")
    return {
        **data,
        "num_hidden_layers": data.get("draft_num_hidden_layers", depth),
        "layer_types": None,
        "use_sliding_window": False,
    }


def layer_fields(folder: Path, layer: dict, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of our configuration that follow from a decoder layer's configuration and tensor names."""
    sliding = "sliding_attention" in list_of(layer.get("layer_types")) or bool(layer.get("use_sliding_window"))
    check_entries(folder, {**layer, "use_sliding_window": sliding}, SUPPORTED)
    sizes = {own: entry(folder, layer, name, int) for own, name in SIZES.items()}
    heads = sizes["heads"] or 1
    theta, scaling, section, interleaved, partial = rope_of(folder, layer)
    return {
        **sizes,
        "kv_heads": layer.get("num_key_value_heads") or heads,
        "head_size": layer.get("head_dim") or sizes["hidden"] // heads,
        "eps": layer.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": partial,
        "mrope_section": section,
        "mrope_interleaved": interleaved,
        "own_embedding": EMBEDDING in shapes,
        "fc_bias": "fc.bias" in shapes,
        "qkv_bias": any(name.endswith("q_proj.bias") for name in shapes if "self_attn" in name),
    }


def stated_layers(form: str, data: dict, layers: int) -> tuple[Any, str]:
    """Return the target's layer ids as an EAGLE-3 head names them, and what they refer to: "outputs" or "inputs" of
    layers; "boundary", inputs that include the last layer's output before the final norm (NVIDIA, vLLM); or, if the
    head names none, "defaults", which are hidden states.
    """
    parts = (data, object_of(data.get("dflash_config")), object_of(data.get("eagle_config")))
    own = data.get("target_layer_ids")  # DeepSpec's key, for outputs
    layer_ids = own or next((part[IDS] for part in parts if part.get(IDS)), None)
    if not layer_ids:
        return (2, layers // 2, layers - 3), "defaults"
    if form == "eagle3" and (own or next(iter(list_of(layer_ids)), None) in (0, 1)):
        return layer_ids, "outputs"
    return layer_ids, "boundary" if layers in list_of(layer_ids) else "inputs"


def _states(folder: Path, form: str, data: dict, depth: int, option: Layers | None) -> tuple[int, ...]:
    """Return the hidden states that an EAGLE-3 head reads: those requested, else those stated at the top level or in
    `dflash_config` or `eagle_config`, else (none, or [] as ModelOpt writes) those before layers 2, n / 2 and n - 3.
    """
    layer_ids, convention = stated_layers(form, data, depth)
    ids, named = layer_ids, "the default"
    if convention != "defaults":
        ids = check_wholes(IDS, layer_ids, 0, depth)
        named = f"{'outputs' if convention == 'outputs' else 'inputs'} of the layers {list(ids)} named in its config"
    if option is not None:
        ids, convention, named = _layers_option(option, depth), "asked", "as requested"
    states = [i + (convention == "outputs" or i == depth) for i in ids]
    if wrong := [i for i in states if not (0 <= i < depth or convention == "boundary")]:
        problem = (
            f"no {IDS} for a target of {depth} layers" if named == "the default" else f"a state after layer {wrong[0]}"
        )
        raise ValueError(f"drafter: {folder} names {problem}, expected states before one of its layers 0..{depth - 1}.")
    summary = f"{folder.name} reads hidden states {states}: {named}"
    logger.info("%s", summary)
    if convention in ("outputs", "inputs") and form == "eagle3" and not data.get("target_layer_ids") and ids[0] != 1:
        warnings.warn(
            f"drafter: {summary}. Some trainers count layers differently; to state the hidden states, set"
            f" {folder.name}:layers={'-'.join(map(str, states))}",
            RuntimeWarning,
            stacklevel=2,
        )
    return tuple(states)


def _layers_option(value: Layers, depth: int) -> tuple[int, ...]:
    """Parse the option `layers` into hidden states: "2-14-29", one number, or a list."""
    parts = value if isinstance(value, (list, tuple)) else str(value).split("-")
    if not parts or not all(str(part).isdecimal() for part in parts):
        raise ValueError(f"layers: got {shorten(value)}, expected hidden states such as 2-{depth // 2}-{depth - 3}.")
    return check_wholes("layers", [int(part) for part in parts], 0, depth - 1)


def _images(folder: Path, stored: str | None, option: str | None, pictures: bool) -> str:
    """Return how a head of the EAGLE-2 form represents images. Its tensors only reveal latents."""
    if stored is not None:
        if not pictures or option not in (None, stored):
            problem = f"images={option}" if pictures else "a target that sees no images"
            raise ValueError(f"drafter: {folder} is a ViSpec head, which represents images as latents, got {problem}")
        return stored
    if not pictures:
        return "none"
    forms = ("slots", "embeddings", "none")
    if option not in forms:
        raise ValueError(
            f"drafter: {folder} does not say how it represents images, expected {folder.name}:images=slots (EAGLE),"
            " images=embeddings (MSD) or images=none (HiViS)."
        )
    return option


def _levels(form: str, data: dict) -> int:
    methods = list_of(object_of(data.get("speculators_config")).get("proposal_methods"))
    count = object_of(next(iter(methods), None)).get("speculative_tokens")
    return data.get("ttt_length", DEPTHS[form]) if count is None else count  # DeepSpec's key, or speculators'
