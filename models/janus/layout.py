"""Load DeepSeek's original Janus and Janus-Pro as transformers' `JanusForConditionalGeneration`."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
)

from visspec.io.checkpoint import read_json
from visspec.models.published_tensors import (
    Named,
    Rules,
    count,
    llama_fields,
    multipliers,
    one_sentence,
    place,
    read_all_tensors,
    rename,
    require,
    stock,
)

# the contrastive head of SigLIP, the codebook's histogram, and tables that are computed
NOT_WEIGHTS = r"vision_model\.vision_tower\.attn_pool\.|gen_vision_model\.quantize\.codebook_used$|.*rotary_emb\."
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
HEADS = ("num_heads", "heads", "num_attention_heads")  # names of the vision tower's number of heads
TOWERS = {"siglip_so400m": 16, "siglip_large": 16, "siglip_base": 12}  # prefix of a tower's name: number of heads
VISION, TEXT, CODES = "vision_model.vision_tower.", "language_model.model.", "gen_vision_model."


def _deeper(match: re.Match[str]) -> str:
    """Linear layers of an MLP alternate with activations: layers 2, 4, ... are hidden layers 0, 1, ..."""
    return f"{match[1]}hidden_layers.{int(match[2]) // 2 - 1}."


RULES: Rules = (
    (r"^vision_model\.vision_tower\.", "model.vision_model."),
    (r"^(model\.vision_model\.)patch_embed\.proj\.", r"\1embeddings.patch_embedding."),
    (r"^(model\.vision_model\.)pos_embed$", r"\1embeddings.position_embedding.weight"),
    (r"^(model\.vision_model\.)norm\.", r"\1post_layernorm."),
    (r"^(model\.vision_model\.)blocks\.", r"\1encoder.layers."),
    (r"^(model\.vision_model\..*)\.norm([12])\.", r"\1.layer_norm\2."),
    (r"^(model\.vision_model\..*)\.attn\.proj\.", r"\1.self_attn.projection_layer."),
    (r"^(model\.vision_model\..*)\.attn\.", r"\1.self_attn."),
    (r"^gen_vision_model\.", "model.vqmodel."),
    (r"^(model\.vqmodel\.(?:en|de)coder\.conv_blocks\.\d+)\.res\.", r"\1.block."),
    (r"^model\.vqmodel\.encoder\.conv_blocks\.", "model.vqmodel.encoder.down."),
    (r"^model\.vqmodel\.decoder\.conv_blocks\.", "model.vqmodel.decoder.up."),
    (r"^(model\.vqmodel\..*)\.mid\.0\.", r"\1.mid.block_1."),
    (r"^(model\.vqmodel\..*)\.mid\.1\.", r"\1.mid.attn_1."),
    (r"^(model\.vqmodel\..*)\.mid\.2\.", r"\1.mid.block_2."),
    (r"^gen_aligner\.", "model.generation_aligner."),
    (r"^aligner\.", "model.aligner."),
    (r"^(model\.(?:generation_)?aligner\.)layers\.0\.", r"\1fc1."),
    (r"^(model\.(?:generation_)?aligner\.)layers\.(\d*[2468]|\d+0)\.", _deeper),
    (r"^gen_head\.output_mlp_projector\.", "model.generation_head.proj_out."),
    (r"^gen_head\.vision_head\.", "model.generation_head.vision_head."),
    (r"^gen_embed\.", "model.generation_embeddings."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)


def load_janus(folder: str | Path, config: JanusConfig | None = None, dtype: torch.dtype | None = None) -> Any:
    """A stock `JanusForConditionalGeneration` from DeepSeek's layout, in evaluation mode.

    config: inferred from the folder's config.json and the shapes by default. dtype: default, that of the file. The
    layout has no generation settings (guidance, token ids): set `generation_config` of the returned model before using
    it in an `ImagePipeline`. Raises ValueError.
    """
    tensors = read_all_tensors(folder)
    settings = None
    if config is None:
        published = read_json(Path(folder), "config.json")
        config = config_of(tensors, published, folder)
        said = published.get("language_config", {})  # absent ids stay unset, because Llama's defaults would be wrong
        settings = GenerationConfig(**{name: said.get(name) for name in IDS})
    config = copy.deepcopy(config)
    # both matrices are stored; with tied weights one would overwrite the other
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    dtype = dtype or require(tensors, "language_model.model.embed_tokens.weight", 2, folder).dtype
    model = stock(JanusForConditionalGeneration, config, dtype)
    place(model, _rename(tensors), folder)
    model.generation_config = settings or model.generation_config
    return model


def _rename(tensors: dict[str, Tensor]) -> Named:
    named: Named = {}
    for name, (published, tensor) in rename(tensors, RULES, NOT_WEIGHTS).items():
        if ".self_attn.qkv." in name:
            for part, third in zip("qkv", tensor.tensor_split(3)):
                named[name.replace(".qkv.", f".{part}_proj.")] = (published, third)
        else:
            flat = name.endswith("position_embedding.weight") and tensor.dim() == 3 and tensor.shape[0] == 1
            named[name] = (published, tensor[0] if flat else tensor)
    return named


def config_of(tensors: dict[str, Tensor], published: dict, where: str | Path) -> JanusConfig:
    """The stock configuration for DeepSeek's config.json and the shapes of its weights; shapes take precedence."""
    with one_sentence(where):
        text = llama_fields(tensors, TEXT, published.get("language_config", {}), where)
        return JanusConfig(
            text_config=LlamaConfig(**text),
            vision_config=_vision(tensors, (published.get("vision_config") or {}).get("params") or {}, where),
            vq_config=_codes(tensors, where),
            tie_word_embeddings=False,
        )


