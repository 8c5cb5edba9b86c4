"""Export of one-layer drafters to other engines. `layout` describes the formats and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from visspec.io.checkpoint import check_choice, write_folder
from visspec.models.drafting.published_config import VERSION, speculators_config
from visspec.models.eagle.config import EagleConfig

if TYPE_CHECKING:
    from visspec.models.eagle.drafter import EagleDrafter

FORMS = ("eagle", "eagle3", "speculators")
MIDLAYER, LAYER = "midlayer.", "layers.0."
IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}


def write(drafter: EagleDrafter, folder: str | Path, form: str, verifier: str | None = None) -> None:
    """Write a drafter in a published form, with M-RoPE stated in its configuration.

    Raises ValueError if the form cannot represent the drafter.

    Args:
        verifier: Name or path of the target, for speculators.
    """
    config = drafter.config
    check_form(config, form)
    data, tensors = head_config(config, drafter.model, form, verifier), dict(drafter.head.state_dict())
    if form == "eagle3":
        tensors = {name.replace(LAYER, MIDLAYER, 1): tensor for name, tensor in tensors.items()}
    write_folder(folder, tensors, data)


def check_form(config: EagleConfig, form: str) -> None:
    """Raise ValueError if a published form cannot represent a configuration."""
    check_choice("form", form, FORMS)
    fusion = "sum" if form == "eagle" else "split"
    images = ("slots", "embeddings", "none", "latents") if form == "eagle" else ("slots", "placeholders", "none")
    for name, value, allowed in (
        ("fusion", config.fusion, (fusion,)),
        ("images", config.images, images),
        ("positions", config.positions, ("index" if form == "eagle" else "target",)),
        ("fc_bias", config.fc_bias, (True, False) if form == "eagle" else (False,)),
        ("qkv_bias", config.qkv_bias, (True, False) if form == "eagle" else (False,)),
        ("qk_norm", config.qk_norm, (True, False) if form == "speculators" else (False,)),
        ("norm_before_residual", config.norm_before_residual, (True, False) if form == "speculators" else (False,)),
        ("draft_vocab", config.draft_vocab > 0, (form != "eagle",)),
        ("block", config.block, (1,)),
        ("norm_output", config.norm_output, (False,) if form == "eagle" else (True, False)),
        ("norm_input", config.norm_input, (False,)),
        ("norm_embedding", config.norm_embedding, (False,)),
        ("ahead", config.ahead, (1,)),
    ):
        if value not in allowed:
            expected = ", ".join(map(str, allowed))
            raise ValueError(f"form: got a drafter with {name} {value} for {form!r}, expected {expected}.")
    if form == "eagle3" and any(not 0 < i < config.target_layers for i in config.feature_layers):
        raise ValueError(f"form: got feature_layers {config.feature_layers}, expected 1..{config.target_layers - 1}.")
    states = config.feature_layers
    apart = len(set(states)) == len(states)
    if form == "speculators" and not (apart and all(0 <= i < config.target_layers for i in states)):
        raise ValueError(
            f"form: got feature_layers {states}, expected different ones of 0..{config.target_layers - 1}."
        )


def head_config(config: EagleConfig, model: PreTrainedModel, form: str, verifier: str | None) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{name: getattr(config, own) for own, name in SIZES.items()},
        "num_hidden_layers": 1,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope(config),
        **({} if config.partial_rotary_factor == 1 else {"partial_rotary_factor": config.partial_rotary_factor}),
        "max_position_embeddings": model.config.get_text_config().max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if form == "eagle":
        return {"architectures": ["LlamaForCausalLM"], **layer, "bias": config.fc_bias, "qkv_bias": config.qkv_bias}
    own = {"draft_vocab_size": config.draft_vocab, "fc_norm": config.fc_norm, "norm_output": config.norm_output}
    own["norm_before_fc"] = config.norm_before_fc
    if config.target_hidden != config.hidden:
        own["target_hidden_size"] = config.target_hidden
    if form == "eagle3":
        shift = config.feature_layers[0] < 3  # layer outputs: readers take ids that begin with 0 or 1 as such
        states = {IDS: [i - shift for i in config.feature_layers], "use_aux_hidden_state": True}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **own,
            "target_model_type": config.family,
            "eagle_config": states,
        }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        **own,
        "norm_before_residual": config.norm_before_residual,
        IDS: list(config.feature_layers),
        "transformer_layer_config": layer,
        "speculators_config": speculators_config("eagle3", config.levels, model, verifier),
    }


def _rope(config: EagleConfig) -> dict[str, Any] | None:
    """Return the rotary entry: the scaling, or M-RoPE's sections, of type "mrope" if not interleaved (Qwen2.5-VL)."""
    if not config.mrope_section:
        return config.rope_scaling
    kind = {"rope_type": "default"} if config.mrope_interleaved else {"type": "mrope", "rope_type": "default"}
    more = {"mrope_interleaved": True} if config.mrope_interleaved else {}
    return {**kind, "mrope_section": list(config.mrope_section), **more}
