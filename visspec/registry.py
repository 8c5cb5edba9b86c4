"""Registry of drafters, acceptance rules, orders, draft-length policies and checkpoints by name, and of `presets`.

Imports are lazy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from visspec.entries import ACCEPTANCE, DRAFTERS, KINDS, LENGTHS, ORDERS
from visspec.io import hub, included
from visspec.io.checkpoint import read_json
from visspec.io.included import load
from visspec.presets import IMAGES, OWN, TRAINED, Preset, TrainedPreset
from visspec.types import ConfiguredModel, Drafter, Order

DrafterSpec = str | Path | Drafter | nn.Module | None  # what `accelerate` takes as its drafter
SHIPPED = {name: included.table().models[name] for name in included.table().drafters}
SHAPE = ("tree", "entropy", "confidence")  # options of every `StructuredDrafter`
VALUES: dict[str, tuple[Any, str]] = {  # of options, by the annotation of a constructor's argument: types and words
    "int": (int, "a whole number"),
    "float": ((int, float), "a finite number"),
    "bool": (bool, "true or false"),
    "str": (str, "a name"),
}
CHECKPOINTS = included.FOLDER  # of the included models, a folder each


def included_folder(name: str) -> Path:
    """The folder of an included checkpoint by its name; any other name is a path. Raises ValueError for the name of an
    included one that this installation lacks.
    """
    own = "/" not in name and (included.present(name) or (name in included.table().models and not Path(name).exists()))
    return included.check("checkpoint", name) if own else Path(name)


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
    folder = spec.partition(":")[0] not in DRAFTERS | SHIPPED and Path(spec).is_dir()
    return (spec, {}) if folder else parse(spec)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def make(what: str, name: str, kind: Callable, options: dict[str, Any], start: Callable | None = None) -> Any:
    """`(start or kind)(**options)`. Raises ValueError for an unknown option or a value unlike `kind`'s annotation."""
    for option, value in list(options.items()):
        parameter = signature(kind).parameters.get(option)
        annotated = str(parameter.annotation).removesuffix(" | None") if parameter else ""
        types, words = VALUES.get(annotated, (object, "a finite number"))
        wrong = not isinstance(value, types) or (isinstance(value, bool) and annotated in ("int", "float"))
        if wrong or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{option}: got {value}, expected {words}")
    try:
        return (start or kind)(**options)
    except TypeError as error:
        raise ValueError(f"{what}: {name} does not take {options}, {error}") from None


def _pick(table: dict, what: str, name: str):
    if name not in table:
        raise ValueError(f"{what}: got {name!r}, expected one of {', '.join(table)}")
    return table[name]


def rule(text: str) -> Any:
    """A rule by name and options, "typical:epsilon=0.1". Raises ValueError for an unknown name or option."""
    name, options = parse(text)
    return make("acceptance", name, load(str(_pick(ACCEPTANCE, "acceptance", name).reference)), options)


def preset(name: str, draws: str = "any order", model: ConfiguredModel | None = None) -> Preset:
    """A preset of image generation, for a family that `draws` codes, codes in any order, vectors or maps. Drafters that
    have to be trained are named by kind; with a `model`, by the included one of that kind that is made for it, where
    one is. Raises ValueError for an unknown name.
    """
    found = _pick(IMAGES[draws], "preset", name)
    if model is None:
        return found
    parts = {part: made_for(value, model) if part == "refiner" else value for part, value in found.parts.items()}
    return found._replace(drafter=_drafter_of(found.drafter, model), parts=parts)


def _drafter_of(spec: str, model: ConfiguredModel) -> str:
    """`spec` with the included model that is made for `model` in place of each kind of one."""
    name, options = parse(spec)
    words = ",".join(f"{key}={made_for(str(value), model)}" for key, value in options.items())
    name = made_for(name, model) if DRAFTERS[name].checkpoint else name
    return f"{name}:{words}" if words else name


def made_for(kind: str, model: ConfiguredModel) -> str:
    """The included model of a kind that is made for `model`; the kind itself, where none is."""
    return included.made_for(kind, model) or kind


def included_drafter(model: ConfiguredModel, kind: str = "eagle") -> str | None:
    """The included drafter of a kind that is made for a model, by its configuration; None where there is none."""
    own = included.made_for(kind, model)
    return own if own and included.present(own) else None


