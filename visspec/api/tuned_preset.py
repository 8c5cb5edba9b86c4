"""The file of `visspec tune --out`: arguments of `accelerate`, or of `ImagePipeline`, for one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visspec.io.checkpoint import read_json
from visspec.io.files import write_json
from visspec.types import ConfiguredModel

KEPT = ("drafter", "acceptance", "levels")
DRAWN = ("drafter", "acceptance", "order")  # of image models
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def preset_target(model: ConfiguredModel) -> dict[str, Any]:
    """What a preset is made for."""
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    return {name: getattr(model.config if name == "model_type" else text, name, None) for name in SIZES}


def write_preset(path: str | Path, model: ConfiguredModel, choice: Mapping[str, Any], **more: object) -> None:
    """Write what `accelerate(model, path)` or `ImagePipeline(..., tuned=path)` reads."""
    kept = {name: choice[name] for name in (*KEPT, "order") if name in choice}
    write_json(path, {**kept, "made_for": preset_target(model), **more})


def read_preset(path: str | Path, model: ConfiguredModel, wanted: Sequence[str] = KEPT) -> dict[str, Any]:
    """These arguments of `accelerate`, or of `ImagePipeline`. Raises ValueError for another file or model."""
    found = read_json(Path(path).parent, Path(path).name)
    missing = [name for name in (*wanted, "made_for") if name not in found]
    if missing:
        raise ValueError(f"drafter: {path} has no {missing[0]}, expected a preset that `visspec tune` wrote")
    for name, value in preset_target(model).items():
        if found["made_for"].get(name) != value:
            raise ValueError(
                f"drafter: {path} is made for a model with {name} {found['made_for'].get(name)!r}, got {value!r}"
            )
    return {name: found[name] for name in wanted}
