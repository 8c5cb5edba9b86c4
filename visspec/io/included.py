"""What is included beside the library: small models, drafters for them and pictures to measure them on, as one table.

`visspec.toys` fills the table, and this is the only place that looks it up. The rest of the library knows none of its
names and runs with that package deleted: the table is empty then.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from visspec.types import ConfiguredModel, Processor

PACKAGE, TABLE = "visspec.toys", "visspec.toys.table"
FOLDER = Path(next(iter(importlib.import_module("visspec.models.zoo").__path__)))
NOT_ARCHITECTURE = {
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
    "attn_implementation",
} | {f"{kind}_token_id" for kind in ("pad", "bos", "eos")}


@dataclass(frozen=True)
class IncludedModel:
    """A checkpoint in `models/zoo`. One that is made for another says for which (`target`) and as what (`kind`): a
    drafter of `zoo.DRAFTERS`, "lowres" for a sibling of fewer positions, "upsampler", or "assistant" for a smaller
    model of the same words.
    """

    what: str
    kind: str = ""
    target: str = ""  # the name of the model that it is made for
    folder: str = ""  # in `models/zoo`, where that is not its name


@dataclass(frozen=True)
class Included:
    """The table. References are "module:name", loaded when they are needed."""

    models: Mapping[str, IncludedModel] = field(default_factory=dict)
    drafters: tuple[str, ...] = ()  # those of `models` that `drafter=` takes by name
    text_model: str = ""  # of `models`: which one captions where none is named
    image_model: str = ""  # which one draws
    worlds: tuple[str, ...] = ()  # kinds of pictures, by name
    scenes: str = ""  # of a function: (world, processor, use) -> Scenes
    detectors: Mapping[str, str] = field(default_factory=dict)  # of functions: () -> `eval.metrics.detection.Detector`
    parse: str = ""  # of a function: a prompt -> GenEval's metadata; ValueError for one that it can't read
    foreign: str = ""  # of a function: (files, most pixels) -> why `text_model` can't caption one of them, or None


class Scenes(Protocol):
    """Held-out pictures of one world, for a bench: the same for the same numbers, and nothing is trained on them."""

    name: str
    tasks: tuple[str, ...]  # tags of `prompts`, as GenEval's

    def images(self, count: int, first: int = 0) -> list[Image.Image]:
        """Pictures number first..first+count, to be captioned."""

    def questions(self, count: int, first: int = 0) -> list[list[str]]:
        """What can be asked of each of these pictures."""

    def prompts(self) -> list[dict[str, Any]]:
        """All prompts that the world's image model is taught, as GenEval's metadata with `prompt` and `tag`."""

    def render(self, prompt: Mapping[str, Any], rng: np.random.Generator, side: int) -> np.ndarray:
        """A random picture of what a prompt says, uint8 (side, side, 3)."""

    def detector(self) -> Any:
        """`eval.metrics.detection.Detector` of the world."""


def table() -> Included:
    """The table of `visspec.toys`; an empty one where that package is not."""
    return importlib.import_module(TABLE).INCLUDED if find_spec(PACKAGE) is not None else Included()


def load(reference: str) -> Any:
    """The object behind "module:name"."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def scenes(world: str | None = None, processor: Processor | None = None, use: str = "captions") -> Scenes:
    """The scenes of a world by name; without a name, of the one all of whose words a model's processor knows, or of the
    first. use: what the words are of, "captions" or "prompts". Raises ValueError for an unknown name, and where no
    scenes are included.
    """
    if not table().scenes:
        raise ValueError(f"world: got {world!r} where no scenes are included, expected the package {PACKAGE}")
    return load(table().scenes)(world, processor, use)


def folder(name: str) -> Path:
    """Where the weights of an included model are, or would be."""
    row = table().models.get(name)
    return FOLDER / (row.folder if row and row.folder else name)


def text_model() -> str:
    """The included model that captions. Raises ValueError where none is included."""
    return _default(table().text_model)


def image_model() -> str:
    """The included model that draws. Raises ValueError where none is included."""
    return _default(table().image_model)


def detector() -> Any:
    """The first of the included detectors. Raises ValueError where none is included."""
    found = next(iter(table().detectors.values()), None)
    if found is None:
        raise ValueError(f"detector: got none, expected one: no detector is included without {PACKAGE}")
    return load(found)()


def parse(prompt: str) -> dict[str, Any]:
    """GenEval's metadata of a prompt. Raises ValueError for one that none of the included worlds knows."""
    if not table().parse:
        raise ValueError(f"prompt: got {prompt!r}, expected GenEval's metadata beside it: no world is included")
    return load(table().parse)(prompt)


def _default(name: str) -> str:
    if not name:
        raise ValueError(f"model: got none, expected a folder or a hub id: no model is included without {PACKAGE}")
    return name


def present(name: str) -> bool:
    """Whether this installation has the weights of an included model."""
    return (folder(name) / "config.json").is_file()


def check(what: str, name: str) -> Path:
    """The folder of an included model. Raises ValueError if this installation lacks its weights."""
    if not present(name):
        raise ValueError(
            f"{what}: got {name!r}, whose weights are not in this installation, expected them in {folder(name)}; the"
            f" repository has them in models/zoo"
        )
    return folder(name)


def made_for(kind: str, model: ConfiguredModel) -> str | None:
    """The included model of a kind that is made for a model, by its configuration; None where none is."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return None
    rows = ((name, row) for name, row in table().models.items() if row.kind == kind and row.target)
    return next((name for name, row in rows if present(row.target) and not difference(row.target, model)), None)


def difference(name: str, model: ConfiguredModel) -> tuple[str, Any, Any] | None:
    """Where a model's configuration differs from that of an included one: what, there and here."""
    from visspec.io.checkpoint import read_json  # which imports torch: the table is read by `visspec --help` too

    there, here = read_json(folder(name), "config.json"), model.config.to_dict()
    for part in ("", "text_config", "vision_config"):
        wanted, found = (there.get(part) or {}, here.get(part) or {}) if part else (there, here)
        for key, value in wanted.items():
            architecture = isinstance(value, (int, str)) and key not in NOT_ARCHITECTURE
            if architecture and found.get(key) != value:
                return f"{part}.{key}" if part else key, value, found.get(key)
    return None
