"""Kernel Inception distance (Binkowski et al. 2018, arXiv 1801.01401): unbiased MMD^2 with a cubic polynomial kernel.

k(x, y) = (x . y / d + 1)^3, averaged over random subsets, computed by torch-fidelity. It is called KID only with the
verified Inception features.
"""

import torch

from visspec.eval.metrics.features import FeatureExtractor, FeatureTable, metric_name, result

SUBSETS = 100
SUBSET_SIZE = 1000
SEED = 2020


def from_features(
    first: torch.Tensor, second: torch.Tensor, subsets: int = SUBSETS, subset_size: int = SUBSET_SIZE, seed: int = SEED
) -> tuple[float, float]:
    """Return mean and standard deviation of the estimate over subsets."""
    if subset_size < 2:  # NaN for a single image
        raise ValueError(f"the unbiased estimate needs at least 2 images on each side, not {subset_size}.")
    from torch_fidelity.metric_kid import kid_features_to_metric

    settings = {"kid_subsets": subsets, "kid_subset_size": subset_size, "rng_seed": seed, "verbose": False}
    figures = kid_features_to_metric(first.double(), second.double(), **settings)
    return figures["kernel_inception_distance_mean"], figures["kernel_inception_distance_std"]


def compare(
    generated: FeatureTable,
    reference: FeatureTable,
    extractor: FeatureExtractor,
    subsets: int = SUBSETS,
    subset_size: int | None = None,
) -> dict:
    """Return the result row of two folders. A subset has 1,000 images by default, or all if there are fewer."""
    x, y = generated.features, reference.features
    size = subset_size or min(SUBSET_SIZE, len(x), len(y))
    mean, std = from_features(x, y, subsets, size)
    values = {"value": mean, "std": std, "subsets": subsets, "subset_size": size}
    return result(metric_name(extractor, "KID", "KID"), generated, reference, extractor, **values)
