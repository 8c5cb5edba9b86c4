"""Checkpoint folders of feature drafters: config.json, model.safetensors, provenance.json. Loading is strict.

Every refusal is a ValueError of one sentence: the argument, the value found, the value expected.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from visspec.checkpoint import check_folder, load_strictly, read_json, read_tensors
from visspec.models.nets.feature_head import FeatureHead, HeadConfig

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
KIND = "feature_drafter"


def read_config(folder: str | Path) -> HeadConfig:
    """The network's configuration. Refuses unknown, missing and mistyped entries."""
    data = read_json(check_folder(folder), CONFIG)
    if data.pop("kind", None) != KIND:
        raise ValueError(f"drafter: {folder} has a {CONFIG} of another kind, expected kind {KIND!r}")
    fields = {f.name: f for f in dataclasses.fields(HeadConfig)}
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    strange, missing = sorted(set(data) - set(fields)), sorted(required - set(data))
    if strange or missing:
        found = f"the unknown entry {strange[0]!r}" if strange else f"no entry {missing[0]!r}"
        raise ValueError(f"drafter: {CONFIG} of {folder} has {found}, expected the fields of HeadConfig")
    try:
        return HeadConfig(**data)
    except TypeError as error:
        raise ValueError(f"drafter: {CONFIG} of {folder} has an entry of a wrong type ({error})") from None


def read(folder: str | Path, model: nn.Module) -> FeatureHead:
    """The network of a checkpoint, for a target it was made for. Nothing is read before the target is checked."""
    config = read_config(folder)
    check_target(config, model)
    head = FeatureHead(config)
    load_strictly(head, read_tensors(Path(folder)), folder)
    return head


def write(folder: str | Path, head: FeatureHead, provenance: dict[str, Any], dtype: torch.dtype | None = None) -> None:
    """Save a network; `dtype` is how the weights are stored (default: as they are)."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in head.state_dict().items()}
    save_file(tensors, root / WEIGHTS)
    (root / CONFIG).write_text(json.dumps({"kind": KIND, **head.config.to_dict()}, indent=2) + "\n")
    (root / PROVENANCE).write_text(json.dumps(provenance, indent=2, default=str) + "\n")


def check_target(config: HeadConfig, model: nn.Module) -> None:
    """Refuse a model that the drafter was not made for."""
    found = {
        "family": ("family", model.config.model_type),
        "hidden": ("hidden size", model.config.get_text_config().hidden_size),
        "vocab": ("vocabulary", model.get_output_embeddings().weight.shape[0]),
        "target_layers": ("number of layers", model.config.get_text_config().num_hidden_layers),
    }
    for key, (name, value) in found.items():
        if getattr(config, key) != value:
            raise ValueError(f"drafter: made for a target of {name} {getattr(config, key)!r}, got a model of {value!r}")
