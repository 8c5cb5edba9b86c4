"""MAR's transformers and autoencoder in their published layouts: safetensors, or converted `checkpoint-last.pth`
(`visspec.io.convert_checkpoint --ema`: the averaged weights are those to draw with) and `kl16.ckpt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from visspec.models.codecs.kl_layout import load_kl
from visspec.models.codecs.vqgan import settings_of
from visspec.models.mar.model import MARImageModel
from visspec.models.mar.network import GUIDANCE, MAR, SIZES, MARConfig
from visspec.models.published_tensors import count, place, read_all_tensors, rename, require

SCALING = 0.2325  # of the published latents
HEAD = "diffloss.net."


def load_mar(path: str | Path, heads: int | None = None, dtype: torch.dtype | None = None) -> MAR:
    """A MAR network from a .safetensors file or folder, in evaluation mode.

    heads: of the attention, only for widths that were not published. dtype: default, that of the file. Raises
    ValueError in one sentence before any weight is placed.
    """
    tensors = read_all_tensors(path)
    config = config_of(tensors, heads, path)
    model = MAR(config).to(dtype or tensors["z_proj.weight"].dtype).eval()
    place(model, rename(tensors, ()), path)
    return model


def load_mar_vae(path: str | Path, dtype: torch.dtype | None = None) -> AutoencoderKL:
    """MAR's KL-16 autoencoder (or another of its layout) from safetensors."""
    return load_kl(path, SCALING, dtype=dtype)


def config_of(tensors: Mapping[str, Tensor], heads: int | None, where: str | Path) -> MARConfig:
    """Infer the configuration from the shapes of published weights."""
    width, size = require(tensors, "z_proj.weight", 2, where).shape
    slots = require(tensors, "encoder_pos_embed_learned", 3, where).shape[1]
    tokens = require(tensors, "diffusion_pos_embed_learned", 3, where).shape[1]
    if heads is None:
        heads = {config.width: config.heads for config in SIZES.values()}.get(width)
        if heads is None:
            raise ValueError(f"heads: {where} has the width {width}, expected heads=... for this size")
    return MARConfig(
        width,
        count(tensors, "encoder_blocks."),
        heads,
        head_width=require(tensors, HEAD + "input_proj.weight", 2, where).shape[0],
        head_depth=count(tensors, HEAD + "res_blocks."),
        size=size,
        tokens=tokens,
        buffer=slots - tokens,
        classes=require(tensors, "class_emb.weight", 2, where).shape[0],
        hidden=require(tensors, "encoder_blocks.0.mlp.fc1.weight", 2, where).shape[0],
    )


def published(weights: Path, vq: Path, heads: int | None = None) -> MARImageModel:
    """A MAR with its autoencoder, of published files."""
    net, codec = load_mar(weights, heads), load_mar_vae(vq)
    entries = {"network": asdict(net.config), "autoencoder": settings_of(codec)}
    settings = {"guidance_scale": GUIDANCE.get(net.config.width, 1.0)}
    return MARImageModel.of(entries, settings, mar=net, autoencoder=codec)
