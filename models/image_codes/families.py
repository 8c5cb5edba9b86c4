"""Drives a loaded image model by the family that the registry has for its `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from visspec import registry

if TYPE_CHECKING:
    from torch import nn

    from visspec.models.image_codes.target import EncodedPrompt, Family, ImageLayout


def family_of(model: nn.Module, processor: Callable[..., Any] | None, **parts: Any) -> Family:
    """The family that drives a model. `parts` are what only some take: a codec, a style, a negative prompt.

    Raises ValueError for a model that draws no images here, or for a part that its family does not take.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in (known := registry.table("family")):
        raise ValueError(
            f"model: one of the type {kind!r} draws no images; `visspec list families` has those that do. `visspec"
            " caption`, `bench caption`, `bench text`, `tune --images` and `serve` are for models that write."
        )
    family = known[kind].load()
    unknown = sorted(set(parts) - set(signature(family).parameters))
    if unknown:
        raise ValueError(f"{unknown[0]}: got one for a model of the type {kind!r}, which takes none")
    codec: Any = parts.get("codec")
    if hasattr(codec, "to"):  # it may have been loaded on its own
        codec.to(cast(Any, model).device)
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
