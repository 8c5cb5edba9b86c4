"""Checkpoint folders of feature drafters: config.json, model.safetensors, provenance.json. Loading is strict.

Every refusal is a ValueError of one sentence: the argument, the value found, the value expected.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from visspec.models.nets.feature_head import FeatureHead, HeadConfig

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def inside(folder: str | Path, name: str) -> Path:
    """The file `name` of a checkpoint folder; refuses names and links that leave the folder, and missing files."""
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"drafter: got {str(folder)!r}, expected a checkpoint folder")
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ValueError(f"drafter: {name} in {str(folder)!r} leads to {str(path)!r}, expected a file inside the folder")
    if not path.is_file():
        pickled = [p.name for p in sorted(root.iterdir()) if p.suffix in PICKLED]
        found = f"pickled weights ({', '.join(pickled)})" if pickled and name == WEIGHTS else "no such file"
        raise ValueError(f"drafter: got {found} in {str(folder)!r}, expected {name}")
    return path


def read_config(folder: str | Path) -> HeadConfig:
    """The network's configuration. Refuses unknown and missing entries."""
    path = inside(folder, CONFIG)
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"drafter: {CONFIG} is not JSON ({error}), expected the configuration of a drafter") from None
    if not isinstance(data, dict) or data.pop("kind", None) != "feature_drafter":
        raise ValueError(f"drafter: {CONFIG} in {str(folder)!r} has no kind 'feature_drafter', expected one")
    fields = {f.name: f for f in dataclasses.fields(HeadConfig)}
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    strange, missing = sorted(set(data) - set(fields)), sorted(required - set(data))
    if strange or missing:
        raise ValueError(f"drafter: {CONFIG} lacks {missing} and has unknown {strange}, expected the fields of a drafter")
    try:
        return HeadConfig(**data)
    except TypeError as error:
        raise ValueError(f"drafter: {CONFIG} has an entry of the wrong type ({error}), expected numbers") from None


def read_weights(folder: str | Path, head: FeatureHead) -> None:
    """Load model.safetensors into a network. Refuses missing, extra and mis-shaped tensors."""
    path = inside(folder, WEIGHTS)
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"drafter: {WEIGHTS} can't be read ({error}), expected a safetensors file") from None
    wanted = head.state_dict()
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        raise ValueError(f"drafter: {WEIGHTS} has missing tensors {missing} and extra tensors {extra}, expected neither")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"drafter: tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
            )
    head.load_state_dict({k: v.to(wanted[k].dtype) for k, v in found.items()}, strict=True)


def write(folder: str | Path, head: FeatureHead, provenance: dict[str, Any], dtype: torch.dtype | None = None) -> None:
    """Save a network; `dtype` is how the weights are stored (default: as they are)."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {
        k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in head.state_dict().items()
    }
    save_file(tensors, root / WEIGHTS)
    config = {"kind": "feature_drafter", **head.config.to_dict()}
    (root / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (root / PROVENANCE).write_text(json.dumps(provenance, indent=2, default=str) + "\n")


def check_target(config: HeadConfig, model: nn.Module) -> None:
    """Refuse a model that the drafter was not made for."""
    text = model.config.get_text_config()
    found = {
        "family": model.config.model_type,
        "hidden": text.hidden_size,
        "vocab": model.get_output_embeddings().weight.shape[0],
    }
    names = {"family": "model family", "hidden": "hidden size", "vocab": "vocabulary"}
    for key, value in found.items():
        if getattr(config, key) != value:
            raise ValueError(
                f"drafter: made for a target of {names[key]} {getattr(config, key)!r}, got a model of {value!r}, "
                "expected the same"
            )
