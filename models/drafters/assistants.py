"""Models that transformers loads to draft for others: which drafter runs one is read off its form, not its name."""

from __future__ import annotations

from typing import Any

from torch import nn

from visspec.models.drafters import dflash
from visspec.models.drafters.shared_cache import SharedCache, shares_cache
from visspec.models.drafters.small_model import SmallModel
from visspec.types import Drafter


def assistant(spec: nn.Module, model: nn.Module) -> Drafter:
    """The drafter that runs a loaded model for `model`. Raises ValueError where it does not fit."""
    config: Any = getattr(spec, "config", None)
    if all(hasattr(config, name) for name in dflash.NEEDED):
        return dflash.BlockModel(spec, model)
    if shares_cache(spec):
        return SharedCache(spec, model)
    return SmallModel(spec, model)
