"""Published drafters: checkpoint folders, and models that transformers loads. A folder's form follows from its
configuration and tensor names, a model's drafter class from its structure; no code in a folder is run. Unknown forms
are refused by name, so that no head runs under a different algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from visspec.io.checkpoint import CONFIG, check_folder, read_json, read_shapes, shorten
from visspec.models.block import drafter as dflash
from visspec.models.block import layout as dflash_layouts
from visspec.models.decoder.shared_cache import SharedCache, shares_cache
from visspec.models.decoder.small_model import SmallModel
from visspec.models.drafting.published_config import list_of, object_of, strip_prefix
from visspec.models.eagle import layout as eagle_layouts
from visspec.models.eagle.lantern import LanternDrafter, family_of_layout
from visspec.models.layers import load_exactly
from visspec.types import Drafter

SPECULATORS = {"eagle3": "eagle", "dflash": "dflash", "dflash2": "dflash", "dspark": "dflash"}  # type -> reader
EAGLE3 = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaEagle3DraftModel",
    "Qwen3Eagle3Model",
)
BLOCKS = {
    "DFlashDraftModel": "dflash",
    "QwenDFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "DominoDraftModel": "domino",
    "Qwen3DSparkModel": "deepspec",
}
PLAIN = ("LlamaForCausalLM", "LlamaModel")  # class names of EAGLE-1, 2 and 3, if any
HEAD = {"fc.weight", "layers.0.self_attn.q_proj.weight"}  # of MSD and ViSpec, which use their target's class name
ASSISTANTS = ("muse_glimmer_assistant", "gemma4_assistant", "gemma4_unified_assistant")
WORDS = ("eagle", "dflash", "speculator", "medusa", "spark", "mtp", "hydra", "draft")  # of unsupported drafters


def form_of(folder: Path, data: dict, names: Iterable[str]) -> tuple[str, str]:
    """Return a folder's reader and form: ("eagle", "eagle" | "eagle3" | "speculators"), ("dflash", a form of
    `block.layout`) or ("transformers", ""). Raises ValueError for anything else, or if configuration and tensors
    disagree.
    """
    names, named = set(names), list_of(data.get("architectures"))
    first = next(iter(named), "") if all(isinstance(name, str) for name in named) else ""
    if "speculators_model_type" in data:
        return SPECULATORS[_speculators(folder, data)], "speculators"
    if first in BLOCKS:
        projector = object_of(data.get("dflash_config")).get("projector_type")
        return "dflash", projector if projector in ("dspark", "domino") else BLOCKS[first]
    if data.get("model_type") in ASSISTANTS:
        return "transformers", ""
    if first in ("VispecDraftModel", "LlamaEagleDraftModel"):
        return "eagle", "eagle"
    if first in EAGLE3 or (first in ("", *PLAIN) and any(name.startswith("midlayer.") for name in names)):
        return "eagle", "eagle3"
    bare = any(name.startswith(("fc.", "layers.")) for name in names)  # transformers' names start with `model.`
    is_unknown = "dflash_config" in data or any(word in first.lower() for word in WORDS)
    if not is_unknown and (bare if first in ("", *PLAIN) else HEAD <= names):
        return "eagle", "eagle"
    if first and not is_unknown and not {"fc.weight", "midlayer.hidden_norm.weight"} & names:
        return "transformers", ""
    forms = ", ".join([*EAGLE3[:1], *BLOCKS, *(f"speculators' {kind}" for kind in SPECULATORS)])
    raise ValueError(
        f"drafter: {folder} is a checkpoint of {shorten(first or None)}, expected EAGLE-1, 2 or 3, MSD, ViSpec, DFlash,"
        f" DSpark or Domino ({forms}), a model of transformers, or one of ours."
    )


def _speculators(folder: Path, data: dict) -> str:
    """Return the type of a speculators checkpoint, which its configuration states twice."""
    kind = data["speculators_model_type"]
    algorithm = object_of(data.get("speculators_config")).get("algorithm", kind)
    if not isinstance(kind, str) or kind not in SPECULATORS:
        raise ValueError(f"drafter: speculators_model_type of {folder} is {shorten(kind)}, expected {[*SPECULATORS]}.")
    if algorithm != kind:
        raise ValueError(f"drafter: algorithm of {folder} is {shorten(algorithm)}, expected {kind!r} as its type says.")
    return kind


def reader(folder: Path) -> Any:
    """Return the callable that reads a published folder, whose arguments are its options: a class, or `load`."""
    shapes = strip_prefix(read_shapes(check_folder(folder)), folder)
    return LanternDrafter if family_of_layout(read_json(folder, CONFIG), set(shapes)) else load


def load(folder: str | Path, model: PreTrainedModel, **options: Any) -> Drafter:
    """Load a published drafter for its target.

    Raises ValueError, before it reads weights, for another algorithm, another target or other tensors.

    Args:
        options: `width` and `nodes` of its trees and, for one-layer drafters, `images`, how they represent images.
    """
    root = check_folder(folder)
    data, shapes = read_json(root, CONFIG), strip_prefix(read_shapes(root), root)
    reader, form = form_of(root, data, shapes)
    if reader == "eagle":
        return eagle_layouts.read(root, form, data, shapes, model, **options)
    if reader == "dflash":
        return dflash_layouts.read(root, form, data, shapes, model, **options)
    return load_assistant(root, data, model, **options)


def assistant(spec: PreTrainedModel, model: PreTrainedModel, **options: Any) -> Drafter:
    """Return the drafter that runs a loaded model for `model`. Raises ValueError if the two do not fit.

    Args:
        options: Those of its class.
    """
    config = getattr(spec, "config", None)
    if all(hasattr(config, name) for name in dflash.NEEDED):
        return dflash.BlockModel(spec, model, **options)
    if shares_cache(spec):
        return SharedCache(spec, model, **options)
    return SmallModel(spec, model, **options)


def load_assistant(folder: Path, data: dict, model: PreTrainedModel, **options: Any) -> Drafter:
    """Load the drafter from a folder with a transformers model, in the target's dtype and on its device.

    Raises ValueError for a class that transformers does not have, or if tensors are missing or unexpected.
    """
    named = list_of(data.get("architectures"))
    kind = getattr(transformers, named[0], None) if named and isinstance(named[0], str) else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        label = shorten(named[0]) if named else "no architectures"
        raise ValueError(f"drafter: {folder} names {label}, expected a model class of transformers.")
    spec = load_exactly(kind, "drafter", folder, dtype=model.dtype, local_files_only=True)
    return assistant(spec.to(model.device).eval(), model, **options)
