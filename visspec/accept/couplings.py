"""Couplings of two Gaussians: given a draw from one, draw from the other so that both are equal as often as possible.
Shapes: (..., d) points, (...) or (..., 1 or d) parameters; everything is in log space. Both couplings use the point
once, so the result is an exact draw from N(mean, sigma^2), whatever it is coupled to.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def reflection_coupling(
    normal: Tensor, other: Tensor, mean: Tensor, log_sigma: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from the maximal coupling of Gaussians of equal deviation, by reflection (Bou-Rabee, Eberle, Zimmer 2020;
    for denoising chains: De Bortoli et al., arXiv 2501.05370, algorithm 4).

    `normal` is a standardised draw from N(other, sigma^2), `uniform` (...) the log of a uniform number. Returns the
    draw from N(mean, sigma^2) (..., d), and whether it is the same point (...); if so, the caller keeps the first
    point.
    """
    sigma = log_sigma.exp()
    shift = (other - mean) / sigma
    along = (normal * shift).sum(dim=-1)
    squared = (shift * shift).sum(dim=-1)
    same = uniform <= -(along + squared / 2)  # log density ratio at the point
    mirror = normal - 2 * (along / squared.clamp(min=TINY))[..., None] * shift
    return torch.addcmul(mean, sigma, mirror), same


def candidate_coupling(
    point: Tensor,
    other: Tensor,
    log_other: Tensor,
    mean: Tensor,
    log_sigma: Tensor,
    uniform: Tensor,
    candidates: Tensor,
    chances: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw from a nearly maximal coupling of Gaussians of different deviations, without a loop.

    A point of q belongs to the overlap with probability min(1, p/q), and a candidate, drawn from p, with probability
    min(1, q/p); otherwise each belongs to the residual of its distribution. A point of the overlap is kept. Otherwise
    the first candidate of the residual replaces it, or the first candidate if all belong to the overlap. That alone
    would give the overlap TV (1 - TV)^K too much of p. To compensate, the point is replaced by its last candidate in an
    equally likely event: the point belongs to the overlap, and of all candidates only the last does not. So the
    distribution is p for every K, and the point is kept with probability 1 - TV - TV (1 - TV)^K.

    Args:
        point: A draw from N(other, exp(log_other)^2).
        uniform: Log of a uniform number (...).
        candidates: Normal numbers (..., K, d).
        chances: Logs of uniform numbers (..., K).
    """
    draws = mean[..., None, :] + log_sigma.exp()[..., None, :] * candidates
    ratio, ratios = log_ratios(point, draws, other, log_other, mean, log_sigma)
    same, taken = select_candidate(uniform <= ratio, chances <= ratios)
    return candidate(draws, taken), same


def log_ratios(
    point: Tensor, draws: Tensor, other: Tensor, log_other: Tensor, mean: Tensor, log_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log p/q of the point (...) and log q/p of the candidates (..., K), with p = N(mean, exp(log_sigma)^2)."""
    ratio = log_density(point, mean, log_sigma) - log_density(point, other, log_other)
    ratios = log_density(draws, other[..., None, :], log_other[..., None, :])
    return ratio, ratios - log_density(draws, mean[..., None, :], log_sigma[..., None, :])


def select_candidate(overlap: Tensor, overlaps: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether the point is kept, and the index (...) of the candidate that replaces it, given whether the point
    (...) and the candidates (..., K) belong to the overlap of their two distributions.
    """
    first = overlaps.long().cumprod(dim=-1).sum(dim=-1)  # number of candidates before the first one of the residual
    count = overlaps.shape[-1]
    return overlap & (first != count - 1), torch.where(first == count, 0, first)


def candidate(draws: Tensor, index: Tensor) -> Tensor:
    """Return the candidates (..., d) at these indices (...) among draws (..., K, d)."""
    return draws.gather(-2, index[..., None, None].expand(*index.shape, 1, draws.shape[-1]))[..., 0, :]


def log_density(x: Tensor, mean: Tensor, log_sigma: Tensor) -> Tensor:
    """Return log N(x; mean, sigma^2) (...) up to a constant; deviations are (..., 1 or d)."""
    half = ((x - mean) * (-log_sigma).exp()).square().sum(dim=-1) / 2
    return -half - log_sigma.expand_as(mean).sum(dim=-1)
