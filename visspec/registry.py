"""The registry: one table of everything that has a name, and the objects that names stand for.

`entries` and `presets` hold what is built in, `io.included` the included models. Other packages add to them by
`register`, or by an entry point of the group `visspec.plugins`: a function without arguments that calls `register`.
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

DrafterSpec = str | Path | Drafter | nn.Module | None  # what `accelerate` takes as its drafter
DRAFTER = "drafter"  # the folder of a model's own drafter, in the model's
KINDS = {"drafter": "drafters", "rule": "rules", "length": "lengths", "order": "orders", "family": "families",
         "layout": "layouts", "preset": "presets", "recipe": "recipes", "model": "models"}  # fmt: skip
ARGUMENTS = {"rule": "acceptance", "recipe": "preset"}  # the argument that takes a name, where it is not the kind
PLUGINS = "visspec.plugins"
SHAPE = ("tree", "confidence")  # options of `shaped` of drafters that build their drafts
CHECKPOINTS = included.FOLDER  # of the included models, a folder each
_plugins_called = False
_added: set[tuple[str, str]] = set()  # (kind, name) that `register` has added


# --- the table --------------------------------------------------------------------------------------------------------


def register(kind: str, name: str, target: Any, what: str = "", needs: str = "", checkpoint: str = "") -> None:
    """Add a name that `accelerate`, `ImagePipeline` and the command line take.

    Args:
        kind: "drafter", "rule", "length", "order", "family" (name: the `model_type` of its models) or "preset".
        target: a class, or "module:name" of one, which is imported when it is used; of a preset, a `Preset`.
        what: a description of a few words for `visspec list`.
        needs: what the models that it is for generate: "text", "codes", "any order", "vectors" or "maps"; "" for all.
        checkpoint: of a trained drafter, the `kind` in the config.json of its weights, which `from_pretrained` reads.

    Raises:
        ValueError: for another kind, and for a name that is built in.
    """
    if kind not in (*TABLES, "preset") or needs not in NEEDS[kind == "preset" :]:
        raise ValueError(
            f"register: got {kind!r} that needs {needs!r}, expected one of {', '.join(TABLES)} or preset, and one of"
            f" {', '.join(NEEDS[1:])}"
        )
    if name in (PRESETS if kind == "preset" else TABLES[kind]) and (kind, name) not in _added:
        raise ValueError(f"register: the {kind} {name!r} is built in, expected another name")
    _added.add((kind, name))
    if kind == "preset":
        PRESETS.setdefault(name, {})[needs] = target
    else:
        documented = "" if isinstance(target, str) else (target.__doc__ or "").strip().partition("\n")[0]
        TABLES[kind][name] = Entry(target, what or documented, needs, checkpoint)


def load_plugins() -> None:
    """Call the functions behind the entry points, once. One that fails is left out with a warning."""
    global _plugins_called
    if _plugins_called:
        return
    _plugins_called = True
    for point in entry_points(group=PLUGINS):
        try:
            point.load()()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"plug-in {point.name!r} ({point.value}) failed and is left out: {why}", stacklevel=2)


def table(kind: str) -> dict[str, Entry]:
    """All entries of a kind by name, those of plug-ins included."""
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
    """The entry of a name. Raises ValueError with the nearest names for one that is not there."""
    known = table(kind)
    if name not in known:
        others = f"expected a name of `visspec list {KINDS[kind]}`, such as {nearest(name, known)}"
        raise ValueError(f"{ARGUMENTS.get(kind, kind)}: got {name!r}, {others}")
    return known[name]


# --- names with options -----------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """ "lantern:k=100,delta=0.1" -> ("lantern", {"k": 100, "delta": 0.1}). Numbers become numbers."""
    name, _, tail = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{name}: got option {item!r}, expected key=value")
        options[key] = _number(value)
    return name, options


def split(spec: str) -> tuple[str, dict[str, Any]]:
    """A drafter's name, or a folder, and its options. The path of a folder may have a colon."""
    if is_named(spec.partition(":")[0]):
        return parse(spec)
    if Path(spec).is_dir():
        return spec, {}
    folder, _, options = spec.rpartition(":")
    if "=" in options and Path(folder).is_dir():
        return folder, parse(f"folder:{options}")[1]
    return parse(spec)


def joined(name: str | Path, options: dict[str, Any]) -> str:
    """The inverse of `split`."""
    tail = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()
    )
    return f"{name}:{tail}" if tail else str(name)


