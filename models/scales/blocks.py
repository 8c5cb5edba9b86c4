"""Building blocks of next-scale transformers: VAR's attention, MLP and modulated norm (arXiv 2404.02905)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec.models.layers import Network

EPSILON = 1e-6  # epsilon of all layer norms


SHARPEST = math.log(100)  # maximum log scale of an attention head


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v (R, H, Q, E) -> (R, H, Q, E), unscaled


class VARAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.scale_mul_1H11 = nn.Parameter(torch.full((1, heads, 1, 1), math.log(4)))
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.zero_k_bias: Tensor
        self.register_buffer("zero_k_bias", torch.zeros(width))
        self.mat_qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x_RQC: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        bias = torch.cat([self.q_bias, self.zero_k_bias, self.v_bias])
        qkv = F.linear(x_RQC, self.mat_qkv.weight, bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = F.normalize(q, dim=-1) * self.scale_mul_1H11.clamp(max=SHARPEST).exp()
        return self.proj(attend(q, F.normalize(k, dim=-1), v).transpose(1, 2).flatten(2))


class ModulatedNorm(nn.Module):
    """The modulated norm before the head."""

    def __init__(self, width: int):
        super().__init__()
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x_RQC: Tensor, given_RC: Tensor) -> Tensor:
        scale, shift = self.ada_lin(given_RC)[:, None].chunk(2, dim=-1)
        return norm(x_RQC) * (scale + 1) + shift


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPSILON)


class NextScale(Network):
    """Base class of networks that predict all codes of a scale at once, given the earlier scales and a condition.

    Subclasses define these attributes and `forward(x, condition, attend, places)`.
    """

    config: Any
    pos_start: nn.Parameter
    first: Callable[..., Tensor]  # (embedded condition)
    embed: Callable[..., Tensor]  # (x, begin)
    logits: Callable[..., Tensor]  # (hidden, embedded condition)
    embed_condition: Callable[..., Any]  # (condition of R rows): what the blocks take
