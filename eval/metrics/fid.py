"""Frechet distance of two sets of images: |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2) of their features.

It is called FID (Heusel et al. 2017, arXiv 1706.08500) only with the 2048 pool features of the 2015-12-05 Inception
graph, checked by hash; with any other extractor it is `FD[extractor]`. It is biased upward by roughly 1/N: compare
equal N only, and relative to the noise floor, the distance between two halves of the reference.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from visspec.eval.metrics.features import FeatureExtractor, gather, metric_name
from visspec.eval.metrics.references import Reference
from visspec.eval.metrics.statistics import GaussianStats


def _root(matrix: torch.Tensor) -> torch.Tensor:
    """Symmetric square root of a positive semi-definite matrix (d, d)."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def trace_of_root(a: GaussianStats, b: GaussianStats) -> float:
    """tr (S1 S2)^(1/2), the nuclear norm of F1 F2^T for any factors S = F^T F.

    With at most d rows the centred rows themselves are the factor (exact to rounding, where eigenvalues of the
    singular product would err by 1e-8 relative); otherwise it is the sum of the roots of the eigenvalues of the
    symmetric S1^(1/2) S2 S1^(1/2).
    """
    first, second = a.factor(), b.factor()
    if first is None and second is None:
        root = _root(a.covariance)
        product = root @ b.covariance @ root
        return float(torch.linalg.eigvalsh((product + product.T) / 2).clamp_min(0).sqrt().sum())
    first = _root(a.covariance) if first is None else first
    second = _root(b.covariance) if second is None else second
    return float(torch.linalg.svdvals(first @ second.T).sum())


def frechet_distance(a: GaussianStats, b: GaussianStats) -> float:
    """Squared Frechet distance of the Gaussians fitted to two feature sets (unbiased covariances), in float64."""
    if a.dim != b.dim:
        raise ValueError(f"features of {a.dim} and {b.dim} dimensions cannot be compared")
    traces = float(a.covariance.diagonal().sum() + b.covariance.diagonal().sum())
    return float((a.mean - b.mean).square().sum()) + traces - 2 * trace_of_root(a, b)


def from_features(first: torch.Tensor, second: torch.Tensor) -> float:
    """The distance of two feature tables (n, d) and (m, d)."""
    return frechet_distance(GaussianStats(first.shape[1]).update(first), GaussianStats(second.shape[1]).update(second))


@dataclass(frozen=True)
class FrechetResult:
    """A distance with the data needed to interpret it.

    `noise_floor` is the distance between the reference's two halves of `noise_floor_n` images each; `noise_floor_here`
    scales it, as 1/N, to the two counts of this comparison.
    """

    name: str
    value: float
    n: int
    n_reference: int
    noise_floor: float
    noise_floor_n: int
    noise_floor_here: float
    extractor: str
    fingerprint: str
    preprocessing: str
    problems: tuple[str, ...] = ()


def compare(stats: GaussianStats, reference: Reference, extractor: FeatureExtractor, problems=()) -> FrechetResult:
    """Distance of statistics to a reference; ValueError if the reference was made with another extractor."""
    reference.require(extractor)
    floor = frechet_distance(*reference.halves)
    half = min(part.n for part in reference.halves)
    here = floor * half / 2 * (1 / stats.n + 1 / reference.stats.n)
    notes = list(problems)
    if stats.n != reference.stats.n:
        notes.append(f"different counts: {stats.n} images against {reference.stats.n} of the reference")
    value, counts = frechet_distance(stats, reference.stats), (stats.n, reference.stats.n)
    described = extractor.name, extractor.fingerprint, extractor.preprocessing
    return FrechetResult(metric_name(extractor), value, *counts, floor, half, here, *described, tuple(notes))


def from_folder(
    folder: str | Path, reference: Reference, extractor: FeatureExtractor, batch_size: int = 32
) -> FrechetResult:
    """Distance of a folder's images to a reference; broken files are listed in `problems` and excluded from N."""
    stats = GaussianStats(extractor.dim)
    gathered = gather(folder, extractor, stats.update, batch_size)
    return compare(stats, reference, extractor, gathered.problems)