def _vision(tensors: dict[str, Tensor], published: dict, where: str | Path) -> JanusVisionConfig:
    hidden, channels, patch, _ = require(tensors, VISION + "patch_embed.proj.weight", 4, where).shape
    places = require(tensors, VISION + "pos_embed", 3, where).shape[1]
    size = published.get("image_size", patch * round(places**0.5))
    return JanusVisionConfig(
        hidden_size=hidden,
        num_attention_heads=_heads(published, hidden, where),
        num_channels=channels,
        patch_size=patch,
        image_size=size,
        num_image_tokens=places,
        num_hidden_layers=count(tensors, VISION + "blocks."),
        mlp_ratio=require(tensors, VISION + "blocks.0.mlp.fc1.weight", 2, where).shape[0] / hidden,
        projection_dim=require(tensors, "aligner.layers.0.weight", 2, where).shape[0],
        depth=count(tensors, "aligner.layers."),
    )


def _heads(published: dict, hidden: int, where: str | Path) -> int:
    """Number of attention heads of the vision tower, from the config's number or the tower's name."""
    given = next((published[name] for name in HEADS if published.get(name) is not None), None)
    name = str(published.get("model_name", ""))
    heads = given if given is not None else next((n for start, n in TOWERS.items() if name.startswith(start)), None)
    if heads is None:
        raise ValueError(
            f"checkpoint: config.json of {where} has a vision tower {name!r} and no number of heads, expected"
            f" vision_config.params.num_heads, or a name that starts with one of {', '.join(TOWERS)}"
        )
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or hidden % heads:
        raise ValueError(f"checkpoint: config.json of {where} has {heads} heads, expected a divisor of {hidden}")
    return heads


def _codes(tensors: dict[str, Tensor], where: str | Path) -> JanusVQVAEConfig:
    codes, code_size = require(tensors, CODES + "quantize.embedding.weight", 2, where).shape
    channels, steps = multipliers(tensors, CODES + "encoder.", "conv_blocks.{}.res", where)
    middle, hidden = require(tensors, "gen_head.output_mlp_projector.weight", 2, where).shape
    aligned = require(tensors, "gen_aligner.layers.0.weight", 2, where).shape[0]
    if middle != aligned:
        raise ValueError(f"checkpoint: {where} has heads of {middle} and aligners of {aligned}, expected one width")
    return JanusVQVAEConfig(
        embed_dim=code_size,
        num_embeddings=codes,
        latent_channels=require(tensors, CODES + "encoder.conv_out.weight", 4, where).shape[0],
        base_channels=channels,
        channel_multiplier=list(steps),
        num_res_blocks=count(tensors, CODES + "encoder.conv_blocks.0.res."),
        projection_dim=aligned,
        num_hidden_layers=count(tensors, "gen_aligner.layers."),
        image_token_embed_dim=hidden,
    )
