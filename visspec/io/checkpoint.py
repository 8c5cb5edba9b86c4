"""Checkpoint folders: safetensors only, no files outside the folder, strict names and shapes.

Used by all loaders. Errors are ValueErrors, raised before any weight is read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE = "pickled weights ({}), expected .safetensors (visspec convert safetensors PATH --out FOLDER writes them)"
MAX_JSON_BYTES = 16 << 20
AVERAGED = ("ema.", "ema_model.")  # prefixes of averaged weights in training checkpoints
LARGEST = 1 << 24  # upper limit of sizes in a configuration; products of two don't overflow
Value = TypeVar("Value")  # a tensor, or its shape


def shorten(value: object) -> str:
    """Format a value for an error message: on one line, truncated if long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, and the next if that ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


def check_whole(name: str, value: object, low: int = 1, high: int = LARGEST) -> None:
    """Raise ValueError if an entry of a configuration is not an integer from low to high."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}: got {shorten(value)}, expected a whole number from {low} to {high}.")


def check_wholes(name: str, values: object, low: int, high: int, most: int = 1024) -> tuple[int, ...]:
    """Return a list of at most `most` integers as a tuple. Raises ValueError as `check_whole`."""
    if not isinstance(values, (list, tuple)) or len(values) > most:
        raise ValueError(f"{name}: got {shorten(values)}, expected a list of at most {most} whole numbers.")
    for value in values:
        check_whole(name, value, low, high)
    return tuple(values)


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError if a value is not one of these."""
    if value not in choices:
        raise ValueError(f"{name}: got {shorten(value)}, expected one of {', '.join(choices)}.")