def training_preset(name: str | None, table: dict[str, TrainedPreset] = TRAINED) -> TrainedPreset:
    """A preset of `visspec train drafter`; None is our own form. Raises ValueError for an unknown name."""
    return OWN if name is None else _pick(table, "preset", name)


def method(text: str) -> dict[str, str | None]:
    """ "drafter/rule" or "drafter/rule/order" as arguments of an `ImagePipeline`."""
    drafter, _, rest = text.partition("/")
    acceptance, _, order = rest.partition("/")
    return {"drafter": drafter, "acceptance": acceptance, "order": order or None}


def order(spec: str | Order | Iterable[int] | None) -> Any:
    """An order by name and options, or an object; of any-order models a list of places, too. Raises
    ValueError as `rule` does.
    """
    if spec is None or isinstance(spec, Order):
        return spec
    if not isinstance(spec, str):
        return load("visspec.loop.visits:ListedOrder")(spec)
    name, options = parse(str(spec))
    return make("order", name, load(str(_pick(ORDERS, "order", name).reference)), options)


def length(spec: Any) -> Callable[[int], Any] | None:
    """What makes a draft-length policy for a number of levels, by name and options, "adaptive:share=0.02", or copies an
    object. Raises ValueError as `rule` does.
    """
    if spec is None:
        return None
    if not isinstance(spec, str):
        return lambda levels: copy.deepcopy(spec)
    name, options = parse(spec)
    kind = load(str(_pick(LENGTHS, "length", name).reference))
    make("length", name, kind, options)
    return partial(kind, **options)


def drafter(spec: DrafterSpec, model: ConfiguredModel, family: object = None) -> tuple[Any, str]:
    """A drafter for a target, and its name. `spec` is as in `visspec.accelerate`; `family` drives an image model."""
    if spec is None or spec == "none":
        return None, "none"
    if isinstance(spec, nn.Module):
        return load("visspec.models.assistants:assistant")(spec, model), type(spec).__name__
    if not isinstance(spec, (str, Path)):
        return spec, type(spec).__name__
    name, options = split(str(spec))
    if name not in DRAFTERS | SHIPPED and Path(name).is_dir():
        return from_folder(Path(name), model, options, family), Path(name).name
    if name not in ORDERS and hub.names(name):
        return from_folder(hub.fetch(name), model, options, family), name.rpartition("/")[2]
    if name in ORDERS:
        raise ValueError(f"drafter: got {str(spec)!r}, which is an order of decoding, expected order={str(spec)!r}")
    if name in KINDS.values():
        own = included.made_for(name, model)
        if own is None:
            some = f" or one of {', '.join(SHIPPED)}, each for its own model" if SHIPPED else ""
            expected = f"expected the folder of its weights{some}"
            raise ValueError(f"drafter: got {str(spec)!r}, which has to be trained, {expected}")
        name = own
    if name in SHIPPED:
        folder = included.check("drafter", name)
        if apart := included.difference(SHIPPED[name].target, model):
            where, value, found = apart
            raise ValueError(f"drafter: {name} is made for a model with {where} {value!r}, got {found!r}")
        return from_folder(folder, model, options, family), name
    if name in DRAFTERS:
        return make("drafter", name, drafter_class(name), options), name
    known = ", ".join([*DRAFTERS, *SHIPPED])
    raise ValueError(f"drafter: got {str(spec)!r}, expected one of {known}, a checkpoint folder or a hub id")


def drafter_class(name: str) -> Any:
    """The class of a drafter of `DRAFTERS`. Raises ValueError for "none"."""
    reference = DRAFTERS[name].reference
    if reference is None:
        raise ValueError(f"drafter: got {name!r} with options, expected {name!r} alone")
    return load(reference)


def from_folder(folder: Path, model: ConfiguredModel, options: dict[str, Any], family: object = None) -> Any:
    """A drafter from a checkpoint folder, of ours or published by others; its options are those of its class."""
    config = read_json(folder, "config.json")
    if str(config.get("kind", config.get("model_type"))) in KINDS or "kind" in config:
        kind = drafter_class(KINDS.get(str(config.get("kind", config.get("model_type"))), "eagle"))
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
