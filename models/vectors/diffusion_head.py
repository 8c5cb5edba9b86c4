"""The diffusion head of continuous tokens: an MLP with adaptive normalization, and its step schedules.

This is MAR's DiffLoss network (Li et al., arXiv 2406.11838, section 3.3), with its published parameter names. Shapes: M
rows, d size of a token, C width of the condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec.distributions import DenoisingSteps
from visspec.io.checkpoint import check_choice

TOTAL = 1000  # timesteps of training
LATEST = 0.999  # maximum beta of the cosine schedule
OFFSET = 0.008  # offset of the cosine schedule, Nichol and Dhariwal 2021, equation 17
EPSILON = 1e-6  # epsilon of all layer norms
# the head's prediction, at x = signal value + noise eps: coefficients of x and of the prediction in an estimated value
PREDICTIONS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "noise": lambda signal, noise: (1 / signal, -noise / signal),  # eps
    "velocity": lambda signal, noise: (signal, -noise),  # signal eps - noise value, of schedules with unit variance
    "flow": lambda signal, noise: (torch.ones_like(noise), noise),  # value - eps, of schedules with signal + noise = 1
}


@dataclass(frozen=True, eq=False)
class Schedule:
    """Timesteps that a chain visits, noisiest first. All (S,), float64.

    Args:
        times: Timesteps as input of the network.
        signal, noise: Coefficients of x = signal value + noise eps at each timestep.
        predicts: What the network predicts, a key of PREDICTIONS.
    """

    steps: DenoisingSteps
    times: Tensor
    signal: Tensor
    noise: Tensor
    predicts: str = "noise"

    def __post_init__(self):
        check_choice("predicts", self.predicts, PREDICTIONS)

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return coefficients (S,) of x and of the network's prediction in the estimated value."""
        return PREDICTIONS[self.predicts](self.signal, self.noise)


def schedule(count: int, learned: bool = False, noisy: bool = True) -> Schedule:
    """Choose `count` evenly spaced timesteps out of the cosine ones of training, as iDDPM respaces them.

    Raises ValueError if the steps do not fit the timesteps.

    Args:
        learned: Whether deviations are interpolated between the posterior's and the forward process's, by a share that
            the network predicts; otherwise the posterior's are used.
    """
    if not 2 <= count <= TOTAL:
        raise ValueError(f"steps: got {count}, expected 2..{TOTAL}, the timesteps the head was trained on.")
    t = torch.arange(TOTAL + 1, dtype=torch.float64) / TOTAL
    level = torch.cos((t + OFFSET) / (1 + OFFSET) * math.pi / 2) ** 2
    levels = (1 - (1 - level[1:] / level[:-1]).clamp(max=LATEST)).cumprod(dim=0)  # cumulative products of alpha
    stride = (TOTAL - 1) / (count - 1)
    # sums as in the published code: products would round ties differently
    times = torch.tensor([0.0, *[stride] * (count - 1)], dtype=torch.float64).cumsum(dim=0).round().long()
    level = levels[times]  # rising in noise
    previous = torch.cat([level.new_ones(1), level[:-1]])
    beta = 1 - level / previous
    posterior = beta * (1 - previous) / (1 - level)
    low = torch.cat([posterior[1:2], posterior[1:]]).log() / 2  # the last step's own deviation would be zero
    high = beta.log() / 2 if learned else low
    keep = (1 - previous) * (1 - beta).sqrt() / (1 - level)
    move = beta * previous.sqrt() / (1 - level)
    keep, move, low, high = (part.flip(0).float() for part in (keep, move, low, high))
    steps = DenoisingSteps(keep, move, low, high if learned else low, noisy)
    return Schedule(steps, times.flip(0), level.sqrt().flip(0), (1 - level).sqrt().flip(0))


class TimeEmbedding(nn.Module):
    """Sinusoidal embedding of a timestep, followed by two layers: (M,) -> (M, width)."""

    def __init__(self, width: int, frequencies: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.frequencies = frequencies

    def forward(self, t_M: Tensor) -> Tensor:
        half = self.frequencies // 2
        scale = torch.exp(-math.log(10_000) / half * torch.arange(half, device=t_M.device))
        angle = t_M[..., None].float() * scale
        return self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1).to(next(self.parameters()).dtype))


class ResidualBlock(nn.Module):
    """Residual block, modulated by the condition."""

    def __init__(self, width: int):
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPSILON)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, modulation: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        shift, scale, gate = modulation
        return torch.addcmul(x, gate, self.mlp(torch.addcmul(shift, self.in_ln(x), scale)))


class OutputLayer(nn.Module):
    """Last layer, modulated by the condition."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=EPSILON)
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, modulation: tuple[Tensor, Tensor]) -> Tensor:
        shift, scale = modulation
        return self.linear(torch.addcmul(shift, self.norm_final(x), scale))


class DiffusionHead(nn.Module):
    """Noise predictor of a token: (points (M, d), timesteps (M,), conditions (M, C)) -> (M, d), or (M, 2 d) with
    `learned` deviations, which follow the noise.
    """

    def __init__(self, size: int, condition: int, width: int, depth: int, learned: bool = False):
        super().__init__()
        self.size, self.learned = size, learned
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition, width)
        self.input_proj = nn.Linear(size, width)
        self.res_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.final_layer = OutputLayer(width, 2 * size if learned else size)

    def forward(self, x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
        return self.run_modulated(x, self.modulations(self.time_embed(t) + self.cond_embed(condition)))

    def modulations(self, y: Tensor) -> Tensor:
        """Return the modulations for the sum of time and condition (..., width), concatenated: shifts, scales (plus
        one) and gates of the blocks, then shift and scale of the last layer.
        """
        active, blocks, parts = F.silu(y), cast(Any, self.res_blocks), []
        for block in (*blocks, self.final_layer):
            shift, scale, *gate = block.adaLN_modulation[1](active).split(self.final_layer.linear.in_features, dim=-1)
            parts += [shift, scale + 1, *gate]
        return torch.cat(parts, dim=-1)

    def run_modulated(self, x: Tensor, modulations: Tensor) -> Tensor:
        """Run the head at x (..., d) with precomputed modulations."""
        *parts, shift, scale = modulations.split(self.final_layer.linear.in_features, dim=-1)
        x = self.input_proj(x)
        for i, block in enumerate(self.res_blocks):
            x = block(x, parts[3 * i : 3 * i + 3])
        return self.final_layer(x, (shift, scale))
