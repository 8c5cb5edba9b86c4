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
from visspec.io.checkpoint import LARGEST, PICKLED, check_folder, read_json, read_shapes
from visspec.models import assistants, published
from visspec.models.decoder import mtp_layer, target
from visspec.models.drafting import checkpoint
from visspec.models.drafting.published_config import object_of, rope_of, strip_prefix
from visspec.models.eagle import lantern
from visspec.models.layers import MOST_LAYERS

Shapes = dict[str, tuple[int, ...]]
Model = PreTrainedModel | None  # the target, where there is one
DEPTH = 64  # of a target that stands in for one of which nothing is known
OF_THE_TARGET = ("target_model_type", "num_target_layers", "speculators_config")  # entries that tell one from others


@dataclass
class Inspection:
    """What is known of a checkpoint.

    form: the algorithm, or None. layers: ids of the target's layers that it reads, by `convention`: "outputs" or
    "inputs" of layers, "boundary" (inputs, one of them behind the last layer), "defaults" where it names none;
    hidden_states: what is read by that, 0 being the embeddings and -1 the last. None: none, or the target's depth would
    tell. fits: whether it is read for the target, None without one; refused: why it is not read. positions, vocabulary:
    as configured. tensors: None where no weights are there. notes: what readers warn of.
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
    name, options = (str(drafter), {}) if Path(drafter).is_dir() else zoo.parse(str(drafter))
    root, shapes = open_checkpoint(name)
    data = read_json(root, checkpoint.CONFIG)
    alone = "kind" not in data and str(data.get("model_type")) in KINDS
    whole = None if model is None or alone else loading.without_weights(model)
    found = Inspection(tensors={"count": len(shapes), "missing": [], "unexpected": []} if shapes else None)
    with warnings.catch_warnings(record=True) as caught, loading.quiet():
        warnings.simplefilter("always")
        try:
            found.fits = _judge(found, root, data, shapes, whole, options)
        except ValueError as error:
            found.refused, found.fits = str(error), None if model is None and found.form != "mtp" else False
            if found.tensors:
                found.tensors |= {key: getattr(error, key, []) for key in ("missing", "unexpected")}
    found.notes += [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    return found


def open_checkpoint(name: str) -> tuple[Path, Shapes]:
    """The folder of a checkpoint, with its configuration at least, and the shapes of its tensors; {}: no weights."""
    if hub.names(name):
        root, shapes = hub.headers(name)
        if "kind" in read_json(root, checkpoint.CONFIG):
            root = hub.fetch(name)  # the networks of ours are small
    else:
        root = zoo.included_folder(name)
        if not root.is_dir():
            raise ValueError(f"drafter: got {name!r}, expected a folder, a hub id or the name of an included drafter")
        weights = any(path.suffix == ".safetensors" for path in root.iterdir())
        shapes = read_shapes(check_folder(root)) if weights else {}
    return root, strip_prefix(shapes, root) if shapes else {}


def _judge(found: Inspection, root: Path, data: dict, shapes: Shapes, model: Model, options: dict) -> bool | None:
    """Fill in what a checkpoint is. Returns whether it was judged for a target, else None; raises ValueError for why it
    is not read.
    """
    kind = str(data.get("kind", data.get("model_type")))
    depth = _whole(object_of(data.get("text_config", data)).get("num_hidden_layers"))
    if "kind" in data or kind in KINDS:
        return _own(found, root, data, kind, model, options)
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
        zoo.from_folder(root, model, options)
        return True
    return _is_drafter(found, root, data, shapes, model, options)


def _own(found: Inspection, root: Path, data: dict, kind: str, model: Model, options: dict) -> bool | None:
    """A drafter that this library has saved."""
    found.form = KINDS.get(kind, kind)
    found.layers = found.hidden_states = data.get("feature_layers")
    found.convention = found.layers and "inputs"
    counted = "slots" if data.get("positions") == "index" else "target"
    _fill_sizes(found, root, data, counted, data.get("draft_vocab"))
    found.positions = found.positions if "rope_theta" in data else None
    if "kind" not in data:
        found.notes.append("a model by itself, which is judged when it is loaded")
        return None
    if model is None or kind not in KINDS:
        network = zoo.drafter_class(KINDS.get(kind, "eagle")).head_class
        checkpoint.read(root, network, lambda config: None, empty=True)
        return None
    zoo.from_folder(root, model, options)
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
    if reader == "transformers":
        return _model(found, root, data, shapes, model, options)
    if not shapes and any(path.suffix in PICKLED for path in root.iterdir()):
        check_folder(root)
    said, judged_for = data, model is not None
    if model is None:
        said = {key: value for key, value in data.items() if key not in OF_THE_TARGET}
        model = stand_in(layer, found.form == "vispec", data.get("target_hidden_size"), depth, found.hidden_states)
    options = {key: value for key, value in options.items() if key not in zoo.SHAPE}
    start = partial(published.read, root, said, shapes, model)
    judged = zoo.make("drafter", root.name, published.read, options, start)
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
    if model is None:
        assistants.read(root, data, torch.float32, empty=True)
        return None
    zoo.from_folder(root, model, options)
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
