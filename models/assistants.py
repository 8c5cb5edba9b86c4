"""Models that transformers loads as drafters. The drafter class is chosen by a model's structure, not by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from visspec.io.checkpoint import shorten
from visspec.models.block import drafter as dflash
from visspec.models.block.diffusion import DiffusionModel, denoises
from visspec.models.decoder.shared_cache import SharedCache, shares_cache
from visspec.models.decoder.small_model import SmallModel
from visspec.models.drafting.published_config import list_of
from visspec.models.layers import load_exactly
from visspec.types import Drafter


def assistant(spec: PreTrainedModel, model: PreTrainedModel, **options: Any) -> Drafter:
    """Return the drafter that runs a loaded model for `model`. options: those of its class. Raises ValueError if the
    two do not fit.
    """
    config = getattr(spec, "config", None)
    if all(hasattr(config, name) for name in dflash.NEEDED):
        return dflash.BlockModel(spec, model, **options)
    if shares_cache(spec):
        return SharedCache(spec, model, **options)
    if denoises(spec):
        return DiffusionModel(spec, model, **options)
    return SmallModel(spec, model, **options)


def load_assistant(folder: Path, data: dict, model: PreTrainedModel, **options: Any) -> Drafter:
    """Load the drafter from a folder with a transformers model, in the target's dtype and on its device.

    Raises ValueError for a class that transformers does not have, or if tensors are missing or unexpected.
    """
    named = list_of(data.get("architectures"))
    kind = getattr(transformers, named[0], None) if named and isinstance(named[0], str) else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        label = shorten(named[0]) if named else "no architectures"
        raise ValueError(f"drafter: {folder} names {label}, expected a model class of transformers")
    spec = load_exactly(kind, "drafter", folder, dtype=model.dtype, local_files_only=True)
    return assistant(spec.to(model.device).eval(), model, **options)
