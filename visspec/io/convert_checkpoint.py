"""Conversion of authors' .pt, .pth, .bin or .ckpt files to safetensors. This is the only place that opens pickles of
others.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from visspec.io.checkpoint import weight_sets

WRAPPERS = ("model", "module", "state_dict", "vae")  # keys under which training scripts store their weights
AVERAGES = ("ema", "model_ema", "ema_state_dict")  # keys of averaged weights, in addition or alone


def convert(path: Path, out: Path) -> None:
    """Write the tensors of a .pt, .pth, .bin or .ckpt file as safetensors, averaged weights if there are any.

    The file is unpickled with `weights_only=True`, so none of its code runs; files that need more are rejected. Weights
    may be under 'model', 'module', 'state_dict' or 'vae', averaged ones under 'ema' or names that begin with it. The
    prefixes of torch.compile and data parallelism are removed. Everything else (optimizer, steps) is dropped. Raises
    ValueError if there are no tensors.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # training arguments, often saved with the weights
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise any kind of error
        raise ValueError(f"path: {path} is not a file of plain tensors, expected one ({reason(error)}).") from None
    plain, averaged = state_dicts(content, path)
    weights = averaged or plain
    if not weights:
        where = ", ".join((*WRAPPERS, *AVERAGES))
        raise ValueError(f"path: {path} holds no tensors, expected a state dict or one under {where}.")
    tensors = {name: value.detach().contiguous().clone() for name, value in weights.items()}
    save_file(tensors, out, metadata={"format": "pt"})


def reason(error: Exception) -> str:
    """Return why a file was rejected, without torch's advice to run its code."""
    text = str(error).strip()
    if match := re.search(r"GLOBAL (\S+)", text):
        return f"its pickle asks for {match[1]}, which is not run"
    if "TorchScript" in text:
        return "it is a TorchScript archive"
    if "weights_only" in text:
        return "its pickle holds more than tensors"
    return text.splitlines()[0] if text else type(error).__name__


def state_dicts(content: object, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (weights, averaged weights) in a file's content; either may be empty."""
    average: dict[str, Tensor] = {}
    while isinstance(content, Mapping):
        if not average and (key := next((k for k in AVERAGES if isinstance(content.get(k), Mapping)), None)):
            plain, averaged = state_dicts(content[key], path)
            average = plain or averaged
        inner = next((content[k] for k in WRAPPERS if isinstance(content.get(k), Mapping)), None)
        if inner is None:
            tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
            plain, averaged = weight_sets(tensors, path)
            return plain, average or averaged
        content = inner
    return {}, average
