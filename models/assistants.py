"""Models that transformers loads to draft for others: which drafter runs one is read off its form, not its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging

from visspec.io.checkpoint import first_line, shorten
from visspec.models.block import drafter as dflash
from visspec.models.block.diffusion import DiffusionModel, denoises
from visspec.models.decoder.shared_cache import SharedCache, shares_cache
from visspec.models.decoder.small_model import SmallModel
from visspec.models.drafting.published_config import list_of
from visspec.models.layers import check_layers
from visspec.types import Drafter


def assistant(spec: PreTrainedModel, model: PreTrainedModel, **options: Any) -> Drafter:
    """The drafter that runs a loaded model for `model`; options: those of its class. Raises ValueError where it does
    not fit.
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
    """The drafter of a folder with a model that transformers knows, in the target's dtype and on its device."""
    spec: Any = read(folder, data, model.dtype)
    return assistant(spec.to(model.device).eval(), model, **options)


def read(folder: Path, data: dict, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder.

    Raises ValueError for a class that transformers does not have, or tensors that are not exactly its own.
    """
    check_layers(data, folder)
    named = list_of(data.get("architectures"))
    kind = getattr(transformers, named[0], None) if named and isinstance(named[0], str) else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        found = shorten(named[0]) if named else "no architectures"
        raise ValueError(f"drafter: {folder} names {found}, expected a model class of transformers")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would report of the tensors is said below, in one sentence
    try:
        both = kind.from_pretrained(
            str(folder), dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # of whichever library checks the part that is wrong
        raise ValueError(f"drafter: {folder} could not be loaded, {first_line(error)}") from None
    finally:
        logging.set_verbosity(verbosity)
    spec, info = cast(tuple[PreTrainedModel, dict], both)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            says = f"{what.replace('_', ' ')} ({sorted(map(str, info[what]))[0]})"
            raise ValueError(f"drafter: {folder} has {says}, expected exactly its tensors")
    return spec
