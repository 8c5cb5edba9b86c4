"""The file of `visspec tune --out`: arguments of `accelerate` for one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visspec.io.checkpoint import read_json
from visspec.io.files import write_json
from visspec.types import ConfiguredModel

KEPT = ("drafter", "acceptance", "levels")
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def preset_target(model: ConfiguredModel) -> dict[str, Any]:
    """What a preset is made for."""
    text = model.config.get_text_config()
    return {name: getattr(model.config if name == "model_type" else text, name, None) for name in SIZES}


def write_preset(path: str | Path, model: ConfiguredModel, choice: Mapping[str, Any], **more: Any) -> None:
    """Write what `accelerate(model, path)` reads."""
    write_json(path, {**{name: choice[name] for name in KEPT}, "made_for": preset_target(model), **more})


def read_preset(path: str | Path, model: ConfiguredModel) -> dict[str, Any]:
    """Arguments of `accelerate`: drafter, acceptance, levels. Raises ValueError for another file or model."""
    found = read_json(Path(path).parent, Path(path).name)
    missing = [name for name in (*KEPT, "made_for") if name not in found]
    if missing:
        raise ValueError(f"drafter: {path} has no {missing[0]}, expected a preset that `visspec tune` wrote")
    for name, value in preset_target(model).items():
        if found["made_for"].get(name) != value:
            raise ValueError(
                f"drafter: {path} is made for a model with {name} {found['made_for'].get(name)!r}, got {value!r}"
            )
    return {name: found[name] for name in KEPT}
