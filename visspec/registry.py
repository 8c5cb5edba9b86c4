"""The registry of everything that has a name, and the functions that create objects from names.

`entries` and `presets` hold the built-in names, `io.included` the included models. Other packages add names with
`register`, or with an entry point of the group `visspec.plugins`: a function without arguments that calls `register`.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import entry_points
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from torch import nn

from visspec.entries import NEEDS, TABLES, VALUES, Entry, options_of
from visspec.io import hub, included
from visspec.io.checkpoint import read_json
from visspec.io.included import load
from visspec.io.options import nearest
from visspec.presets import PRESETS, RECIPES, Preset, Recipe, read_preset
from visspec.types import ConfiguredModel, Drafter, Order

DrafterSpec = str | Path | Drafter | nn.Module | None
DRAFTER = "drafter"  # name of the folder of a model's own drafter
CODEC = "codec"  # and of a codec that transformers' model lacks
KINDS = {"drafter": "drafters", "rule": "rules", "length": "lengths", "order": "orders", "family": "families",
         "layout": "layouts", "preset": "presets", "recipe": "recipes", "model": "models"}  # fmt: skip
ARGUMENTS = {"rule": "acceptance", "recipe": "preset"}  # the user's argument, if it is not called like the kind
PLUGINS = "visspec.plugins"
SHAPE = ("tree", "confidence")  # options of `shaped`, for drafters that build trees
CHECKPOINTS = included.FOLDER  # one folder per included model
_plugins_called = False
_added: set[tuple[str, str]] = set()  # (kind, name) pairs added by `register`


# --- the table --------------------------------------------------------------------------------------------------------


def register(kind: str, name: str, target: Any, what: str = "", needs: str = "", checkpoint: str = "") -> None:
    """Add a name for use in `accelerate`, `ImagePipeline` and the command line.

    Args:
        kind: "drafter", "rule", "length", "order", "family" (name: the `model_type` of its models) or "preset".
        name: The new name.
        target: A class, or "module:name" to import it on use; for a preset, a `Preset`.
        what: A short description for `visspec list`.
        needs: What the supported models generate: "text", "codes", "any order", "vectors" or "maps"; "" for all.
        checkpoint: For a trained drafter, the `kind` in the config.json of its weights. `from_pretrained` reads them.

    Raises:
        ValueError: If the kind is unknown or the name is built in.
    """
    if kind not in (*TABLES, "preset") or needs not in NEEDS[kind == "preset" :]:
        raise ValueError(
            f"register: got {kind!r} that needs {needs!r}, expected one of {', '.join(TABLES)} or preset, and one of"
            f" {', '.join(NEEDS[1:])}."
        )
    if name in (PRESETS if kind == "preset" else TABLES[kind]) and (kind, name) not in _added:
        raise ValueError(f"register: The {kind} {name!r} is built in. Choose another name.")
    _added.add((kind, name))
    if kind == "preset":
        PRESETS.setdefault(name, {})[needs] = target
    else:
        documented = "" if isinstance(target, str) else (target.__doc__ or "").strip().partition("\n")[0]
        TABLES[kind][name] = Entry(target, what or documented, needs, checkpoint)


def load_plugins() -> None:
    """Call the functions of the entry points, once. A plug-in that fails is skipped with a warning."""
    global _plugins_called
    if _plugins_called:
        return
    _plugins_called = True
    for point in entry_points(group=PLUGINS):
        try:
            point.load()()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"plug-in {point.name!r} ({point.value}) failed and was skipped: {why}", stacklevel=2)


def table(kind: str) -> dict[str, Entry]:
    """Return all entries of a kind by name, including those of plug-ins."""
    load_plugins()
    if kind == "preset":
        return {
            name: Entry(by, "; ".join(dict.fromkeys(one.source for one in by.values())), ", ".join(by))
            for name, by in PRESETS.items()
        }
    if kind == "recipe":
        drafters = TABLES["drafter"]
        return {name: Entry(one, one.source, drafters[one.kind].needs) for name, one in RECIPES.items()}
    if kind == "model":
        models = included.table().models
        return {name: Entry(model, model.what, model.target) for name, model in models.items()}
    return TABLES[kind]


def find(kind: str, name: str) -> Entry:
    """Return the entry of a name. Raises ValueError that suggests the nearest names if there is none."""
    entries = table(kind)
    if name not in entries:
        others = f"expected a name of `visspec list {KINDS[kind]}`, such as {nearest(name, entries)}"
        raise ValueError(f"{ARGUMENTS.get(kind, kind)}: got {name!r}, {others}")
    return entries[name]


# --- names with options -----------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split "lantern:k=100,delta=0.1" into ("lantern", {"k": 100, "delta": 0.1})."""
    name, _, tail = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{name}: got option {item!r}, expected key=value.")
        options[key] = _number(value)
    return name, options


