"""What the checkpoint of a drafter is, before anyone loads it: by its configuration, the headers of its tensors and a
target on `meta`, the readers themselves judge. No weights are read, nor fetched.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from visspec.api import loading, zoo
from visspec.api.entries import KINDS
from visspec.api.sources import need
from visspec.io import hub
from visspec.io.checkpoint import LARGEST, PICKLED, check_folder, first_line, read_json, read_shapes
from visspec.models import assistants, published
from visspec.models.decoder import mtp_layer, target
from visspec.models.drafting import checkpoint
from visspec.models.drafting.checkpoint import Shapes
from visspec.models.drafting.published_config import object_of, rope_of, strip_prefix
from visspec.models.eagle import lantern
from visspec.models.image_codes.families import FAMILIES, LOADERS, family_of
from visspec.models.layers import MOST_LAYERS
from visspec.models.lowres.drafter import LowRes

Model = PreTrainedModel | None  # the target, where there is one
DEPTH = 64  # of a target that stands in for one of which nothing is known
SIZES_ALONE = "codebooks were compared by their sizes, their values are compared when it is loaded"
OF_THE_TARGET = ("target_model_type", "num_target_layers", "speculators_config")  # entries that tell one from others


@dataclass
class Inspection:
    """What is known of a checkpoint.

    form: the algorithm, or None. layers: ids of the target's layers that it reads, by `convention`: "outputs" or
    "inputs" of layers, "boundary" (inputs, one of them behind the last layer), "defaults" where it names none;
    hidden_states: what is read by that, 0 being the embeddings, -1 the last, and n + 1 of n layers the last before the
    final norm. None: none, or the target's depth would tell. fits: whether it is read for the target, None without one;
    refused: why not. positions, vocabulary: as configured. tensors: None without weights. notes: what readers warn of.
    """

    form: str | None = None
    layers: list | None = None
    convention: str | None = None
    hidden_states: list | None = None
    fits: bool | None = None
    refused: str | None = None
    positions: dict[str, Any] | None = None
    vocabulary: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def inspect(drafter: str | Path, model: str | None = None) -> Inspection:
    """Judge a drafter's folder, hub id or included name, with options behind a colon as `accelerate` takes them.
    model: the same of a target, or its config.json.

    Raises ValueError where there is nothing to judge: no configuration, broken files, no such target.
    """
    name, options = zoo.split(str(drafter))
    root, shapes = open_checkpoint(name)
    data = read_json(root, checkpoint.CONFIG)
    alone = "kind" not in data and str(data.get("model_type")) in KINDS
    whole = None if model is None else loading.without_weights(model)
    kinds = str(data.get("model_type")), None if whole is None else whole.config.model_type
    apart = whole is not None and (kinds[0] != kinds[1] if alone else kinds[1] in LOADERS)
    found = Inspection(tensors={"count": len(shapes), "missing": [], "unexpected": []} if shapes else None)
    with warnings.catch_warnings(record=True) as caught, loading.quiet():
        warnings.simplefilter("always")
        try:
            found.fits = _judge(found, root, data, shapes, None if apart else whole, options)
            if apart:
                made = f"{kinds[0]!r} alone" if alone else "another type"
                raise ValueError(f"drafter: {root} drafts for models of {made}, got one of {kinds[1]!r}")
            if name in zoo.SHIPPED and whole is not None:
                zoo.check_included(name, whole)
        except ValueError as error:
            found.refused, found.fits = str(error), None if model is None and found.form != "mtp" else False
            if found.tensors:
                found.tensors |= {key: getattr(error, key, []) for key in ("missing", "unexpected")}
    found.notes += [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    return found


def open_checkpoint(name: str) -> tuple[Path, Shapes]:
    """The folder of a checkpoint, with its configuration at least, and the shapes of its tensors; {}: no weights."""
    remote = hub.names(name)
    if remote:
        root, shapes = hub.headers(name)
    else:
        root = zoo.included_folder(name)
        if not root.is_dir():
            raise ValueError(f"drafter: got {name!r}, expected a folder, a hub id or the name of an included drafter")
        weights = any(path.suffix == ".safetensors" for path in root.iterdir())
        shapes = read_shapes(check_folder(root)) if weights else {}
    if "kind" in read_json(root, checkpoint.CONFIG):  # of ours, which are small and have no prefixes
        return hub.fetch(name) if remote else root, shapes
    return root, strip_prefix(shapes, root) if shapes else {}


def _judge(found: Inspection, root: Path, data: dict, shapes: Shapes, model: Model, options: dict) -> bool | None:
    """Fill in what a checkpoint is. Returns True if judged for a target, else None; raises ValueError if not read."""
    kind = str(data.get("kind", data.get("model_type")))
    depth = _whole(object_of(data.get("text_config", data)).get("num_hidden_layers"))
    if "kind" in data or kind in KINDS:
        return _own(found, root, data, shapes, model, options)
    if "speculators_model_type" not in data and mtp_layer.layer_names(shapes, depth or 0):
        found.form, found.layers, found.convention, found.hidden_states = "mtp", [-1], "defaults", [-1]
        model = model or loading.without_weights(str(root))
        model.config._name_or_path = str(root)
        found.vocabulary = {"target": model.config.get_text_config().vocab_size, "draft": None}
        mtp_layer.check(model, shapes)
        return True
    if lantern.family_of_layout(data, set(shapes)):
        found.form, found.layers, found.convention, found.hidden_states = "lantern", [-1], "defaults", [-1]
        _fill_sizes(found, root, data, "slots")
        lantern.layer_fields(root, data, shapes)
        if model is None:
            return None
        zoo.from_folder(root, model, options, shapes=shapes)
        return True
    return _is_drafter(found, root, data, shapes, model, options)


def _own(found: Inspection, root: Path, data: dict, shapes: Shapes, model: Model, options: dict) -> bool | None:
    """A drafter that this library has saved."""
    kind = str(data.get("kind", data.get("model_type")))
    found.form = KINDS.get(kind, kind)
    found.layers = found.hidden_states = data.get("feature_layers")
    found.convention = found.layers and "inputs"
    counted = "slots" if data.get("positions") == "index" else "target"
    _fill_sizes(found, root, data, counted, data.get("draft_vocab"))
    found.positions = found.positions if "rope_theta" in data else None
    if "kind" not in data:
        return _by_itself(found, root, kind, model, options)
    if model is None or kind not in KINDS:
        network = zoo.drafter_class(KINDS.get(kind, "eagle")).head_class
        checkpoint.read(root, network, lambda config: None, empty=True, shapes=shapes)
        return None
    zoo.from_folder(root, model, options, shapes=shapes)
    return True


def _by_itself(found: Inspection, root: Path, kind: str, model: Model, options: dict) -> bool | None:
    """A model of ours that drafts for a larger one of its type."""
    if model is None:
        zoo.load(LOADERS[kind])(root, empty=True)
        return None
    zoo.from_folder(root, model, options).attach(family_of(model, None))
    found.notes += [SIZES_ALONE] if kind == "var_image" else []
    return True


def _is_drafter(found: Inspection, root: Path, data: dict, shapes: Shapes, model: Model, options: dict) -> bool | None:
    """A drafter that someone else has made, or a model that can draft."""
    layer = object_of(data.get("transformer_layer_config", data.get("text_config", data)))
    row = published.not_read(data, shapes)
    found.form = row and row[1][0]
    _fill_sizes(found, root, layer, "slots")
    reader, form = published.form_of(root, data, shapes)
    found.form = published.kind_of(reader, form, data, shapes)
    heads = reader == "eagle" and form != "eagle"
    if heads or form == "speculators":
        found.vocabulary["draft"] = data.get("draft_vocab_size") or found.vocabulary["target"]
    depth = _whole(data.get("num_target_layers")) if model is None else target.depth(model)
    found.layers, found.convention, found.hidden_states = published.layers_of(reader, form, data, depth)
    if not shapes and any(path.suffix in PICKLED for path in root.iterdir()):
        check_folder(root)
    if reader == "transformers":
        return _model(found, root, data, shapes, model, options)
    said, judged_for = data, model is not None
    if model is None:
        said = {key: value for key, value in data.items() if key not in OF_THE_TARGET}
        model = stand_in(layer, found.form == "vispec", data.get("target_hidden_size"), depth, found.hidden_states)
    shape = {key: options[key] for key in zoo.SHAPE if key in options}
    options = {key: value for key, value in options.items() if key not in shape}
    start = partial(published.read, root, said, shapes, model)
    judged = zoo.shaped(zoo.make("drafter", root.name, published.read, options, start), root.name, shape)
    if found.hidden_states is not None or "layers" in options:
        found.hidden_states = list(judged.traits.feature_layers)
    if "layers" in options:
        found.layers, found.convention = found.hidden_states, "inputs"
    if found.positions and reader == "eagle":
        found.positions["counted"] = "slots" if judged.config.positions == "index" else "target"
        found.positions["mrope_section"] = list(judged.config.mrope_section)
    return True if judged_for else None


def _model(found: Inspection, root: Path, data: dict, shapes: Shapes, model: Model, options: dict) -> bool | None:
    """A model of transformers, whose tensors transformers names."""
    found.positions = None
    if not shapes and data.get("num_hidden_layers") == 1:
        found.form = None
        raise ValueError(
            f"drafter: {root} may be an EAGLE head or a model of one layer, expected its weights beside it"
        )
    if not any(root.glob("*.safetensors")):
        found.notes.append("a model of transformers, which is judged when it is loaded")
        return None
    need("accelerate", f"the judgement of {root}, a model of transformers,", "train")
    if model is not None and str(data.get("model_type")) in {model.config.model_type} & set(FAMILIES):
        return _sibling(found, root, data, model, options)
    if model is None:
        assistants.read(root, data, torch.float32, empty=True)
        return None
    zoo.from_folder(root, model, options)
    return True


def _sibling(found: Inspection, root: Path, data: dict, model: PreTrainedModel, options: dict) -> bool:
    """A model that draws what the target draws, with fewer codes (`lowres:model=FOLDER`)."""
    found.form = "lowres"
    found.notes += [f"drafts as lowres:model={root}", SIZES_ALONE]
    folders = root, Path(model.config._name_or_path)
    worded = all(Path(folder, "tokenizer_config.json").is_file() for folder in folders)
    small = assistants.read(root, data, torch.float32, empty=True)
    try:
        words = [transformers.AutoProcessor.from_pretrained(folder) if worded else None for folder in folders]
    except Exception as error:  # of whichever library reads the file that is wrong
        raise ValueError(f"drafter: words of {root} or its target could not be read ({first_line(error)})") from None
    own, theirs = (family_of(one, processor) for one, processor in zip((small, model), words))
    zoo.make("drafter", root.name, LowRes, options, partial(LowRes, own, theirs))
    return True


def _fill_sizes(found: Inspection, root: Path, layer: dict, counted: str, draft: int | None = None) -> None:
    """Fill in positions, as the target counts them or by slots, and vocabulary, of which `draft` ids are predicted."""
    found.vocabulary = {"target": layer.get("vocab_size", layer.get("vocab")), "draft": draft or None}
    with suppress(ValueError):  # which the reader says
        theta, scaling, section, *_, share = rope_of(root, layer)
        found.positions = {"counted": counted, "rope_type": "default", **(scaling or {}), "theta": theta}
        found.positions |= {"partial_rotary_factor": share, "mrope_section": list(section)}


def stand_in(layer: dict, sees: bool, hidden: int | None, depth: int | None, states: list | None) -> PreTrainedModel:
    """A target on `meta` that a drafter fits by what it says itself. sees: whether it takes pictures."""
    last = max((i for i in states or () if _whole(i)), default=0) or DEPTH
    sizes: dict[str, Any] = {"vocab_size": layer.get("vocab_size"), "hidden_size": hidden or layer.get("hidden_size")}
    sizes = {name: value for name, value in sizes.items() if _whole(value)}
    sizes |= {"image_token_id": 0} if sees else {}
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config)
    model.model.layers = torch.nn.ModuleList([model.model.layers[0]] * min(depth or last + 2, MOST_LAYERS))
    return model


def _whole(value: object) -> int | None:
    """A size, or None for what is none."""
    return value if type(value) is int and 0 < value <= LARGEST else None
