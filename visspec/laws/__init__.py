"""Laws: distributions of node values, one for each node of a batch.

The loop passes laws between target, drafter and rule without reading them. Operations on a law (sampling, residuals,
validation of a drafter's law) are methods of its class: `Categorical` for ids, `Denoising` for vectors, `Maps`
for maps of ids.
"""

from visspec.laws.base import Law, check_tensor
from visspec.laws.categorical import Categorical, categorical, draw, residual
from visspec.laws.denoising import Denoising, Steps, Trajectory, asked, denoising
from visspec.laws.maps import Maps, maps

__all__ = [
    "Categorical", "Denoising", "Law", "Maps", "Steps", "Trajectory", "asked", "categorical", "check_tensor",
    "denoising", "draw", "maps", "residual",
]  # fmt: skip
