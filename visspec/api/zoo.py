"""Registry of drafters, acceptance rules, orders and checkpoints, by name, and of `presets`. Imports are lazy."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from visspec.api.presets import IMAGES, TRAINED, Preset, TrainedPreset
from visspec.io import hub
from visspec.io.checkpoint import read_json
from visspec.types import Order

ACCEPTANCE = {
    "exact": ("visspec.accept.exact:Exact", "greedy and sampling, chains and trees; token-identical to plain decoding"),
    "rejection": (
        "visspec.accept.rejection:Rejection",
        "exact, with coins of its own: for drafts sampled from a reported law",
    ),
    "typical": ("visspec.accept.typical:Typical", "keeps what the target finds plausible; drift is measured"),
    "lantern": ("visspec.accept.lantern:Lantern", "image codes borrow up to delta from k codebook neighbours"),
    "lantern_plus": ("visspec.accept.lantern:LanternPlus", "the same, up to lam times a code's own probability"),
    "grouped": ("visspec.accept.grouped:Grouped", "image codes judged by their group: ranks of p, or clusters"),
    "cool": ("visspec.accept.cool:Cool", "ratios loosened by a factor that decays with depth"),
    "budget": (
        "visspec.accept.budget:Budget",
        "image codes receive mass from their nearest ones; drift per code at most `drift`, by construction",
    ),
    "run_product": (
        "visspec.accept.run_product:RunProduct",
        "confident runs of a chain judged by one product of ratios",
    ),
    "coupled": (
        "visspec.accept.coupled:Coupled",
        "vectors: denoising chains coupled step by step with the drafter's; exact; several steps in a pass",
    ),
    "surrogate": ("visspec.accept.surrogate:Surrogate", "vectors: the published ratio (CSpD); drift is measured"),
    "legacy": (
        "visspec.accept.legacy:Legacy",
        "vectors: the published code of CSpD, for comparison only; drift is not measured",
    ),
    "scales": ("visspec.accept.scales:Scales", "scales of codes; exact, code for code as plain decoding draws them"),
    "repaired": (
        "visspec.accept.scales:Repaired",
        "scales of codes, rejected codes drawn again; exact, with coins of its own",
    ),
    "local": ("visspec.accept.local:Local", "drafted images judged place by place; rejected islands are drawn again"),
}
DRAFTERS = {
    "none": (None, "plain decoding in our loop"),
    "ngram": ("visspec.models.lookup.ngram:NGram", "prompt and history lookup; every target, nothing to train"),
    "suffix": (
        "visspec.models.lookup.suffix:SuffixDrafter",
        "what followed the longest ending seen before; shared=true: in all requests",
    ),
    "recycling": (
        "visspec.models.lookup.recycling:Recycling",
        "trees of what the target ranked highest after each token in earlier passes; shared=true: of all requests",
    ),
    "layers": (
        "visspec.models.decoder.layer_skip:LayerSkip",
        "text: the target itself with layers left out, chosen on the fly (every=3), or an early exit (exit=4)",
    ),
    "mtp": (
        "visspec.models.decoder.mtp:MultiToken",
        "text: layers of the target's own checkpoint that predict several tokens (`use_mtp` in transformers)",
    ),
    "jacobi": ("visspec.models.jacobi.drafter:Jacobi", "images: the target's own laws of the last pass; no training"),
    "lowres": ("visspec.models.lowres.drafter:LowRes", "images: a low-resolution sibling draws all of it, enlarged"),
    "eagle": ("visspec.models.eagle.drafter:FeatureDrafter", "on the target's hidden states (EAGLE, ViSpec); trained"),
    "eagle-head": (
        "visspec.models.eagle.head_drafter:EagleDrafter",
        "the same in the published forms (EAGLE-1 to 3, MSD, ViSpec, FLASH, DREAM, ...); trained, or one of others",
    ),
    "block-head": (
        "visspec.models.block.trained:BlockDrafter",
        "several places in one pass, with the target's hidden states as context (DFlash, DSpark); trained",
    ),
    "diffusion-lm": (
        "visspec.models.block.diffusion_trained:DiffusionDrafter",
        "text: a block of masks denoised in one pass or a few, by a masked diffusion language model (DEER); trained",
    ),
    "image-eagle": (
        "visspec.models.eagle.image_drafter:ImageFeatureDrafter",
        "images: on the target's hidden states; trained; tree=chain, dynamic or static",
    ),
    "distilled": (
        "visspec.models.distilled.drafter:DistilledDrafter",
        "images: from the noise of many places to their codes, in a few passes of a small network; trained",
    ),
    "continuous": (
        "visspec.models.continuous.drafter:ContinuousDrafter",
        "vectors: a small model of the painter's form; its denoising chains are the drafts; trained",
    ),
    "mar": ("visspec.models.mar.drafter:SmallMAR", "vectors: a smaller MAR, in the order of the row; trained"),
    "var": (
        "visspec.models.var.drafter:SmallVAR",
        "scales: a smaller next-scale model, several scales ahead; trained",
    ),
    "ahead": (
        "visspec.models.randar.ahead:Ahead",
        "any-order images: the target's own laws of later codes, at no further pass (ASSD); no training",
    ),
    "neighbours": (
        "visspec.models.lookup.neighbours:Neighbours",
        "any-order images: what was seen beside the codes around, in the same image (a context n-gram)",
    ),
}
ORDERS = {  # order of generation of an image's positions
    "raster": ("visspec.loop.orders:Raster", "row by row, through the loop; the default"),
    "zipar": ("visspec.loop.orders:ZipAR", "a row starts `window` codes after the last; drafts nothing"),
    "islands": (
        "visspec.loop.orders:RejectedRegions",
        "a drafted image is judged at once, what is rejected is drawn again; of lowres with local by itself",
    ),
    "spread": ("visspec.loop.visits:SpreadOrder", "any-order images: every place as far as can be from those before"),
    "halton": ("visspec.loop.visits:HaltonOrder", "any-order images: points of the Halton sequence"),
}
SHIPPED = {  # trained drafters of the package: the drafter, its checkpoint, that of its target, what it is
    "vispec": ("eagle", "captioner-vispec", "captioner", "the embedded captioner's"),
    "vispec-emoji": ("eagle", "captioner-emoji-vispec", "captioner-emoji", "that of the emoji's captioner"),
    "painter-eagle": ("image-eagle", "painter-eagle", "painter", "the embedded painter's"),
    "painter-emoji-eagle": ("image-eagle", "painter-emoji-eagle", "painter-emoji", "that of the emoji's painter"),
    "painter-distilled": ("distilled", "painter-distilled", "painter", "the embedded painter's"),
    "painter-continuous-drafter": (
        "continuous",
        "painter-continuous-drafter",
        "painter-continuous",
        "the embedded continuous painter's",
    ),
    "painter-mar-drafter": ("mar", "painter-mar-drafter", "painter-mar", "the embedded MAR's"),
    "painter-var-small": ("var", "painter-var-small", "painter-var", "the embedded VAR's, a painter by itself"),
}
KINDS = {
    "feature_drafter": "eagle",
    "eagle_head": "eagle-head",
    "block_drafter": "block-head",
    "diffusion_lm": "diffusion-lm",
    "image_drafter": "image-eagle",
    "distilled_drafter": "distilled",
    "continuous_image": "continuous",
    "mar_image": "mar",
    "var_image": "var",
}  # of a checkpoint: the drafter that reads it
SHAPE = ("tree", "entropy", "confidence")  # options of every drafter that builds its drafts level by level (`Shaped`)
VALUES: dict[str, tuple[Any, str]] = {  # of options, by the annotation of a constructor's argument: types and words
    "int": (int, "a whole number"),
    "float": ((int, float), "a finite number"),
    "bool": (bool, "true or false"),
    "str": (str, "a name"),
}
NOT_ARCHITECTURE = {
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
    "attn_implementation",
} | {f"{kind}_token_id" for kind in ("pad", "bos", "eos")}
CHECKPOINTS = Path(next(iter(importlib.import_module("visspec.models.zoo").__path__)))


def load(reference: str) -> Any:
    """The object behind "module:name"."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def located(name: str) -> Path:
    """The folder of a shipped checkpoint by its name; any other name is a path."""
    shipped = CHECKPOINTS / name
    return shipped if "/" not in name and (shipped / "config.json").is_file() else Path(name)


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


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def make(what: str, name: str, kind: Callable, options: dict[str, Any], start: Callable | None = None) -> Any:
    """`kind(**options)`, or `start(**options)` if given. Raises ValueError for an unknown option or a value that does
    not match the constructor's annotation.
    """
    for option, value in list(options.items()):
        parameter = signature(kind).parameters.get(option)
        annotated = str(parameter.annotation).removesuffix(" | None") if parameter else ""
        if annotated == "Acceptance":
            options[option] = acceptance(str(value), option)
            continue
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


