"""Infinity's multi-scale autoencoder: an image's features as a sum of maps of bits. (BSQ, arXiv 2406.07548; 2412.04431)

A bit of d is a channel's sign: its code is (2 bit - 1) / sqrt(d), a corner of a cube in the unit sphere; there is no
codebook. Maps are enlarged to the finest grid (bilinear, no convolution); the next map's input is the sum so far on
that map's grid (bilinear too). With a patch of 2 a position of the transformer holds 2 x 2 places of the autoencoder,
channel by channel, so n = 4 d bits.

Shapes: B images, T bits of all maps, S bits of a map, (h, w) positions of a map, (H, W) the autoencoder's finest grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers.models.autoencoders.vae import Decoder, Encoder
from torch import Tensor, nn
from torch.nn import functional as F

from visspec.models.scales.multiscale import GROUPS, ScaleSizes


class BitQuantizer(nn.Module):
    """Bits of features, which are float32. It has nothing to learn."""

    def __init__(self, bits: int, patch: int = 1):
        super().__init__()
        self.bits, self.patch = bits, patch

    def grid(self, scale: int, scales: ScaleSizes) -> tuple[int, int]:
        """Of the autoencoder at a scale; -1: the finest."""
        rows, columns = scales.grids[scale]
        return rows * self.patch, columns * self.patch

    def blank(self, images: int, scales: ScaleSizes, device: torch.device) -> Tensor:
        """Features (B, d, H, W) of no maps."""
        return torch.zeros(images, self.bits, *self.grid(-1, scales), device=device)

    def part(self, scale: int, scales: ScaleSizes, bits_BS: Tensor) -> Tensor:
        """What a map adds to the features, (B, d, H, W)."""
        code = (2 * bits_BS - 1).float() * self.bits**-0.5
        code = code.unflatten(1, (*scales.grids[scale], -1)).permute(0, 3, 1, 2)
        return F.interpolate(F.pixel_shuffle(code, self.patch), size=self.grid(-1, scales), mode="bilinear")

    def shrink(self, features: Tensor, scale: int, scales: ScaleSizes) -> Tensor:
        """Features (B, d, H, W) as a scale's inputs, (B, h w, n)."""
        return self.rows(F.interpolate(features, size=self.grid(scale, scales), mode="bilinear"))

    def rows(self, x: Tensor) -> Tensor:
        """(B, d, patch h, patch w) -> (B, h w, n)."""
        return F.pixel_unshuffle(x, self.patch).flatten(2).transpose(1, 2)

    def features(self, bits_BT: Tensor, scales: ScaleSizes) -> Tensor:
        """(B, d, H, W) of whole images."""
        sizes = [size * self.bits * self.patch**2 for size in scales.sizes]
        return torch.stack([self.part(k, scales, own) for k, own in enumerate(bits_BT.split(sizes, dim=1))]).sum(dim=0)

    def encode(self, features: Tensor, scales: ScaleSizes) -> Tensor:
        """Bits (B, T): of each map the signs of what the maps before have left, averaged on its grid."""
        found, left = [], features
        for k in range(len(scales)):
            at = left if k == len(scales) - 1 else F.interpolate(left, size=self.grid(k, scales), mode="area")
            found.append(self.rows((at > 0).long()).flatten(1))
            left = left - self.part(k, scales, found[-1])
        return torch.cat(found, dim=1)


@dataclass(frozen=True)
class BSQShape:
    """multipliers: of `channels`, from the finest level to the coarsest, each of half the size. patch: places of the
    autoencoder along a side of the transformer's position.
    """

    codes: ClassVar = 2

    bits: int = 32
    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4, 4)
    blocks: int = 2
    patch: int = 1

    @property
    def size(self) -> int:
        """Bits of a position."""
        return self.bits * self.patch**2


class BSQVAE(nn.Module):
    """Pixels (B, 3, height, width) in [-1, 1] to bits of any scales, and back."""

    def __init__(self, shape: BSQShape):
        super().__init__()
        self.shape, levels = shape, len(shape.multipliers)
        widths = tuple(shape.channels * m for m in shape.multipliers)
        self.encoder = Encoder(
            3,
            shape.bits,
            ("DownEncoderBlock2D",) * levels,
            widths,
            shape.blocks,
            norm_num_groups=GROUPS,
            double_z=False,
            mid_block_add_attention=False,
        )
        self.decoder = Decoder(
            shape.bits,
            3,
            ("UpDecoderBlock2D",) * levels,
            widths,
            shape.blocks,
            norm_num_groups=GROUPS,
            mid_block_add_attention=False,
        )
        self.quantize = BitQuantizer(shape.bits, shape.patch)

    @property
    def factor(self) -> int:
        """Pixels per position of the finest map, along a side."""
        return self.shape.patch * 2 ** (len(self.shape.multipliers) - 1)

    @torch.no_grad()
    def encode(self, pixels: Tensor, scales: ScaleSizes) -> Tensor:
        """Bits (B, T). Raises ValueError unless the pixels are `factor` times the finest grid."""
        wanted = tuple(side * self.factor for side in scales.grids[-1])
        if pixels.dim() != 4 or tuple(pixels.shape[2:]) != wanted:
            raise ValueError(f"pixels: got shape {tuple(pixels.shape)}, expected (B, 3, {wanted[0]}, {wanted[1]})")
        return self.quantize.encode(self.encoder(pixels).float(), scales)

    @torch.no_grad()
    def decode(self, bits_BT: Tensor, scales: ScaleSizes) -> Tensor:
        """Pixels. Raises ValueError unless there are as many bits as the scales have."""
        wanted = scales.total * self.shape.size
        if bits_BT.dim() != 2 or bits_BT.shape[1] != wanted:
            raise ValueError(f"codes: got shape {tuple(bits_BT.shape)}, expected (B, {wanted})")
        features = self.quantize.features(bits_BT, scales)
        return self.decoder(features.to(self.decoder.conv_in.weight.dtype)).clamp(-1, 1)
