"""Checkpoint folders of trained drafters: config.json, model.safetensors, provenance.json. Loading is strict.

Errors are ValueErrors of one line that name the argument, the value found and the value expected.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from visspec.io import hub
from visspec.io.checkpoint import (
    CONFIG,
    check_folder,
    check_positive,
    check_shapes,
    check_wholes,
    first_line,
    load_strictly,
    read_json,
    read_shapes,
    read_tensors,
    shorten,
    write_folder,
)

TargetT = TypeVar("TargetT")  # a text model, or an image family
PROVENANCE = "provenance.json"
NAMES = {
    "hidden": "hidden size",
    "target_hidden": "hidden size",
    "vocab": "vocabulary",
    "target_layers": "number of layers",
}


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Base class of a drafter's configuration, stored in config.json: sizes of its network and of its target.

    Raises ValueError for numbers and flags with which the network would run but give nonsense. Sizes need no check:
    the network is built on `meta` first, and its tensors are compared with the file's.

    Args:
        structure: Default structure of drafts, as options of `StructuredDrafter` and its `tree`.
    """

    family: str
    vocab: int
    hidden: int
    structure: dict[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)

    def __post_init__(self):
        is_known = isinstance(self.structure, dict) and self.structure.keys() <= {"width", "nodes", "tree"}
        if not is_known or "." in str(self.structure.get("tree")):  # a file name would point outside the folder
            text = shorten(self.structure)
            raise ValueError(f"structure: got {text}, expected tree=chain, or a tree such as width=4,nodes=16.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # from JSON
                object.__setattr__(self, field.name, tuple(value))
            if field.type in ("float", float):
                check_positive(field.name, value)
            elif field.type in ("bool", bool) and not isinstance(value, bool):
                raise ValueError(f"{field.name}: got {shorten(value)}, expected true or false.")

    def check_layers(self, low: int, high: int) -> None:
        """Raise ValueError unless `feature_layers` lists at least one number, all from low to high."""
        if not check_wholes("feature_layers", vars(self)["feature_layers"], low, high):
            raise ValueError("feature_layers: got (), expected at least one layer.")

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


class NetworkDrafter(Generic[TargetT]):
    """A drafter around a network, `head`, made for one target; its checkpoint folder is the network's.

    To add a trained drafter, write a subclass with the class of its network, `sizes` and `defaults`, and add a row to
    the table of drafters.
    """

    saved_as = "network"
    head_class: ClassVar[type[Any]]
    head: Any

    @classmethod
    def subject(cls, target: TargetT) -> TargetT:
        """Convert the target to the object that the drafter works with.

        Args:
            target: A transformers model or an image family.
        """
        return target

    @classmethod
    def sizes(cls, target: TargetT) -> dict[str, Any]:
        """Return the configuration fields that must match the target's.

        Args:
            target: The target.
        """
        raise NotImplementedError

    @classmethod
    def defaults(cls, target: TargetT, options: dict[str, Any]) -> dict[str, Any]:
        """Return the other fields of a new configuration.

        Args:
            target: The target, as returned by `subject`.
            options: Fields that the caller has set, on which others may depend.
        """
        raise NotImplementedError

    @classmethod
    def config_for(cls, target: TargetT, **options: object) -> Any:
        """Build the configuration of a new network for a target.

        Args:
            target: The target.
            options: Fields of the configuration.
        """
        fields = {**cls.sizes(target), **cls.defaults(target, options)}
        return cls.head_class.config_class(**{**fields, **options})

    @classmethod
    def check_target(cls, config: object, target: TargetT) -> None:
        """Raise ValueError if the network was made for another target. One made for a language model also fits models
        that read pictures with that language model.

        Args:
            config: The network's configuration.
            target: The target.
        """
        for key, value in cls.sizes(target).items():
            if (expected := getattr(config, key)) != value and (key, expected) != ("family", language_model(target)):
                name = NAMES.get(key, key)
                raise ValueError(f"drafter: made for a target of {name} {shorten(expected)}, got a model of {value!r}.")

    @classmethod
    def for_model(cls, target: TargetT, *, seed: int = 0, **options: object) -> Self:
        """Create an untrained drafter for a target.

        Args:
            target: The target.
            seed: Seed of the initial weights.
            options: Fields of the configuration.
        """
        target = cls.subject(target)
        torch.manual_seed(seed)
        return cls.around(cls.head_class(cls.config_for(target, **options)), target)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: TargetT, **options: Any) -> Self:
        """Load one of our checkpoint folders for its target, strictly.

        Args:
            folder: A folder or hub id.
            target: The target.
            options: Arguments of the constructor.
        """
        target = cls.subject(target)
        head = read(folder, cls.head_class, lambda config: cls.check_target(config, target))
        return cls.around(head, target, **options)

    @classmethod
    def around(cls, head: Any, target: TargetT, **options: Any) -> Self:
        """Create a drafter around a network.

        Args:
            head: The network.
            target: The target.
            options: Options that override the structure in its configuration.
        """
        structure = {} if {"width", "nodes"} & options.keys() else dict(head.config.structure)
        tree = structure.pop("tree", None)
        drafter: Any = cls(head, target, **structure, **options)  # type: ignore[call-arg]
        return drafter if tree is None else drafter.shaped(tree)

    def head_in(self, dtype: torch.dtype) -> Any:
        """Return the network in a dtype: itself, or a copy.

        Args:
            dtype: The dtype of the copy.
        """
        same = next(self.head.parameters()).dtype == dtype
        return self.head if same else copy.deepcopy(self.head).to(dtype)

    @property
    def ids(self) -> Tensor | None:
        """Target ids of the trained logits, in ascending order; None means the target's vocabulary."""
        return getattr(self.head, "ids", None)

    def save_pretrained(self, folder: str | Path, provenance: dict[str, Any], dtype: torch.dtype | None = None) -> None:
        """Write model.safetensors (stored as `dtype`), config.json and provenance.json.

        Args:
            folder: Where to write.
            provenance: What provenance.json holds.
            dtype: The dtype of the stored weights; None to keep it.
        """
        write(folder, self.head, provenance, dtype)

    def push_to_hub(self, repo_id: str, provenance: dict[str, Any] | None = None, private: bool | None = None) -> str:
        """Upload what `save_pretrained` writes and return the URL.

        Args:
            repo_id: "owner/name" on the hub.
            provenance: What provenance.json holds.
            private: Whether a new repository is private.
        """
        return hub.push(repo_id, lambda folder: self.save_pretrained(folder, provenance or {}), private)


