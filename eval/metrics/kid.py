"""Kernel Inception distance (Binkowski et al. 2018, arXiv 1801.01401): unbiased MMD^2 with a cubic polynomial kernel.

k(x, y) = (x . y / d + 1)^3, averaged over random subsets, computed by torch-fidelity. It is called KID only with the
verified Inception features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from visspec.eval.metrics.features import FeatureExtractor, FeatureTable, metric_name, result

SUBSETS = 100
SUBSET_SIZE = 1000
SEED = 2020
SWAPS = 2000  # of pairs at random


class PairedDistance(NamedTuple):
    """`value` is unbiased, so it may be negative. `floor` is its 95 % quantile if there is no difference."""

    value: float
    floor: float


def from_features(
    first: Tensor, second: Tensor, subsets: int = SUBSETS, subset_size: int = SUBSET_SIZE, seed: int = SEED
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


def paired(first: Tensor, second: Tensor, seed: int = 0) -> PairedDistance:
    """Return the distance of features (n, d) whose rows belong to the same prompts: MMD^2 over pairs.

    The influence of the prompt cancels in a pair, so fewer images suffice than for a distance of two sets. If both
    sides have the same distribution given the prompt, swapping pairs at random does not change the distribution of the
    value. `floor` is the 95 % quantile under such swaps.
    """
    n, d = first.shape
    f_Nd, g_Nd = first.double(), second.double()

    def kernel(a_Nd: Tensor, b_Nd: Tensor) -> Tensor:
        return (a_Nd @ b_Nd.T / d + 1) ** 3

    cross_NN = kernel(f_Nd, g_Nd)
    pairs_NN = (kernel(f_Nd, f_Nd) + kernel(g_Nd, g_Nd) - cross_NN - cross_NN.T).fill_diagonal_(0) / (n * (n - 1))
    generator = torch.Generator().manual_seed(seed)
    sign_SN = torch.randint(2, (SWAPS, n), generator=generator).to(pairs_NN) * 2 - 1
    swapped_S = ((sign_SN @ pairs_NN) * sign_SN).sum(dim=1)
    return PairedDistance(float(pairs_NN.sum()), float(swapped_S.quantile(0.95)))
