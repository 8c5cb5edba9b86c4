"""What is included beside the library: small models, drafters for them and pictures to measure them on, as one table.

`visspec.toys` fills the table, and this is the only place that looks it up. The rest of the library knows none of its
names and runs with that package deleted: the table is empty then.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visspec.io.options import nearest

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from visspec.types import ConfiguredModel

PACKAGE, TABLE = "visspec.toys", "visspec.toys.table"
FOLDER = Path(next(iter(importlib.import_module("visspec.models.zoo").__path__)))
PUBLISHED = FOLDER.parents[1] / "real"  # where `make real` stores weights
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
    drafter's name, "lowres" for a sibling of fewer positions, "upsampler", or "assistant" for a smaller model of the
    same words.
    """

    what: str
    kind: str = ""
    target: str = ""  # the name of the model that it is made for, if that is included
    parts: tuple[str, ...] = ()  # a published language model (`make real`) and an included tower that it is built of


@dataclass(frozen=True)
class World:
    """Held-out pictures of one kind, which no included model was trained on, and prompts for painters of that kind.

    The folder has PNGs and metadata.jsonl, which `datasets.load_dataset("imagefolder", data_dir=...)` reads: `caption`,
    `questions` with their `answers`, and GenEval's `include`. Its prompts.jsonl has GenEval's metadata of prompts.
    References are "module:name", loaded when they are needed.
    """

    name: str
    folder: Path
    detector_reference: str  # of a function: () -> `eval.metrics.detection.Detector`
    render_reference: str  # of a function: (prompt, generator, side) -> a random picture of it, uint8 (side, side, 3)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metadata.jsonl; none where the world has prompts only."""
        return _lines(self.folder / "metadata.jsonl")

    def images(self, count: int, first: int = 0) -> list[Image.Image]:
        """Pictures number `first` to `first + count`. Raises ValueError where there are fewer."""
        from PIL import Image

        if first + count > len(self.rows):
            raise ValueError(f"images: got {first + count}, but the world {self.name!r} has {len(self.rows)} pictures")
        rows = self.rows[first : first + count]
        return [Image.open(self.folder / row["file_name"]).convert("RGB") for row in rows]

    def prompts(self) -> list[dict[str, Any]]:
        """The prompts that the world's painter was trained on, as GenEval's metadata with `prompt` and `tag`."""
        return _lines(self.folder / "prompts.jsonl")

    def render(self, prompt: Mapping[str, Any], rng: np.random.Generator, side: int) -> np.ndarray:
        """A random picture of what a prompt says, uint8 (side, side, 3)."""
        return load(self.render_reference)(prompt, rng, side)

    def detector(self) -> Any:
        """A new `eval.metrics.detection.Detector` of the world."""
        return load(self.detector_reference)()

    def known_to(self, processor: object, use: str) -> bool:
        """Whether a model has all prompts as classes, or its processor or tokenizer has all words of the captions and
        questions (`use="captions"`) or of the prompts (`use="prompts"`).
        """
        labels = getattr(getattr(processor, "config", None), "labels", None)
        if labels:
            return {row["prompt"] for row in self.prompts()} <= set(labels)
        tokenizer = getattr(processor, "tokenizer", processor)
        known = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        if use == "prompts":
            texts = [row["prompt"] for row in self.prompts()]
        else:
            texts = [text for row in self.rows for text in (row["caption"], *row["questions"], *row["answers"])]
        return bool(texts) and set(" ".join(texts).split()) <= set(known)


@dataclass(frozen=True)
class Included:
    """The table."""

    models: Mapping[str, IncludedModel] = field(default_factory=dict)
    drafters: Mapping[str, IncludedModel] = field(default_factory=dict)  # of `models`: those that `drafter=` takes
    text_model: str = ""  # of `models`: which one captions where none is named
    image_model: str = ""  # which one draws
    worlds: Mapping[str, World] = field(default_factory=dict)  # by name; the first is that of `text_model`
    foreign: str = ""  # of a function: (files, most pixels) -> why `text_model` can't caption one of them, or None


def table() -> Included:
    """The table of `visspec.toys`; an empty one where that package is not."""
    return importlib.import_module(TABLE).INCLUDED if find_spec(PACKAGE) is not None else Included()


