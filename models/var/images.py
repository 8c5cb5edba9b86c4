"""`VARImageModel`, a folder with a VAR, as a family of images: prompts are the names of its classes, or their numbers.

A smaller model of the same maps is its refiner (CoDe) or its drafter; a number for a budget is a share of the cache
(ScaleKV), which the layers get by their measured selectivity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from visspec.io import included
from visspec.models.scales.kv_budget import CacheBudget, selectivity
from visspec.models.scales.target import ScaleSettings
from visspec.models.var.model import VARImageModel, check_codebook, load
from visspec.models.var.network import VAR
from visspec.models.var.target import VARImages

CALIBRATED = 8  # images that selectivity is measured on


class LabelledVARImages(VARImages):
    """settings: a generation_config in place of the model's. refiner: a model, or the name of an included one.
    budget: as of `VARImages`, or the share of the cache that is kept on average, a number in (0, 1].
    """

    load = staticmethod(load)

    def __init__(
        self,
        model: VARImageModel,
        processor: Callable[..., Any] | None = None,
        *,
        settings: GenerationConfig | None = None,
        per_scale: ScaleSettings | None = None,
        ramp: str | None = None,
        refiner: VARImageModel | VAR | str | None = None,
        handover: int | None = None,
        budget: CacheBudget | float | None = None,
    ):
        if isinstance(budget, (bool, str)):
            raise ValueError(f"budget: got {budget!r}, expected a `CacheBudget` or the share of the cache, a number")
        if isinstance(budget, (int, float)):
            budget = calibrate_budget(model, float(budget))
        super().__init__(
            model.var, processor, model.autoencoder, per_scale, ramp, small(refiner, model), handover, budget
        )
        self.default_guidance = model.guidance(settings)
        self.labels = tuple(model.config.labels)


def small(other: VARImageModel | VAR | str | None, model: VARImageModel) -> Any:
    """The network of a smaller model; of an included one by its name, or by its kind ("var") the one that is made for
    the model, on the model's device and in its dtype.

    No other folder is opened: a saved pipeline names its parts, and may come from anyone.
    """
    if isinstance(other, str):
        name = included.made_for(other, model) or other
        if name not in included.table().models:
            raise ValueError(f"refiner: got {other!r}, expected a model or the name of an included one")
        small: Any = load(included.check("refiner", name), model.dtype)
        other = small.to(model.device)
    if not isinstance(other, VARImageModel):
        return other
    check_codebook("refiner", other, model)
    return other.var


def calibrate_budget(model: VARImageModel, share: float) -> CacheBudget:
    """A budget by selectivity, measured on a few images of classes from all over. Raises ValueError as `allot`, before
    any is drawn for a share that is none.
    """
    net: VAR = model.var
    if not 0 < share <= 1:
        raise ValueError(f"budget: got {share}, expected a share in (0, 1]")
    count = min(CALIBRATED, net.config.classes)
    classes = torch.arange(count, device=net.device) * net.config.classes // count
    found = selectivity(net, model.autoencoder.quantize, classes, torch.Generator(net.device).manual_seed(0))
    window = next((side**2 for side in (4, 3, 2) if side**2 <= round(share * net.config.scales.begins[-2])), 1)
    return CacheBudget.allot(found, net.config.scales, share, window)
