"""Reading published checkpoints of DFlash block drafters (`export` writes them). The network is transformers' own class
(`MuseGlimmerAssistantModel`), or ours for DFlash 2. The forms differ in where the configuration states what, in the
names of two tensors, and in `DFlashVariant`.

Forms: "dflash" (z-lab and SpecForge: a Qwen3 configuration with `dflash_config`; layer i means hidden_states[i + 1]),
"dflash2" (the same with sizes of convolutions and selector), "dspark", "domino" (SpecForge: the same with a sequential
head), "deepspec" (DSpark, and DFlash without a head, with all entries at the top and copies of the target's embeddings
and head), "speculators" (a nested configuration; id i means hidden_states[i]; optionally its own vocabulary; all but
Domino), "transformers". DSpark is written in speculators' form.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel

from visspec.io.checkpoint import LARGEST, check_whole, check_wholes, shorten
from visspec.models.block.dflash2 import CONVOLUTIONS, DFlash2Model, with_convolutions
from visspec.models.block.drafter import BlockModel, DFlashVariant
from visspec.models.block.export import ASSISTANT, SIZES
from visspec.models.block.sequential import Spark, published_name, sequential_of
from visspec.models.decoder.target import vocabulary
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
from visspec.models.layers import MOST_LAYERS, depth
from visspec.models.published_tensors import load_published

OF_THE_TARGET = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
OWN_HEAD = ("lm_head.weight", "d2t", "t2d")
COPIES = ("embed_tokens.weight", "lm_head.weight")  # copies of the target's weights in DeepSpec's form
KINDS = ("full_attention", "sliding_attention")


def read(
    folder: Path,
    form: str,
    data: dict,
    shapes: Mapping[str, tuple[int, ...]],
    model: PreTrainedModel,
    width: int = 1,
    nodes: int = 24,
    causal: bool | None = None,
) -> BlockModel:
    """Load a published checkpoint as a drafter, in the target's dtype.

    Raises ValueError, before it reads weights, unless the tensors are exactly those of the form and of this target.

    Args:
        data, shapes: Its configuration and the headers of its tensors.
        causal: Whether windows hide later places of the block, if the checkpoint does not say.
    """
    parts: Any = nn.Module()
    table = cast(Tensor, model.get_input_embeddings().weight)
    with sentence_of(folder), torch.device("meta"):
        config, block = config_of(folder, form, data, model, causal)
        vocab = entry(folder, layer_of(folder, form, data), "vocab_size", int)
        if vocab != vocabulary(model):
            raise ValueError(f"drafter: made for a target of vocabulary {vocab}, got a model of {vocabulary(model)}.")
        few = (data.get("draft_vocab_size") or vocab) if form == "speculators" else 0
        network = DFlash2Model if algorithm(form, data) == "dflash2" else MuseGlimmerAssistantModel
        parts.assistant, parts.own = network(config), _own(form, shapes, config.hidden_size, few, vocab)
        parts.head = sequential_of(folder, algorithm(form, data), entries_of(form, data), vocab, few, table)
    if network is DFlash2Model and 0 < few < vocab:
        raise ValueError(f"drafter: draft_vocab_size of {folder} is {few}, expected {vocab} for a selector.")
    ignored = {"speculators": (*OF_THE_TARGET, *OWN_HEAD), "deepspec": COPIES}.get(form, ())
    tensors = partial(read_stripped, folder)

    def rebuild() -> nn.Module:
        parts.to_empty(device="cpu").assistant = network(config)  # its rotary tables are in no file
        return parts

    parts = load_published(parts, shapes, tensors, folder, model.dtype, _published, ignored, rebuild).to(model.device)
    head, more = parts.head, _fields(folder, parts.own, model, vocab)
    if isinstance(head, Spark):
        head.ids = more.get("ids")
    return BlockModel(parts.assistant, model, width, nodes, replace(block, sequential=head, **more))


def _published(own: str) -> str:
    """Return the published name of a tensor of `read`'s parts."""
    part, _, name = own.partition(".")
    return ASSISTANT[name] if name in ASSISTANT else published_name(name) if part == "head" else name


def layer_of(folder: Path, form: str, data: dict) -> dict:
    return entry(folder, data, "transformer_layer_config", dict) if form == "speculators" else data


def entries_of(form: str, data: dict) -> dict:
    """Return a checkpoint's own entries at one level."""
    return data if form == "speculators" else {**data, **object_of(data.get("dflash_config"))}


def algorithm(form: str, data: dict) -> str:
    """Return the algorithm of a checkpoint: its form, or the one that a speculators configuration names."""
    return data["speculators_model_type"] if form == "speculators" else form


