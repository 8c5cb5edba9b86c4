"""Checkpoints in their authors' original key layouts, for our networks and for stock classes.

Shared by all layouts: reading safetensors (pickles raise; `visspec.io.convert_checkpoint` converts them), renaming
by an ordered list of rules, and strict placement, with errors that give a tensor's published name. The families are in
`models/*/layout.py`. Errors are ValueErrors of one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from visspec.io.checkpoint import (
    PICKLE,
    PICKLED,
    Value,
    inside,
    load_strictly,
    read_file,
    unwrap_names,
    weight_files,
)

Rules = Iterable[tuple[str, str | Callable[[re.Match], str]]]
Named = dict[str, tuple[str, Tensor]]  # new name -> (published name, tensor)
GROUPS = 32  # of every group norm in these image codecs
SHOWN = 4


def read_all_tensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file, or of a folder of them; no file outside the folder is opened. Prefixes of
    wrappers are removed from the names (`checkpoint.unwrapped`).

    Raises ValueError for a pickle, a missing path, a file that is not safetensors, a duplicate name, or averaged
    weights in addition to plain ones.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"checkpoint: {path} does not exist, expected a .safetensors file or a folder of them")
    if path.suffix in PICKLED and path.is_file():
        raise ValueError(f"checkpoint: {path} holds {PICKLE.format(path.name)}")
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path) if path.is_dir() else [inside(path.parent, path.name)]:
        found = read_file(file, lambda opened, name: opened.get_tensor(name))
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise ValueError(f"checkpoint: {path} holds tensor {twice[0]!r} twice, expected the path of one model")
        tensors |= found
    return unwrap_names(tensors, path)


def rename_tensor(name: str, rules: Rules) -> str:
    """Apply all rules to a name, in order: pairs of a pattern and a replacement for re.sub."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def rename(tensors: Mapping[str, Value], rules: Rules, dropped: str = "(?!)") -> dict[str, tuple[str, Value]]:
    """New name -> (published name, tensor or its shape). Names whose start matches `dropped` are omitted."""
    rules = list(rules)
    named: dict[str, tuple[str, Value]] = {}
    for name, tensor in tensors.items():
        if re.match(dropped, name):
            continue
        new = rename_tensor(name, rules)
        if new in named:
            raise ValueError(f"checkpoint: tensors {named[new][0]!r} and {name!r} are the same, expected one layout")
        named[new] = (name, tensor)
    return named


def place(module: nn.Module, named: Named, where: str | Path) -> None:
    """Copy renamed tensors into a module with exactly these tensors, cast to the module's dtype."""
    published = {new: name for new, (name, _) in named.items()}
    load_strictly(module, {new: tensor for new, (_, tensor) in named.items()}, where, lambda n: published.get(n, n))


def require(tensors: Mapping[str, Tensor], name: str, dimensions: int, where: str | Path) -> Tensor:
    """A required tensor, whose shape determines the configuration."""
    if name not in tensors:
        some = ", ".join(sorted(tensors)[:SHOWN])
        raise ValueError(f"checkpoint: {where} has no tensor {name!r} (but {some}, ...), expected another layout")
    if tensors[name].dim() != dimensions:
        found = tuple(tensors[name].shape)
        raise ValueError(f"checkpoint: tensor {name!r} of {where} has shape {found}, expected {dimensions} dimensions")
    return tensors[name]


def count(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Number of different indices after a prefix: layers, levels or blocks."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return len({match[1] for match in map(pattern.match, tensors) if match})


def multipliers(
    tensors: Mapping[str, Tensor], prefix: str, block: str, where: str | Path
) -> tuple[int, tuple[int, ...]]:
    """Input channels of a convolutional encoder and the multiplier of each level, from its first blocks."""
    first = require(tensors, f"{prefix}conv_in.weight", 4, where).shape[0]
    level = prefix + block.split("{}")[0]
    widths = [
        require(tensors, f"{prefix}{block.format(i)}.0.conv1.weight", 4, where).shape[0]
        for i in range(max(count(tensors, level), 1))
    ]
    return first, tuple(width // first for width in widths)


@contextmanager
def one_sentence(where: str | Path) -> Iterator[None]:
    """Context manager: errors from the original config.json become a ValueError of one sentence."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, StrictDataclassError) as error:
        what = (str(error.args[0]) if isinstance(error, KeyError) else str(error)).strip().splitlines()[0]
        raise ValueError(f"checkpoint: config.json of {where} has a wrong entry ({what})") from None


def stock(kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """A transformers model with uninitialised weights, in evaluation mode. Raises ValueError for an invalid config."""
    try:
        with no_init_weights():
            return kind._from_config(config, dtype=dtype).eval()
    except (TypeError, ValueError, KeyError, AssertionError, ZeroDivisionError) as error:
        raise ValueError(f"config: {kind.__name__} does not take it ({str(error).splitlines()[0]})") from None