def acceptance(text: str, what: str = "acceptance") -> Any:
    """A rule by name and options, "typical:epsilon=0.1". Raises ValueError for an unknown name or option."""
    name, options = parse(text)
    reference, _ = _pick(ACCEPTANCE, what, name)
    return make(what, name, load(reference), options)


def preset(name: str, draws: str = "any order", model: Any = None) -> Preset:
    """A preset of image generation, for a family that `draws` codes, codes in any order, vectors or maps; its drafter
    is that of `model`, where one is included. Raises ValueError for an unknown name.
    """
    found = _pick(IMAGES[draws], "preset", name)
    return found if model is None else found._replace(drafter=_drafter_of(found.drafter, model))


def _drafter_of(spec: str, model: Any) -> str:
    """`spec`, or the included drafter of the same kind that is made for `model`."""
    from transformers import PreTrainedModel

    name, colon, options = spec.partition(":")
    if name not in SHIPPED or not isinstance(model, PreTrainedModel):
        return spec
    of_type = KINDS.get(kind_of(model))  # painters of vectors: their drafters are models of the same type
    for own, (kind, _, target, _) in SHIPPED.items():
        if kind == of_type or (kind == SHIPPED[name][0] and _differs(CHECKPOINTS / target, model) is None):
            return own + colon + options
    return spec


