"""VQ image codecs as published: LlamaGen's `vq_ds*.pt`, and the taming-style `vqgan.ckpt` of Chameleon.

Anole and Lumina-mGPT ship Chameleon's file unchanged. Both layouts go into diffusers' stock `VQModel` (`vqgan.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.models.codecs.vqgan import ImageCodec, VQShape
from visspec.models.published_tensors import Named, Rules, count, multipliers, place, read_all_tensors, rename, require

NOT_WEIGHTS = r"loss\.|quantize\.codebook_used$"  # training losses, and a histogram of used codes
CODEBOOK = "quantize.embedding.weight"


def load_llamagen_vq(path: str | Path, dtype: torch.dtype | None = None) -> ImageCodec:
    """LlamaGen's VQ-16 or VQ-8 (or the same architecture) from safetensors. Codes are stored L2-normalised.

    dtype: default, that of the file. Raises ValueError in one sentence before any weight is placed.
    """
    tensors = read_all_tensors(path)
    return _codec(tensors, llamagen_rules(count(tensors, "decoder.conv_blocks.")), True, dtype, path)


def load_taming_vq(path: str | Path, dtype: torch.dtype | None = None) -> ImageCodec:
    """Chameleon's VQGAN (also Anole's and Lumina-mGPT's), or another taming-style VQGAN, from safetensors."""
    return _codec(read_all_tensors(path), (), False, dtype, path)


def llamagen_rules(levels: int) -> Rules:
    """LlamaGen's names -> taming's, which number the decoder's levels from the finest."""
    return [
        (r"\.mid\.0\.", ".mid.block_1."),
        (r"\.mid\.1\.", ".mid.attn_1."),
        (r"\.mid\.2\.", ".mid.block_2."),
        (r"^(encoder|decoder)\.conv_blocks\.(\d+)\.res\.", r"\1.conv_blocks.\2.block."),
        (r"^encoder\.conv_blocks\.", "encoder.down."),
        (r"^decoder\.conv_blocks\.(\d+)\.", lambda m: f"decoder.up.{levels - 1 - int(m[1])}."),
    ]


def stock_rules(levels: int) -> Rules:
    """Taming's names -> diffusers' `VQModel`, which numbers the decoder's levels from the coarsest."""
    return [
        (r"^encoder\.down\.(\d+)\.", r"encoder.down_blocks.\1."),
        (r"^decoder\.up\.(\d+)\.", lambda m: f"decoder.up_blocks.{levels - 1 - int(m[1])}."),
        (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
        (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
        (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
        (r"_blocks\.(\d+)\.block\.", r"_blocks.\1.resnets."),
        (r"_blocks\.(\d+)\.attn\.", r"_blocks.\1.attentions."),
        (r"\.(down|up)sample\.conv\.", r".\1samplers.0.conv."),
        (r"\.nin_shortcut\.", ".conv_shortcut."),
        (r"(\.attentions\.\d+)\.norm\.", r"\1.group_norm."),
        (r"(\.attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
        (r"(\.attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
        (r"^(encoder|decoder)\.norm_out\.", r"\1.conv_norm_out."),
    ]


def shape_of(tensors: Mapping[str, Tensor], where: str | Path) -> VQShape:
    """Infer the codec's shape from tensors in taming's layout."""
    codes, code_size = require(tensors, CODEBOOK, 2, where).shape
    channels, steps = multipliers(tensors, "encoder.", "down.{}.block", where)
    return VQShape(
        codes,
        code_size,
        channels=channels,
        multipliers=steps,
        blocks=count(tensors, "encoder.down.0.block."),
        latent=require(tensors, "encoder.conv_out.weight", 4, where).shape[0],
        attention=count(tensors, f"encoder.down.{len(steps) - 1}.attn.") > 0,
    )


def _codec(
    tensors: dict[str, Tensor], rules: Rules, normalised: bool, dtype: torch.dtype | None, where: str | Path
) -> ImageCodec:
    taming = rename(tensors, rules, NOT_WEIGHTS)
    shape = shape_of(unnamed(taming), where)
    model = shape.build()
    # diffusers' `to` warns about modules kept in float32 even if there are none
    nn.Module.to(model, dtype or taming[CODEBOOK][1].dtype)
    place_stock(model, taming, len(shape.multipliers), where)
    if normalised:
        codebook = taming[CODEBOOK][1]
        with torch.no_grad():
            model.quantize.embedding.weight.copy_(F.normalize(codebook.float(), dim=-1))
    return ImageCodec(model)


def unnamed(named: Named) -> dict[str, Tensor]:
    """Tensors by their new names, without the published ones."""
    return {name: tensor for name, (_, tensor) in named.items()}


def place_stock(module: nn.Module, taming: Named, levels: int, where: str | Path) -> None:
    """Copy tensors with taming's names into a module with diffusers' encoder and decoder of so many levels."""
    named = rename(unnamed(taming), stock_rules(levels))
    place(
        module, {name: (taming[old][0], conv_to_linear(name, tensor)) for name, (old, tensor) in named.items()}, where
    )


def conv_to_linear(name: str, tensor: Tensor) -> Tensor:
    """Convert attention weights from 1 x 1 convolutions to linear layers."""
    linear = re.search(r"\.attentions\.\d+\.to_", name) and tensor.dim() == 4 and tensor.shape[2:] == (1, 1)
    return tensor[:, :, 0, 0] if linear else tensor
