"""Load BAAI's original Emu3 (separate text model and vision tokenizer) as `Emu3ForConditionalGeneration`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Emu3Config, Emu3ForConditionalGeneration
from transformers.models.emu3.configuration_emu3 import Emu3TextConfig, Emu3VQVAEConfig

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

IMAGE, END_OF_LINE = 151851, 151846  # <|image token|> and <|extra_200|>, ids of the published configuration
NOT_WEIGHTS = r".*rotary_emb\."

TEXT_RULES: Rules = ((r"^model\.", "model.text_model."),)
CODE_RULES: Rules = (
    (r"^(encoder|decoder)\.mid\.attn_1\.norm\.", r"\1.middle_block.attn_norm."),
    (r"^(encoder|decoder)\.mid\.", r"\1.middle_block."),
    (r"^encoder\.down\.", "encoder.down_block.down."),
    (r"^decoder\.up\.", "decoder.up_block.up."),
    (r"(\.(?:down|up)\.\d+)\.attn\.(\d+)\.norm\.", r"\1.attn_norms.\2."),
    (r"(\.attn\.\d+|\.attn_1)\.([qkv])\.", r"\1.\2_proj."),
    (r"(\.attn\.\d+|\.attn_1)\.proj_out\.", r"\1.out_proj."),
    (r"^", "model.vqmodel."),
)


def load_emu3(
    text: str | Path, tokenizer: str | Path, config: Emu3Config | None = None, dtype: torch.dtype | None = None
) -> Any:
    """A stock `Emu3ForConditionalGeneration` from Emu3-Gen (or another text model) and Emu3-VisionTokenizer.

    config: inferred from the text folder's config.json and the shapes by default. dtype: default, the text model's.
    Raises ValueError in one sentence before any weight is placed.
    """
    words, codes = read_all_tensors(text), read_all_tensors(tokenizer)
    if config is None:
        config = config_of(words, codes, read_json(Path(text), "config.json"), text, tokenizer)
    model = stock(
        Emu3ForConditionalGeneration, config, dtype or require(words, "model.embed_tokens.weight", 2, text).dtype
    )
    named: Named = rename(words, TEXT_RULES, NOT_WEIGHTS)
    for name, (published, tensor) in rename(codes, CODE_RULES).items():
        linear = "_proj." in name and tensor.dim() == 4 and tensor.shape[2:] == (1, 1)
        named[name] = (published, tensor[:, :, 0, 0] if linear else tensor)
    place(model, named, f"{text} with {tokenizer}")
    return model


def config_of(
    words: dict[str, Tensor], codes: dict[str, Tensor], published: dict, text: str | Path, tokenizer: str | Path
) -> Emu3Config:
    """The stock configuration for BAAI's config.json and the shapes of both parts; shapes take precedence."""
    with one_sentence(text):
        text_config = Emu3TextConfig(**llama_fields(words, "model.", published, text))
        vq_config = _codes(codes, tokenizer)
        first = text_config.vocab_size - vq_config.codebook_size  # image codes are the last ids
        vocabulary = {f"<|visual token {i:06d}|>": first + i for i in range(vq_config.codebook_size)}
        vocabulary["<|extra_200|>"] = published.get("eol_token_id", END_OF_LINE)
        vocabulary["<image>"] = published.get("img_token_id", IMAGE)
        return Emu3Config(text_config=text_config, vq_config=vq_config, vocabulary_map=vocabulary)


def _codes(tensors: dict[str, Tensor], where: str | Path) -> Emu3VQVAEConfig:
    codes, code_size = require(tensors, "quantize.embedding.weight", 2, where).shape
    channels, steps = multipliers(tensors, "encoder.", "down.{}.block", where)
    return Emu3VQVAEConfig(
        codebook_size=codes,
        embed_dim=code_size,
        latent_channels=require(tensors, "decoder.conv_in.weight", 4, where).shape[1],
        temporal_downsample_factor=2 ** count(tensors, "encoder.time_conv."),
        base_channels=channels,
        channel_multiplier=list(steps),
        num_res_blocks=count(tensors, "encoder.down.0.block."),
        attn_resolutions=[i for i in range(len(steps)) if count(tensors, f"encoder.down.{i}.attn.")],
        hidden_size=channels * steps[-1],
    )