def split(spec: str) -> tuple[str, dict[str, Any]]:
    """Split the name or folder of a drafter from its options. The path of a folder may contain a colon."""
    if is_named(spec.partition(":")[0]):
        return parse(spec)
    if Path(spec).is_dir():
        return spec, {}
    folder, _, options = spec.rpartition(":")
    if "=" in options and Path(folder).is_dir():
        return folder, parse(f"folder:{options}")[1]
    return parse(spec)


def joined(name: str | Path, options: dict[str, Any]) -> str:
    """Return the inverse of `split`."""
    tail = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()
    )
    return f"{name}:{tail}" if tail else str(name)


def is_named(name: str) -> bool:
    """Return whether the registry has a drafter of this name."""
    return name in table("drafter") or name in included.table().drafters


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def make(what: str, name: str, kind: Callable, options: dict[str, Any], start: Callable | None = None) -> Any:
    """Return `(start or kind)(**options)`. Raises ValueError for unknown options, or values of the wrong type."""
    accepted = options_of(kind)
    free = any(one.kind is Parameter.VAR_KEYWORD for one in signature(kind).parameters.values())
    for option, value in options.items():
        if option not in accepted and not free:
            raise ValueError(f"{what}: {name} does not take {option!r}, expected {', '.join(accepted) or 'no option'}.")
        annotated = accepted[option][0] if option in accepted else ""
        types, words = VALUES.get(annotated, (object, "a finite number"))
        wrong = not isinstance(value, types) or (isinstance(value, bool) and annotated in ("int", "float"))
        if wrong or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{option}: got {value}, expected {words}.")
    try:
        return (start or kind)(**options)
    except TypeError as error:
        raise ValueError(f"{what}: {name} does not take {options}, {error}") from None


def named(kind: str, text: str) -> Any:
    """Create an object from a name with options, "typical:epsilon=0.1". Raises ValueError if one of them is unknown."""
    name, options = parse(text)
    return make(ARGUMENTS.get(kind, kind), name, find(kind, name).load(), options)


def rule(text: str) -> Any:
    """Create an acceptance rule from a name with options, "typical:epsilon=0.1"."""
    return named("rule", text)


def order(spec: str | Order | Iterable[int] | None) -> Any:
    """Create an order from a name with options, or for any-order models from a list of places. Other values are
    returned.
    """
    if spec is None or isinstance(spec, Order):
        return spec
    return named("order", spec) if isinstance(spec, str) else load("visspec.loop.visits:ListedOrder")(spec)


def length(spec: object) -> Callable[[int], Any] | None:
    """Return a function that makes a draft-length policy for a number of levels, from a name with options or an
    object.
    """
    if spec is None:
        return None
    if not isinstance(spec, str):
        return lambda levels: copy.deepcopy(spec)
    name, options = parse(spec)
    named("length", spec)  # raises now if the name or an option is wrong
    kind = find("length", name).load()
    return lambda levels: kind(**{"levels": levels} | options)


# --- presets and included models --------------------------------------------------------------------------------------


def presets(needs: str) -> dict[str, Preset]:
    """Return the presets for models that generate "text", "codes", "any order", "vectors" or "maps", by name."""
    load_plugins()
    kinds = ("any order", "codes") if needs == "any order" else (needs,)
    return {name: by[kind] for name, by in PRESETS.items() for kind in kinds if kind in by}


def preset(name: str | Path, needs: str, model: ConfiguredModel | None = None) -> Preset:
    """Return a preset by name, or from a file of `visspec tune --out`. Raises ValueError if it is unknown, or for other
    models than `needs` or `model`.
    """
    if str(name).endswith(".json"):
        return read_preset(name, model)
    entry, names = find("preset", str(name)), presets(needs)
    if name not in names:
        others = f"expected one for {needs}, {', '.join(names)}"
        raise ValueError(f"preset: got {name!r}, which is for models of {entry.needs}, {others}")
    return names[str(name)]


def recipe(name: str | None, needs: str = "text") -> Recipe:
    """Return a recipe of `visspec train drafter`, by default "own". Raises ValueError if it does not fit `needs`."""
    entry = find("recipe", name or "own")
    if entry.needs != needs:
        raise ValueError(f"preset: got {name!r}, which is for models of {entry.needs}, expected one for {needs}.")
    return entry.target


def included_folder(name: str) -> Path:
    """Return the folder of an included checkpoint by name; any other name is a path. Raises ValueError if it is
    missing.
    """
    own = "/" not in name and (included.present(name) or (name in included.table().models and not Path(name).exists()))
    return included.check("checkpoint", name) if own else Path(name)


def included_drafter(model: ConfiguredModel, kind: str = "eagle") -> str | None:
    """Return the name of the included drafter of a kind that fits the model's configuration, or None."""
    own = included.made_for(kind, model)
    return own if own and included.present(own) else None


