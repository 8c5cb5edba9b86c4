"""Checkpoint folders that can be trusted: safetensors only, nothing outside the folder, strict shapes.

Used by every loader of ours. Raises ValueError in one sentence before any weight is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_JSON_BYTES = 16 << 20
LITEMA = "model_ema."  # before names without dots
AVERAGED = ("ema.", "ema_model.", LITEMA)  # what training scripts put before the names of averaged weights
COUNTERS = ("decay", "num_updates")  # of LitEma, beside its weights


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder, refused when it is absolute, climbs out, or is a link to elsewhere."""
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ValueError(f"checkpoint: {folder} names the file {name!r}, expected a file inside the folder")
    return path


def read_json(folder: Path, name: str) -> dict:
    """A JSON object of a checkpoint folder."""
    path = inside(folder, name)
    if not path.is_file():
        raise ValueError(f"checkpoint: {folder} has no {name}, expected a folder written by save_pretrained")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"checkpoint: {name} has {path.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}")
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint: {path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"checkpoint: {path} holds a {type(value).__name__}, expected an object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, following its index. Pickled weights alone are refused."""
    index = sorted(p.name for p in folder.glob("*.safetensors.index.json"))
    if index:
        named = set(read_json(folder, index[0]).get("weight_map", {}).values())
        return [inside(folder, str(name)) for name in sorted(named)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
        what = f"pickled weights ({pickled[0]})" if pickled else "no weights"
        raise ValueError(f"checkpoint: {folder} has {what}, expected .safetensors")
    return [inside(folder, path.name) for path in found]


def check_folder(folder: str | Path) -> Path:
    """A model folder before transformers opens it: it exists, its weights are safetensors, and all lie inside it."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"checkpoint: {path} is not a folder, expected one with config.json and .safetensors")
    for entry in path.iterdir():
        inside(path, entry.name)
    read_json(path, "config.json")
    for weights in weight_files(path):
        if not weights.is_file():
            raise ValueError(f"checkpoint: {path} names the weights {weights.name}, expected them in the folder")
    return path


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:
            raise ValueError(f"checkpoint: {path} is not a readable safetensors file ({error})") from None
    return tensors


def unwrapped(tensors: Mapping[str, Tensor], where: str | Path) -> dict[str, Tensor]:
    """Tensors by the names that the model alone would give them, without what torch.compile (`_orig_mod.`), data
    parallelism (`module.`) and averaging (`ema.`) put before all of them.

    Raises ValueError for two sets of weights in one, and for names without dots, as LitEma writes them.
    """
    plain, averaged = weight_sets(tensors, where)
    if plain and averaged:
        raise ValueError(
            f"checkpoint: {where} holds averaged weights ({next(iter(averaged))!r}) beside others, expected one set"
            " (python -m visspec.recipes.convert_checkpoint FILE OUT writes one, with --ema the averaged)"
        )
    return plain or with_dots(averaged, {}, where)


def weight_sets(tensors: Mapping[str, Tensor], where: str | Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, averaged weights) of a state dict, either may be empty, without the wrappers' parts in their names.

    Averaged weights have one of AVERAGED before their names; LITEMA stays, for `with_dots`. Raises ValueError where two
    tensors get one name.
    """
    named = _stripped(tensors, where)
    prefix = next((p for p in AVERAGED if any(name.startswith(p) for name in named)), None)
    if prefix is None:
        return named, {}
    plain = {name: tensor for name, tensor in named.items() if not name.startswith(prefix)}
    kept = prefix if prefix == LITEMA else ""
    averaged = {kept + name.removeprefix(prefix): t for name, t in named.items() if name.startswith(prefix)}
    return plain, _stripped(averaged, where)


def with_dots(averaged: Mapping[str, Tensor], plain: Iterable[str], where: str | Path) -> dict[str, Tensor]:
    """Averaged weights by the names of the others: LitEma leaves the dots out, and with them what names the model
    within its trainer (`model.`). Raises ValueError where the others do not tell.
    """
    if not all(name.startswith(LITEMA) for name in averaged):
        return dict(averaged)
    short = {name.removeprefix(LITEMA): tensor for name, tensor in averaged.items()}
    short = {name: tensor for name, tensor in short.items() if name not in COUNTERS}
    if any("." in name for name in short):
        return short
    for start in ("", "model."):
        full = {name.removeprefix(start).replace(".", ""): name for name in plain if name.startswith(start)}
        if short.keys() <= full.keys():
            return {full[name]: tensor for name, tensor in short.items()}
    raise ValueError(
        f"checkpoint: {where} holds averaged weights by names without dots ({next(iter(short))!r}), expected a"
        " file with the others too, which tell the names (python -m visspec.recipes.convert_checkpoint FILE OUT --ema)"
    )


def _stripped(tensors: Mapping[str, Tensor], where: str | Path) -> dict[str, Tensor]:
    """Without `_orig_mod.` anywhere, and without `module.` where all names begin with it."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = re.sub(r"(^|\.)_orig_mod\.", r"\1", name)
        if short in found:
            raise ValueError(f"checkpoint: {where} holds tensor {short!r} twice, expected the weights of one model")
        found[short] = tensor
    while found and all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    return found


def check_values(name: str, value: Tensor, wanted: Tensor, where: str | Path) -> None:
    """Refuse values that a tensor of a module can't stand for: integers for weights and the reverse, NaN, infinity, and
    what is beyond its dtype. Raises ValueError that names the tensor.
    """
    if value.is_floating_point() != wanted.is_floating_point():
        found, expected = (str(t.dtype).removeprefix("torch.") for t in (value, wanted))
        raise ValueError(f"checkpoint: tensor {name!r} of {where} has the dtype {found}, expected {expected}")
    if not value.is_floating_point() or not value.numel():
        return
    wide = value if value.element_size() > 1 else value.float()  # float8 has no minimum
    low, high = wide.aminmax()
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise ValueError(f"checkpoint: tensor {name!r} of {where} has values that are not finite, expected numbers")
    if max(-float(low), float(high)) > torch.finfo(wanted.dtype).max:
        dtype = str(wanted.dtype).removeprefix("torch.")
        raise ValueError(f"checkpoint: tensor {name!r} of {where} has values beyond {dtype}, expected a wider dtype")


def load_strictly(module: nn.Module, tensors: dict[str, Tensor], where: str | Path) -> None:
    """Copy tensors into a module that must want exactly these names and shapes; values become the module's dtype."""
    wanted = module.state_dict()
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        name, what = (missing[0], "lacks") if missing else (extra[0], "has the unknown")
        raise ValueError(f"checkpoint: {where} {what} tensor {name!r}, expected exactly the module's {len(wanted)}")
    for name, value in tensors.items():
        if value.shape != wanted[name].shape:
            found, expected = tuple(value.shape), tuple(wanted[name].shape)
            raise ValueError(f"checkpoint: tensor {name!r} of {where} has shape {found}, expected {expected}")
        check_values(name, value, wanted[name], where)
    with torch.no_grad():
        for name, value in tensors.items():
            wanted[name].copy_(value)
