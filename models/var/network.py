"""VAR's transformer: all codes of a scale at once, given the scales before it. (Tian et al., arXiv 2404.02905)

The input of a scale is made of the codes before it (`multiscale.Quantizer.shrink`); that of the first is the class.
Attention is block-causal: a scale sees itself and the scales before it. How, is said by the caller (`Attend`), which
keeps the cache and gets the queries and keys that the layer uses. Parameters have their published names.

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

GUIDANCE = 2.5  # of the published evaluation


@dataclass(frozen=True)
class VARConfig:
    """Sizes. shared: one modulation for all blocks, as the models of 512 pixels have."""

    ALIKE: ClassVar = ("scales", "codes", "code_size", "classes")  # of models that draw the same maps of one class

    width: int
    depth: int
    heads: int
    scales: ScaleSizes
    codes: int = 4096
    code_size: int = 32
    classes: int = 1000
    hidden: int | None = None  # of the blocks' MLPs; default 4 width
    shared: bool = False

    @classmethod
    def of(cls, depth: int, scales: ScaleSizes, shared: bool = False) -> VARConfig:
        """As published: d16, d20, d24, d30, d36."""
        return cls(64 * depth, depth, depth, scales, shared=shared)


class VARBlock(nn.Module):
    """A block of a transformer whose norms are modulated by the class: its own way, or shared and shifted."""

    def __init__(self, config: VARConfig):
        super().__init__()
        width = config.width
        self.attn = VARAttention(width, config.heads)
        self.ffn = GeluMLP(width, config.hidden or 4 * width, width, approximate="tanh")
        if config.shared:
            self.ada_gss = nn.Parameter(torch.randn(1, 1, 6, width) / math.sqrt(width))
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x_RQC: Tensor, given: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """given: (R, C) the class, or (R, 1, 6, C) what is shared."""
        shared = given.dim() == 4
        parts = self.ada_gss + given if shared else self.ada_lin(given).unflatten(-1, (6, -1))[:, None]
        gamma1, gamma2, scale1, scale2, shift1, shift2 = parts.unbind(dim=2)
        x_RQC = x_RQC + self.attn(norm(x_RQC) * (scale1 + 1) + shift1, attend) * gamma1
        return x_RQC + self.ffn(norm(x_RQC) * (scale2 + 1) + shift2) * gamma2


class VAR(NextScale):
    """Logits of a scale's codes. The class number `classes` is none."""

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

    def given(self, classes_R: Tensor) -> Tensor:
        """Embedded classes (R, C)."""
        return self.class_emb(classes_R)

    def first(self, given_RC: Tensor) -> Tensor:
        """Inputs of the first scale, (R, S, C)."""
        return given_RC[:, None] + self.pos_start + self.places(0, self.config.scales.sizes[0])

    def embed(self, x_RQc: Tensor, begin: int) -> Tensor:
        """Inputs of the positions from `begin` on, (R, Q, C)."""
        return self.word_embed(x_RQc.to(self.dtype)) + self.places(begin, begin + x_RQc.shape[1])

    def places(self, begin: int, end: int) -> Tensor:
        return self.lvl_embed(self.level_L[begin:end]) + self.pos_1LC[:, begin:end]

    def forward(self, x_RQC: Tensor, given_RC: Tensor, attend: Attend, places: Tensor) -> Tensor:
        """Hidden states (R, Q, C) of inputs (R, Q, C). given: embedded classes. places: in the inputs already."""
        modulation = given_RC
        if self.config.shared:
            modulation = self.shared_ada_lin(given_RC).unflatten(-1, (1, 6, -1))
        for layer, block in enumerate(self.blocks):
            x_RQC = block(x_RQC, modulation, partial(attend, layer))
        return x_RQC

    def logits(self, hidden_RQC: Tensor, given_RC: Tensor) -> Tensor:
        """(R, Q, V)."""
        return self.head(self.head_nm(hidden_RQC, given_RC))
