"""VAR's multi-scale VQ autoencoder: features of an image as a sum of maps of codes, coarse to fine. (arXiv 2404.02905)

Each map is looked up, enlarged to the finest grid (bicubic) and smoothed by a convolution of its own; the next map's
input is the sum so far, reduced to that map's grid by averaging ("area"). Parameters have their published names, the
encoder and the decoder those of diffusers' stock classes.

Shapes: B images, T codes of all maps, S codes of a map, c channels of codes, (H, W) the finest grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import Decoder, Encoder
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 32  # of every group norm
MOST_CODES = 1 << 20  # of all maps of an image
MIX = 0.5  # share of the convolution in what a map adds


@dataclass(frozen=True)
class ScaleSizes:
    """The maps of an image: (rows, columns) of each, coarse to fine."""

    grids: tuple[tuple[int, int], ...]

    def __post_init__(self):
        codes = sum(rows * columns for rows, columns in self.grids)
        if not self.grids or min(map(min, self.grids)) < 1 or codes > MOST_CODES:
            raise ValueError(f"scales: got {codes} codes in {len(self.grids)} maps, expected 1..{MOST_CODES}")

    @classmethod
    def square(cls, *sides: int) -> ScaleSizes:
        return cls(tuple((side, side) for side in sides))

    def __len__(self) -> int:
        return len(self.grids)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Codes of each map."""
        return tuple(rows * columns for rows, columns in self.grids)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """The number of the map that each code belongs to."""
        return tuple(k for k, size in enumerate(self.sizes) for _ in range(size))

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Codes before each map, and all of them last."""
        return tuple(accumulate(self.sizes, initial=0))

    @property
    def total(self) -> int:
        return self.begins[-1]


SCALES = {
    256: ScaleSizes.square(1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    512: ScaleSizes.square(1, 2, 3, 4, 6, 9, 13, 18, 24, 32),
}


def nearest(count: int, scale: int, scales: int) -> int:
    """Which of the convolutions a scale takes. In numpy as published: of ten scales two lie halfway between ticks,
    where rounding decides.
    """
    edge = 1 / (3 if count == 4 else 2) / count
    return int(np.argmin(np.abs(np.linspace(edge, 1 - edge, count) - scale / max(scales - 1, 1))))


class ScaleQuantizer(nn.Module):
    """Base class of quantisers: features of an image as a sum of what maps of codes add. each: codes of a position."""

    each = 1

    def blank(self, images: int, scales: ScaleSizes, device: torch.device) -> Tensor:
        """Features (B, c, H, W) of no maps."""
        raise NotImplementedError

    def part(self, scale: int, scales: ScaleSizes, codes_BS: Tensor) -> Tensor:
        """What a map adds to the features, (B, c, H, W)."""
        raise NotImplementedError

    def shrink(self, features: Tensor, scale: int, scales: ScaleSizes) -> Tensor:
        """Features (B, c, H, W) as inputs of a scale, (B, positions, numbers of a position)."""
        raise NotImplementedError

    def encode(self, features: Tensor, scales: ScaleSizes) -> Tensor:
        """Codes (B, T): of each map the nearest to what the maps before have left."""
        raise NotImplementedError

    def features(self, codes_BT: Tensor, scales: ScaleSizes) -> Tensor:
        """(B, c, H, W) of whole images."""
        maps = enumerate(codes_BT.split([size * self.each for size in scales.sizes], dim=1))
        return torch.stack([self.part(k, scales, codes) for k, codes in maps]).sum(dim=0)


class Quantizer(ScaleQuantizer):
    """Codes of `size` channels and the convolutions after enlarging, each of them shared by neighbouring scales."""

    def __init__(self, codes: int, size: int, shared: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(codes, size)
        smooth = [nn.Conv2d(size, size, 3, padding=1) for _ in range(shared)]
        self.quant_resi = nn.ModuleDict({"qresi_ls": nn.ModuleList(smooth)})

    @property
    def size(self) -> int:
        return self.embedding.weight.shape[1]

    def blank(self, images: int, scales: ScaleSizes, device: torch.device) -> Tensor:
        return self.embedding.weight.new_zeros(images, self.size, *scales.grids[-1], device=device)

    def smooth(self, scale: int, scales: ScaleSizes, x: Tensor) -> Tensor:
        """The convolution whose tick is nearest to the scale's place between the first (0) and the last (1)."""
        layers: nn.ModuleList = self.quant_resi["qresi_ls"]  # type: ignore[assignment]
        layer = layers[nearest(len(layers), scale, len(scales))]
        return x * (1 - MIX) + layer(x) * MIX

    def part(self, scale: int, scales: ScaleSizes, codes_BS: Tensor) -> Tensor:
        looked = self.embedding(codes_BS).transpose(1, 2).unflatten(2, scales.grids[scale])
        if scale < len(scales) - 1:
            looked = F.interpolate(looked, size=scales.grids[-1], mode="bicubic")
        return self.smooth(scale, scales, looked)

    def shrink(self, features: Tensor, scale: int, scales: ScaleSizes) -> Tensor:
        return F.interpolate(features, size=scales.grids[scale], mode="area").flatten(2).transpose(1, 2)

    def maps(self, features: Tensor, scales: ScaleSizes) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each map: what the maps before have left, on its grid (B, S, c); the nearest codes (B, S); what they add,
        (B, c, H, W).
        """
        left = features
        for k in range(len(scales)):
            at_BSc = self.shrink(left, k, scales) if k < len(scales) - 1 else left.flatten(2).transpose(1, 2)
            codes_BS = torch.cdist(at_BSc.float(), self.embedding.weight.float()[None]).argmin(-1)
            part = self.part(k, scales, codes_BS)
            left = left - part.detach()
            yield at_BSc, codes_BS, part

    def encode(self, features: Tensor, scales: ScaleSizes) -> Tensor:
        return torch.cat([codes for _, codes, _ in self.maps(features, scales)], dim=1)


@dataclass(frozen=True)
class MultiScaleShape:
    """multipliers: of `channels`, from the finest level to the coarsest, each of half the size. shared: convolutions of
    the quantiser. kernel: of the convolutions around it.
    """

    codes: int = 4096
    size: int = 32
    channels: int = 160
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    blocks: int = 2
    shared: int = 4
    kernel: int = 3


class ScaleVAE(nn.Module):
    """Base class of autoencoders: pixels (B, 3, height, width) in [-1, 1] to codes of any scales, and back.

    factor: pixels per position of the finest map, along a side.
    """

    shape: Any
    factor: int
    quantize: ScaleQuantizer

    def __init__(self, size: int, widths: tuple[int, ...], blocks: int, attention: bool):
        """diffusers' encoder to `size` channels, and decoder. attention: at the coarsest level and in the middle."""
        super().__init__()
        plain, coarse = len(widths) - 1, "Attn" if attention else ""
        shared: dict[str, Any] = {"norm_num_groups": GROUPS, "mid_block_add_attention": attention}
        down = ("DownEncoderBlock2D",) * plain + (f"{coarse}DownEncoderBlock2D",)
        up = (f"{coarse}UpDecoderBlock2D",) + ("UpDecoderBlock2D",) * plain
        self.encoder = Encoder(3, size, down, widths, blocks, double_z=False, **shared)
        self.decoder = Decoder(size, 3, up, widths, blocks, **shared)

    def latents(self, pixels: Tensor) -> Tensor:
        """Features (B, c, H, W) before they are quantised."""
        raise NotImplementedError

    def decoded(self, features: Tensor) -> Tensor:
        """Pixels of features (B, c, H, W)."""
        raise NotImplementedError

    @torch.no_grad()
    def encode(self, pixels: Tensor, scales: ScaleSizes) -> Tensor:
        """Codes (B, T) of pixels, `factor` times the finest grid."""
        return self.quantize.encode(self.latents(pixels), scales)

    @torch.no_grad()
    def decode(self, codes_BT: Tensor, scales: ScaleSizes) -> Tensor:
        """Pixels."""
        return self.decoded(self.quantize.features(codes_BT, scales)).clamp(-1, 1)


class MultiScaleVAE(ScaleVAE):
    """VAR's autoencoder, whose codes are those of a codebook."""

    quantize: Quantizer

    def __init__(self, shape: MultiScaleShape):
        super().__init__(shape.size, tuple(shape.channels * m for m in shape.multipliers), shape.blocks, attention=True)
        self.shape, self.factor = shape, 2 ** (len(shape.multipliers) - 1)
        self.quantize = Quantizer(shape.codes, shape.size, shape.shared)
        around: dict[str, Any] = {"kernel_size": shape.kernel, "padding": shape.kernel // 2}
        self.quant_conv = nn.Conv2d(shape.size, shape.size, **around)
        self.post_quant_conv = nn.Conv2d(shape.size, shape.size, **around)

    def latents(self, pixels: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(pixels))

    def decoded(self, features: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(features))
