"""Distributions of node values, one for each node of a batch. The loop passes distributions between target, drafter and
rule without reading them. Operations such as sampling, residuals and the validation of a drafter's distribution are
methods of each class: `Categorical` for ids, `Denoising` for vectors, `Maps` for maps of ids.
"""

from visspec.distributions.base import Distribution, check_tensor
from visspec.distributions.categorical import Categorical, categorical, draw, residual
from visspec.distributions.denoising import Denoising, DenoisingSteps, Trajectory, denoising
from visspec.distributions.maps import Maps, maps

__all__ = [
    "Categorical",
    "Denoising",
    "DenoisingSteps",
    "Distribution",
    "Maps",
    "Trajectory",
    "categorical",
    "check_tensor",
    "denoising",
    "draw",
    "maps",
    "residual",
]
