"""The published code of CSpD (arXiv 2411.11925), which differs from its paper: for reproduction and comparison only.

What it does otherwise than `surrogate`, as measured on the code: the product of deviations is inverted in acceptance
and residual alike; squared distances are divided by 42 in the acceptance alone, so that nearly everything is accepted;
nodes that follow a rejected one are kept, drafted from a value that is no longer there; and where 100 candidates of a
residual fail, the vector is all zeros. (It draws no vector after a full path, as we do for every rule.)

What stands in the target's cache for a replaced vector is the drafted one: the published target keeps no cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from visspec.accept.coupled import followed
from visspec.accept.surrogate import Surrogate
from visspec.types import Draft, Verdict

SOFTNESS = 42.0
TRIES = 100


class Legacy(Surrogate):
    """tries: candidates of a residual before it becomes zeros. stop: end the path at the first rejection, as in the
    paper.
    """

    def __init__(self, tries: int = TRIES, softness: float = SOFTNESS, stop: bool = False):
        super().__init__(tries)
        if softness <= 0:
            raise ValueError(f"softness: got {softness}, expected a positive number")
        self.softness, self.stop = softness, stop

    def ratio(self, log_product: Tensor, half_p: Tensor, half_q: Tensor, log_scale: Tensor) -> Tensor:
        return -log_product + log_scale + (half_q - half_p) / self.softness

    def weight(self, log_product: Tensor) -> Tensor:
        return -log_product

    def replacement(self, own: Tensor) -> Tensor:
        return torch.zeros_like(own)

    def verdict(
        self, draft: Draft, ends: Tensor, accepted: Tensor, drift: Tensor, moved: Tensor, missed: Tensor
    ) -> Verdict:
        if self.stop:
            return super().verdict(draft, ends, accepted, drift, moved, missed)
        size, shape = draft.tree.size, draft.value.shape[:2]
        real = torch.ones(shape, dtype=torch.bool, device=ends.device) if draft.real is None else draft.real
        following = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)  # a drafted node comes next
        kept = followed(draft, ends, following.flatten())
        values = torch.cat([draft.value[:, :1], ends.view(*shape, -1)[:, : size - 1]], dim=1)
        drift, moved, missed = (part.view(shape).sum(dim=1) for part in (drift, moved, missed))
        return replace(kept, drift=drift, displacement=moved, capped=missed, values=values)
