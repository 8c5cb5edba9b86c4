"""Export of block drafters to other engines. `layout` describes the formats and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from visspec.io.checkpoint import check_choice, write_folder
from visspec.models.block.dflash2 import CONVOLUTIONS
from visspec.models.block.sequential import CandidateSelector, Domino, Spark, entries, published_name
from visspec.models.drafting.published_config import VERSION, speculators_config
from visspec.models.layers import depth

if TYPE_CHECKING:
    from visspec.models.block.drafter import BlockModel

ALGORITHMS = {type(None): "dflash", CandidateSelector: "dflash2", Spark: "dspark", Domino: "domino"}  # by head class
DFLASH2 = "DFlash2DraftModel"
FORMS = ("dflash", "dflash2", "dspark", "domino", "speculators", "transformers")
# names of the assistant's tensors in published files
ASSISTANT = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def write(drafter: BlockModel, folder: str | Path, form: str, verifier: str | None = None) -> None:
    """Write a block drafter in a published form. verifier: name or path of the target, for speculators.

    Raises ValueError if the form cannot represent the drafter.
    """
    check_form(drafter, form)
    form = "speculators" if form == "dspark" else form
    assistant = drafter.assistant
    if form == "transformers":
        assistant.save_pretrained(folder)
        return
    tensors = {ASSISTANT.get(name, name): tensor for name, tensor in assistant.state_dict().items()}
    block = drafter.form
    if block.sequential is not None:
        tensors |= {published_name(name): tensor for name, tensor in block.sequential.state_dict().items()}
    if block.head is not None:
        tensors["lm_head.weight"] = block.head.weight
        if block.ids is not None:
            tensors["d2t"] = block.ids - torch.arange(len(block.ids), device=block.ids.device)
            tensors["t2d"] = torch.zeros(drafter.vocab, dtype=torch.bool).index_fill_(0, block.ids.cpu(), True)
    write_folder(folder, tensors, head_config(drafter, form, verifier))


def check_form(drafter: BlockModel, form: str) -> None:
    """Raise ValueError if a published form cannot represent a drafter."""
    check_choice("form", form, FORMS)
    block, plain, flat = drafter.form, type(drafter.form)(), ("scale", "multiplier", "softcap")
    only = {"dflash": flat, "dflash2": flat, "domino": ("anchor", *flat), "transformers": ()}
    walks: dict[str, Any] = {"dflash2": CandidateSelector, "dspark": Spark, "domino": Domino}
    walks["speculators"] = (CandidateSelector, Spark, type(None))
    if not isinstance(block.sequential, walks.get(form, type(None))):
        kind = "no sequential head" if block.sequential is None else f"a {type(block.sequential).__name__} head"
        raise ValueError(f"form: got a drafter with {kind}, which {form!r} cannot represent, expected another form")
    for name in ("anchor", "head", "embed", "scale", "multiplier", "softcap"):
        if name not in only.get(form, ("anchor", "head")) and getattr(block, name) != getattr(plain, name):
            raise ValueError(f"form: got a drafter with {name} for {form!r}, expected one without")
    if form in ("speculators", "dspark") and depth(drafter.model) in drafter.traits.feature_layers:
        raise ValueError(f"form: {form!r} cannot represent a drafter that reads the state after the last layer")
    if "sliding_attention" in drafter.kinds:
        if block.from_anchor != (form in ("speculators", "dspark")):
            raise ValueError(f"form: got windows that are not those of {form!r}, expected layers of full attention")
        if form == "transformers" and (block.causal or drafter.reach != drafter.window):
            raise ValueError("form: got causal windows for 'transformers', expected layers of full attention")


def form_for(drafter: BlockModel) -> str:
    """Return a published form that can represent a drafter."""
    block, kind = drafter.form, ALGORITHMS[type(drafter.form.sequential)]
    if kind == "domino":
        return kind
    if kind == "dspark" or block.head is not None or block.anchor or block.from_anchor:
        return "speculators"
    return kind if block.index else "transformers"


def head_config(drafter: BlockModel, form: str, verifier: str | None) -> dict[str, Any]:
    config = drafter.assistant.config
    block, rope = drafter.form, dict(config.rope_parameters)
    theta, sliding = rope.pop("rope_theta"), "sliding_attention" in drafter.kinds
    layer: dict[str, Any] = {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in SIZES},
        "vocab_size": drafter.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": (drafter.reach + (form != "speculators")) if sliding else None,
        "tie_word_embeddings": False,
    }
    ids, kind = list(config.target_layer_ids), ALGORITHMS[type(block.sequential)]
    walks = entries(block.sequential, block.anchor)
    if kind == "dflash2":
        walks |= {name: getattr(config, name) for name in CONVOLUTIONS}
    if form != "speculators":
        own = walks | {"target_layer_ids": ids, "mask_token_id": drafter.mask}
        own |= {"block_size": drafter.block} if kind == "dflash2" else {}
        factors = {"input_embedding_scale": block.scale, "output_multiplier": block.multiplier}
        own |= {name: value for name, value in factors.items() if value != 1.0}
        own |= {"final_logit_softcapping": block.softcap} if block.softcap else {}
        return {
            "architectures": [{"dflash": "DFlashDraftModel", "dflash2": DFLASH2, "domino": "DominoDraftModel"}[kind]],
            **layer,
            **({} if block.causal else {"is_causal": False}),
            "block_size": drafter.block,
            "num_target_layers": depth(drafter.model),
            "dflash_config": own,
        }
    return {
        "architectures": [{"dflash": "DFlashSpeculator", "dflash2": DFLASH2, "dspark": "DSparkSpeculator"}[kind]],
        "speculators_model_type": kind,
        **walks,
        "speculators_version": VERSION,
        "draft_vocab_size": drafter.vocab if block.ids is None else len(block.ids),
        "block_size": drafter.block,
        "mask_token_id": drafter.mask,
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "sample_from_anchor": block.anchor,
        "sliding_window_non_causal": not block.causal,
        "transformer_layer_config": layer,
        "speculators_config": speculators_config(kind, drafter.traits.levels, drafter.model, verifier),
    }
