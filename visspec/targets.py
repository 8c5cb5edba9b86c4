"""Loading what the command line works on: a vision-language model and its processor, by name, folder or hub id."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from visspec import checkpoint, zoo


def load(spec: str | None = None, *, device: str = "cpu", dtype: str = "auto", trust_remote_code: bool = False):
    """(model, processor), ready for `accelerate`. `spec` None is the embedded captioner; else a folder or a hub id.

    Safetensors only; remote code only when asked for. Raises ValueError in one sentence when the checkpoint has
    pickled weights, missing, extra or mis-shaped tensors, or files outside its folder.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()

    where = str(zoo.CHECKPOINTS / "captioner") if spec in (None, "captioner") else str(spec)
    local = Path(where).exists() or where.startswith((".", "/"))
    if local:
        checkpoint.check_folder(where)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local}
    kind = torch.float32 if device == "cpu" and dtype == "auto" else dtype
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what transformers would report of the tensors is said below, in one sentence
    try:
        model, info = AutoModelForImageTextToText.from_pretrained(
            where, dtype=kind, use_safetensors=True, output_loading_info=True, **options
        )
    except (RuntimeError, OSError, KeyError, SafetensorError) as error:
        raise ValueError(f"model: {where} could not be loaded, {_first_line(error)}") from None
    finally:
        logging.set_verbosity(verbosity)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            name = sorted(map(str, info[what]))[0]
            raise ValueError(
                f"model: {where} has {what.replace('_', ' ')} ({name}), expected exactly the model's tensors"
            )
    return model.to(device).eval(), AutoProcessor.from_pretrained(where, **options)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