# --- drafters ---------------------------------------------------------------------------------------------------------


def drafter(spec: DrafterSpec, model: ConfiguredModel, family: object = None) -> tuple[Any, str]:
    """Create a drafter for a target from a `spec` as in `visspec.accelerate`. Returns the drafter and its name.
    `family` drives an image model. The option `copies` combines a drafter by name or folder with "context"
    (`models.lookup.merged`).

    Args:
        spec: A name with options, a folder or hub id, or an object, as in `visspec.accelerate`.
        model: The transformers model.
        family: The image family, for an image model.
    """
    if spec is None or spec == "none":
        return None, "none"
    if isinstance(spec, nn.Module):
        return load("visspec.models.published:assistant")(spec, model), type(spec).__name__
    if not isinstance(spec, (str, Path)):
        return spec, type(spec).__name__
    name, options = split(str(spec))
    if copies := options.pop("copies", False):
        if copies is not True or family is not None:
            raise ValueError(f"copies: got {copies}, expected true or false, and a model of text.")
        return merged(*drafter(joined(name, options), model), model)
    names, shipped = table("drafter"), included.table().drafters
    if name in table("order"):
        raise ValueError(f"drafter: {name!r} is an order of decoding. Pass order={name!r}.")
    if not is_named(name):
        if not (Path(name).is_dir() or hub.names(name)):
            raise ValueError(
                f"drafter: got {str(spec)!r}, expected a checkpoint folder, a hub id or a name of `visspec list"
                f" drafters`, such as {nearest(name, [*names, *shipped])}."
            )
        folder = hub.resolve_folder(name)
        return from_folder(folder, model, options, family), Path(name).name
    if name in names and names[name].checkpoint:
        own = included.made_for(name, model)
        if own is None and any(p.default is Parameter.empty for p in signature(names[name].load()).parameters.values()):
            own_folder = own_drafter(model)
            if own_folder is not None and isinstance(
                found := from_folder(own_folder, model, options, family), drafter_class(name)
            ):
                return found, name
            raise ValueError(f"drafter: {str(spec)!r} must be trained first. Pass the folder of its weights.")
        name = own or name
    if name in shipped:
        folder = included.check("drafter", name)
        if apart := included.difference(shipped[name].target or name, model):
            where, value, found = apart
            raise ValueError(f"drafter: {name} is made for a model with {where} {value!r}, got {found!r}.")
        return from_folder(folder, model, options, family), name
    return make("drafter", name, drafter_class(name), options), name


def merged(trained: Any, name: str, model: ConfiguredModel) -> tuple[Any, str]:
    """Return a drafter combined with "context", or itself if it is none or copies text anyway; and its name."""
    if trained is None or trained.traits.counts_nodes:
        return trained, name
    return load("visspec.models.lookup.merged:MergedDrafter")(trained, drafter("context", model)[0]), name


def own_drafter(model: ConfiguredModel) -> Path | None:
    """Return the folder `drafter` inside a model's folder, or None."""
    where = getattr(model.config, "_name_or_path", "")
    return own if where and (own := Path(where) / DRAFTER).is_dir() else None


def drafter_class(name: str) -> Any:
    """Return the class of a drafter by name. Raises ValueError for "none"."""
    if name == "none":
        raise ValueError(f"drafter: {name!r} takes no options.")
    return find("drafter", name).load()


def from_folder(folder: Path, model: ConfiguredModel, options: dict[str, Any], family: object = None) -> Any:
    """Load a drafter from a checkpoint folder, ours or a published one. Its options are those of its class."""
    config = read_json(folder, "config.json")
    trained = {entry.checkpoint: entry for entry in table("drafter").values() if entry.checkpoint}
    ours = str(config.get("kind", config.get("model_type")))
    if ours in trained or "kind" in config:
        kind = trained.get(ours, TABLES["drafter"]["eagle"]).load()
    else:
        kind = load("visspec.models.published:reader")(folder)
    target = family if family is not None and getattr(kind, "of_family", False) else model
    reader = partial(getattr(kind, "from_pretrained", kind), folder, target)
    own = signature(kind).parameters
    later = {name: options[name] for name in SHAPE if name in options and name not in own}
    instance = make("drafter", folder.name, kind, {k: v for k, v in options.items() if k not in later}, reader)
    return shaped(instance, folder.name, later)


def shaped(instance: object, name: str, options: dict[str, Any]) -> Any:
    """Apply options of `SHAPE` to a drafter. Raises ValueError if it takes none."""
    if not options:
        return instance
    if not isinstance(instance, load("visspec.models.drafting.base:StructuredDrafter")):
        raise ValueError(f"{next(iter(options))}: {name} does not support this option.")
    return make("drafter", name, instance.shaped, options)
