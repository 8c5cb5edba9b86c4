"""The one table of image families: a loaded model's `model_type` to the class that drives it. Lazy."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # so that the table can be read without transformers
    from torch import nn

    from visspec.models.image_codes.target import EncodedPrompt, Family, ImageLayout

FAMILIES = {
    "janus": "visspec.models.janus.target:Janus",
    "emu3": "visspec.models.emu3.target:Emu3",
    "glm_image": "visspec.models.glm_image.target:GlmImage",
    "chameleon": "visspec.models.chameleon.target:Chameleon",
    "mar_image": "visspec.models.mar.images:LabelledMARImages",
    "randar_image": "visspec.models.randar.target:PromptedRandARImages",
    "var_image": "visspec.models.var.images:LabelledVARImages",
    # not of transformers: known by their classes
    "LlamaGen": "visspec.models.llamagen.target:LlamaGenImages",
    "RandAR": "visspec.models.randar.target:RandARImages",
    "MAR": "visspec.models.mar.target:MARImages",
    "VAR": "visspec.models.var.target:VARImages",
    "Infinity": "visspec.models.infinity.target:InfinityImages",
    "NextStep": "visspec.models.nextstep.target:NextStepImages",
}
LOADERS = {  # of folders with a network of ours: (folder, dtype) -> model
    "mar_image": "visspec.models.mar.model:load",
    "randar_image": "visspec.models.randar.model:load",
    "var_image": "visspec.models.var.model:load",
}


def family_of(model: nn.Module, processor: Callable[..., Any] | None, **parts: Any) -> Family:
    """The family that drives a model. `parts` are what only some take: a codec, a style, a negative prompt.

    Raises ValueError for a model that draws no images here, or for a part that its family does not take.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES:
        raise ValueError(f"model: got the type {kind!r}, expected an image model of {', '.join(FAMILIES)}")
    module, name = FAMILIES[kind].split(":")
    family = getattr(import_module(module), name)
    unknown = sorted(set(parts) - set(signature(family).parameters))
    if unknown:
        raise ValueError(f"{unknown[0]}: got one for a model of the type {kind!r}, which takes none")
    return family(model, processor, **parts)


def prompt_of(
    family: Family, texts: list[str], guided: bool, layout: ImageLayout, negative: list[str] | None = None
) -> EncodedPrompt:
    """`family.prompt`, with a text for each unconditional row: "" stands for the model's own unconditional prompt.

    Raises ValueError for a family whose unconditional prompts have no text.
    """
    if negative is None:
        return family.prompt(texts, guided, layout)
    make = cast(Callable, family.prompt)
    if "negative" not in signature(make).parameters:
        raise ValueError(f"negative_prompt: got {negative[0]!r}, expected None: {family.name} reads none")
    return make(texts, guided, layout, negative=negative)
