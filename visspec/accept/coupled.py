"""Exact acceptance of drafted vectors, by coupling the chains that sample them.

At every step of a chain the target's next point is drawn from a maximal coupling of its own Gaussian with the drafter's
realised point. Chains that have separated may meet again. A vector is accepted if both chains end at the same point.
The first vector that differs ends the path and is the target's own draw. After a full path the target draws the bonus
vector alone. Given the earlier vectors, the distribution of each vector is the target's, whatever was drafted.

The declared target adds noise in its last step too; otherwise no draft would ever equal the target's draw. With
`window` > 1 the head takes several steps of each chain in one pass (`denoise`), which is also exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from visspec.accept import denoise
from visspec.accept.graphed_passes import GraphedPasses
from visspec.distributions import Denoising
from visspec.sampling import Normals
from visspec.types import Acceptance, Capabilities, Draft, RuleTraits, Scores, Verdict

CANDIDATES = 8  # candidates for the residual of a step, needed if deviations are predicted and so differ


class Coupled(Acceptance):
    """Coupling of denoising chains, exact for the declared target.

    Args:
        window: Maximum number of points of each chain in a pass of the head.
        merge: Number of last steps in which separated chains may meet again.
    """

    traits = RuleTraits("exact for the declared target", judges_draws=True, chains_only=True, distribution=Denoising)
    graphs: GraphedPasses | None = None  # records passes of the head as CUDA graphs, if enabled

    def __init__(self, window: int = 32, merge: int = 40):
        for name, value, least in (("window", window, 1), ("merge", merge, 0)):
            if value < least:
                raise ValueError(f"{name}: got {value}, expected at least {least}.")
        if window > denoise.MOST:
            raise ValueError(f"window: got {window}, expected at most {denoise.MOST}.")
        self.window, self.merge = window, merge

    def bind(self, capabilities: Capabilities) -> None:
        super().bind(capabilities)
        if capabilities.steps is not None and not capabilities.steps.noisy:
            raise ValueError("acceptance: coupled needs noise in the target's last step. Pass last_noise=True.")

    def allow_graphs(self) -> None:
        self.graphs = GraphedPasses()

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> Normals:
        steps = self.capabilities.steps
        assert steps is not None
        count, size = self.capabilities.chains
        return Normals(generators, count, size, (0, 0) if steps.fixed else (count, CANDIDATES))

    def __call__(self, draft: Draft, scores: Scores, noise: Normals | None) -> Verdict:
        assert noise is not None
        distribution, nodes = cast(Denoising, scores.distribution), draft.tree.size
        numbers = noise.numbers(nodes)
        if draft.q is None and self.window == 1:
            ends = distribution.value(numbers.start, numbers.steps)
            return accepted_path(draft, ends, torch.zeros_like(ends[:, 0], dtype=torch.bool))
        drafted = denoise.child_trajectories(draft)
        results = denoise.run(distribution, numbers, drafted, nodes, self.window, self.merge, self.graphs)
        return accepted_path(draft, *results)


def accepted_path(draft: Draft, ends_Md: Tensor, accepted_M: Tensor) -> Verdict:
    """Return the path of a chain up to the first node whose next value is not the drafted one, for M = B N nodes."""
    size = draft.tree.size
    index = torch.arange(size, device=ends_Md.device)
    accepted_BN = accepted_M.view(-1, size) & (index < size - 1)
    length_B = accepted_BN.long().cumprod(dim=1).sum(dim=1) + 1
    path_BN = torch.where(index < length_B[:, None], index, -1)
    last = (length_B - 1)[:, None, None].expand(-1, 1, ends_Md.shape[-1])
    return Verdict(path_BN, length_B, ends_Md.view(*accepted_BN.shape, -1).gather(1, last)[:, 0])
