"""Every class of transformers that generates, as a tiny random model: its default configuration made small by the names
of its fields (`tiny_sizes`). Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import nn

from tests.tiny import BOS, PAD
from tests.tiny_sizes import EXCEPTIONS, HEAD, LAYERS, LIMIT, MISSING, PICTURES, SIDE, SIZES, SPECIAL, TOKENS, WINDOW

MOST_PARAMETERS = 4_000_000


def generating() -> list[str]:
    """Names of all public classes that generate, aliases left out."""
    found = {}
    for name in dir(tf):
        kind = getattr(tf, name, None) if name[0].isupper() or name[0] == "x" else None
        if inspect.isclass(kind) and issubclass(kind, tf.PreTrainedModel) and issubclass(kind, tf.GenerationMixin):
            found[kind.__name__] = kind
    return sorted(name for name, kind in found.items() if kind.config_class is not None)


# --- configurations -------------------------------------------------------------------------------------------------

PER_LAYER = re.compile(r"\w*(types?|layers|layer\w*|pattern|size|heads\w*|multipliers|list|theta|window\w*)")


def _sized(name: str, old: Any) -> Any:
    """The small value of a field: of a number, of each number of a list, or the value itself."""
    if isinstance(old, bool) or old is None:
        return old
    if isinstance(old, (list, tuple)):
        return type(old)(_sized(name, item) for item in old)
    if not isinstance(old, int):
        return old
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size(old) if callable(size) else (size if old > 0 else old)
    return old


class _Shrinking:
    """One configuration being made small; special ids stay the same ids in all of its parts."""

    def __init__(self, windows: bool, filled: bool):
        self.windows, self.filled, self.ids = windows, filled, {}

    def __call__(self, config: tf.PreTrainedConfig) -> dict[str, Any]:
        """Arguments that make a small configuration of the same kind."""
        config.allow_global_per_layer_attribute_access = True
        old = {f.name: getattr(config, f.name, None) for f in fields(config)}
        changed = {name: self.field(name, value) for name, value in old.items()}
        changed |= self.layers(config, old)
        if self.windows and "sliding_window" in old:
            changed |= self.sliding(changed)
        heads = [k for k in old if k in ("num_attention_heads", "n_head", "n_heads")]
        for name in ("num_key_value_heads", "num_kv_heads"):
            if heads and old.get(name) == old[heads[0]]:
                changed[name] = changed[heads[0]]
        if old.get("rope_parameters"):
            changed["rope_parameters"] = _rope(old["rope_parameters"], "vocab_size" in old and _sectioned(config))
        if self.filled:
            changed |= {k: v for k, v in MISSING.items() if k in old and old[k] is None}
        changed = {k: v for k, v in changed.items() if k not in old or v != old[k]}
        return changed | EXCEPTIONS.get(type(config).__name__, {})

    def sliding(self, changed: dict[str, Any]) -> dict[str, Any]:
        """Fields that make the first layer slide."""
        fields = {"sliding_window": WINDOW}
        if "use_sliding_window" in changed:
            fields["use_sliding_window"] = True
        if set(changed.get("layer_types") or ()) == {"full_attention"}:
            fields["layer_types"] = ["sliding_attention", *changed["layer_types"][1:]]
        return fields

    def field(self, name: str, value: Any) -> Any:
        if isinstance(value, tf.PreTrainedConfig):
            return {**_given(value), **self(value), "model_type": value.model_type}
        if name == "image_grid_pinpoints":
            return [[2 * SIDE, SIDE]]
        if name in TOKENS:
            return TOKENS[name] if value is not None else None
        if re.fullmatch(r"\w*_(id|ids|index|idx|indices)", name):
            return self.special(name if value is None and name in PICTURES else value)
        return _sized(name, value)

    def special(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.special(item) for item in value]
        if value not in PICTURES and (type(value) is not int or value < SPECIAL[0]):
            return value
        return self.ids.setdefault(value, SPECIAL[len(self.ids) % len(SPECIAL)])

    def layers(self, config: Any, old: dict[str, Any]) -> dict[str, Any]:
        """Lists with an entry a layer keep the first layer of every kind; lists of layers keep those that are left."""
        count = next((old[k] for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if old.get(k)), 0)
        if not isinstance(count, int) or not count:
            return {}
        lists = {
            k: v for k, v in old.items() if isinstance(v, (list, tuple)) and len(v) == count and PER_LAYER.fullmatch(k)
        }
        lists = {k: v for k, v in lists.items() if list(v) != list(range(count))}
        kept: list[int] = []
        for i in range(count):
            if any(v[i] not in [v[j] for j in kept] for v in lists.values()):
                kept.append(i)
        while len(kept) < LAYERS:
            kept.append(count - 1)
        if old.get("num_kv_shared_layers"):
            kept = kept * 2
        names = [k for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if old.get(k) == count]
        changed: dict[str, Any] = {k: len(kept) for k in names}
        if old.get("num_kv_shared_layers"):
            changed["num_kv_shared_layers"] = len(kept) // 2
        for name, value in lists.items():
            changed[name] = type(value)(_sized(name, value[i]) for i in kept)
        for name, value in old.items():
            indices = isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value)
            if indices and name not in lists and re.search(r"index|indices|idx|layer", name):
                changed[name] = sorted({min(v, len(kept) - 1) for v in value})
        return changed


def _given(config: tf.PreTrainedConfig) -> dict[str, Any]:
    """What the configuration around it gave to a part: fields that differ from the part's own defaults."""
    try:
        default = type(config)()
    except Exception:  # a part that has no defaults
        return {}
    config.allow_global_per_layer_attribute_access = default.allow_global_per_layer_attribute_access = True
    values = {f.name: getattr(config, f.name, None) for f in fields(config)}
    return {
        k: v for k, v in values.items()
        if not isinstance(v, tf.PreTrainedConfig) and v != getattr(default, k, None)
    }  # fmt: skip


