"""Distance between images and others of the same prompts: MMD^2 with KID's cubic kernel, over pairs.

The influence of the prompt cancels in a pair, so fewer images suffice than for a distance of two sets. If both sides
have the same distribution given the prompt, swapping pairs at random does not change the distribution of the value.
`floor` is the 95 % quantile under such swaps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SWAPS = 2000


class PairedDistance(NamedTuple):
    """`value` is unbiased, so it may be negative. `floor` is its 95 % quantile if there is no difference."""

    value: float
    floor: float


def from_features(first: Tensor, second: Tensor, seed: int = 0) -> PairedDistance:
    """Compute the distance from features (n, d), whose rows belong to the same prompts."""
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
