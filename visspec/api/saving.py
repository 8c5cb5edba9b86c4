"""The settings that `save_pretrained` writes next to model and processor as JSON: drafter, rule, order, levels and
parts.

Drafters and rules are written as the names that create them; a drafter's weights are stored in a subfolder. A folder
may come from anyone, so it can only refer to itself and to names of `registry`.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visspec import registry
from visspec.io import checkpoint, hub, included
from visspec.io.files import Json, unwritable, write_json
from visspec.io.provenance import provenance
from visspec.models.drafting.checkpoint import PROVENANCE
from visspec.registry import CODEC, DRAFTER, DrafterSpec
from visspec.types import Acceptance, ConfiguredModel, Drafter, Order

FILE = "visspec.json"
ENTRIES = ("drafter", "acceptance", "order", "levels", "batch_invariant", "parts")
AUTO = "auto"  # chosen by `accelerate.default_drafter`
DEEPEST = 4096  # maximum levels in a file
Component = DrafterSpec | Acceptance | Order
PLAIN = (bool, int, float, str, tuple, list, type(None))
logger = logging.getLogger(__name__)


def save(folder: str | Path, components: Mapping[str, Any], family: object = None, /, **options: object) -> None:
    """Write the components of a pipeline, or of an accelerated model, which may lack a processor. `options` go to the
    model's own `save_pretrained`; `family` belongs to an image model. Raises ValueError, before anything is written,
    for what `read` could not restore.
    """
    root = Path(folder)
    class_conditional = getattr(components["model"], "class_conditional", False) or "processor" not in components
    names = ("model",) if class_conditional else ("model", "processor")
    for name in names:
        if not hasattr(components[name], "save_pretrained"):
            kind = type(components[name]).__name__
            raise ValueError(f"{name}: got {kind}, expected a {name} of transformers to save.")
    if (why := unwritable(root, folder=True)) is not None:
        raise ValueError(f"folder: {why}")
    with tempfile.TemporaryDirectory() as staged:
        settings = {
            "drafter": _drafter_entry(components["drafter"], components["model"], family, Path(staged) / DRAFTER),
            "acceptance": _entry("acceptance", components["acceptance"]),
            "order": _entry("order", components["order"]),
            "levels": _levels(components["levels"]),
            "batch_invariant": components["batch_invariant"],
            # null: parts that are not texts must be passed again
            "parts": {name: part if isinstance(part, str) else None for name, part in components["parts"].items()},
        }
        components["model"].save_pretrained(folder, **options)
        if "processor" in names:
            components["processor"].save_pretrained(folder)
        where = getattr(components["model"].config, "_name_or_path", "")
        for name in (CODEC, DRAFTER) if where else ():  # unknown to transformers' model
            if (part := Path(where, name)).is_dir() and part.resolve() != (root / name).resolve():
                shutil.copytree(part, root / name, dirs_exist_ok=True)
        if isinstance(settings["drafter"], dict):
            shutil.rmtree(root / DRAFTER, ignore_errors=True)  # removes files of an earlier drafter
            shutil.copytree(Path(staged) / DRAFTER, root / DRAFTER)
    write_json(root / FILE, settings)
    logger.info("%s: saved with %s", root, settings)


def read(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor: `options`, and those in the folder. A folder without the file, or a hub
    id, contains none. Raises ValueError like other readers of checkpoints.
    """
    folder, arguments = registry.included_folder(where), dict(options)
    if not (folder / FILE).is_file():
        return arguments
    settings = checkpoint.read_json(folder, FILE)
    if strange := sorted(settings.keys() - set(ENTRIES)):
        entry = checkpoint.shorten(strange[0])
        raise ValueError(f"checkpoint: {FILE} of {folder} has the entry {entry}, expected {', '.join(ENTRIES)}.")
    for name in ENTRIES[:4]:
        if name in settings and name not in options and not options.get("preset"):
            entry = settings[name]
            arguments[name] = _levels(entry) if name == "levels" else _named(name, folder, entry)
    if not isinstance(invariant := settings.get("batch_invariant", False), bool):
        text = checkpoint.shorten(invariant)
        raise ValueError(f"checkpoint: batch_invariant of {folder / FILE} is {text}, expected true or false.")
    arguments.setdefault("batch_invariant", invariant)
    arguments["parts"] = _parts(folder, settings.get("parts", {}), options.get("parts") or {})
    logger.info("%s: read %s", folder / FILE, {name: arguments[name] for name in settings if name in arguments})
    return arguments


def drafter_of(folder: str | Path) -> DrafterSpec:
    """Return the drafter named in a model's folder, for `registry.drafter`, or None."""
    root = Path(folder)
    entry = checkpoint.read_json(root, FILE).get("drafter") if (root / FILE).is_file() else None
    return None if entry == AUTO else _named("drafter", root, entry)


# --- reading of one entry ---------------------------------------------------------------------------------------------