def is_named(name: str) -> bool:
    """Whether a drafter has this name in the registry."""
    return name in table("drafter") or name in included.table().drafters


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def make(what: str, name: str, kind: Callable, options: dict[str, Any], start: Callable | None = None) -> Any:
    """`(start or kind)(**options)`. Raises ValueError for an unknown option or a value unlike `kind`'s annotation."""
    known = options_of(kind)
    free = any(one.kind is Parameter.VAR_KEYWORD for one in signature(kind).parameters.values())
    for option, value in options.items():
        if option not in known and not free:
            raise ValueError(f"{what}: {name} does not take {option!r}, expected {', '.join(known) or 'no option'}")
        annotated = known[option][0] if option in known else ""
        types, words = VALUES.get(annotated, (object, "a finite number"))
        wrong = not isinstance(value, types) or (isinstance(value, bool) and annotated in ("int", "float"))
        if wrong or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{option}: got {value}, expected {words}")
    try:
        return (start or kind)(**options)
    except TypeError as error:
        raise ValueError(f"{what}: {name} does not take {options}, {error}") from None


def named(kind: str, text: str) -> Any:
    """The object of a name with options, "typical:epsilon=0.1". Raises ValueError for an unknown name or option."""
    name, options = parse(text)
    return make(ARGUMENTS.get(kind, kind), name, find(kind, name).load(), options)


def rule(text: str) -> Any:
    """An acceptance rule by name and options, "typical:epsilon=0.1"."""
    return named("rule", text)


def order(spec: str | Order | Iterable[int] | None) -> Any:
    """An order by name and options, or an object; of any-order models a list of places, too. Raises ValueError as
    `named` does.
    """
    if spec is None or isinstance(spec, Order):
        return spec
    return named("order", spec) if isinstance(spec, str) else load("visspec.loop.visits:ListedOrder")(spec)


def length(spec: object) -> Callable[[int], Any] | None:
    """What makes a draft-length policy for a number of levels, by name and options, "adaptive:share=0.02", or copies an
    object. Raises ValueError as `named` does.
    """
    if spec is None:
        return None
    if not isinstance(spec, str):
        return lambda levels: copy.deepcopy(spec)
    name, options = parse(spec)
    named("length", spec)  # refuses what is wrong now
    kind = find("length", name).load()
    return lambda levels: kind(**{"levels": levels} | options)


# --- presets and included models --------------------------------------------------------------------------------------


def presets(needs: str) -> dict[str, Preset]:
    """The presets of models that generate "text", "codes", codes in "any order", "vectors" or "maps", by name."""
    load_plugins()
    kinds = ("any order", "codes") if needs == "any order" else (needs,)
    return {name: by[kind] for name, by in PRESETS.items() for kind in kinds if kind in by}


def preset(name: str | Path, needs: str, model: ConfiguredModel | None = None) -> Preset:
    """A preset by name, or of a file that `visspec tune --out` wrote; one of a file has to fit `model`, if it is given.
    Raises ValueError for an unknown name, for one of other models, and for another file.
    """
    if str(name).endswith(".json"):
        return read_preset(name, model)
    entry, known = find("preset", str(name)), presets(needs)
    if name not in known:
        others = f"expected one for {needs}, {', '.join(known)}"
        raise ValueError(f"preset: got {name!r}, which is for models of {entry.needs}, {others}")
    return known[str(name)]


def recipe(name: str | None, needs: str = "text") -> Recipe:
    """A recipe of `visspec train drafter` for models that generate `needs`, or "own". Raises ValueError for another."""
    entry = find("recipe", name or "own")
    if entry.needs != needs:
        raise ValueError(f"preset: got {name!r}, which is for models of {entry.needs}, expected one for {needs}")
    return entry.target


def included_folder(name: str) -> Path:
    """The folder of an included checkpoint by its name; any other name is a path. Raises ValueError for the name of an
    included one that this installation lacks.
    """
    own = "/" not in name and (included.present(name) or (name in included.table().models and not Path(name).exists()))
    return included.check("checkpoint", name) if own else Path(name)


def included_drafter(model: ConfiguredModel, kind: str = "eagle") -> str | None:
    """The included drafter of a kind that is made for a model, by its configuration; None where there is none."""
    own = included.made_for(kind, model)
    return own if own and included.present(own) else None


