"""KL autoencoders in the layout of latent diffusion (LDM), loaded into diffusers' stock `AutoencoderKL`.

MAR's `kl16.ckpt` and NextStep-1's tokenizer use it. Optional parts (attention, quantizer convolutions) are inferred
from names and shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL

from visspec.models.codecs.vq_layout import load_stock
from visspec.models.published_tensors import GROUPS, Weights

NOT_WEIGHTS = r"loss\."  # discriminator and perceptual loss, only used in training


def load_kl(path: str | Path, scaling: float, shift: float = 0.0) -> AutoencoderKL:
    """Load an autoencoder from safetensors. scaling, shift: a generator's latents are (latents - shift) * scaling."""
    weights = Weights.read(path, dropped=NOT_WEIGHTS)
    config = config_of(weights) | {"scaling_factor": scaling, "shift_factor": shift}
    return load_stock(weights, AutoencoderKL(**config))


def config_of(weights: Weights) -> dict[str, Any]:
    """Infer the arguments of `AutoencoderKL` from names and shapes."""
    channels, steps, blocks = weights.encoder()
    levels = range(len(steps))
    down = [weights.count(f"encoder.down.{i}.attn.") > 0 for i in levels]
    up = [weights.count(f"decoder.up.{i}.attn.") > 0 for i in reversed(levels)]
    return {
        "in_channels": weights.shape("encoder.conv_in.weight", 4)[1],
        "out_channels": weights.shape("decoder.conv_out.weight", 4)[0],
        "down_block_types": tuple("AttnDownEncoderBlock2D" if seen else "DownEncoderBlock2D" for seen in down),
        "up_block_types": tuple("AttnUpDecoderBlock2D" if seen else "UpDecoderBlock2D" for seen in up),
        "block_out_channels": tuple(channels * step for step in steps),
        "layers_per_block": blocks,
        "latent_channels": weights.shape("decoder.conv_in.weight", 4)[1],
        "norm_num_groups": GROUPS,
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in weights,
        "use_quant_conv": "quant_conv.weight" in weights,
        "use_post_quant_conv": "post_quant_conv.weight" in weights,
    }
