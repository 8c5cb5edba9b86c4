"""The one table of image families: a loaded model's `model_type` to the class that drives it. Lazy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from visspec.models.targets.image_ar import Family

FAMILIES = {
    "janus": "visspec.models.targets.janus:Janus",
}


def family_of(model: Any, processor: Any) -> Family:
    """The family that drives a model. Raises ValueError for a model that draws no images here."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES:
        raise ValueError(f"model: got the type {kind!r}, expected an image model of {', '.join(FAMILIES)}")
    module, name = FAMILIES[kind].split(":")
    return getattr(import_module(module), name)(model, processor)
