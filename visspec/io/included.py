"""The table of everything included with the library: small models, their drafters, and pictures to measure them on.

`visspec.toys` fills the table, and only this module reads it. The rest of the library does not depend on the names in
it and also runs if that package is deleted; the table is then empty.
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
PUBLISHED = FOLDER.parents[1] / "real"  # weights downloaded by `make real`
NOT_ARCHITECTURE = {*"dtype torch_dtype transformers_version use_cache _name_or_path attn_implementation".split()}
NOT_ARCHITECTURE |= {"pad_token_id", "bos_token_id", "eos_token_id"}


@dataclass(frozen=True)
class IncludedModel:
    """A checkpoint in `models/zoo`. If it is made for another model (`target`), `kind` is the name of a drafter,
    "lowres" for a sibling of fewer positions, "upsampler", or "assistant" for a smaller model with the same vocabulary.
    """

    what: str
    kind: str = ""
    target: str = ""  # name of the model that it is made for, if included
    # a published language model (`make real`) and an included vision tower of which it is built
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class World:
    """Held-out pictures of one kind, which no included model was trained on, and prompts for painters of that kind.

    The folder has PNGs and metadata.jsonl (`caption`, `questions` with their `answers`, and GenEval's `include`), for
    `datasets.load_dataset("imagefolder", data_dir=...)`. Its prompts.jsonl has GenEval's metadata of prompts.
    References are "module:name", loaded on demand.
    """

    name: str
    folder: Path
    detector_reference: str  # a function () -> `eval.metrics.detection.Detector`
    render_reference: str  # a function (prompt, generator, side) -> a random picture of it, uint8 (side, side, 3)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metadata.jsonl; empty if the world only has prompts."""
        return _lines(self.folder / "metadata.jsonl")

    def images(self, count: int, first: int = 0) -> list[Image.Image]:
        """Return `count` pictures, starting with number `first`. Raises ValueError if there are too few."""
        from PIL import Image

        if first + count > len(self.rows):
            raise ValueError(f"images: got {first + count}, but the world {self.name!r} has {len(self.rows)} pictures.")
        rows = self.rows[first : first + count]
        return [Image.open(self.folder / row["file_name"]).convert("RGB") for row in rows]

    def prompts(self) -> list[dict[str, Any]]:
        """The prompts on which the world's painter was trained, as GenEval's metadata with `prompt` and `tag`."""
        return _lines(self.folder / "prompts.jsonl")

    def render(self, prompt: Mapping[str, Any], rng: np.random.Generator, side: int) -> np.ndarray:
        """Draw a random picture of a prompt, uint8 (side, side, 3)."""
        return load(self.render_reference)(prompt, rng, side)

    def detector(self) -> Any:
        """Create an `eval.metrics.detection.Detector` of the world."""
        return load(self.detector_reference)()

    def known_to(self, processor: object, use: str) -> bool:
        """Return whether a model has all prompts as classes, or its processor or tokenizer has all words of captions
        and questions (`use="captions"`) or of prompts (`use="prompts"`).
        """
        labels = getattr(getattr(processor, "config", None), "labels", None)
        if labels:
            return {row["prompt"] for row in self.prompts()} <= set(labels)
        tokenizer = getattr(processor, "tokenizer", processor)
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        if use == "prompts":
            texts = [row["prompt"] for row in self.prompts()]
        else:
            texts = [text for row in self.rows for text in (row["caption"], *row["questions"], *row["answers"])]
        return bool(texts) and set(" ".join(texts).split()) <= set(vocabulary)


@dataclass(frozen=True)
class Included:
    """The table."""

    models: Mapping[str, IncludedModel] = field(default_factory=dict)
    drafters: Mapping[str, IncludedModel] = field(default_factory=dict)  # those of `models` for `drafter=`
    text_model: str = ""  # the default captioner among `models`
    image_model: str = ""  # the default painter among `models`
    worlds: Mapping[str, World] = field(default_factory=dict)  # by name; the first belongs to `text_model`
    foreign: str = ""  # a function (files, max pixels) -> why `text_model` can't caption one of them, or None


def table() -> Included:
    """Return the table of `visspec.toys`, or an empty one if that package is missing."""
    return importlib.import_module(TABLE).INCLUDED if find_spec(PACKAGE) is not None else Included()


def load(reference: str) -> Any:
    """Import the object "module:name"."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def scenes(world: str | None = None, processor: object = None, use: str = "captions") -> World:
    """Return a world by name, or by default the first whose words a model's processor knows (`World.known_to`), else
    the first. Raises ValueError if the name is unknown or no world is included.

    Args:
        world: Name of a world; None to choose by the processor.
        processor: Processor of the model.
        use: Which of its words the processor has to know, those of "captions" or of "prompts".
    """
    worlds = table().worlds
    if not worlds:
        raise ValueError(f"world: got {world!r}, but no scenes are included without {PACKAGE}.")
    if world is None:
        candidates = worlds.values() if processor is not None else ()
        return next((each for each in candidates if each.known_to(processor, use)), next(iter(worlds.values())))
    if world not in worlds:
        raise ValueError(f"world: got {world!r}, expected one of {', '.join(worlds)}.")
    return worlds[world]


def is_included(model: str | Path) -> bool:
    """Return whether a model is an included one, by name or folder."""
    return str(model) in table().models or Path(model).resolve().parent == FOLDER.resolve()


def folder(name: str) -> Path:
    """Return the folder of an included model's weights, which may not exist.

    Args:
        name: Name of an included model.
    """
    return FOLDER / name


def text_model() -> str:
    """Return the included model that captions. Raises ValueError if there is none."""
    return _default(table().text_model)


def image_model() -> str:
    """Return the included model that draws. Raises ValueError if there is none."""
    return _default(table().image_model)


def detector() -> Any:
    """Return the detector of the first world. Raises ValueError if there is none."""
    for world in table().worlds.values():
        return world.detector()
    raise ValueError(f"detector: got none, and no detector is included without {PACKAGE}.")


def parse(prompt: str) -> dict[str, Any]:
    """Return GenEval's metadata of a prompt of an included world. Raises ValueError for other prompts."""
    for world in table().worlds.values():
        for row in world.prompts():
            if row["prompt"] == prompt:
                return row
    raise ValueError(f"prompt: got {prompt!r}, expected GenEval's metadata or a prompt of an included world.")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def _default(name: str) -> str:
    if not name:
        raise ValueError(f"model: got none, and no model is included without {PACKAGE}. Pass a folder or a hub id.")
    return name


def present(name: str) -> bool:
    """Return whether this installation has an included model, or its own part of an assembled one."""
    return (folder(name) / "config.json").is_file()


def check(what: str, name: str) -> Path:
    """Return the folder of an included model, assembled if it has `parts`. Raises ValueError if weights are missing."""
    if not present(name):
        raise ValueError(f"{what}: the weights of {name!r} are not in {folder(name)}. The repository has them.")
    if name in table().models and (parts := table().models[name].parts):
        from visspec.io.assembly import assemble  # imports torch

        return assemble(folder(name), PUBLISHED / parts[0], folder(parts[1]), PUBLISHED / name)
    return folder(name)


def check_model(spec: str | Path) -> bool:
    """Check within seconds that a model is included, on this machine, in the cache of the hub or on the hub. Returns
    whether it is on this machine by name or path. Raises ValueError if it is not found.
    """
    spec = str(spec)
    if spec in table().models or Path(spec).exists() or spec.startswith((".", "/")):
        return True
    from visspec.io import hub

    try:
        hub.require(spec)
    except ValueError as error:
        hint = f" or an included model, such as {nearest(spec, table().models)}" if table().models else ""
        raise ValueError(f"{error}{'' if '/' in spec else f', expected a folder, a hub id{hint}'}") from None
    return False


def made_for(kind: str, model: ConfiguredModel) -> str | None:
    """Return the included model of a kind that fits a model's configuration, or None."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return None
    rows = {name: row.target or name for name, row in table().models.items() if row.kind == kind}
    return next((name for name, target in rows.items() if present(target) and not difference(target, model)), None)


def difference(name: str, model: ConfiguredModel) -> tuple[str, Any, Any] | None:
    """Return the first difference between the configurations of a model and an included one: name, value there, value
    here. A drafter whose target is not included stores the target's sizes as `target`.
    """
    from visspec.io.checkpoint import read_json  # imports torch, which `visspec --help` does not need

    there, here = read_json(folder(name), "config.json"), model.config.to_dict()
    there = there.get("target", there)
    for part in ("", "text_config", "vision_config"):
        expected, actual = (there.get(part) or {}, here.get(part) or {}) if part else (there, here)
        for key, value in expected.items():
            architecture = isinstance(value, (int, str)) and key not in NOT_ARCHITECTURE
            if architecture and actual.get(key) != value:
                return f"{part}.{key}" if part else key, value, actual.get(key)
    return None
