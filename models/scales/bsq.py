"""Infinity's multi-scale autoencoder: an image's features as a sum of bit maps. (BSQ, arXiv 2406.07548; 2412.04431)

Each of d bits is a channel's sign: its code is (2 bit - 1) / sqrt(d), a corner of a cube inscribed in the unit sphere,
so there is no codebook. Maps are enlarged to the finest grid (bilinear, no convolution); the next map's input is the
sum so far on that map's grid (also bilinear). With a patch of 2, a position of the transformer covers 2 x 2 places of
the autoencoder, channel by channel, so it has n = 4 d bits.

Shapes: B images, T bits of all maps, S bits of a map, (h, w) positions of a map, (H, W) the autoencoder's finest grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.models.scales.multiscale import ScaleQuantizer, ScaleSizes, ScaleVAE


class BitQuantizer(ScaleQuantizer):
    """Converts between float32 features and bits. It has no parameters."""

    def __init__(self, bits: int, patch: int = 1):
        super().__init__()
        self.bits, self.patch, self.each = bits, patch, bits * patch**2

    def grid(self, scale: int, scales: ScaleSizes) -> tuple[int, int]:
        """Return the autoencoder's grid at a scale; -1 is the finest."""
        rows, columns = scales.grids[scale]
        return rows * self.patch, columns * self.patch

    def blank(self, images: int, scales: ScaleSizes, device: torch.device) -> Tensor:
        return torch.zeros(images, self.bits, *self.grid(-1, scales), device=device)

    def part(self, scale: int, scales: ScaleSizes, bits_BS: Tensor) -> Tensor:
        code = (2 * bits_BS - 1).float() * self.bits**-0.5
        code = code.unflatten(1, (*scales.grids[scale], -1)).permute(0, 3, 1, 2)
        return F.interpolate(F.pixel_shuffle(code, self.patch), size=self.grid(-1, scales), mode="bilinear")

    def shrink(self, features: Tensor, scale: int, scales: ScaleSizes) -> Tensor:
        return self.rows(F.interpolate(features, size=self.grid(scale, scales), mode="bilinear"))

    def rows(self, x: Tensor) -> Tensor:
        """Reshape (B, d, patch h, patch w) to (B, h w, n)."""
        return F.pixel_unshuffle(x, self.patch).flatten(2).transpose(1, 2)

    def encode(self, features: Tensor, scales: ScaleSizes) -> Tensor:
        """Encode features to bits (B, T): for each map, the signs of the residual averaged on its grid."""
        bits, residual = [], features
        for k in range(len(scales)):
            at = residual if k == len(scales) - 1 else F.interpolate(residual, size=self.grid(k, scales), mode="area")
            bits.append(self.rows((at > 0).long()).flatten(1))
            residual = residual - self.part(k, scales, bits[-1])
        return torch.cat(bits, dim=1)


@dataclass(frozen=True)
class BSQShape:
    """multipliers: of `channels`, from the finest level to the coarsest, each at half the size. patch: places of the
    autoencoder along one side of a transformer position.
    """

    codes: ClassVar = 2

    bits: int = 32
    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4, 4)
    blocks: int = 2
    patch: int = 1

    @property
    def size(self) -> int:
        """Number of bits per position."""
        return self.bits * self.patch**2


class BSQVAE(ScaleVAE):
    """Infinity's autoencoder, whose codes are bits."""

    def __init__(self, shape: BSQShape):
        widths = tuple(shape.channels * m for m in shape.multipliers)
        super().__init__(shape.bits, widths, shape.blocks, attention=False)
        self.shape, self.factor = shape, shape.patch * 2 ** (len(widths) - 1)
        self.quantize = BitQuantizer(shape.bits, shape.patch)

    def latents(self, pixels: Tensor) -> Tensor:
        return self.encoder(pixels).float()

    def decoded(self, features: Tensor) -> Tensor:
        return self.decoder(features.to(self.decoder.conv_in.weight.dtype))
