"""Frechet distance of two sets of images: |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2) of their features.

It is called FID (Heusel et al. 2017, arXiv 1706.08500) only with the 2048 pool features of the 2015-12-05 Inception
graph, checked by hash; with any other extractor it is `FD[extractor]`. It is biased upward by roughly 1/N, so only
compare equal N, relative to the noise floor, the distance between two halves of the reference.
"""

import torch
from torch import Tensor

from visspec.eval.metrics.features import FeatureExtractor, FeatureTable, metric_name, result


def from_features(first: Tensor, second: Tensor) -> float:
    """Return the squared Frechet distance of Gaussians fitted to two feature tables (n, d) and (m, d), in float64."""
    (mean_a, factor_a), (mean_b, factor_b) = _fit(first), _fit(second)
    # With S = F^T F, tr (S1 S2)^(1/2) is the nuclear norm of F1 F2^T: no square root of a nearly singular product.
    shared = float(torch.linalg.svdvals(factor_a @ factor_b.T).sum())
    spread = float(factor_a.square().sum() + factor_b.square().sum())
    return float((mean_a - mean_b).square().sum()) + spread - 2 * shared


def _fit(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (d,) and a factor F, with at most d rows, where F^T F is the unbiased covariance (d, d)."""
    if len(features) < 2 or not torch.isfinite(features).all():
        raise ValueError(f"features must be finite and of at least 2 images, not of {len(features)}.")
    rows = features.double()
    mean = rows.mean(0)
    factor = (rows - mean) / (len(rows) - 1) ** 0.5
    return mean, torch.linalg.qr(factor, mode="r").R if len(rows) > rows.shape[1] else factor


def compare(generated: FeatureTable, reference: FeatureTable, extractor: FeatureExtractor) -> dict:
    """Return the result row of two folders. `noise_floor` is the distance between the reference's two halves (every
    second image) of `noise_floor_n` images each. `noise_floor_here` scales it, as 1/N, to the two counts of this
    comparison.
    """
    x, y = generated.features, reference.features
    if len(y) < 4:
        raise ValueError(f"a reference needs at least 4 images, not {len(y)}.")
    floor, half = from_features(y[0::2], y[1::2]), len(y) // 2
    here = floor * half / 2 * (1 / len(x) + 1 / len(y))
    values = {"value": from_features(x, y), "noise_floor": floor, "noise_floor_n": half, "noise_floor_here": here}
    return result(metric_name(extractor), generated, reference, extractor, **values)
