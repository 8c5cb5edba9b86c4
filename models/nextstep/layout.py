"""Folder with a NextStep-1 and its image tokenizer, in transformers' layout, and published NextStep-1 (and 1.1).

The decoder is transformers' stock Qwen2: its weights are a Llama's with biases of only queries, keys and values.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL
from transformers import Qwen2Config

from visspec.io.checkpoint import check_positive, read_json
from visspec.models.codecs.vq_layout import load_kl, settings_of
from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.nextstep.network import GUIDANCE, NextStep, NextStepConfig
from visspec.models.published_tensors import Rules, Weights, one_sentence

RULES: Rules = ((r"^(embed_tokens|layers|norm)\.", r"model.\1."),)
HEAD, TABLE = "image_head.net.", "gen_pos_embed"
# the text head, which is not used for images, and tables that are computed
NOT_WEIGHTS = r"lm_head\.|.*rotary_emb\."
DECODER_FIELDS = (  # entries not implied by shapes, with the same names in transformers
    "num_attention_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",  # replaces the two above in transformers 5
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
PATCH = ("latent_patch_size", "patch_size")  # names in configurations of the first release and of 1.1


class NextStepImageConfig(PartsConfig):
    """network: `sizes`, see `NextStepConfig`; the `decoder`, see `Qwen2Config`; and whether tokens are `normalised`.
    codec: configuration of an `AutoencoderKL`.
    """

    model_type = "nextstep_image"


class NextStepImageModel(OwnImageModel):
    """`net` generates vectors; `codec` decodes them to images."""

    config_class = NextStepImageConfig
    base_model_prefix = "net"

    def __init__(self, config: NextStepImageConfig):
        super().__init__(config)
        network = config.network
        sizes, decoder = NextStepConfig(**network["sizes"]), Qwen2Config.from_dict(network["decoder"])
        self.net, self.codec = NextStep(sizes, decoder, network["normalised"]), AutoencoderKL(**config.codec)
        self.post_init()


def load_nextstep(folder: str | Path, normalised: bool) -> NextStep:
    """Load a NextStep-1 network from the authors' folder, which does not state `normalised` (see `NextStep`). Its sizes
    follow from shapes of the weights, the rest of its configuration from the authors' config.json.
    """
    published = read_json(Path(folder), "config.json")
    table = published.get("use_gen_pos_embed", False)
    weights = Weights.read(folder, RULES, NOT_WEIGHTS if table else rf"{NOT_WEIGHTS}|{TABLE}$")
    vocab, hidden = weights.shape("model.embed_tokens.weight", 2)
    keys = weights.shape("model.layers.0.self_attn.k_proj.weight", 2)[0]
    fields = {name: published[name] for name in DECODER_FIELDS if published.get(name) is not None}
    heads = fields.setdefault("num_attention_heads", 32)
    fields |= {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": weights.shape("model.layers.0.mlp.gate_proj.weight", 2)[0],
        "num_hidden_layers": weights.count("model.layers."),
        "num_key_value_heads": keys * heads // hidden,
        "tie_word_embeddings": False,
    }
    with one_sentence(weights.where):
        decoder = Qwen2Config(**fields, use_sliding_window=False)
    patch = next((published[name] for name in PATCH if published.get(name) is not None), None)
    if patch is None or published.get("boi") is None:
        missing = "boi" if patch is not None else PATCH[0]
        raise ValueError(f"checkpoint: config.json of {weights.where} has no {missing!r}, expected that of NextStep-1.")
    config = NextStepConfig(
        size=weights.shape("image_in_projector.weight", 2)[1],
        patch=patch,
        head_width=weights.shape(HEAD + "input_proj.weight", 2)[0],
        head_depth=weights.count(HEAD + "res_blocks."),
        image_start=published["boi"],
        positions=weights.shape(TABLE, 3)[1] if table else 0,
    )
    return weights.load(NextStep(config, decoder, normalised, weights.dtype))


def load_nextstep_vae(folder: str | Path) -> AutoencoderKL:
    """Load NextStep-1's image tokenizer from safetensors (converted `checkpoint.pth`) beside its config.json.

    It decodes as the authors' class does; their encoder also normalizes latents, which this class does not.
    """
    published = read_json(Path(folder), "config.json")
    factor: Any = published.get("scaling_factor")
    centre: Any = published.get("shift_factor")
    check_positive("scaling_factor", factor)
    if type(centre) not in (int, float) or not math.isfinite(centre):
        raise ValueError(f"shift_factor: got {centre!r}, expected a finite number in config.json of {folder}.")
    return load_kl(folder, factor, centre)


def published(weights: Path, vq: Path) -> NextStepImageModel:
    """Build a NextStep-1 with its image tokenizer from the authors' folders."""
    normalised = read_json(weights, "config.json").get(PATCH[0]) is not None  # true for the first release
    net, codec = load_nextstep(weights, normalised), load_nextstep_vae(vq)
    network = {"sizes": vars(net.config), "decoder": net.model.config.to_dict(), "normalised": normalised}
    entries = {"network": network, "codec": settings_of(codec)}
    return NextStepImageModel.of(entries, {"guidance_scale": GUIDANCE}, net=net, codec=codec)
