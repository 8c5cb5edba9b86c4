"""Distributions of node values, one for each node of a batch: `Categorical` for ids, `Denoising` for vectors, `Maps`
for maps of ids.

The loop passes distributions between target, drafter and rule without reading them. Operations such as sampling,
residuals and the validation of a drafter's distribution are methods of each class.
Shapes: B rows, N nodes, V vocabulary. Vectors: S steps, d size; M rows of a batch of chains, W points of each chain.
Maps: S codes of the largest map in a pass; smaller maps are padded at the end.
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
from torch.nn import functional as F

SUM_TOLERANCE = 1e-3  # a float32 softmax over 256k entries sums to one within 1e-4
BLOCK = 128  # ids of a block of `argmax` and `topk`
LEAST = 64 * BLOCK  # two steps are slower for fewer ids

Predict = Callable[[Tensor, Tensor | int, Tensor | None], tuple[Tensor, Tensor | None]]


class Distribution:
    """Base class. `width`: maximum random numbers per sample."""

    @property
    def width(self) -> int:
        raise NotImplementedError

    @classmethod
    def limits(cls, capabilities: Any, device: torch.device | str) -> Tensor:
        """Return data about a target (`types.Capabilities`) for `drafted` and `sanitize`, computed once."""
        raise NotImplementedError

    @classmethod
    def check_drafted(cls, value: Tensor, shape: tuple[int, int], limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Check drafted values of (B, N) nodes. Returns sanitised values, which of them are valid, and which may be
        drafted, both (B, N) bool. Raises ValueError if `value` is not a tensor of such values.
        """
        raise NotImplementedError

    def sanitize(self, value: Tensor, limits: Tensor) -> tuple[Distribution, Tensor]:
        """Return the sanitised distribution, and where it is valid, (B, N) bool. Raises ValueError for a wrong shape or
        dtype.
        """
        raise NotImplementedError