def included_drafter(model: Any, kind: str = "eagle") -> str | None:
    """The included drafter of a kind that is made for a model, by its configuration; None where there is none."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return None
    own = (
        name for name, (of, _, target, _) in SHIPPED.items() if of == kind and not _differs(CHECKPOINTS / target, model)
    )
    return next(own, None)


def trained(name: str) -> TrainedPreset:
    """A preset of `visspec train drafter`. Raises ValueError for an unknown name."""
    return _pick(TRAINED, "preset", name)


def kind_of(model: Any) -> str:
    """The `model_type` of a model's configuration; of a class without one, its name."""
    return getattr(getattr(model, "config", None), "model_type", type(model).__name__)


def method(text: str) -> dict[str, str | None]:
    """ "drafter/rule" or "drafter/rule/order" as arguments of an `ImagePipeline`."""
    drafter, _, rest = text.partition("/")
    acceptance, _, order = rest.partition("/")
    return {"drafter": drafter, "acceptance": acceptance, "order": order or None}


def order(spec: Any) -> Any:
    """An order by name and options, "zipar:window=4", or an object; of any-order models a list of places, too. Raises
    ValueError as `acceptance` does.
    """
    if spec is None or isinstance(spec, Order):
        return spec
    if not isinstance(spec, str):
        return load("visspec.loop.visits:ListedOrder")(spec)
    name, options = parse(str(spec))
    reference, _ = _pick(ORDERS, "order", name)
    return make("order", name, load(reference), options)


