"""The published code of CSpD (arXiv 2411.11925), which differs from its paper: for reproduction and comparison only.

What it does otherwise than `surrogate`, as measured on the code: the product of deviations is inverted in acceptance
and residual alike; squared distances are divided by 42 in the acceptance alone, so that nearly everything is accepted;
nodes that follow a rejected one are kept, drafted from a value that is no longer there; and where 100 candidates of a
residual fail, the vector is all zeros. (It draws no vector after a full path, as we do for every rule.)

What stands in the target's cache for a replaced vector is the drafted one: the published target keeps no cache. So what
is judged below a replaced vector, in its round and in all later ones, is off by an amount that only more passes could
tell: no drift is reported, except with `stop` (`surrogate`). The displacement is of each vector below those that it was
judged by.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from visspec.accept.coupled import accepted_path
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
        if not stop:
            self.traits = replace(self.traits, unmetered="vectors are judged below drafted ones that were replaced")

    def log_acceptance(
        self, ratio: Tensor, ratios: Tensor, log_product: Tensor, log_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        return (ratio - log_scale) / self.softness + log_scale - log_product, ratios + log_product[:, None]

    def select(self, overlap: Tensor, overlaps: Tensor) -> tuple[Tensor, Tensor]:
        return overlap, (~overlaps).long().argmax(dim=-1)  # the first of the residual

    def replacement(self, drawn: Tensor, missed: Tensor) -> Tensor:
        return drawn.masked_fill(missed[:, None], 0.0)

    def verdict(
        self, draft: Draft, ends: Tensor, accepted: Tensor, drift: Tensor, moved: Tensor, missed: Tensor
    ) -> Verdict:
        if self.stop:
            return super().verdict(draft, ends, accepted, drift, moved, missed)
        size, shape = draft.tree.size, draft.value.shape[:2]
        real = torch.ones(shape, dtype=torch.bool, device=ends.device) if draft.real is None else draft.real
        following = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)  # a drafted node comes next
        kept = accepted_path(draft, ends, following.flatten())
        values = torch.cat([draft.value[:, :1], ends.view(*shape, -1)[:, : size - 1]], dim=1)
        moved, missed = (part.view(shape).sum(dim=1) for part in (moved, missed))
        return replace(kept, displacement=moved, capped=missed, values=values)