def language_model(target: Any) -> str | None:
    """Return the model type of a transformers model's language model, or None for an image family."""
    config = getattr(target, "config", None)
    return config.get_text_config().model_type if isinstance(config, PreTrainedConfig) else None


def read_config(folder: str | Path, kind: type[Any]) -> Any:
    """Read a network's `kind.config_class`. Raises ValueError for unknown, missing and mistyped entries."""
    data = read_json(check_folder(folder), CONFIG)
    if data.pop("kind", None) != kind.kind:
        raise ValueError(f"drafter: {folder} has a {CONFIG} of another kind, expected kind {kind.kind!r}.")
    fields = {f.name: f for f in dataclasses.fields(kind.config_class)}
    required = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    unknown, missing = sorted(set(data) - set(fields)), sorted(required - set(data))
    if unknown or missing:
        problem = f"the unknown entry {shorten(unknown[0])}" if unknown else f"no entry {missing[0]!r}"
        raise ValueError(f"drafter: {CONFIG} of {folder} has {problem}, expected {kind.config_class.__name__}.")
    with sentence_of(folder):
        return kind.config_class(**data)


@contextmanager
def sentence_of(folder: str | Path) -> Iterator[None]:
    """Context manager that turns errors of a configuration and its network into a ValueError that names the file."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        text = first_line(error)
        raise ValueError(text if text.startswith("drafter: ") else f"drafter: {CONFIG} of {folder}: {text}") from None


def read(folder: str | Path, kind: type[Any], check: Callable[[Any], None]) -> Any:
    """Load the network of a checkpoint of this kind, from a folder or hub id. Weights are read only after `check`, and
    after headers were compared with the configuration.
    """
    folder = hub.resolve_folder(folder)
    config = read_config(folder, kind)
    check(config)
    with sentence_of(folder), torch.device("meta"):
        head = kind(config)
    check_shapes(head, read_shapes(Path(folder)), folder)
    derived = {name for name, _ in head.named_buffers()} - set(head.state_dict())  # buffers that are not saved
    head = kind(config) if derived else head.to_empty(device="cpu")
    load_strictly(head, read_tensors(Path(folder)), folder)
    return head


def write(folder: str | Path, head: Any, provenance: dict[str, Any], dtype: torch.dtype | None = None) -> None:
    """Save a network. `dtype` of the stored weights: unchanged by default."""
    tensors = {k: v.to(dtype or v.dtype) for k, v in head.state_dict().items()}
    write_folder(folder, tensors, {"kind": head.kind, **head.config.to_dict()})
    write_provenance(folder, provenance)


def write_provenance(folder: str | Path, record: dict[str, Any]) -> None:
    (Path(folder) / PROVENANCE).write_text(json.dumps(record, indent=2, default=str) + "\n")
