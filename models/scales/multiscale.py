"""VAR's multi-scale VQ autoencoder: image features as a sum of code maps, coarse to fine. (arXiv 2404.02905)

Each map is looked up, enlarged to the finest grid (bicubic) and smoothed by a convolution; the next map's input is the
sum so far, reduced to that map's grid by averaging ("area"). Parameters have their published names; those of encoder
and decoder are the names in diffusers' stock classes.

Shapes: B images, T codes of all maps, S codes of a map, c channels of codes, (H, W) the finest grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import Decoder, Encoder
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 32  # groups of all group norms
MOST_CODES = 1 << 20  # maximum codes in all maps of an image
MIX = 0.5  # weight of the convolution in a map's contribution


@dataclass(frozen=True)
class ScaleSizes:
    """The maps of an image: (rows, columns) of each, coarse to fine."""

    grids: tuple[tuple[int, int], ...]

    def __post_init__(self):
        codes = sum(rows * columns for rows, columns in self.grids)
        if not self.grids or min(map(min, self.grids)) < 1 or codes > MOST_CODES:
            raise ValueError(f"scales: got {codes} codes in {len(self.grids)} maps, expected 1..{MOST_CODES}.")

    @classmethod
    def square(cls, *sides: int) -> ScaleSizes:
        return cls(tuple((side, side) for side in sides))

    def __len__(self) -> int:
        return len(self.grids)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes in each map."""
        return tuple(rows * columns for rows, columns in self.grids)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Number of the map that each code belongs to."""
        return tuple(k for k, size in enumerate(self.sizes) for _ in range(size))

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Number of codes before each map, followed by the total."""
        return tuple(accumulate(self.sizes, initial=0))

    @property
    def total(self) -> int:
        return self.begins[-1]


def nearest(count: int, scale: int, scales: int) -> int:
    """Return which convolution a scale uses. It is computed in numpy as in the published code, because two of ten
    scales lie halfway between ticks, where rounding decides.
    """
    edge = 1 / (3 if count == 4 else 2) / count
    return int(np.argmin(np.abs(np.linspace(edge, 1 - edge, count) - scale / max(scales - 1, 1))))


class ScaleQuantizer(nn.Module):
    """Base class of quantizers: image features (B, c, H, W) as a sum of contributions from code maps."""

    each = 1  # codes per position
    blank: Callable[..., Tensor]  # (images, scales, device): features of images without any maps
    part: Callable[..., Tensor]  # (scale, scales, codes (B, S)): a map's contribution to the features
    shrink: Callable[..., Tensor]  # (features, scale, scales): a scale's inputs (B, positions, channels of a position)
    encode: Callable[..., Tensor]  # (features, scales): codes (B, T), each map nearest to the earlier maps' residual

    def features(self, codes_BT: Tensor, scales: ScaleSizes) -> Tensor:
        """Return the features (B, c, H, W) of whole images."""
        maps = enumerate(codes_BT.split([size * self.each for size in scales.sizes], dim=1))
        return torch.stack([self.part(k, scales, codes) for k, codes in maps]).sum(dim=0)


class Quantizer(ScaleQuantizer):
    """A codebook with `size` channels, and convolutions after enlarging, each shared by neighboring scales."""

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
        """Apply the convolution whose tick is nearest to the scale's place between the first (0) and the last (1)."""
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
        """Yield, for each map: the residual of the earlier maps on its grid (B, S, c), the nearest codes (B, S), and
        their contribution (B, c, H, W).
        """
        residual = features
        for k in range(len(scales)):
            at_BSc = self.shrink(residual, k, scales) if k < len(scales) - 1 else residual.flatten(2).transpose(1, 2)
            codes_BS = torch.cdist(at_BSc.float(), self.embedding.weight.float()[None]).argmin(-1)
            part = self.part(k, scales, codes_BS)
            residual = residual - part.detach()
            yield at_BSc, codes_BS, part

    def encode(self, features: Tensor, scales: ScaleSizes) -> Tensor:
        return torch.cat([codes for _, codes, _ in self.maps(features, scales)], dim=1)


@dataclass(frozen=True)
class MultiScaleShape:
    """multipliers: of `channels`, from the finest level to the coarsest, each at half the size. shared: number of the
    quantizer's convolutions. kernel: size of the convolutions around it.
    """

    codes: int = 4096
    size: int = 32
    channels: int = 160
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    blocks: int = 2
    shared: int = 4
    kernel: int = 3


class ScaleVAE(nn.Module):
    """Base class of autoencoders from pixels (B, 3, height, width) in [-1, 1] to codes of any scales, and back.

    Args:
        factor: Pixels per position of the finest map, along one side.
    """

    shape: Any
    factor: int
    quantize: ScaleQuantizer
    latents: Callable[[Tensor], Tensor]  # pixels -> features (B, c, H, W) before quantization
    decoded: Callable[[Tensor], Tensor]  # features -> pixels

    def __init__(self, size: int, widths: tuple[int, ...], blocks: int, attention: bool):
        """Build diffusers' encoder to `size` channels, and decoder.

        Args:
            attention: At the coarsest and the middle level.
        """
        super().__init__()
        plain, coarse = len(widths) - 1, "Attn" if attention else ""
        shared: dict[str, Any] = {"norm_num_groups": GROUPS, "mid_block_add_attention": attention}
        down = ("DownEncoderBlock2D",) * plain + (f"{coarse}DownEncoderBlock2D",)
        up = (f"{coarse}UpDecoderBlock2D",) + ("UpDecoderBlock2D",) * plain
        self.encoder = Encoder(3, size, down, widths, blocks, double_z=False, **shared)
        self.decoder = Decoder(size, 3, up, widths, blocks, **shared)

    @torch.no_grad()
    def encode(self, pixels: Tensor, scales: ScaleSizes) -> Tensor:
        """Encode pixels to codes (B, T). The pixels' size must be `factor` times the finest grid."""
        return self.quantize.encode(self.latents(pixels), scales)

    @torch.no_grad()
    def decode(self, codes_BT: Tensor, scales: ScaleSizes) -> Tensor:
        """Decode codes to pixels in [-1, 1]."""
        return self.decoded(self.quantize.features(codes_BT, scales)).clamp(-1, 1)


class MultiScaleVAE(ScaleVAE):
    """VAR's autoencoder, whose codes index a codebook."""

    quantize: Quantizer

    def __init__(self, shape: MultiScaleShape):
        super().__init__(shape.size, tuple(shape.channels * m for m in shape.multipliers), shape.blocks, attention=True)
        self.shape, self.factor = shape, 2 ** (len(shape.multipliers) - 1)
        self.quantize = Quantizer(shape.codes, shape.size, shape.shared)
        convolution: dict[str, Any] = {"kernel_size": shape.kernel, "padding": shape.kernel // 2}
        self.quant_conv = nn.Conv2d(shape.size, shape.size, **convolution)
        self.post_quant_conv = nn.Conv2d(shape.size, shape.size, **convolution)

    def latents(self, pixels: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(pixels))

    def decoded(self, features: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(features))
