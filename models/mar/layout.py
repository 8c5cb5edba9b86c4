"""Folder with a MAR and its autoencoder, in transformers' layout (class names are the prompts), and their published
weights: safetensors, converted from `checkpoint-last.pth` (`visspec convert`, which uses the averaged weights) and
`kl16.ckpt`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from transformers import PreTrainedConfig

from visspec.models.codecs.vq_layout import load_kl, settings_of
from visspec.models.folders import OwnImageModel
from visspec.models.mar.network import GUIDANCE, MAR, SIZES, MARConfig
from visspec.models.published_tensors import Weights
from visspec.models.vectors.diffusion_head import Schedule, schedule

SCALING = 0.2325  # scaling factor of the published latents
HEAD = "diffloss.net."


class MARImageConfig(PreTrainedConfig):
    """network: sizes, see `MARConfig`. labels: the prompt of each class. predicts: what the head predicts, a key of
    `PREDICTIONS` (noise in published MAR). denoising_steps: per token. autoencoder: configuration of an `AutoencoderKL`
    whose latents are the tokens, or None for a drafter.
    """

    model_type = "mar_image"

    def __init__(
        self,
        network: dict[str, Any] | None = None,
        labels: list[str] | None = None,
        predicts: str = "noise",
        denoising_steps: int = 100,
        autoencoder: dict[str, Any] | None = None,
        **options: Any,
    ):
        sizes = MARConfig(
            **({"width": 32, "depth": 1, "heads": 2, "head_width": 32, "head_depth": 1} | (network or {}))
        )
        self.network, self.labels = asdict(sizes), [str(i) for i in range(sizes.classes)] if labels is None else labels
        if len(set(self.labels)) != sizes.classes:
            raise ValueError(
                f"labels: got {len(set(self.labels))} names, expected {sizes.classes}, one for each class."
            )
        self.predicts, self.denoising_steps, self.autoencoder = predicts, denoising_steps, autoencoder
        super().__init__(**options)


class MARImageModel(OwnImageModel):
    """`mar`, and `autoencoder` if the configuration has one."""

    config_class = MARImageConfig
    base_model_prefix = "mar"
    class_conditional = True

    def __init__(self, config: MARImageConfig):
        super().__init__(config)
        self.mar = MAR(MARConfig(**config.network))
        with torch.device("cpu"):  # a schedule needs real numbers, even if the weights are on `meta`
            self.schedule()  # raises for unknown predictions
        if config.autoencoder is not None:
            self.autoencoder = AutoencoderKL(**config.autoencoder)
        self.post_init()

    def schedule(self, steps: int | None = None) -> Schedule:
        """Return the steps of a token's chain, by default `denoising_steps`, with noise in the last one."""
        plan = schedule(self.config.denoising_steps if steps is None else steps, learned=True)
        return replace(plan, predicts=self.config.predicts)


def load_mar(path: str | Path, heads: int | None = None) -> MAR:
    """Load a MAR network from a .safetensors file or folder.

    Args:
        heads: Only for widths that were not published.
    """
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
            raise ValueError(f"heads: {weights.where} has the width {width}, expected heads=... for this size.")
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
