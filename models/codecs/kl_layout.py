"""KL autoencoders in the layout of latent diffusion (LDM), as diffusers' stock `AutoencoderKL`.

MAR's `kl16.ckpt` and NextStep-1's tokenizer have it; whatever differs (attention, quantiser convolutions) is inferred
from names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from visspec.models.codecs.vq_layout import place_stock, unnamed
from visspec.models.published_tensors import GROUPS, count, multipliers, read_all_tensors, rename, require

NOT_WEIGHTS = r"loss\."  # the discriminator and perceptual loss of training


def load_kl(path: str | Path, scaling: float, shift: float = 0.0, dtype: torch.dtype | None = None) -> AutoencoderKL:
    """An autoencoder from safetensors, in evaluation mode.

    scaling, shift: a generator's latents are (latents - shift) scaling; the file does not tell. dtype: default, that of
    the file. Raises ValueError in one sentence before any weight is placed.
    """
    named = rename(read_all_tensors(path), (), NOT_WEIGHTS)
    tensors = unnamed(named)
    config = config_of(tensors, path) | {"scaling_factor": scaling, "shift_factor": shift}
    model = AutoencoderKL(**config).eval()
    # diffusers' `to` warns about modules kept in float32 even if there are none
    nn.Module.to(model, dtype or require(tensors, "encoder.conv_in.weight", 4, path).dtype)
    place_stock(model, named, len(config["block_out_channels"]), path)
    return model


def config_of(tensors: Mapping[str, Tensor], where: str | Path) -> dict[str, Any]:
    """Arguments of `AutoencoderKL`, from names and shapes."""
    channels, steps = multipliers(tensors, "encoder.", "down.{}.block", where)
    levels = range(len(steps))
    down = [count(tensors, f"encoder.down.{i}.attn.") > 0 for i in levels]
    up = [count(tensors, f"decoder.up.{i}.attn.") > 0 for i in reversed(levels)]
    return {
        "in_channels": require(tensors, "encoder.conv_in.weight", 4, where).shape[1],
        "out_channels": require(tensors, "decoder.conv_out.weight", 4, where).shape[0],
        "down_block_types": tuple("AttnDownEncoderBlock2D" if seen else "DownEncoderBlock2D" for seen in down),
        "up_block_types": tuple("AttnUpDecoderBlock2D" if seen else "UpDecoderBlock2D" for seen in up),
        "block_out_channels": tuple(channels * step for step in steps),
        "layers_per_block": count(tensors, "encoder.down.0.block."),
        "latent_channels": require(tensors, "decoder.conv_in.weight", 4, where).shape[1],
        "norm_num_groups": GROUPS,
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in tensors,
        "use_quant_conv": "quant_conv.weight" in tensors,
        "use_post_quant_conv": "post_quant_conv.weight" in tensors,
    }
