"""VAR's transformer: all codes of a scale at once, given the earlier scales. (Tian et al., arXiv 2404.02905)

A scale's input is computed from the codes before it (`multiscale.Quantizer.shrink`); the first scale's input is the
class. Attention is block-causal: a scale sees itself and earlier scales. The caller implements it (`Attend`): it owns
the cache and gets the layer's queries and keys. Parameters have their published names.

Shapes: R rows, Q positions of a pass, L positions of an image, C width, H heads, E head size, S codes of a scale, c
channels of codes, V codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from visspec.models.layers import GeluMLP
from visspec.models.scales.blocks import Attend, ModulatedNorm, NextScale, VARAttention, norm
from visspec.models.scales.multiscale import ScaleSizes

GUIDANCE = 2.5  # from the published evaluation


@dataclass(frozen=True)
class VARConfig:
    """Sizes.

    Args:
        shared: One modulation for all blocks, as in the 512-pixel models.
    """

    ALIKE: ClassVar = ("scales", "codes", "code_size", "classes")  # equal in models with the same maps and classes

    width: int
    depth: int
    heads: int
    scales: ScaleSizes
    codes: int = 4096
    code_size: int = 32
    classes: int = 1000
    hidden: int | None = None  # width of the blocks' MLPs; default 4 width
    shared: bool = False


class VARBlock(nn.Module):
    """A transformer block whose norms are modulated by the class, either by its own layer or shared with an offset."""

    def __init__(self, config: VARConfig):
        super().__init__()
        width = config.width
        self.attn = VARAttention(width, config.heads)
        self.ffn = GeluMLP(width, config.hidden or 4 * width, width, approximate="tanh")
        if config.shared:
            self.ada_gss = nn.Parameter(torch.randn(1, 1, 6, width) / math.sqrt(width))
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x_RQC: Tensor, condition: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Run the block.

        Args:
            condition: The class (R, C), or the shared modulation (R, 1, 6, C).
        """
        shared = condition.dim() == 4
        parts = self.ada_gss + condition if shared else self.ada_lin(condition).unflatten(-1, (6, -1))[:, None]
        gamma1, gamma2, scale1, scale2, shift1, shift2 = parts.unbind(dim=2)
        x_RQC = x_RQC + self.attn(norm(x_RQC) * (scale1 + 1) + shift1, attend) * gamma1
        return x_RQC + self.ffn(norm(x_RQC) * (scale2 + 1) + shift2) * gamma2


class VAR(NextScale):
    """Predicts logits of a scale's codes. The class number `classes` means no class."""

    def __init__(self, config: VARConfig):
        super().__init__()
        self.config = config
        width, scales, deviation = config.width, config.scales, math.sqrt(1 / config.width / 3)

        def table(length: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(1, length, width) * deviation)

        self.word_embed = nn.Linear(config.code_size, width)
        self.class_emb = nn.Embedding(config.classes + 1, width)
        self.pos_start = table(scales.sizes[0])
        self.pos_1LC = table(scales.total)
        self.lvl_embed = nn.Embedding(len(scales), width)
        if config.shared:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(VARBlock(config) for _ in range(config.depth))
        self.head_nm = ModulatedNorm(width)
        self.head = nn.Linear(width, config.codes)
        self.level_L: Tensor
        self.register_buffer("level_L", torch.tensor(scales.levels), persistent=False)

    def embed_condition(self, classes_R: Tensor) -> Tensor:
        """Return embedded classes (R, C)."""
        return self.class_emb(classes_R)

    def first(self, given_RC: Tensor) -> Tensor:
        """Return inputs of the first scale, (R, S, C)."""
        return given_RC[:, None] + self.pos_start + self.places(0, self.config.scales.sizes[0])

    def embed(self, x_RQc: Tensor, begin: int) -> Tensor:
        """Return inputs of the positions from `begin` on, (R, Q, C)."""
        return self.word_embed(x_RQc.to(self.dtype)) + self.places(begin, begin + x_RQc.shape[1])

    def places(self, begin: int, end: int) -> Tensor:
        return self.lvl_embed(self.level_L[begin:end]) + self.pos_1LC[:, begin:end]

    def forward(self, x_RQC: Tensor, given_RC: Tensor, attend: Attend, places: Tensor) -> Tensor:
        """Return hidden states (R, Q, C).

        Args:
            given_RC: Embedded classes.
            places: Unused, as the inputs contain them.
        """
        modulation = given_RC
        if self.config.shared:
            modulation = self.shared_ada_lin(given_RC).unflatten(-1, (1, 6, -1))
        for layer, block in enumerate(self.blocks):
            x_RQC = block(x_RQC, modulation, partial(attend, layer))
        return x_RQC

    def logits(self, hidden_RQC: Tensor, given_RC: Tensor) -> Tensor:
        return self.head(self.head_nm(hidden_RQC, given_RC))