def _named(what: str, folder: Path, entry: Json) -> str | None:
    """Return the drafter, rule or order of an entry. A drafter may be the folder of its weights."""
    if entry is None and what != "acceptance":
        return None
    if what == "drafter" and entry == AUTO:
        return AUTO
    if what == "drafter" and isinstance(entry, dict) and {**entry, "options": ""} == {"folder": DRAFTER, "options": ""}:
        options = entry.get("options", "")
        if not isinstance(options, str) or re.fullmatch(r"([a-z_]+=[\w.+-]+(,[a-z_]+=[\w.+-]+)*)?", options) is None:
            raise ValueError(f"checkpoint: options of {folder / FILE} is {checkpoint.shorten(options)}.")
        root = str(checkpoint.check_folder(checkpoint.inside(folder, DRAFTER)))
        return f"{root}:{options}" if options else root
    if not isinstance(entry, str):
        text = checkpoint.shorten(entry)
        raise ValueError(f"checkpoint: {what} of {folder / FILE} is {text}, expected a name with options.")
    return portable_name(what, entry)


def _levels(entry: Json) -> int | None:
    if entry is not None:
        checkpoint.check_whole("levels", entry, 1, DEEPEST)
    assert entry is None or isinstance(entry, int)
    return entry


def _parts(folder: Path, entry: Json, options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(entry, dict) or not all(isinstance(part, str | None) for part in entry.values()):
        raise ValueError(f"checkpoint: parts of {folder / FILE} is {checkpoint.shorten(entry)}, expected texts.")
    parts = {**entry, **options}
    if lost := [name for name in entry if entry[name] is None and name not in options]:
        raise ValueError(f"parts: {folder} does not contain {lost[0]}. Pass parts={{{lost[0]!r}: ...}}.")
    return parts


# --- writing of one entry ---------------------------------------------------------------------------------------------


def _drafter_entry(drafter: DrafterSpec, model: ConfiguredModel, family: object, staged: Path) -> Json:
    from transformers import PreTrainedModel

    if drafter is None:
        return None
    if isinstance(drafter, (str, Path)):
        text = str(drafter)
        if text == AUTO:
            return AUTO
        name, options = registry.split(text)
        if registry.is_named(name) or not (Path(name).is_dir() or hub.names(name)):
            return portable_name("drafter", text)
        source = hub.resolve_folder(name)
        has_record = (source / PROVENANCE).is_file()
        record = checkpoint.read_json(source, PROVENANCE) if has_record else provenance(model)
        own_drafter = registry.drafter(drafter, model, family)[0]
        if own_drafter.saved_as == "model":  # a transformers model has its own files in the folder
            staged.mkdir(parents=True)
            for file in source.iterdir():
                if file.suffix in (".json", ".safetensors"):
                    shutil.copyfile(file, staged / file.name)
        else:
            own_drafter.save_pretrained(staged, record)
        # what a published head sees of pictures is now in its configuration
        stays = {k: v for k, v in options.items() if k in registry.SHAPE or not isinstance(v, str)}
        later = registry.joined("", stays)[1:]
        return {"folder": DRAFTER, "options": later} if later else {"folder": DRAFTER}
    if isinstance(drafter, PreTrainedModel):
        drafter.save_pretrained(staged)
        return {"folder": DRAFTER}
    if isinstance(drafter, Drafter) and drafter.saved_as == "network":
        drafter.save_pretrained(staged, provenance(model))
        restored = registry.drafter(staged, model, family)[0]
        if type(restored) is not type(drafter):
            raise ValueError(
                f"drafter: A {type(drafter).__name__} can't be restored from its weights. Pass it by name."
            )
        again, own = (_options(x) for x in (restored, drafter))
        if other := [name for name in own if own[name] != again.get(name)]:
            got = f"a {type(drafter).__name__} with {other[0]} {own[other[0]]}"
            raise ValueError(
                f"drafter: got {got}, but its weights have {again.get(other[0])}. Pass it by name with options."
            )
        return {"folder": DRAFTER}
    return _entry("drafter", drafter)


def _entry(what: str, thing: Component) -> str | None:
    """Return the entry of a rule, an order or a drafter without weights: the user's text, or None for no order."""
    if thing is None or isinstance(thing, str):
        return None if thing is None else portable_name(what, thing)
    raise ValueError(f"{what}: got a {type(thing).__name__}, expected its name with options to write into {FILE}.")


def _options(drafter: Drafter) -> dict[str, Any]:
    fields = {name: value for name, value in vars(drafter).items() if type(value) in PLAIN and type(value) is not bool}
    return fields | {"paths": vars(drafter).get("paths"), "traits": drafter.traits}


# --- names ------------------------------------------------------------------------------------------------------------


def portable_name(what: str, text: str) -> str:
    """Return a name with options that means the same on any machine. Raises ValueError for names that the registry
    lacks, options that name a path, and options that a rule does not take.
    """
    name, options = registry.parse(text)
    kind = "rule" if what == "acceptance" else what
    if not (what == "drafter" and name in included.table().drafters):
        registry.find(kind, name)
    for option, value in options.items():
        word = isinstance(value, str) and re.fullmatch(r"[\w+-]+", value)
        shipped = word and registry.included_folder(value) != Path(value)
        if isinstance(value, str) and not shipped and (not word or Path(value).exists()):
            raise ValueError(f"{option}: got {checkpoint.shorten(value)}, expected no path outside of the folder.")
    if what == "acceptance":
        registry.rule(text)
    return text
