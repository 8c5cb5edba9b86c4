"""Chooses the family of a loaded image model by its `model_type`, from the registry."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from visspec import registry

if TYPE_CHECKING:
    from torch import nn

    from visspec.models.image_codes.target import EncodedPrompt, Family, ImageLayout


def family_of(model: nn.Module, processor: Callable[..., Any] | None, **parts: Any) -> Family:
    """Return the family that runs a model. `parts` are optional arguments of some families: a codec, a style, ...

    Raises ValueError if the model does not generate images here, or if its family does not take a part.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in (known := registry.table("family")):
        raise ValueError(
            f"model: type {kind!r} does not generate images; `visspec list families` shows the types that do. `visspec"
            " caption`, `bench caption`, `bench text`, `tune --images` and `serve` are for models that generate text."
        )
    family = known[kind].load()
    unknown = sorted(set(parts) - set(signature(family).parameters))
    if unknown:
        raise ValueError(f"{unknown[0]}: models of type {kind!r} do not take it. Leave it out.")
    codec: Any = parts.get("codec")
    if hasattr(codec, "to"):  # it may be on another device than the model
        codec.to(cast(Any, model).device)
    return family(model, processor, **parts)


def prompt_of(
    family: Family, texts: list[str], guided: bool, layout: ImageLayout, negative: list[str] | None = None
) -> EncodedPrompt:
    """Call `family.prompt` with a text for each unconditional row; "" selects the model's own unconditional prompt.

    Raises ValueError for a family whose unconditional prompts have no text.
    """
    if negative is None:
        return family.prompt(texts, guided, layout)
    make = cast(Callable, family.prompt)
    if "negative" not in signature(make).parameters:
        raise ValueError(f"negative_prompt: got {negative[0]!r}, expected None: {family.name} does not support it.")
    return make(texts, guided, layout, negative=negative)
