"""Distributions over vectors, sampled by a chain of Gaussian steps as in a diffusion head.

Shapes: B rows, N nodes, S steps, d size of a vector; M rows of a batch of chains, W points of each chain. Step i of a
chain goes from x_i to x_(i+1), from x_0 ~ N(0, I) to the value x_S:

    x_(i+1) = keep_i x_i + move_i o(x_i, i) + sigma_i z_i,    z_i ~ N(0, I)

where o is the network's estimate of the value (the "predicted x0" of DDPM), and log sigma_i is fixed or lies between
two bounds, at a share that the network predicts (iDDPM, Nichol and Dhariwal 2021, equation 15).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from visspec.distributions.base import Distribution, check_tensor

Predict = Callable[[Tensor, Tensor | int, Tensor | None], tuple[Tensor, Tensor | None]]
Ends = Callable[[Tensor, Tensor, "DenoisingSteps"], Tensor]


@dataclass(frozen=True, eq=False)
class DenoisingSteps:
    """Coefficients of the S steps of a chain, all (S,). `low` and `high` are bounds of log sigma, equal if it is fixed.
    `noisy` is whether the last step adds noise; without it the value given x_(S-1) is a point mass, and no draft would
    ever equal it.
    """

    keep: Tensor
    move: Tensor
    low: Tensor
    high: Tensor
    noisy: bool = True

    def __post_init__(self):
        size = len(self.keep)
        for name in ("keep", "move", "low", "high"):
            values = getattr(self, name)
            finite = values.is_meta or bool(values.isfinite().all())
            if values.shape != (size,) or not finite:
                raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected {size} finite numbers.")
        if size == 0:
            raise ValueError("keep: got no steps, expected at least one.")

    def __len__(self) -> int:
        return len(self.keep)

    @property
    def fixed(self) -> bool:
        """Return whether deviations only depend on the step."""
        return self.low is self.high

    @cached_property
    def each(self) -> list[tuple[float, Tensor, float]]:
        """(keep, move (), lower sigma) of every step, in the form that is fastest for small tensors."""
        return list(zip(self.keep.tolist(), self.move.unbind(), self.low.exp().tolist()))

    def to(self, device: torch.device | str) -> DenoisingSteps:
        if self.keep.device == torch.device(device):
            return self
        low = self.low.to(device)
        high = low if self.fixed else self.high.to(device)
        return DenoisingSteps(self.keep.to(device), self.move.to(device), low, high, self.noisy)

    def warmer(self, temperature: float) -> DenoisingSteps:
        """Return the same steps with all deviations multiplied by `temperature`."""
        if temperature == 1.0:
            return self
        scale = math.log(temperature)
        low = self.low + scale
        return DenoisingSteps(self.keep, self.move, low, low if self.fixed else self.high + scale, self.noisy)


class Denoising(Distribution):
    """Distributions (B, N) of vectors of `size` numbers, one chain each.

    Args:
        predict: Maps points (M, W, d), their steps (M, W) int64 (or one step for one point of every chain), and indices
            (M,) of the chains among the B N (None: all) to estimates of the value (M, W, d) and shares (M, W, d) of log
            sigma between its bounds (None if deviations are fixed).
        steps: The coefficients.
        shape: (B, N).
        size: The size d of a vector.
        calls: Counts calls of `predict` under `name`.
        name: The name.
        ends: Maps start (M, d), normal numbers (M, S, d) and steps to values (M, d), if that is faster than step by
            step.
    """

    def __init__(
        self,
        predict: Predict,
        steps: DenoisingSteps,
        shape: tuple[int, int],
        size: int,
        calls: Counter[str] | None = None,
        name: str = "head",
        ends: Ends | None = None,
    ):
        self.predict, self.steps, self.shape, self.size = predict, steps, shape, size
        self.calls, self.name = Counter() if calls is None else calls, name
        self.ends = ends

    @property
    def width(self) -> int:
        """Number of normal numbers for one sample."""
        return (len(self.steps) + 1) * self.size

    def kernel(self, x_MWd: Tensor, step_MW: Tensor, chains_M: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return each next point's mean (M, W, d), log sigma (M, W, 1 or d), and the estimated value (M, W, d)."""
        value, share = self.estimate(x_MWd, step_MW, chains_M)
        return *self.gaussian(x_MWd, step_MW, value, share), value

    def estimate(
        self, x_MWd: Tensor, step_MW: Tensor | int, chains_M: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Call `predict` and count the call."""
        self.calls[self.name] += 1
        return self.predict(x_MWd, step_MW, chains_M)

    def gaussian(self, x: Tensor, step: Tensor, value: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (mean, log sigma) of the points after x (..., d), given estimates of the value and shares."""
        steps = self.steps
        mean = steps.keep[step][..., None] * x + steps.move[step][..., None] * value
        log_sigma = steps.low[step][..., None]
        if share is not None:
            log_sigma = log_sigma + share * (steps.high[step][..., None] - log_sigma)
        return mean, log_sigma

    def sample(self, start_Md: Tensor, normal_MSd: Tensor) -> Trajectory:
        """Sample one value from each of the M = B N distributions, step by step, with the given normal numbers."""
        points, means, deviations = zip(*self._walk(start_Md, normal_MSd))
        fixed = deviations[0] is None
        log_sigma = self.steps.low[:, None].expand(len(start_Md), -1, 1) if fixed else torch.stack(deviations, 1)
        return Trajectory(torch.stack((start_Md, *points), 1), torch.stack(means, 1), log_sigma)

    def value(self, start_Md: Tensor, normal_MSd: Tensor) -> Tensor:
        """Return the values of `sample`, (M, d)."""
        if self.ends is not None:
            self.calls[self.name] += len(self.steps)
            return self.ends(start_Md, normal_MSd, self.steps)
        for point, *_ in self._walk(start_Md, normal_MSd):
            end = point
        return end

    def _walk(self, x_Md: Tensor, normal_MSd: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        steps = self.steps
        last = len(steps) - 1
        for i, (normal_Md, (keep, move, sigma)) in enumerate(zip(normal_MSd.unbind(1), steps.each)):
            value, share = (None if part is None else part[:, 0] for part in self.estimate(x_Md[:, None], i))
            mean = torch.add(cast(Tensor, value) * move, x_Md, alpha=keep)
            log_sigma = None if share is None else steps.low[i] + share * (steps.high[i] - steps.low[i])
            if i == last and not steps.noisy:
                x_Md = mean
            elif log_sigma is None:
                x_Md = torch.add(mean, normal_Md, alpha=sigma)
            else:
                x_Md = torch.addcmul(mean, log_sigma.exp(), normal_Md)
            yield x_Md, mean, log_sigma

    @classmethod
    def limits(cls, capabilities: Any, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor (S, d), whose shape is used to check drafts."""
        return torch.empty(*capabilities.chains, device=device)

    @classmethod
    def drafted(cls, value: Tensor, shape: tuple[int, int], limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_tensor("value", value, (*shape, limits.shape[1]), None, limits.device)
        finite_BN = value.isfinite().all(dim=-1)
        return torch.where(finite_BN[..., None], value, 0.0), finite_BN, torch.ones_like(finite_BN)


@dataclass(frozen=True, eq=False)
class Trajectory(Distribution):
    """Chains from which drafts were sampled: all points, and the Gaussian from which each of them was drawn. `points`
    is (B, N, S + 1, d), with the drafted value last. `mean` (B, N, S, d) and `log_sigma` (B, N, S, 1 or d) belong to
    the distribution of point i + 1 given the earlier points.
    """

    points: Tensor
    mean: Tensor
    log_sigma: Tensor

    @classmethod
    def chain(cls, levels: Sequence[Trajectory]) -> Trajectory:
        """Stack trajectories (B, S + 1, d) of a chain's levels to (B, 1 + levels, ...). The root's entry is unused."""
        stacks = zip(*((level.points, level.mean, level.log_sigma) for level in levels))
        return cls(*(torch.stack([torch.zeros_like(stack[0]), *stack], dim=1) for stack in stacks))

    def sanitize(self, value: Tensor, limits: Tensor) -> tuple[Trajectory, Tensor]:
        (steps, size), nodes = limits.shape, value.shape[:2]
        check_tensor("q.points", self.points, (*nodes, steps + 1, size), None, limits.device)
        check_tensor("q.mean", self.mean, (*nodes, steps, size), None, limits.device)
        deviations = 1 if self.log_sigma.shape[-1] == 1 else size
        check_tensor("q.log_sigma", self.log_sigma, (*nodes, steps, deviations), None, limits.device)
        lawful_BN = (self.points[:, :, -1] == value).all(dim=-1)
        for tensor in (self.points, self.mean, self.log_sigma):
            lawful_BN = lawful_BN & tensor.isfinite().flatten(2).all(dim=-1)
        return self, lawful_BN


Denoising.drafts = Trajectory


def denoising(distribution: Distribution) -> Denoising:
    """Cast a distribution to `Denoising`. `setup.check` has checked the type."""
    return cast(Denoising, distribution)