def drafter(spec: Any, model: nn.Module) -> tuple[Any, str]:
    """A drafter for a target, and its name. `spec` is as in `visspec.accelerate`."""
    if spec is None or spec == "none":
        return None, "none"
    if isinstance(spec, nn.Module):
        return load("visspec.models.assistants:assistant")(spec, model), type(spec).__name__
    if not isinstance(spec, (str, Path)):
        return spec, type(spec).__name__
    if str(spec).partition(":")[0] not in DRAFTERS | SHIPPED and Path(spec).is_dir():
        return _from_folder(Path(spec), model, {}), Path(spec).name
    name, options = parse(str(spec))
    if name not in DRAFTERS | SHIPPED and Path(name).is_dir():
        return _from_folder(Path(name), model, options), Path(name).name
    if name not in ORDERS and hub.names(name):
        return _from_folder(hub.fetched(name), model, options), name.rpartition("/")[2]
    if name in ORDERS:
        raise ValueError(f"drafter: got {str(spec)!r}, which is an order of decoding, expected order={str(spec)!r}")
    if name in SHIPPED:
        _, folder, target, _ = SHIPPED[name]
        if apart := _differs(CHECKPOINTS / target, model):
            where, value, found = apart
            raise ValueError(f"drafter: {name} is made for a model with {where} {value!r}, got {found!r}")
        return _from_folder(CHECKPOINTS / folder, model, options), name
    if name in KINDS.values():
        expected = f"expected the folder of its weights or one of {', '.join(SHIPPED)}"
        raise ValueError(f"drafter: got {str(spec)!r}, which has to be trained, {expected}")
    if name in DRAFTERS:
        return make("drafter", name, drafter_class(name), options), name
    known = ", ".join([*DRAFTERS, *SHIPPED])
    raise ValueError(f"drafter: got {str(spec)!r}, expected one of {known}, a checkpoint folder or a hub id")


def drafter_class(name: str) -> Any:
    """The class of a drafter of `DRAFTERS`. Raises ValueError for "none"."""
    reference, _ = DRAFTERS[name]
    if reference is None:
        raise ValueError(f"drafter: got {name!r} with options, expected {name!r} alone")
    return load(reference)


def _from_folder(folder: Path, model: nn.Module, options: dict[str, Any]) -> Any:
    """A drafter from a checkpoint folder, of ours or published by others; its options are those of its class."""
    config = read_json(folder, "config.json")
    kind = load("visspec.models.published:load")
    read = partial(kind, folder, model)
    if str(config.get("kind", config.get("model_type"))) in KINDS or "kind" in config:
        kind = drafter_class(KINDS.get(str(config.get("kind", config.get("model_type"))), "eagle"))
        read = partial(kind.from_pretrained, folder, model)
    own = signature(kind).parameters
    later = {name: options[name] for name in SHAPE if name in options and name not in own}
    found = make("drafter", folder.name, kind, {k: v for k, v in options.items() if k not in later}, read)
    if not later:
        return found
    if not isinstance(found, load("visspec.models.drafting.structure:StructuredDrafter")):
        name = next(iter(later))
        raise ValueError(f"{name}: got {later[name]} for {folder.name}, expected a drafter that builds its drafts")
    return make("drafter", folder.name, found.shaped, later)


def _differs(folder: Path, model: nn.Module) -> tuple[str, Any, Any] | None:
    """Where the model's configuration differs from that of an included checkpoint: what, there and here."""
    config: Any = model.config
    there, here = read_json(folder, "config.json"), config.to_dict()
    for part in ("", "text_config", "vision_config"):
        wanted, found = (there.get(part) or {}, here.get(part) or {}) if part else (there, here)
        for key, value in wanted.items():
            architecture = isinstance(value, (int, str)) and key not in NOT_ARCHITECTURE
            if architecture and found.get(key) != value:
                return f"{part}.{key}" if part else key, value, found.get(key)
    return None
