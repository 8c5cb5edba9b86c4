"""Couplings of two Gaussians: given a draw from one, a draw from the other that equals it as often as possible.

Shapes: (..., d) points, (...) or (..., 1 or d) as said; all in log space. In both couplings the point is used once, so
the result is an exact draw from N(mean, sigma^2) whatever it is coupled to.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def reflection_coupling(
    normal: Tensor, other: Tensor, mean: Tensor, log_sigma: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Maximal coupling of Gaussians of one deviation, by reflection (Bou-Rabee, Eberle, Zimmer 2020; for denoising
    chains: De Bortoli et al., arXiv 2501.05370, algorithm 4).

    normal: standardised draw from N(other, sigma^2); coin (...): log of a uniform number. Returns the draw from
    N(mean, sigma^2) (..., d), and whether it is the same point (...); the caller keeps the first point where it is.
    """
    sigma = log_sigma.exp()
    shift = (other - mean) / sigma
    along = (normal * shift).sum(dim=-1)
    squared = (shift * shift).sum(dim=-1)
    same = uniform <= -(along + squared / 2)  # log of the ratio of densities at the point
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
    """Nearly maximal coupling of Gaussians of different deviations, without a loop.

    point: a draw from N(other, exp(log_other)^2). coin (...), chances (..., K): logs of uniform numbers; candidates
    (..., K, d): normal numbers. A point of q is of the overlap with probability min(1, p/q), a candidate, drawn from p,
    with probability min(1, q/p); otherwise it is of the residual of its distribution. A point of the overlap is kept,
    else the first candidate of the residual is taken, and if there is none the first candidate, of the overlap. That
    would give the overlap TV (1 - TV)^K too much of p; the equally likely event that the point is of the overlap and of
    all candidates the last alone is not, gives its candidate instead. So the distribution is p for every K, and the
    point is kept with probability 1 - TV - TV (1 - TV)^K.
    """
    draws = mean[..., None, :] + log_sigma.exp()[..., None, :] * candidates
    ratio, ratios = log_ratios(point, draws, other, log_other, mean, log_sigma)
    same, taken = select_candidate(uniform <= ratio, chances <= ratios)
    return candidate(draws, taken), same


def log_ratios(
    point: Tensor, draws: Tensor, other: Tensor, log_other: Tensor, mean: Tensor, log_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """log p/q of the point (...) and log q/p of the candidates (..., K), p = N(mean, exp(log_sigma)^2), q likewise."""
    ratio = log_density(point, mean, log_sigma) - log_density(point, other, log_other)
    ratios = log_density(draws, other[..., None, :], log_other[..., None, :])
    return ratio, ratios - log_density(draws, mean[..., None, :], log_sigma[..., None, :])


def select_candidate(overlap: Tensor, overlaps: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the point is kept, and the index of the candidate in its place (...), by which of them are of the overlap
    of their two distributions: the point (...), the candidates (..., K).
    """
    first = overlaps.long().cumprod(dim=-1).sum(dim=-1)  # candidates of the overlap before the first of the residual
    count = overlaps.shape[-1]
    return overlap & (first != count - 1), torch.where(first == count, 0, first)


def candidate(draws: Tensor, index: Tensor) -> Tensor:
    """The candidate (..., d) of that index (...) among draws (..., K, d)."""
    return draws.gather(-2, index[..., None, None].expand(*index.shape, 1, draws.shape[-1]))[..., 0, :]


def log_density(x: Tensor, mean: Tensor, log_sigma: Tensor) -> Tensor:
    """log N(x; mean, sigma^2) (...) up to a constant, deviations (..., 1 or d)."""
    half = ((x - mean) * (-log_sigma).exp()).square().sum(dim=-1) / 2
    return -half - log_sigma.expand_as(mean).sum(dim=-1)
