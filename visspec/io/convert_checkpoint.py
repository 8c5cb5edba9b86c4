"""Rewrite an authors' .pt, .pth, .bin or .ckpt file as safetensors: the only place that opens a pickle of others.

python -m visspec.io.convert_checkpoint c2i_B_256.pt c2i_B_256.safetensors
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from visspec.io.checkpoint import LITEMA, weight_sets, with_dots
from visspec.io.files import replacing

WRAPPERS = ("model", "module", "state_dict", "vae")  # how training scripts file their weights
AVERAGES = ("ema", "model_ema", "ema_state_dict")  # and averages of them, beside or alone


def convert(path: str | Path, out: str | Path, ema: bool | None = False) -> str:
    """Write the tensors of a .pt, .pth, .bin or .ckpt file, or of a folder's pytorch_model.bin, as safetensors. Returns
    in words which of two sets of weights were left behind, or "".

    The file is unpickled with `weights_only=True`, so nothing in it runs; one that needs more is refused. The weights
    may lie under 'model', 'module', 'state_dict' or 'vae'; averaged ones (`ema`; None: if there are any) under 'ema' or
    by names that begin with 'ema.' or, as LitEma's, 'model_ema.'. Names lose what torch.compile and data parallelism
    put before them.
    Everything that is no tensor (optimizer, steps) is left behind. A .safetensors file with both sets is taken too.
    Raises ValueError in one sentence.
    """
    path, out = Path(path), Path(out)
    path = path / "pytorch_model.bin" if path.is_dir() else path
    if out.suffix != ".safetensors" or out.exists():
        raise ValueError(f"out: got {out}, expected a new file that ends in .safetensors")
    if not out.parent.is_dir():
        raise ValueError(f"out: the folder {out.parent} does not exist, expected one that does")
    plain, averaged = state_dicts(content_of(path), path)
    ema = bool(averaged) if ema is None else ema
    chosen = with_dots(averaged, plain, path) if ema or not plain else plain
    if not chosen:
        where = ", ".join(AVERAGES if plain else (*WRAPPERS, *AVERAGES))
        what = "averaged weights" if plain else "tensors"
        raise ValueError(f"path: {path} holds no {what}, expected a state dict or one under {where}")
    tensors = {name: value.detach().contiguous().clone() for name, value in chosen.items()}
    try:
        with replacing(out) as draft:
            save_file(tensors, draft, metadata={"format": "pt"})
    except OSError as error:
        raise ValueError(f"out: {out} can't be written, expected a place for it ({error.strerror or error})") from None
    if not plain:
        return "the file holds averaged weights (ema) only; they were written"
    if not averaged:
        return ""
    return "the other weights were left behind" if ema else "averaged weights (ema) were left behind; --ema writes them"


def content_of(path: Path) -> Any:
    """What the file holds. Raises ValueError for one that can't be read without running code."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # training arguments, often saved beside
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files end in errors of any kind
        raise ValueError(f"path: {path} is not a file of plain tensors, expected one ({reason(error)})") from None


def reason(error: Exception) -> str:
    """Why a file was refused, in words: torch's own advise to run what is in it."""
    text = str(error).strip()
    if asked := re.search(r"GLOBAL (\S+)", text):
        return f"its pickle asks for {asked[1]}, which is not run"
    if "TorchScript" in text:
        return "it is a TorchScript archive"
    if "weights_only" in text:
        return "its pickle holds more than tensors"
    return text.splitlines()[0] if text else type(error).__name__


def state_dicts(content: object, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, averaged weights) of what a file holds; either may be empty."""
    beside: dict[str, Tensor] = {}
    while isinstance(content, Mapping):
        if not beside and (key := next((k for k in AVERAGES if isinstance(content.get(k), Mapping)), None)):
            beside = averages_of(content[key], path)
        inner = next((content[k] for k in WRAPPERS if isinstance(content.get(k), Mapping)), None)
        if inner is None:
            tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
            plain, averaged = weight_sets(tensors, path)
            return plain, beside or averaged
        content = inner
    return {}, beside


def averages_of(content: Mapping, path: Path) -> dict[str, Tensor]:
    """Averaged weights under a key of their own; those of LitEma, which counts its updates, by LITEMA before each."""
    plain, averaged = state_dicts(content, path)
    if "num_updates" in plain:
        return {LITEMA + name: tensor for name, tensor in plain.items()}
    return plain or averaged


def main(arguments: list[str] | None = None) -> int:
    """Command line of the conversion. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Rewrite a pickled checkpoint as safetensors; no code of it runs.")
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--ema", action="store_true", help="the averaged weights, where the file has them beside others"
    )
    options = parser.parse_args(arguments)
    try:
        left = convert(options.path, options.out, options.ema)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if left:
        print(f"{options.out}: {left}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