def _sectioned(config: tf.PreTrainedConfig) -> bool:
    """Whether the model of a configuration rotates by time, height and width."""
    path = Path(inspect.getfile(type(config)))
    model = path.with_name(path.name.replace("configuration_", "modeling_"))
    return model.exists() and "mrope_section" in model.read_text()


def _rope(rope: Any, sections: bool) -> Any:
    """Rotations of the small head."""
    if not isinstance(rope, dict):
        return rope
    new = {k: _rope(v, sections) if isinstance(v, dict) else v for k, v in rope.items()}
    if "rope_type" in new and sections:
        half = int(HEAD * new.get("partial_rotary_factor", 1.0)) // 2
        new["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if "original_max_position_embeddings" in new:
        new["original_max_position_embeddings"] = LIMIT
    return new


def tiny_config(kind: type, windows: bool = True, filled: bool = False) -> tf.PreTrainedConfig:
    """A small configuration of a model class, with sliding windows where there is a field for them, and with values
    where the default configuration leaves usual fields empty.
    """
    try:
        default = kind.config_class()
    except Exception:
        default = kind.config_class(**EXCEPTIONS[kind.config_class.__name__])
    made = _Shrinking(windows, filled)(default)
    if hasattr(default, "is_decoder") and not default.is_encoder_decoder:
        made["is_decoder"] = True  # else such models see both ways
    return kind.config_class(**made)


# --- models ---------------------------------------------------------------------------------------------------------


def enliven(model: nn.Module, seed: int = 0, gain: float = 3.0) -> nn.Module:
    """Random weights of a useful size, a head of its own with logits of spread `gain`: answers vary, ties are rare."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search("gate|alpha", name) and p.numel() and not p.any():
                p.fill_(1.0)  # closed gates would hide the pictures
            if p.dim() < 2 or "A_log" in name or not p.is_floating_point():
                continue
            fan_in = p[0].numel() if p.dim() != 3 else p.shape[-1]
            std = 0.4 if "emb" in name and p.dim() == 2 else 1.2 * fan_in**-0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)
        if getattr(head, "weight", None) is not None and head.weight.dim() == 2:
            weight = torch.randn(head.weight.shape, generator=generator) * gain * head.weight.shape[1] ** -0.5
            head.weight = nn.Parameter(weight)  # a tied head would echo its input
    model.generation_config = tf.GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None)
    if getattr(model, "speaker_map", None) == {}:
        model.speaker_map = {"Chelsie": {}}  # generate wants its default voice, even where nothing is said aloud
    return model.eval()


def tiny_model(name: str, seed: int = 0) -> nn.Module:
    """A tiny random model of a class, with windows where it can have them. Raises what its construction raises."""
    kind = getattr(tf, name)
    error: Exception | None = None
    for windows, filled in itertools.product((True, False), (False, True)):
        try:
            model = kind._from_config(tiny_config(kind, windows, filled), dtype=torch.float32)
            break
        except Exception as e:
            error = error or e
    else:
        raise error
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.1f} million parameters after shrinking")
    return enliven(model, seed)
