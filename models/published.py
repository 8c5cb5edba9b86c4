"""Drafters of checkpoints that others made: which form a folder has is read off its configuration and the names of its
tensors, never off code in it. What is not known is refused by name, so that no head runs as another algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from visspec.io.checkpoint import CONFIG, check_folder, read_json, read_shapes, shorten
from visspec.models import assistants
from visspec.models.block import layout as dflash_layouts
from visspec.models.drafting.published_config import list_of, object_of, strip_prefix
from visspec.models.eagle import layout as eagle_layouts
from visspec.models.eagle.lantern import LanternDrafter, family_of_layout
from visspec.models.layers import MOST_LAYERS
from visspec.types import Drafter

SPECULATORS = {"eagle3": "eagle", "dflash": "dflash", "dflash2": "dflash", "dspark": "dflash"}  # readers of layouts
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
PLAIN = ("LlamaForCausalLM", "LlamaModel")  # what EAGLE-1, 2 and 3 call themselves, if they do
HEAD = {"fc.weight", "layers.0.self_attn.q_proj.weight"}  # of MSD and ViSpec, which are called as their target is
ASSISTANTS = ("muse_glimmer_assistant", "gemma4_assistant", "gemma4_unified_assistant")
NOT_READ = {  # classes, types of speculators, entries and tensors: the form, what it is, and what to take in its place
    **dict.fromkeys(
        ("PEagleDraftModel", "peagle", "mask_hidden"),
        (
            "peagle", "P-EAGLE, several layers that predict all places of a pass from learned states",
            "an EAGLE-3 head of one layer or a block drafter (DFlash, DSpark) of the same target",
        ),
    ),
    "Gemma4Eagle3Model": (
        "eagle3", "EAGLE-3 with Gemma 4's own layer",
        "Gemma 4's own assistant, or an EAGLE-3 head in the form of speculators",
    ),
    "LlamaForCausalLMEagle3Deep": (
        "eagle3", "NVIDIA's EAGLE-3 of several layers", "a head of one layer (LlamaForCausalLMEagle3)",
    ),
    **dict.fromkeys(
        ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        (
            "eagle3", "EAGLE-3 with DeepSeek's latent attention",
            "a head with Llama's layer (LlamaForCausalLMEagle3), as SpecForge trains for such targets",
        ),
    ),
    "MiniCPMForCausalLMEagle3": (
        "eagle3", "EAGLE-3 with MiniCPM's layer", "a head with Llama's layer (LlamaForCausalLMEagle3)",
    ),
    "Gemma4DSparkModel": (
        "dspark", "DSpark with Gemma 4's own layers",
        "Gemma 4's own assistant, or a DSpark drafter in the form of speculators",
    ),
    "QwenDFlareDraftModel": (
        "dflare", "DFlare, whose layers mix the target's states each in its own way",
        "AngelSlim's DFlash of the same target (QwenDFlashDraftModel)",
    ),
    **dict.fromkeys(
        ("MedusaModel", "medusa_num_heads"),
        ("medusa", "Medusa, whose heads do not see what was drafted", "an EAGLE-3 head of the same target"),
    ),
}  # fmt: skip
WORDS = ("eagle", "dflash", "speculator", "medusa", "spark", "mtp", "hydra", "draft")  # of drafters that we don't have


def form_of(folder: Path, data: dict, names: Iterable[str]) -> tuple[str, str]:
    """(reader, form) of a folder: ("eagle", "eagle" | "eagle3" | "speculators"), ("dflash", a form of
    `block.layout`) or ("transformers", ""). Raises ValueError for anything else, or where configuration and tensors
    disagree.
    """
    names, named = set(names), list_of(data.get("architectures"))
    first = next(iter(named), "") if all(isinstance(name, str) for name in named) else ""
    if row := not_read(data, names):
        name, (_, what, instead) = row
        raise ValueError(f"drafter: {folder} is a checkpoint of {name!r}, {what}, expected {instead}")
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
    bare = any(name.startswith(("fc.", "layers.")) for name in names)  # models of transformers have them in `model.`
    strange = "dflash_config" in data or any(word in first.lower() for word in WORDS)
    if not strange and (bare if first in ("", *PLAIN) else HEAD <= names):
        return "eagle", "eagle"
    if first and not strange and not {"fc.weight", "midlayer.hidden_norm.weight"} & names:
        return "transformers", ""
    known = ", ".join([*EAGLE3[:1], *BLOCKS, *(f"speculators' {kind}" for kind in SPECULATORS)])
    raise ValueError(
        f"drafter: {folder} is a checkpoint of {shorten(first or None)}, expected EAGLE-1, 2 or 3, MSD, ViSpec, DFlash,"
        f" DSpark or Domino ({known}), a model of transformers, or one of ours"
    )


def not_read(data: dict, names: Iterable[str]) -> tuple[str, tuple[str, str, str]] | None:
    """The row of `NOT_READ` that a folder is of, by the name in it; None: of none."""
    found = [*list_of(data.get("architectures"))[:1], data.get("speculators_model_type"), *data, *names]
    return next(((name, NOT_READ[name]) for name in found if isinstance(name, str) and name in NOT_READ), None)


def kind_of(reader: str, form: str, data: dict, names: Iterable[str]) -> str:
    """What the form of a folder is called: the algorithm, whoever published it."""
    if reader == "eagle":
        latents = {"imadpt.q", "img_adaptor.query"} & set(names) or "VispecDraftModel" in list_of(
            data.get("architectures")
        )
        return "eagle3" if form != "eagle" else "vispec" if latents else "eagle"
    if reader == "dflash":
        known = {
            "speculators": data.get("speculators_model_type"),
            "deepspec": "dspark" if data.get("markov_rank") else "dflash",
        }
        return str(known.get(form, form))
    if "target_layer_ids" in data:
        return "dflash"
    if data.get("model_type") in ASSISTANTS:
        return "assistant"
    masked = "mask_token_id" in data or str(next(iter(list_of(data.get("architectures"))), "")).endswith("ForMaskedLM")
    return "diffusion-lm" if masked else "small-model"


def layers_of(reader: str, form: str, data: dict, depth: int | None) -> tuple[list | None, str | None, list | None]:
    """(ids of the layers of a target of `depth` layers that a drafter reads, how they are counted, the hidden states
    that are meant, of which 0 is the embeddings, -1 the last and `depth` + 1 the last before the final norm). None:
    nothing is read, or `depth` would tell.
    """
    if (reader, form) == ("eagle", "eagle"):
        return [-1], "defaults", [-1]
    known, count = depth or MOST_LAYERS, object_of(data.get("transformer_layer_config", data)).get("num_hidden_layers")
    if reader == "eagle":
        ids, convention = eagle_layouts.stated_layers(form, data, known)
    elif reader == "dflash" or "target_layer_ids" in data:
        said = {**data, **object_of(data.get("dflash_config"))}
        ids, convention = dflash_layouts.stated_layers(
            form, said, known, count if type(count) is int and count > 0 else 1
        )
    else:
        return None, None, None
    if (convention == "defaults" and depth is None) or not isinstance(ids, (list, tuple)):
        return None, convention, None
    ids, after = list(ids), convention == "outputs" or (convention == "defaults" and reader == "dflash")
    behind = depth if convention == "boundary" else None
    return ids, convention, [i + (after or i == behind) if type(i) is int else i for i in ids]


def _speculators(folder: Path, data: dict) -> str:
    """The type of a checkpoint of speculators, which it names twice."""
    kind = data["speculators_model_type"]
    algorithm = object_of(data.get("speculators_config")).get("algorithm", kind)
    if not isinstance(kind, str) or kind not in SPECULATORS:
        raise ValueError(
            f"drafter: speculators_model_type of {folder} is {shorten(kind)}, expected one of {', '.join(SPECULATORS)}"
        )
    if algorithm != kind:
        raise ValueError(f"drafter: algorithm of {folder} is {shorten(algorithm)}, expected {kind!r} as its type says")
    return kind


def reader(folder: Path) -> Any:
    """What reads a folder that someone else made, and whose arguments are its options: a class, or `load`."""
    shapes = strip_prefix(read_shapes(check_folder(folder)), folder)
    return LanternDrafter if family_of_layout(read_json(folder, CONFIG), set(shapes)) else load


def load(folder: str | Path, model: PreTrainedModel, **options: Any) -> Drafter:
    """The drafter of a folder that someone else made, for its target. options: `width` and `nodes` of its trees, and of
    one-layer drafters `images`, what they see of a picture.

    Raises ValueError, before weights are read, for another algorithm, another target or other tensors.
    """
    root = check_folder(folder)
    return read(root, read_json(root, CONFIG), strip_prefix(read_shapes(root), root), model, **options)


def read(root: Path, data: dict, shapes: dict[str, tuple[int, ...]], model: PreTrainedModel, **options: Any) -> Drafter:
    """As `load`, of a configuration and the headers of its tensors. For a model on `meta` no weights are read, and
    where none are there the configuration alone is judged.
    """
    reader, form = form_of(root, data, shapes)
    if reader == "eagle":
        return eagle_layouts.read(root, form, data, shapes, model, **options)
    if reader == "dflash":
        return dflash_layouts.read(root, form, data, shapes, model, **options)
    return assistants.load_assistant(root, data, model, **options)
