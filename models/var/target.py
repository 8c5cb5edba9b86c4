"""VAR as an image family: prompts are class numbers. (Tian et al., arXiv 2404.02905)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from visspec.io import included
from visspec.models.image_codes.family import ImageLayout, class_numbers
from visspec.models.scales.kv_budget import CacheBudget, selectivity
from visspec.models.scales.multiscale import MultiScaleVAE
from visspec.models.scales.target import ScaleImages, ScalePrompt
from visspec.models.var.layout import VARImageModel, check_codebook
from visspec.models.var.network import GUIDANCE, VAR

CALIBRATED = 8  # number of images for measuring selectivity


class VARImages(ScaleImages):
    """Prompts are class numbers ("207") or class names, including negative ones; an empty negative prompt is no class.

    Args:
        codec: `visspec.models.var.layout.load_var_vae`, or the folder's. With a folder, refiner may be the name of an
            included model, and budget the average share of the cache to keep, a number in (0, 1].
    """

    name = "var"
    default_guidance = GUIDANCE
    autoencoder = MultiScaleVAE, "VAR's autoencoder (visspec.models.var.layout.load_var_vae)"
    load = staticmethod(VARImageModel.read)

    def __init__(
        self,
        model: VARImageModel | VAR,
        processor: Callable[..., Any] | None = None,
        codec: MultiScaleVAE | None = None,
        ramp: str | None = None,
        refiner: VARImageModel | VAR | str | None = None,
        handover: int | None = None,
        budget: CacheBudget | float | None = None,
    ):
        refined: Any = refiner
        shares: Any = budget
        if isinstance(model, VARImageModel):
            refined, self.labels = small(refiner, model), tuple(model.config.labels)
            if budget is not None and not isinstance(budget, CacheBudget):
                shares = calibrate_budget(model, float(budget))
        super().__init__(model, processor, codec, ramp, refined, handover, shares)

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> Any:
        count = self.model.config.classes
        classes = class_numbers(texts, count, "prompt", self.labels)
        unconditional = torch.full((len(texts),), count)
        if negative is not None:
            with_words = [b for b, text in enumerate(negative) if text.strip()]
            if with_words:
                others = [negative[b] for b in with_words]
                unconditional[with_words] = class_numbers(others, count, "negative_prompt", self.labels)
        return ScalePrompt(classes.to(self.model.device), unconditional.to(self.model.device))


def small(other: VARImageModel | VAR | str | None, model: VARImageModel) -> Any:
    """Return the network of a smaller model. A string is the name of an included model, or a kind ("var") for the one
    made for `model`; it is loaded on the model's device and in its dtype.

    No other folder is opened, because a saved pipeline names its parts and may come from anyone.
    """
    if isinstance(other, str):
        name = included.made_for(other, model) or other
        if name not in included.table().models:
            raise ValueError(f"refiner: got {other!r}, expected a model or the name of an included one.")
        small: Any = VARImageModel.read(included.check("refiner", name), model.dtype)
        other = small.to(model.device)
    if not isinstance(other, VARImageModel):
        return other
    check_codebook("refiner", other, model)
    return other.var


def calibrate_budget(model: VARImageModel, share: float) -> CacheBudget:
    """Build a budget from the selectivity measured on images of a few evenly spaced classes. Raises ValueError like
    `allot`, before any image is generated for an invalid share.
    """
    net: VAR = model.var
    if not 0 < share <= 1:
        raise ValueError(f"budget: got {share}, expected a share in (0, 1].")
    count = min(CALIBRATED, net.config.classes)
    classes = torch.arange(count, device=net.device) * net.config.classes // count
    measured = selectivity(net, model.autoencoder.quantize, classes, torch.Generator(net.device).manual_seed(0))
    window = next((side**2 for side in (4, 3, 2) if side**2 <= round(share * net.config.scales.begins[-2])), 1)
    return CacheBudget.allot(measured, net.config.scales, share, window)
