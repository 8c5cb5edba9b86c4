"""Up-sampler from the codes of a small image to logits of a large image's codes: convolutions and a pixel shuffle.

It is used for drafts at low resolution. The first version of MuLo-SD (arXiv 2601.05149) learns one; its network is not
published, and this one is ours.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from visspec.io.checkpoint import check_whole


@dataclass(frozen=True)
class UpsamplerConfig:
    """codes: size of the codebook shared by both images; factor: scale between the grids, along one side."""

    codes: int
    width: int = 96
    layers: int = 3
    factor: int = 2

    def __post_init__(self):
        check_whole("layers", self.layers, 1, 256)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Upsampler(nn.Module):
    """Maps codes (B, rows, columns), int64, to logits (B, factor * rows, factor * columns, codes)."""

    kind: ClassVar[str] = "upsampler"
    config_class: ClassVar[type] = UpsamplerConfig

    def __init__(self, config: UpsamplerConfig):
        super().__init__()
        self.config, width = config, config.width
        self.embed = nn.Embedding(config.codes, width)
        self.small = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(config.layers))
        self.split = nn.Conv2d(width, width * config.factor**2, 1)
        self.large = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Conv2d(width, config.codes, 1)

    def forward(self, codes_BRC: Tensor) -> Tensor:
        x = self.embed(codes_BRC).permute(0, 3, 1, 2)
        for layer in self.small:
            x = x + F.gelu(layer(x))
        x = F.pixel_shuffle(self.split(F.gelu(x)), self.config.factor)
        x = x + F.gelu(self.large(x))
        return self.head(x).permute(0, 2, 3, 1)
