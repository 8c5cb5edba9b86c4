"""MAR's published transformers and autoencoder: safetensors, or converted `checkpoint-last.pth` (`visspec convert`,
which uses the averaged weights) and `kl16.ckpt`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from diffusers import AutoencoderKL

from visspec.models.codecs.kl_layout import load_kl
from visspec.models.codecs.vqgan import settings_of
from visspec.models.mar.model import MARImageModel
from visspec.models.mar.network import GUIDANCE, MAR, SIZES, MARConfig
from visspec.models.published_tensors import Weights

SCALING = 0.2325  # scaling factor of the published latents
HEAD = "diffloss.net."


def load_mar(path: str | Path, heads: int | None = None) -> MAR:
    """Load a MAR network from a .safetensors file or folder. heads: only for widths that were not published."""
    weights = Weights.read(path)
    return weights.load(MAR(config_of(weights, heads)))


def load_mar_vae(path: str | Path) -> AutoencoderKL:
    """Load MAR's KL-16 autoencoder (or another with its layout) from safetensors."""
    return load_kl(path, SCALING)


def config_of(weights: Weights, heads: int | None) -> MARConfig:
    """Infer the configuration from the shapes of published weights."""
    width, size = weights.shape("z_proj.weight", 2)
    tokens = weights.shape("diffusion_pos_embed_learned", 3)[1]
    if heads is None:
        heads = {config.width: config.heads for config in SIZES.values()}.get(width)
        if heads is None:
            raise ValueError(f"heads: {weights.where} has the width {width}, expected heads=... for this size")
    return MARConfig(
        width,
        weights.count("encoder_blocks."),
        heads,
        head_width=weights.shape(HEAD + "input_proj.weight", 2)[0],
        head_depth=weights.count(HEAD + "res_blocks."),
        size=size,
        tokens=tokens,
        buffer=weights.shape("encoder_pos_embed_learned", 3)[1] - tokens,
        classes=weights.shape("class_emb.weight", 2)[0],
        hidden=weights.shape("encoder_blocks.0.mlp.fc1.weight", 2)[0],
    )


def published(weights: Path, vq: Path, heads: int | None = None) -> MARImageModel:
    """Build a MAR with its autoencoder from published files."""
    net, codec = load_mar(weights, heads), load_mar_vae(vq)
    entries = {"network": asdict(net.config), "autoencoder": settings_of(codec)}
    settings = {"guidance_scale": GUIDANCE.get(net.config.width, 1.0)}
    return MARImageModel.of(entries, settings, mar=net, autoencoder=codec)