# --- drafters ---------------------------------------------------------------------------------------------------------


def drafter(spec: DrafterSpec, model: ConfiguredModel, family: object = None) -> tuple[Any, str]:
    """A drafter for a target, and its name. `spec` is as in `visspec.accelerate`; `family` drives an image model.

    A drafter by name or folder takes the option `copies`: it copies what text repeats (`models.lookup.merged`).
    """
    if spec is None or spec == "none":
        return None, "none"
    if isinstance(spec, nn.Module):
        return load("visspec.models.assistants:assistant")(spec, model), type(spec).__name__
    if not isinstance(spec, (str, Path)):
        return spec, type(spec).__name__
    name, options = split(str(spec))
    if copies := options.pop("copies", False):
        if copies is not True or family is not None:
            raise ValueError(f"copies: got {copies}, expected true or false, and a model of text")
        found, name = drafter(joined(name, options), model)
        merges = found is not None and not found.traits.counts_nodes  # the others copy anyway
        return load("visspec.models.lookup.merged:MergedDrafter")(found) if merges else found, name
    known, shipped = table("drafter"), included.table().drafters
    if name in table("order"):
        raise ValueError(f"drafter: got {name!r}, which is an order of decoding, expected order={name!r}")
    if not is_named(name):
        if not (Path(name).is_dir() or hub.names(name)):
            raise ValueError(
                f"drafter: got {str(spec)!r}, expected a checkpoint folder, a hub id or a name of `visspec list"
                f" drafters`, such as {nearest(name, [*known, *shipped])}"
            )
        folder = hub.resolve_folder(name)
        return from_folder(folder, model, options, family), Path(name).name
    if name in known and known[name].checkpoint:
        own = included.made_for(name, model)
        if own is None and any(p.default is Parameter.empty for p in signature(known[name].load()).parameters.values()):
            beside = own_drafter(model)
            if beside is not None and isinstance(
                found := from_folder(beside, model, options, family), drafter_class(name)
            ):
                return found, name
            raise ValueError(f"drafter: got {str(spec)!r}, which has to be trained, expected the folder of its weights")
        name = own or name
    if name in shipped:
        folder = included.check("drafter", name)
        if apart := included.difference(shipped[name].target or name, model):
            where, value, found = apart
            raise ValueError(f"drafter: {name} is made for a model with {where} {value!r}, got {found!r}")
        return from_folder(folder, model, options, family), name
    return make("drafter", name, drafter_class(name), options), name


def own_drafter(model: ConfiguredModel) -> Path | None:
    """The folder `drafter` in that of a model; None where there is none."""
    where = getattr(model.config, "_name_or_path", "")
    return own if where and (own := Path(where) / DRAFTER).is_dir() else None


def drafter_class(name: str) -> Any:
    """The class of a drafter by name. Raises ValueError for "none"."""
    if name == "none":
        raise ValueError(f"drafter: got {name!r} with options, expected {name!r} alone")
    return find("drafter", name).load()


def from_folder(folder: Path, model: ConfiguredModel, options: dict[str, Any], family: object = None) -> Any:
    """A drafter from a checkpoint folder, of ours or published by others; its options are those of its class."""
    config = read_json(folder, "config.json")
    trained = {entry.checkpoint: entry for entry in table("drafter").values() if entry.checkpoint}
    ours = str(config.get("kind", config.get("model_type")))
    if ours in trained or "kind" in config:
        kind = trained.get(ours, TABLES["drafter"]["eagle"]).load()
    else:
        kind = load("visspec.models.published:reader")(folder)
    target = family if family is not None and getattr(kind, "of_family", False) else model
    read = partial(getattr(kind, "from_pretrained", kind), folder, target)
    own = signature(kind).parameters
    later = {name: options[name] for name in SHAPE if name in options and name not in own}
    found = make("drafter", folder.name, kind, {k: v for k, v in options.items() if k not in later}, read)
    return shaped(found, folder.name, later)


def shaped(found: object, name: str, options: dict[str, Any]) -> Any:
    """A drafter with options of `SHAPE`. Raises ValueError for one that takes none."""
    if not options:
        return found
    if not isinstance(found, load("visspec.models.drafting.structure:StructuredDrafter")):
        option, value = next(iter(options.items()))
        raise ValueError(f"{option}: got {value} for {name}, expected a drafter that builds its drafts")
    return make("drafter", name, found.shaped, options)
