"""Published image autoencoders in taming's layout (arXiv 2012.09841), loaded into diffusers' stock classes.

VQ codecs (`VQModel`): LlamaGen's `vq_ds*.pt`, and the `vqgan.ckpt` of Chameleon, which Anole and Lumina-mGPT ship
unchanged. They differ in widths, in their codebook and in whether the coarsest level has attention. If a published
decoder L2-normalizes looked-up codes, the codebook is stored normalized, so that the stock class needs no flag.
KL autoencoders (`AutoencoderKL`): MAR's `kl16.ckpt` and NextStep-1's tokenizer. Optional parts (attention, quantizer
convolutions) are inferred from names and shapes.

Shapes: B images, T = rows * columns codes, D code size, K codes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, ConfigMixin, VQModel
from torch import Tensor

from visspec.models.published_tensors import GROUPS, ModuleT, Rules, Weights


def settings_of(model: ConfigMixin) -> dict[str, Any]:
    """Return the arguments that a diffusers model was created with."""
    return {name: value for name, value in model.config.items() if not name.startswith("_")}


class ImageCodec:
    """A stock `VQModel` that converts between codes and pixels."""

    def __init__(self, model: VQModel):
        self.model = model

    @property
    def codebook(self) -> Tensor:
        """The vectors that the decoder uses, (K, D)."""
        return self.model.quantize.embedding.weight.detach()

    @property
    def factor(self) -> int:
        """Pixels per code, along one side."""
        return 2 ** (len(self.model.config["block_out_channels"]) - 1)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        self.model.to(*args, **kwargs)
        return self

    @torch.no_grad()
    def decode(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Decode codes (B, T) in raster order to pixels (B, height, width, 3), float32 in [-1, 1].

        Raises ValueError for a code outside the codebook, which would abort the process on CUDA.
        """
        rows, columns = grid
        codes = self.codebook.shape[0]
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < codes:
            raise ValueError(f"tokens: got {int(tokens.min())}..{int(tokens.max())}, expected codes 0..{codes - 1}.")
        latents = self.codebook[tokens.to(self.codebook.device)].unflatten(1, (rows, columns))
        pixels = self.model.decode(latents.permute(0, 3, 1, 2), force_not_quantize=True).sample
        return pixels.permute(0, 2, 3, 1).float().clamp(-1, 1)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, height, width, 3) in [-1, 1] to the nearest codes (B, T), int64."""
        latent = self.model.encode(pixels.permute(0, 3, 1, 2).to(self.model.dtype)).latents
        distance = torch.cdist(latent.float().permute(0, 2, 3, 1).flatten(1, 2), self.codebook.float()[None])
        return distance.argmin(-1)


NOT_WEIGHTS = r"loss\.|quantize\.codebook_used$"  # training losses, and a histogram of used codes
CODEBOOK = "quantize.embedding.weight"


def load_llamagen_vq(path: str | Path) -> ImageCodec:
    """Load LlamaGen's VQ-16 or VQ-8 (or the same architecture) from safetensors. Codes are stored L2-normalized."""
    weights = Weights.read(path, dropped=NOT_WEIGHTS)
    codec = _codec(weights.renamed(llamagen_rules(weights.count("decoder.conv_blocks."))))
    table = codec.model.quantize.embedding.weight
    with torch.no_grad():
        table.copy_(F.normalize(weights[CODEBOOK].float(), dim=-1))
    return ImageCodec(codec.model)


def load_taming_vq(path: str | Path) -> ImageCodec:
    """Load Chameleon's VQGAN (also Anole's and Lumina-mGPT's), or another taming-style VQGAN, from safetensors."""
    return _codec(Weights.read(path, dropped=NOT_WEIGHTS))


def llamagen_rules(levels: int) -> Rules:
    """Return rules from LlamaGen's names to taming's, which number the decoder's levels from the finest."""
    return [
        (r"\.mid\.0\.", ".mid.block_1."),
        (r"\.mid\.1\.", ".mid.attn_1."),
        (r"\.mid\.2\.", ".mid.block_2."),
        (r"^(encoder|decoder)\.conv_blocks\.(\d+)\.res\.", r"\1.conv_blocks.\2.block."),
        (r"^encoder\.conv_blocks\.", "encoder.down."),
        (r"^decoder\.conv_blocks\.(\d+)\.", lambda m: f"decoder.up.{levels - 1 - int(m[1])}."),
    ]


def stock_rules(levels: int) -> Rules:
    """Return rules from taming's names to diffusers' `VQModel`, which numbers decoder levels from the coarsest."""
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


def _codec(weights: Weights) -> ImageCodec:
    """Build a codec from tensors with taming's names, which determine its shape."""
    codes, size = weights.shape(CODEBOOK, 2)
    model = VQModel(**stock_settings(weights), num_vq_embeddings=codes, vq_embed_dim=size)
    return ImageCodec(load_stock(weights, model))


def load_kl(path: str | Path, scaling: float, shift: float = 0.0) -> AutoencoderKL:
    """Load a KL autoencoder from safetensors.

    Args:
        scaling, shift: A generator's latents are (latents - shift) * scaling.
    """
    weights = Weights.read(path, dropped=NOT_WEIGHTS)
    optional = {f"use_{name}": f"{name}.weight" in weights for name in ("quant_conv", "post_quant_conv")}
    settings = stock_settings(weights) | optional
    return load_stock(weights, AutoencoderKL(**settings, scaling_factor=scaling, shift_factor=shift))


def stock_settings(weights: Weights) -> dict[str, Any]:
    """Infer the arguments that `VQModel` and `AutoencoderKL` share from tensors with taming's names."""
    channels, steps, blocks = weights.encoder()
    levels = range(len(steps))
    down = ["Attn" if weights.count(f"encoder.down.{i}.attn.") else "" for i in levels]
    up = ["Attn" if weights.count(f"decoder.up.{i}.attn.") else "" for i in reversed(levels)]
    return {
        "in_channels": weights.shape("encoder.conv_in.weight", 4)[1],
        "out_channels": weights.shape("decoder.conv_out.weight", 4)[0],
        "down_block_types": tuple(f"{kind}DownEncoderBlock2D" for kind in down),
        "up_block_types": tuple(f"{kind}UpDecoderBlock2D" for kind in up),
        "block_out_channels": tuple(channels * step for step in steps),
        "layers_per_block": blocks,
        "latent_channels": weights.shape("decoder.conv_in.weight", 4)[1],
        "norm_num_groups": GROUPS,
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in weights,
    }


def load_stock(taming: Weights, module: ModuleT) -> ModuleT:
    """Load tensors with taming's names into a module with diffusers' encoder and decoder."""
    weights = taming.renamed(stock_rules(len(taming.encoder()[1])))
    for name, tensor in weights.items():  # taming's attention has 1 x 1 convolutions, diffusers' linear layers
        if re.search(r"\.attentions\.\d+\.to_", name) and tensor.dim() == 4 and tensor.shape[2:] == (1, 1):
            weights[name] = tensor[:, :, 0, 0]
    return weights.load(module)
