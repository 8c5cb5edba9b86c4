"""Presets of `visspec train drafter` applied to a target: sizes, and values that are measured on its answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec import registry
from visspec.models.decoder.target import vocabulary
from visspec.presets import Recipe
from visspec.train.batches import TrainingBatch


def frequent(batches: Iterable[TrainingBatch], vocab: int, count: int) -> Tensor:
    """Return the `count` most frequent of `vocab` ids in the answers of batches, ascending (FR-Spec, VocabTrim)."""
    counts = torch.zeros(vocab, dtype=torch.long)
    for batch in batches:
        for ids, length in zip(batch.ids[:, batch.prompt_length :], batch.lengths):
            counts += torch.bincount(ids[:length].cpu(), minlength=vocab)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


@torch.no_grad()
def focused_state(model: PreTrainedModel, inputs: dict[str, Any]) -> int:
    """Return the index of the hidden state after the layer whose attention over these prompts has the smallest entropy,
    averaged over heads and tokens, without the last layer (DREAM). The middle one if the model returns no attention
    weights.
    """
    text = model.config.get_text_config()
    attention, middle = text._attn_implementation, max(text.num_hidden_layers // 2, 1)
    mask_BL = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    try:
        text._attn_implementation = "eager"
        weights = model(**inputs, output_attentions=True, use_cache=False).attentions
    finally:
        text._attn_implementation = attention
    entropies = [torch.special.entr(each_BHLL.float()).sum(-1).mean(1)[mask_BL].mean() for each_BHLL in weights or ()]
    if len(entropies) != text.num_hidden_layers or len(entropies) < 2:
        return middle
    return 1 + int(torch.stack(entropies[:-1]).argmin())


def of_preset(name: str | None, model, options: dict[str, Any]) -> tuple[dict[str, Any], Recipe]:
    """Return the preset, and the fields of its network for a model with the user's changes."""
    recipe = registry.recipe(name)
    text = model.config.get_text_config()
    network, depth = {"structure": recipe.draft, **recipe.network, **options}, text.num_hidden_layers
    if "layers" in network and "layers" not in options:
        network["layers"] = min(network["layers"], max(depth // 4, 1))
    for name in {"markov", "selector"} & {*network}:
        network[name] = min(network[name], text.hidden_size)
    if network.get("draft_vocab"):
        network["draft_vocab"] = min(network["draft_vocab"], vocabulary(model))
    if network.get("fusion") == "cross":
        network["feature_layers"] = (max(depth // 2, 1), -1)
    if network.get("fusion") == "split":
        low = min(2, depth - 1)
        network["feature_layers"] = tuple(sorted({low, max(depth // 2, low), max(depth - 3, low)}))
        network["kv_heads"] = text.num_key_value_heads
        network["head_size"] = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return network, recipe


def check_preset(name: str | None, options: dict[str, Any], recipe: Recipe) -> None:
    """Raise ValueError for values that the preset does not have."""
    allowed = {*recipe.network, "intermediate", "structure", *(("draft_vocab",) if recipe.kind == "eagle" else ())}
    if strange := sorted(set(options) - allowed):
        where = f"with the preset {name!r}" if name else "without a preset"
        raise ValueError(f"{strange[0]}: got {options[strange[0]]} {where}, which has no such value, expected none.")