def check_positive(name: str, value: float) -> None:
    """Raise ValueError if an entry of a configuration is not a finite number above 0."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name}: got {shorten(value)}, expected a finite number above 0.")


def inside(folder: Path, name: str) -> Path:
    """Return the path of file `name` in a folder. Raises ValueError if it is outside the folder or links outside,
    except that a snapshot in the hub's cache may link to its repository's `blobs`.
    """
    root = Path(os.path.realpath(folder))  # unlike `resolve` of Python 3.11, this does not raise for circular links
    path, cached = Path("/") if "\0" in name else Path(os.path.realpath(root / name)), root.parent.parent
    snapshot = root.parent.name == "snapshots" and cached.name.startswith("models--")
    if not path.is_relative_to(root) and not (snapshot and path.parent == cached / "blobs"):
        raise ValueError(f"checkpoint: {folder} refers to {name!r}, expected a file inside the folder.")
    return path


def read_json(folder: Path, name: str) -> dict:
    """Read a JSON object from a checkpoint folder."""
    path = inside(folder, name)
    if not path.is_file():
        raise ValueError(f"checkpoint: {folder} has no {name}, expected a folder written by save_pretrained.")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"checkpoint: {name} has {path.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}.")
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint: {path} is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ValueError(f"checkpoint: {path} holds a {type(value).__name__}, expected an object.")
    return value


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, or those of its index. Raises ValueError if all weights are pickled."""
    index = sorted(p.name for p in folder.glob("*.safetensors.index.json"))
    if index:
        named = read_json(folder, index[0]).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ValueError(f"checkpoint: weight_map of {folder / index[0]} is {shorten(named)}, expected file names.")
        return [inside(folder, name) for name in sorted(set(named.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
        what = PICKLE.format(pickled[0]) if pickled else "no weights, expected .safetensors"
        raise ValueError(f"checkpoint: {folder} has {what}.")
    return [inside(folder, path.name) for path in files]


def check_folder(folder: str | Path) -> Path:
    """Check, before transformers opens it, that a model folder exists and its weights are safetensors inside it."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"checkpoint: {path} is not a folder, expected one with config.json and .safetensors.")
    for entry in path.iterdir():
        inside(path, entry.name)
    read_json(path, "config.json")
    for weights in weight_files(path):
        if not weights.is_file():
            raise ValueError(f"checkpoint: {path} names the weights {weights.name}, expected them in the folder.")
    return path


def read_tensors(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read all tensors of a folder's safetensors files, or those with these names."""
    return read_files(weight_files(folder), lambda file, name: file.get_tensor(name), names)


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of all tensors of a folder from the file headers."""
    return read_files(weight_files(folder), lambda file, name: tuple(file.get_slice(name).get_shape()))


def read_files(
    paths: Iterable[Path], get: Callable[[safe_open, str], Value], names: Collection[str] | None = None
) -> dict[str, Value]:
    """Return what `get` reads from the tensors of safetensors files, or from those with these names."""
    values: dict[str, Value] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                values |= {name: get(file, name) for name in file.keys() if names is None or name in names}
        except Exception as error:
            raise ValueError(f"checkpoint: {path} is not a readable safetensors file ({error}).") from None
    return values


def unwrap_names(tensors: Mapping[str, Value], where: str | Path) -> dict[str, Value]:
    """Remove name prefixes of torch.compile, data parallelism and averaging. Raises ValueError for two weight sets."""
    plain, averaged = weight_sets(tensors, where)
    if plain and averaged:
        raise ValueError(f"checkpoint: {where} has averaged weights ({next(iter(averaged))!r}) beside others.")
    return plain or averaged


def weight_sets(tensors: Mapping[str, Value], where: str | Path) -> tuple[dict[str, Value], dict[str, Value]]:
    """Return (weights, averaged weights) of a state dict, without prefixes of wrappers; either may be empty. Averaged
    weights have a prefix of AVERAGED. Raises ValueError if two tensors get the same name.
    """
    named = _strip_prefixes(tensors, where)
    prefix = next((p for p in AVERAGED if any(name.startswith(p) for name in named)), None)
    if prefix is None:
        return named, {}
    plain = {name: tensor for name, tensor in named.items() if not name.startswith(prefix)}
    averaged = {name.removeprefix(prefix): t for name, t in named.items() if name.startswith(prefix)}
    return plain, _strip_prefixes(averaged, where)


def _strip_prefixes(tensors: Mapping[str, Value], where: str | Path) -> dict[str, Value]:
    stripped: dict[str, Value] = {}
    for name, tensor in tensors.items():
        short = re.sub(r"(^|\.)_orig_mod\.", r"\1", name)
        if short in stripped:
            raise ValueError(f"checkpoint: {where} holds tensor {short!r} twice, expected the weights of one model.")
        stripped[short] = tensor
    while stripped and all(name.startswith("module.") for name in stripped):
        stripped = {name.removeprefix("module."): tensor for name, tensor in stripped.items()}
    return stripped


def check_values(name: str, value: Tensor, parameter: Tensor, where: str | Path) -> None:
    """Raise ValueError if values don't fit a tensor of the module: wrong kind, not finite, or out of range."""
    if value.is_floating_point() != parameter.is_floating_point():
        dtype_read, expected = (str(t.dtype).removeprefix("torch.") for t in (value, parameter))
        raise ValueError(f"checkpoint: tensor {name!r} of {where} has the dtype {dtype_read}, expected {expected}.")
    if not value.is_floating_point() or not value.numel():
        return
    wide = value if value.element_size() > 1 else value.float()  # float8 does not support aminmax
    low, high = wide.aminmax()
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise ValueError(f"checkpoint: tensor {name!r} of {where} has values that are not finite, expected numbers.")
    if max(-float(low), float(high)) > torch.finfo(parameter.dtype).max:
        dtype = str(parameter.dtype).removeprefix("torch.")
        raise ValueError(f"checkpoint: tensor {name!r} of {where} has values beyond {dtype}, expected a wider dtype.")


def check_shapes(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], where: str | Path, named: Callable[[str], str] = str
) -> None:
    """Raise ValueError unless names and shapes equal those of the module. `named` returns names for messages."""
    expected_tensors = module.state_dict()
    missing, extra = sorted(expected_tensors.keys() - shapes.keys()), sorted(shapes.keys() - expected_tensors.keys())
    if missing or extra:
        name, what = (missing[0], "lacks") if missing else (extra[0], "has the unknown")
        raise ValueError(
            f"checkpoint: {where} {what} tensor {named(name)!r}, expected the module's {len(expected_tensors)}."
        )
    for name, shape in shapes.items():
        if shape != (expected := tuple(expected_tensors[name].shape)):
            raise ValueError(f"checkpoint: tensor {named(name)!r} of {where} has shape {shape}, expected {expected}.")


def write_folder(folder: str | Path, tensors: Mapping[str, Tensor], entries: Mapping[str, Any]) -> None:
    """Write model.safetensors and config.json to a folder, which is created."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, root / WEIGHTS)
    (root / CONFIG).write_text(json.dumps(entries, indent=2) + "\n")


def load_strictly(
    module: nn.Module, tensors: Mapping[str, Tensor], where: str | Path, named: Callable[[str], str] = str
) -> None:
    """Copy tensors with exactly these names and shapes into a module, cast to its dtype. `named` as above."""
    check_shapes(module, {name: tuple(value.shape) for name, value in tensors.items()}, where, named)
    expected = module.state_dict()
    for name, value in tensors.items():
        check_values(named(name), value, expected[name], where)
    with torch.no_grad():
        for name, value in tensors.items():
            expected[name].copy_(value)