def config_of(
    folder: Path, form: str, data: dict, model: PreTrainedModel, causal: bool | None = None
) -> tuple[MuseGlimmerAssistantConfig, DFlashVariant]:
    """Convert a checkpoint's configuration to transformers' and a variant. Raises ValueError if it is unsupported."""
    layer, fields = layer_of(folder, form, data), entries_of(form, data)
    check_verifier(folder, data, model)
    sizes = {name: entry(folder, layer, name, int) for name in SIZES}
    check_whole("num_hidden_layers", sizes["num_hidden_layers"], 1, MOST_LAYERS)
    theta, scaling, _, _, partial = rope_of(folder, layer)
    check_entries(folder, {"partial_rotary_factor": partial}, {"partial_rotary_factor": 1.0})
    check_entries(folder, layer, {"attention_bias": False, "hidden_act": "silu"})
    for name in ("block_size", "mask_token_id"):
        check_whole(name, fields.get(name), 2 if name == "block_size" else 0, LARGEST)
    kinds = _kinds(folder, layer, sizes["num_hidden_layers"])
    window: Any = layer.get("sliding_window") if "sliding_attention" in kinds else 1
    longest = layer.get("max_position_embeddings") or 1
    config = MuseGlimmerAssistantConfig(
        **sizes,
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope_parameters={"rope_type": "default", "rope_theta": theta, **(scaling or {})},
        max_position_embeddings=longest,
        sliding_window=window,
        layer_types=kinds,
        block_size=fields["block_size"],
        mask_token_id=fields["mask_token_id"],
        target_layer_ids=_layers(folder, form, fields, depth(model), sizes["num_hidden_layers"]),
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    if algorithm(form, data) == "dflash2":
        entries = {**CONVOLUTIONS, **fields} if form == "speculators" else fields
        with_convolutions(config, *(entries.get(name) for name in CONVOLUTIONS))
    return config, _block(folder, form, fields, kinds, window, causal)


def _kinds(folder: Path, layer: dict, count: int) -> list[str]:
    kinds = list_of(layer.get("layer_types")) or ["full_attention"] * count
    windows = layer.get("use_sliding_window") and "layer_types" not in layer
    if len(kinds) != count or any(kind not in KINDS for kind in kinds) or windows:
        raise ValueError(f"drafter: layer_types of {folder} is {shorten(kinds)}, expected {count} {', '.join(KINDS)}.")
    return kinds


def _layers(folder: Path, form: str, entries: dict, layers: int, count: int) -> list[int]:
    """Return the layers whose outputs are read, counted from 0. speculators' form names inputs of layers; if z-lab's
    names none, as many as the drafter has layers are spread from 1 to the last but two.
    """
    low = 1 if form == "speculators" else 0
    name = "aux_hidden_state_layer_ids" if low else "target_layer_ids"
    layer_ids = entries.get(name)
    if layer_ids is None and not low and layers > 3:
        layer_ids = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    ids = check_wholes(name, layer_ids, 0, MOST_LAYERS)
    if not ids or (wrong := [i for i in ids if not low <= i < layers]):
        problem = f"layer {wrong[0]}" if ids else "none"
        raise ValueError(f"drafter: {name} of {folder} names {problem}, expected some of {low}..{layers - 1}.")
    return [i - low for i in ids]


def _block(folder: Path, form: str, entries: dict, kinds: list[str], window: int, causal: bool | None) -> DFlashVariant:
    if causal is not None and not isinstance(causal, bool):
        raise ValueError(f"causal: got {shorten(causal)}, expected true or false.")
    spark = form in ("dspark", "deepspec") or entries.get("speculators_model_type") == "dspark"
    anchor = bool(entries.get("shift_label" if form == "domino" else "sample_from_anchor", spark))
    if form == "speculators":
        both_ways = entries.get("sliding_window_non_causal", algorithm(form, entries) == "dflash2")
        hides = not both_ways if causal is None else causal
        return DFlashVariant(anchor=anchor, causal=hides, reach=window, from_anchor=True, index=True, raw=True)
    own = entries.get("is_causal", entries.get("causal"))  # keys of z-lab and of ModelOpt, for all layers
    if own and "full_attention" in kinds:
        raise ValueError(f"drafter: is_causal of {folder} is true, expected false for layers of full attention.")
    if own is None and causal is None and "sliding_attention" in kinds:
        warnings.warn(
            f"drafter: {folder} does not say whether its windows hide later places of a block. They do here, as in"
            f" SpecForge and vLLM; for z-lab's own code, where they do not, use {folder.name}:causal=false.",
            RuntimeWarning,
            stacklevel=2,
        )
    numbers = {name: entries.get(name) for name in ("input_embedding_scale", "output_multiplier")}
    softcap = entries.get("final_logit_softcapping") or 0.0
    scale, multiplier = (1.0 if value is None else float(value) for value in numbers.values())
    hides = (own is None or bool(own)) if causal is None else causal
    return DFlashVariant(
        anchor=anchor,
        causal=hides,
        reach=window - 1,
        index=True,
        raw=True,
        scale=scale,
        multiplier=multiplier,
        softcap=float(softcap),
    )


# --- its own embeddings and heads -------------------------------------------------------------------------------------


def _own(form: str, names: Collection[str], hidden: int, few: int, vocab: int) -> nn.Module:
    """Build modules for a checkpoint's own head and its ids, or for DeepSpec's copies, instead of the target's."""
    own, some = nn.Module(), 0 < few < vocab
    if form == "deepspec":
        own.embed_tokens, own.lm_head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
    elif some or (form == "speculators" and "lm_head.weight" in names):
        own.lm_head = nn.Linear(hidden, few, bias=False)
    for name, count in (("d2t", few), ("t2d", vocab)) if some else ():
        own.register_buffer(name, torch.zeros(count, dtype=torch.long))
    return own


def _fields(folder: Path, own: Any, model: PreTrainedModel, vocab: int) -> dict[str, Any]:
    """Return these modules as fields of the variant; copies that equal the target's are left out."""
    if hasattr(own, "embed_tokens"):
        targets = {"embed": model.get_input_embeddings(), "head": model.get_output_embeddings()}
        copies = zip(targets.items(), (own.embed_tokens, own.lm_head))
        return {name: mine for (name, its), mine in copies if not torch.equal(mine.weight, its.weight[:vocab])}
    fields: dict[str, Any] = {"head": own.lm_head} if hasattr(own, "lm_head") else {}
    if hasattr(own, "d2t"):
        fields["ids"] = own.d2t + torch.arange(len(own.d2t), device=model.device)
        check_ids(folder, fields["ids"], own.t2d, vocab)
    return fields
