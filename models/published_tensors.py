"""Checkpoints in their authors' original key layouts, for our networks and for stock classes.

All layouts use `Weights`: safetensors (pickles raise; `visspec convert` converts them), renamed by an ordered list of
rules and copied into a module strictly, with errors that give a tensor's published name. Each family has a
`models/*/layout.py` with a function that infers the network's configuration from shapes and loads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from visspec.io.checkpoint import (
    PICKLE,
    PICKLED,
    Value,
    check_shapes,
    inside,
    load_strictly,
    read_files,
    unwrap_names,
    weight_files,
)

Rules = Iterable[tuple[str, str | Callable[[re.Match], str]]]
Named = dict[str, tuple[str, Tensor]]  # new name -> (published name, tensor)
ModuleT = TypeVar("ModuleT", bound=nn.Module)
ModelT = TypeVar("ModelT", bound=PreTrainedModel)
GROUPS = 32  # groups of all group norms in these image codecs
SHOWN = 4


def read_all_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a .safetensors file, or of a folder of them; no file outside the folder is opened. Wrapper
    prefixes are removed from the names (`checkpoint.unwrap_names`).

    Raises ValueError for a pickle, a missing path, a file that is not safetensors, a duplicate name, or averaged
    weights next to plain ones.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"checkpoint: {path} does not exist, expected a .safetensors file or a folder of them.")
    if path.suffix in PICKLED and path.is_file():
        raise ValueError(f"checkpoint: {path} holds {PICKLE.format(path.name)}.")
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path) if path.is_dir() else [inside(path.parent, path.name)]:
        new = read_files([file], lambda opened, name: opened.get_tensor(name))
        twice = sorted(tensors.keys() & new.keys())
        if twice:
            raise ValueError(f"checkpoint: {path} holds tensor {twice[0]!r} twice, expected the path of one model.")
        tensors |= new
    return unwrap_names(tensors, path)


def rename(tensors: Mapping[str, Value], rules: Rules, dropped: str = "(?!)") -> dict[str, tuple[str, Value]]:
    """Map new names to (published name, tensor or its shape). A rule is a pattern and a replacement for `re.sub`; all
    apply, in order. Names whose start matches `dropped` are omitted.
    """
    rules = list(rules)
    named: dict[str, tuple[str, Value]] = {}
    for name, tensor in tensors.items():
        if re.match(dropped, name):
            continue
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in named:
            raise ValueError(f"checkpoint: tensors {named[new][0]!r} and {name!r} have the same name in our layout.")
        named[new] = (name, tensor)
    return named


class Weights(dict[str, Tensor]):
    """Tensors of published files under our names. Published names and the path `where` appear in errors."""

    def __init__(self, where: str | Path, named: Named):
        super().__init__({new: tensor for new, (_, tensor) in named.items()})
        self.where, self.published = where, {new: name for new, (name, _) in named.items()}

    @classmethod
    def read(cls, path: str | Path, rules: Rules = (), dropped: str = "(?!)") -> Self:
        """Read the tensors of a file or folder and rename them; `dropped` names are omitted, as in `rename`."""
        return cls(path, rename(read_all_tensors(path), rules, dropped))

    def renamed(self, rules: Rules) -> Self:
        named = rename(self, rules)
        return type(self)(self.where, {new: (self.published[old], tensor) for new, (old, tensor) in named.items()})

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Return the shape of a required tensor, which determines the configuration."""
        if name not in self:
            some = ", ".join(sorted(self.published.values())[:SHOWN])
            raise ValueError(f"checkpoint: {self.where} has no tensor {name!r} (but {some}, ...).")
        if self[name].dim() != dimensions:
            actual = tuple(self[name].shape)
            raise ValueError(
                f"checkpoint: tensor {name!r} of {self.where} has shape {actual}, expected {dimensions}-D."
            )
        return tuple(self[name].shape)

    def count(self, prefix: str) -> int:
        """Count the different indices after a prefix: layers, levels or blocks."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
        return len({match[1] for match in map(pattern.match, self) if match})

    def encoder(self) -> tuple[int, tuple[int, ...], int]:
        """Return the channels, multipliers and blocks per level of a convolutional encoder with taming's names."""
        first = self.shape("encoder.conv_in.weight", 4)[0]
        levels = range(max(self.count("encoder.down."), 1))
        widths = [self.shape(f"encoder.down.{i}.block.0.conv1.weight", 4)[0] for i in levels]
        return first, tuple(width // first for width in widths), self.count("encoder.down.0.block.")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the largest floating-point tensor."""
        floating = [tensor for tensor in self.values() if tensor.is_floating_point()]
        return max(floating, key=Tensor.numel, default=torch.zeros(0)).dtype

    def load(self, module: ModuleT) -> ModuleT:
        """Load exactly these tensors into the module, in their dtype, and return it in evaluation mode."""
        nn.Module.to(module, self.dtype)  # diffusers' own `to` warns about modules kept in float32 even without any
        load_strictly(module, self, self.where, lambda name: self.published.get(name, name))
        return module.eval()


def load_published(
    module: ModuleT,
    shapes: Mapping[str, tuple[int, ...]],
    reader: Callable[[], Mapping[str, Tensor]],
    where: str | Path,
    dtype: torch.dtype,
    published: Callable[[str], str] = str,
    ignored: Collection[str] = (),
    rebuild: Callable[[], ModuleT] | None = None,
) -> ModuleT:
    """Load exactly a file's tensors into a module built on `meta`, and return it on the CPU in evaluation mode.

    Args:
        module: The module, on `meta`.
        shapes: The shapes of the file's tensors, compared with the module's before anything is read.
        reader: Reads the tensors, with the names of `shapes`.
        where: The file or folder, for errors.
        dtype: The module's dtype.
        published: The file's name of a tensor of the module.
        ignored: Names in the file that the module may lack.
        rebuild: Moves the module to the CPU, if it has buffers that no file holds.
    """
    names = {own: published(own) for own in module.state_dict()}
    owns = {name: own for own, name in names.items()}
    sources = {name: owns.get(name, name) for name in shapes if name in owns or name not in ignored}

    def named(own: str) -> str:
        return names.get(own, own)

    check_shapes(module, {own: shapes[name] for name, own in sources.items()}, where, named)
    module = (module.to_empty(device="cpu") if rebuild is None else rebuild()).to(dtype)
    tensors = reader()
    load_strictly(module, {own: tensors[name] for name, own in sources.items()}, where, named)
    return module.eval()


@contextmanager
def one_sentence(where: str | Path) -> Iterator[None]:
    """Context manager that turns errors from a published config.json into a one-line ValueError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, StrictDataclassError) as error:
        what = (str(error.args[0]) if isinstance(error, KeyError) else str(error)).strip().splitlines()[0]
        raise ValueError(f"checkpoint: config.json of {where} has a wrong entry ({what}).") from None


def stock(kind: type[ModelT], config: PreTrainedConfig, dtype: torch.dtype) -> ModelT:
    """Build a transformers model with uninitialized weights, in evaluation mode. Raises ValueError for a bad config."""
    try:
        with no_init_weights():
            return kind._from_config(config, dtype=dtype).eval()
    except (TypeError, ValueError, KeyError, AssertionError, ZeroDivisionError) as error:
        raise ValueError(f"config: {kind.__name__} rejects it ({str(error).splitlines()[0]}).") from None