def load(reference: str) -> Any:
    """The object behind "module:name"."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def scenes(world: str | None = None, processor: object = None, use: str = "captions") -> World:
    """A world by name; without a name, the first whose words a model's processor knows (`World.known_to`), else the
    first. Raises ValueError for an unknown name, and where no world is included.
    """
    worlds = table().worlds
    if not worlds:
        raise ValueError(f"world: got {world!r} where no scenes are included, expected the package {PACKAGE}")
    if world is None:
        known = worlds.values() if processor is not None else ()
        return next((each for each in known if each.known_to(processor, use)), next(iter(worlds.values())))
    if world not in worlds:
        raise ValueError(f"world: got {world!r}, expected one of {', '.join(worlds)}")
    return worlds[world]


def is_included(model: str | Path) -> bool:
    """Whether a model is an included one, by its name or folder."""
    return str(model) in table().models or Path(model).resolve().parent == FOLDER.resolve()


def folder(name: str) -> Path:
    """Where the weights of an included model are, or would be."""
    return FOLDER / name


def text_model() -> str:
    """The included model that captions. Raises ValueError where none is included."""
    return _default(table().text_model)


def image_model() -> str:
    """The included model that draws. Raises ValueError where none is included."""
    return _default(table().image_model)


def detector() -> Any:
    """The detector of the first world. Raises ValueError where none is included."""
    for world in table().worlds.values():
        return world.detector()
    raise ValueError(f"detector: got none, expected one: no detector is included without {PACKAGE}")


def parse(prompt: str) -> dict[str, Any]:
    """GenEval's metadata of a prompt of an included world. Raises ValueError for any other."""
    for world in table().worlds.values():
        for row in world.prompts():
            if row["prompt"] == prompt:
                return row
    raise ValueError(f"prompt: got {prompt!r}, expected GenEval's metadata beside it or a prompt of an included world")


def _lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def _default(name: str) -> str:
    if not name:
        raise ValueError(f"model: got none, expected a folder or a hub id: no model is included without {PACKAGE}")
    return name


def present(name: str) -> bool:
    """Whether this installation has an included model, or its own part of one that is put together."""
    return (folder(name) / "config.json").is_file()


def check(what: str, name: str) -> Path:
    """The folder of an included model, put together if it has `parts`. Raises ValueError if this installation lacks its
    weights.
    """
    if not present(name):
        raise ValueError(f"{what}: the weights of {name!r} are not in {folder(name)}, the repository has them")
    if name in table().models and (parts := table().models[name].parts):
        from visspec.io.assembly import assemble  # which imports torch

        return assemble(folder(name), PUBLISHED / parts[0], folder(parts[1]), PUBLISHED / name)
    return folder(name)


def check_model(spec: str | Path) -> bool:
    """Check within seconds that a model is included, on this machine, in the cache of the hub or on the hub. Returns
    whether it is on this machine by its name or path. Raises ValueError if it is nowhere.
    """
    spec = str(spec)
    if spec in table().models or Path(spec).exists() or spec.startswith((".", "/")):
        return True
    from visspec.io import hub

    try:
        hub.require(spec)
    except ValueError as error:
        near = f" or an included model, such as {nearest(spec, table().models)}" if table().models else ""
        raise ValueError(f"{error}{'' if '/' in spec else f', expected a folder, a hub id{near}'}") from None
    return False


def made_for(kind: str, model: ConfiguredModel) -> str | None:
    """The included model of a kind that is made for a model, by its configuration; None where none is."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return None
    rows = {name: row.target or name for name, row in table().models.items() if row.kind == kind}
    return next((name for name, target in rows.items() if present(target) and not difference(target, model)), None)


def difference(name: str, model: ConfiguredModel) -> tuple[str, Any, Any] | None:
    """Where a model's configuration differs from that of an included one: what, there and here. A drafter whose target
    is not included has the target's sizes as `target` in its own configuration.
    """
    from visspec.io.checkpoint import read_json  # which imports torch: the table is read by `visspec --help` too

    there, here = read_json(folder(name), "config.json"), model.config.to_dict()
    there = there.get("target", there)
    for part in ("", "text_config", "vision_config"):
        wanted, found = (there.get(part) or {}, here.get(part) or {}) if part else (there, here)
        for key, value in wanted.items():
            architecture = isinstance(value, (int, str)) and key not in NOT_ARCHITECTURE
            if architecture and found.get(key) != value:
                return f"{part}.{key}" if part else key, value, found.get(key)
    return None
