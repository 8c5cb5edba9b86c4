"""Infinity's transformer: all bits of a scale at once, given the earlier scales and a text. (arXiv 2412.04431)

It is VAR's block (`var.network`) with different positions and a different condition. A position holds a row of bits,
each with a classifier of two logits. Queries and keys are rotated by the position's row and column, stretched to the
finest grid of the full schedule, so that positions of all scales at the same spot are rotated alike. Every block
attends to features of the text (T5's), whose attentive pooling modulates its norms and is the first scale's input.
Parameters have their published names, without the chunks that the blocks were stored in for training.

Shapes: R rows, Q positions of a pass, L positions of an image, C width, H heads, E head size, T text tokens, F features
per token, n bits of a position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec.io.checkpoint import check_choice
from visspec.models.layers import GeluMLP, grid_rotations, rotate
from visspec.models.scales.blocks import EPSILON, Attend, ModulatedNorm, NextScale, VARAttention, norm
from visspec.models.scales.multiscale import ScaleSizes

BASE = 10000.0  # base of the rotary frequencies
LONGEST = 512  # maximum text tokens
GUIDANCE = 3.0  # from the published commands
GRIDS = {  # by height over width: grids of the published megapixel models, 16 pixels per position
    1.0: ((1, 1), (2, 2), (4, 4), (6, 6), (8, 8), (12, 12), (16, 16), (20, 20), (24, 24), (32, 32), (40, 40), (48, 48),
          (64, 64)),
    1.25: ((1, 1), (2, 2), (3, 3), (5, 4), (10, 8), (15, 12), (20, 16), (25, 20), (30, 24), (35, 28), (45, 36),
           (55, 44), (70, 56)),
    1.333: ((1, 1), (2, 2), (4, 3), (8, 6), (12, 9), (16, 12), (20, 15), (24, 18), (28, 21), (36, 27), (48, 36),
            (60, 45), (72, 54)),
    1.5: ((1, 1), (2, 2), (3, 2), (6, 4), (9, 6), (15, 10), (21, 14), (27, 18), (33, 22), (39, 26), (48, 32), (63, 42),
          (78, 52)),
    1.75: ((1, 1), (2, 2), (3, 3), (7, 4), (11, 6), (14, 8), (21, 12), (28, 16), (35, 20), (42, 24), (56, 32),
           (70, 40), (84, 48)),
    2.0: ((1, 1), (2, 2), (4, 2), (6, 3), (10, 5), (16, 8), (22, 11), (30, 15), (38, 19), (46, 23), (60, 30), (74, 37),
          (90, 45)),
    2.5: ((1, 1), (2, 2), (5, 2), (10, 4), (15, 6), (20, 8), (25, 10), (30, 12), (40, 16), (50, 20), (65, 26),
          (80, 32), (100, 40)),
    3.0: ((1, 1), (2, 2), (6, 2), (9, 3), (15, 5), (21, 7), (27, 9), (36, 12), (45, 15), (54, 18), (72, 24), (90, 30),
          (111, 37)),
}  # fmt: skip
COUNTS = {"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13}  # number of scales for an image of so many pixels


def schedule(ratio: float = 1.0, pixels: str = "1M") -> ScaleSizes:
    """Return the published scales closest to `ratio` (height over width). Raises ValueError for other `pixels`."""
    check_choice("pixels", pixels, COUNTS)
    return ScaleSizes(min(_shapes(), key=lambda shape: abs(shape[0] - ratio))[1][: COUNTS[pixels]])


def _shapes() -> list[tuple[float, tuple[tuple[int, int], ...]]]:
    """Return every published shape: the upright ones and the same in landscape."""
    flat = [(1 / ratio, tuple((columns, rows) for rows, columns in grids)) for ratio, grids in GRIDS.items()]
    return [*GRIDS.items(), *flat[1:]]


def reach_of(scales: ScaleSizes) -> tuple[int, int]:
    """Return the grid that positions are stretched to: the finest of the megapixel schedule that begins with these
    scales, or their own finest for unpublished scales.
    """
    finest = [grids[-1] for _, grids in _shapes() if scales.grids == grids[: len(scales)]]
    return finest[0] if finest and len(scales) in COUNTS.values() else scales.grids[-1]


@dataclass(frozen=True)
class InfinityConfig:
    """Sizes of the network.

    Args:
        code_size: Bits per position.
        text: Features per text token.
        pool: Heads of the text pooling.
        longest: Maximum text tokens.
        levels: Maximum scales.
        reach: By default, see `reach_of`.
    """

    ALIKE: ClassVar = ("scales", "code_size", "text")  # equal in models with the same maps and prompts
    codes: ClassVar = 2  # classes per bit

    width: int
    depth: int
    heads: int
    scales: ScaleSizes
    code_size: int = 32
    text: int = 2048
    pool: int = 16
    longest: int = LONGEST
    levels: int = 15
    hidden: int | None = None  # width of the blocks' MLPs; default 4 width
    reach: tuple[int, int] | None = None

    def __post_init__(self):
        if len(self.scales) > self.levels or self.scales.sizes[0] != 1:
            actual = f"{len(self.scales)} beginning with {self.scales.sizes[0]} positions"
            raise ValueError(f"scales: got {actual}, expected at most {self.levels}, beginning with one position.")


@dataclass(frozen=True, eq=False)
class Texts:
    """Prompts of R rows: features (R, T, F), a mask of real tokens (R, T), and which rows use the model's own features
    for "no text", of the same length (R,).
    """

    features: Tensor
    real: Tensor
    none: Tensor

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, rows: list[int]) -> Texts:
        return Texts(self.features[rows], self.real[rows], self.none[rows])

    @property
    def device(self) -> torch.device:
        return self.real.device


@dataclass(frozen=True, eq=False)
class TextConditions:
    """Text conditions: pooled (R, C), features (R, T, C), mask of real tokens (R, 1, 1, T)."""

    pooled: Tensor
    text: Tensor
    real: Tensor

    def __len__(self) -> int:
        return len(self.pooled)

    def __getitem__(self, rows: Tensor) -> TextConditions:
        return TextConditions(self.pooled[rows], self.text[rows], self.real[rows])


class TextAttention(nn.Module):
    def __init__(self, width: int, heads: int, text: int):
        super().__init__()
        self.heads = heads
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.zero_k_bias: Tensor
        self.register_buffer("zero_k_bias", torch.zeros(width))
        self.mat_kv = nn.Linear(text, 2 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def after_attention(self, q_RHQE: Tensor, text_RTF: Tensor, real: Tensor) -> Tensor:
        bias = torch.cat([self.zero_k_bias, self.v_bias])
        k, v = F.linear(text_RTF, self.mat_kv.weight, bias).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q_RHQE, k, v, attn_mask=real).transpose(1, 2).flatten(2))


class Pooling(TextAttention):
    """Attention pooling with one learned query per head."""

    def __init__(self, width: int, heads: int, text: int):
        super().__init__(width, heads, text)
        self.mat_q = nn.Parameter(torch.randn(1, heads, width // heads) * math.sqrt(1 / width / 3))

    def forward(self, text_RTF: Tensor, real: Tensor) -> Tensor:
        """Return the pooled text, (R, C)."""
        q_RHQE = self.mat_q[:, :, None].expand(len(text_RTF), -1, -1, -1)
        return self.after_attention(q_RHQE, text_RTF, real)[:, 0]


class InfinityCrossAttention(TextAttention):
    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, width)
        self.mat_q = nn.Linear(width, width)

    def forward(self, x_RQC: Tensor, condition: TextConditions) -> Tensor:
        q_RHQE = self.mat_q(x_RQC).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.after_attention(q_RHQE, condition.text, condition.real)


class InfinityBlock(nn.Module):
    def __init__(self, config: InfinityConfig):
        super().__init__()
        width = config.width
        self.sa = VARAttention(width, config.heads)
        self.ca = InfinityCrossAttention(width, config.heads)
        self.ca_norm = nn.LayerNorm(width, eps=EPSILON)
        self.ffn = GeluMLP(width, config.hidden or 4 * width, width, approximate="tanh")
        self.ada_gss = nn.Parameter(torch.randn(1, 1, 6, width) / math.sqrt(width))

    def forward(self, x_RQC: Tensor, shared: Tensor, condition: TextConditions, attend) -> Tensor:
        """Run the block.

        Args:
            shared: (R, 1, 6, C), common to all blocks.
        """
        gamma1, gamma2, scale1, scale2, shift1, shift2 = (self.ada_gss + shared).unbind(dim=2)
        x_RQC = x_RQC + self.sa(norm(x_RQC) * (scale1 + 1) + shift1, attend) * gamma1
        x_RQC = x_RQC + self.ca(self.ca_norm(x_RQC), condition)
        return x_RQC + self.ffn(norm(x_RQC) * (scale2 + 1) + shift2) * gamma2


class Infinity(NextScale):
    """Predicts two logits for each bit of a scale."""

    def __init__(self, config: InfinityConfig):
        super().__init__()
        self.config = config
        width, deviation = config.width, math.sqrt(1 / config.width / 3)
        self.cfg_uncond = nn.Parameter(torch.randn(config.longest, config.text) / math.sqrt(config.text))
        self.text_norm = nn.RMSNorm(config.text, eps=EPSILON)
        self.text_proj_for_sos = nn.ModuleDict({"ca": Pooling(width, config.pool, config.text)})
        self.text_proj_for_ca = nn.Sequential(
            nn.Linear(config.text, width), nn.GELU(approximate="tanh"), nn.Linear(width, width)
        )
        self.pos_start = nn.Parameter(torch.randn(1, 1, width) * deviation)
        self.lvl_embed = nn.Embedding(config.levels, width)
        self.word_embed = nn.Linear(config.code_size, width)
        self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(InfinityBlock(config) for _ in range(config.depth))
        self.head_nm = ModulatedNorm(width)
        self.head = nn.Linear(width, 2 * config.code_size)
        self.level_L: Tensor
        self.spot_L2: Tensor
        self.register_buffer("level_L", torch.tensor(config.scales.levels), persistent=False)
        reach, spots = config.reach or reach_of(config.scales), list[Tensor]()
        for grid in config.scales.grids:
            at = ((torch.arange(side) * (most / side)).round().long() for side, most in zip(grid, reach))
            spots.append(torch.cartesian_prod(*at))
        self.register_buffer("spot_L2", torch.cat(spots), persistent=False)  # on the grid that all are stretched to

    def embed_condition(self, texts: Texts) -> TextConditions:
        length = texts.features.shape[1]
        real, none = texts.real.to(self.device)[:, None, None], texts.none.to(self.device)[:, None, None]
        features = torch.where(none, self.cfg_uncond[:length], texts.features.to(self.device, self.dtype))
        features = self.text_norm(features)
        return TextConditions(self.text_proj_for_sos["ca"](features, real), self.text_proj_for_ca(features), real)

    def first(self, condition: TextConditions) -> Tensor:
        """Return inputs of the first scale, (R, 1, C)."""
        return condition.pooled[:, None] + self.pos_start + self.lvl_embed(self.level_L[:1])

    def embed(self, x_RQn: Tensor, begin: int) -> Tensor:
        """Return inputs of the positions from `begin` on, (R, Q, C)."""
        return self.word_embed(x_RQn.to(self.dtype)) + self.lvl_embed(self.level_L[begin : begin + x_RQn.shape[1]])

    def forward(self, x_RQC: Tensor, condition: TextConditions, attend: Attend, places: Tensor) -> Tensor:
        """Return hidden states (R, Q, C) of inputs (R, Q, C) at places (R|1, Q)."""
        spot = self.spot_L2[places.clamp(max=len(self.spot_L2) - 1)]  # padding is after the last position
        turn = grid_rotations(spot, self.config.width // self.config.heads, BASE)

        def apply_rope(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = (rotate(x.transpose(1, 2), turn).transpose(1, 2) for x in (q, k))
            return attend(layer, q, k, v)

        shared = self.shared_ada_lin(condition.pooled).unflatten(-1, (1, 6, -1))
        for layer, block in enumerate(self.blocks):
            x_RQC = block(x_RQC, shared, condition, partial(apply_rope, layer))
        return x_RQC

    def logits(self, hidden_RQC: Tensor, condition: TextConditions) -> Tensor:
        """Return logits (R, Q, 2 n): two for the first bit, two for the second, and so on."""
        return self.head(self.head_nm(hidden_RQC, condition.pooled))