def check_tensor(
    name: str, value: object, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Raise ValueError unless `value` is a tensor of this shape, dtype (None: floating) and device."""
    if not isinstance(value, Tensor) or value.device != device:
        what = f"a tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: got {what}, expected a tensor on {device}.")
    if value.dtype != dtype if dtype else not value.is_floating_point():
        raise ValueError(f"{name}: got {value.dtype}, expected {dtype or 'floats'}.")
    if value.shape != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {tuple(shape)}.")


class Categorical(Distribution):
    """Distributions over V ids, from logits or probabilities, float32 (..., V). The other form is computed on use."""

    __slots__ = ("_logits", "_p")

    def __init__(self, logits: Tensor | None = None, *, p: Tensor | None = None):
        self._logits, self._p = logits, p

    @property
    def logits(self) -> Tensor:
        if self._logits is None:
            self._logits = self.p.log()
        return self._logits

    @property
    def p(self) -> Tensor:
        if self._p is None:
            assert self._logits is not None
            self._p = torch.softmax(self._logits, dim=-1)
        return self._p

    @property
    def width(self) -> int:
        table = self._p if self._logits is None else self._logits
        assert table is not None
        return table.shape[-1]

    @classmethod
    def chain(cls, distributions: Sequence[Categorical]) -> Categorical:
        """Stack the distributions (B, V) of a chain's levels to (B, 1 + levels, V). The root's entry is unused."""
        levels = [distribution.p for distribution in distributions]
        return cls(p=torch.stack([torch.zeros_like(levels[0]), *levels], dim=1))

    @classmethod
    def limits(cls, capabilities: Any, device: torch.device | str) -> Tensor:
        allowed_V = torch.ones(capabilities.vocab, dtype=torch.bool, device=device)
        allowed_V[[i for i in capabilities.never_drafted if 0 <= i < len(allowed_V)]] = False
        return allowed_V

    @classmethod
    def check_drafted(cls, value: Tensor, shape: tuple[int, int], limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_tensor("value", value, shape, torch.long, limits.device)
        safe = value.clamp(0, len(limits) - 1)
        return safe, safe == value, limits[safe]

    def sanitize(self, value: Tensor, limits: Tensor) -> tuple[Categorical, Tensor]:
        check_tensor("q", self.p, (*value.shape, len(limits)), None, limits.device)
        q = self.p.float()
        sums = (q.sum(dim=-1) - 1.0).abs() <= SUM_TOLERANCE
        possible = q.gather(-1, value[..., None])[..., 0] > 0
        lawful = q.isfinite().all(dim=-1) & (q >= 0).all(dim=-1) & sums & possible
        return Categorical(p=torch.where(lawful[..., None], q, 0.0)), lawful


def categorical(distribution: Distribution) -> Categorical:
    """Cast a distribution to `Categorical`, for code that only handles ids. `setup.check` has checked the type."""
    return cast(Categorical, distribution)


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Sample ids by inverse CDF from probabilities p (..., V) and uniforms u (...), never an id of probability zero."""
    total = p.cumsum(dim=-1)
    pick = torch.searchsorted(total, (u * total[..., -1])[..., None].contiguous(), right=True)[..., 0]
    last = (p > 0).long().mul(torch.arange(p.shape[-1], device=p.device)).amax(dim=-1)
    return torch.minimum(pick, last)


def residual(p: Tensor, qf: Tensor) -> Tensor:
    """Return the distribution after a rejection, proportional to [p - q f]+; p itself if that is zero (p = q f)."""
    rest = (p - qf).clamp_(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def _blocks(scores: Tensor) -> Tensor | None:
    """Return the scores in blocks, (..., V / BLOCK, BLOCK), or None if one step is faster."""
    vocab = scores.shape[-1]
    if scores.device.type != "cpu" or vocab < LEAST or vocab % BLOCK:
        return None
    return scores.unflatten(-1, (-1, BLOCK))


def argmax(scores: Tensor) -> Tensor:
    """Return `scores.argmax(dim=-1)`, the first of the highest.

    On a CPU, torch's `argmax` and `topk` visit a row id by id. Selecting the best blocks of ids first and then the ids
    in them takes a quarter of the time for 49,152 ids and an eighth for 151,936.
    """
    if (blocks := _blocks(scores)) is None:
        return scores.argmax(dim=-1)
    best = blocks.amax(dim=-1).argmax(dim=-1)
    block = blocks.gather(-2, best[..., None, None].expand(*best.shape, 1, BLOCK)).squeeze(-2)
    return best * BLOCK + block.argmax(dim=-1)


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `scores.topk(k, dim=-1)`: values and ids, highest first. Ties at the end are broken arbitrarily."""
    blocks = _blocks(scores)
    if blocks is None or k > BLOCK // 4:
        values, ids = scores.topk(k, dim=-1)
        return values, ids
    best = blocks.amax(dim=-1).topk(k, dim=-1).indices
    candidates = blocks.gather(-2, best[..., None].expand(*best.shape, BLOCK)).flatten(-2)
    values, place = candidates.topk(k, dim=-1)
    return values, best.gather(-1, place // BLOCK) * BLOCK + place % BLOCK


@dataclass(frozen=True, eq=False)
class DenoisingSteps:
    """Coefficients of the S steps of a chain of Gaussians, as in a diffusion head, all (S,).

    Step i goes from x_i to x_(i+1), from x_0 ~ N(0, I) to the value x_S:

        x_(i+1) = keep_i x_i + move_i o(x_i, i) + sigma_i z_i,    z_i ~ N(0, I)

    where o is the network's estimate of the value (the "predicted x0" of DDPM), and log sigma_i is fixed or lies
    between the bounds `low` and `high`, at a share that the network predicts (iDDPM, Nichol and Dhariwal 2021, equation
    15). The bounds are equal if it is fixed. `noisy` is whether the last step adds noise; without it the value given
    x_(S-1) is a point mass, and no draft would ever equal it.
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
            sigma between its bounds (None if deviations are fixed). None: a method of the subclass.
        steps: The coefficients.
        shape: (B, N).
        size: The size d of a vector.
        calls: Counts calls of `predict` under `name`.
        name: The name.
    """

    def __init__(
        self,
        predict: Predict | None,
        steps: DenoisingSteps,
        shape: tuple[int, int],
        size: int,
        calls: Counter[str] | None = None,
        name: str = "head",
    ):
        if predict is not None:
            self.predict = predict
        self.steps, self.shape, self.size = steps, shape, size
        self.calls, self.name = Counter() if calls is None else calls, name

    @property
    def width(self) -> int:
        """Number of normal numbers for one sample."""
        return (len(self.steps) + 1) * self.size

    def kernel(self, x_MWd: Tensor, step_MW: Tensor, chains_M: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return each next point's mean (M, W, d), log sigma (M, W, 1 or d), and the estimated value (M, W, d)."""
        value, share = self.estimate(x_MWd, step_MW, chains_M)
        steps = self.steps
        mean = steps.keep[step_MW][..., None] * x_MWd + steps.move[step_MW][..., None] * value
        log_sigma = steps.low[step_MW][..., None]
        if share is not None:
            log_sigma = log_sigma + share * (steps.high[step_MW][..., None] - log_sigma)
        return mean, log_sigma, value

    def recordable(self) -> tuple[tuple, dict[str, tuple[Tensor, int]]] | None:
        """Return what a CUDA graph of `kernel` depends on: all host values, and the attributes that are tensors of
        these distributions alone, each with its dimension of chains. None means that it can't be recorded.
        """
        return None

    def estimate(
        self, x_MWd: Tensor, step_MW: Tensor | int, chains_M: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Call `predict` and count the call."""
        self.calls[self.name] += 1
        return self.predict(x_MWd, step_MW, chains_M)

    def sample(self, start_Md: Tensor, normal_MSd: Tensor) -> Trajectory:
        """Sample one value from each of the M = B N distributions, step by step, with the given normal numbers."""
        points, means, deviations = zip(*self._walk(start_Md, normal_MSd))
        fixed = deviations[0] is None
        log_sigma = self.steps.low[:, None].expand(len(start_Md), -1, 1) if fixed else torch.stack(deviations, 1)
        return Trajectory(torch.stack((start_Md, *points), 1), torch.stack(means, 1), log_sigma)

    def value(self, start_Md: Tensor, normal_MSd: Tensor) -> Tensor:
        """Return the values of `sample`, (M, d)."""
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
    def check_drafted(cls, value: Tensor, shape: tuple[int, int], limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


class Maps(Distribution):
    """Distributions over maps of codes, such as the scales of VAR, from float32 logits (B, N, S, V). Node (b, n) has
    count (B, N) codes, which are independent given the earlier nodes. Values: (B, N, S).
    """

    def __init__(self, logits_BNSV: Tensor, count_BN: Tensor):
        self.logits, self.count = logits_BNSV, count_BN

    @property
    def p(self) -> Tensor:
        return torch.softmax(self.logits, dim=-1)

    @property
    def real(self) -> Tensor:
        """(B, N, S) bool: false at padding."""
        return torch.arange(self.logits.shape[2], device=self.count.device) < self.count[..., None]

    @property
    def width(self) -> int:
        return self.logits.shape[-1]

    @classmethod
    def chain(cls, levels: list[Maps], size: int) -> Maps:
        """Stack a chain's distributions (B, 1) to (B, 1 + levels), padded to `size` codes. The root's is unused."""
        padded = [F.pad(distribution.logits, (0, 0, 0, size - distribution.logits.shape[2])) for distribution in levels]
        counts = [distribution.count for distribution in levels]
        stacks = (torch.cat([torch.zeros_like(parts[0]), *parts], dim=1) for parts in (padded, counts))
        return cls(*stacks)

    @classmethod
    def limits(cls, capabilities: Any, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor (S, V), whose shape is used to check drafts."""
        return torch.empty(max(capabilities.scales), capabilities.vocab, device=device)

    @classmethod
    def check_drafted(cls, value: Tensor, shape: tuple[int, int], limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_tensor("value", value, (*shape, len(limits)), torch.long, limits.device)
        safe = value.clamp(0, limits.shape[1] - 1)
        possible_BN = (safe == value).all(dim=-1)
        return safe, possible_BN, torch.ones_like(possible_BN)

    def sanitize(self, value: Tensor, limits: Tensor) -> tuple[Maps, Tensor]:
        check_tensor("q.logits", self.logits, (*value.shape, limits.shape[1]), None, limits.device)
        check_tensor("q.count", self.count, value.shape[:2], torch.long, limits.device)
        logits = self.logits.float()
        possible = logits.gather(-1, value[..., None])[..., 0].isfinite()
        sound = ~(logits.isnan() | logits.isposinf()).any(dim=-1)
        lawful_BN = ((possible & sound) | ~self.real).all(dim=-1)
        return Maps(torch.where(lawful_BN[..., None, None], logits, 0.0), self.count), lawful_BN
