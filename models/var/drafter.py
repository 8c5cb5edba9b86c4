"""A smaller next-scale model as drafter of a larger one: it drafts several scales, one after another.

Accepted scales stay in its cache. Shapes: B images, N nodes, S codes of the largest scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Maps
from visspec.models.scales.blocks import NextScale
from visspec.models.scales.reading import ConditionState, Mark
from visspec.models.scales.target import ScaleImages, check_alike
from visspec.models.var.layout import VARImageModel, check_codebook
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict


class SmallVAR(Drafter):
    """small: a network of the target's class with its codes, scales and prompts. Guidance, temperature, top-k and top-p
    are applied as in the target.
    """

    traits = DrafterTraits(levels=2, distribution=Maps)
    family: ScaleImages  # the target's family, set by `attach`

    def __init__(self, small: NextScale):
        self.small = small

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: VARImageModel | NextScale) -> SmallVAR:
        """Load a model's folder, strictly. Raises ValueError if both are models with different codebooks.

        Args:
            target: A model, for its device, dtype and codebook.
        """
        model: Any = VARImageModel.read(folder, target.dtype)
        model = model.to(target.device)
        if isinstance(target, VARImageModel):
            check_codebook("drafter", model, target)
        return cls(model.var)

    def attach(self, target: ScaleImages) -> None:
        """Attach to a target. Raises ValueError unless both generate the same maps, and the target is a plain model."""
        check_alike("drafter", self.small, target.model)
        if not target.plain:
            raise ValueError("drafter: got one with a refiner or a budget, which draw one scale at a time.")
        self.family = target

    def start(self, state: State, scores: Scores) -> None:
        prompt, live = state.request.inputs, state.rows
        condition = prompt.rows(state.request.sampling.guidance != 1.0)
        reading = ConditionState(self.small, self.family.codec.quantize, condition, len(prompt))
        reading.read()
        reading.select(live)
        state.calls["draft"] += 1
        state.memory = SmallVARState(reading, [[own] for own in state.pending])

    def propose(self, state: State, depth: int) -> Draft:
        memory: SmallVARState = state.memory
        depth = min(depth, state.budget - 1)
        if depth < 1:
            return trees.empty_draft(state.pending)
        node, distributions = self._catch_up(state, memory)
        images, size = len(state.rows), state.pending.shape[1]
        values: list[Tensor] = []
        laws: list[Maps] = []
        for level in range(depth):
            if level:
                groups = memory.reading.read(values[-1][:, None])
                memory.reading.keep([1] * images)
                memory.marks.append(memory.reading.mark())
                node, distributions = [0] * images, self.family.distributions(state, groups, 1)
                state.calls["draft"] += 1
            distribution = _latest(distributions, node)
            if state.noise is None:
                codes_BS, q = distribution.logits[:, 0].argmax(-1), None
            else:
                codes_BS, q = state.noise.draft(distribution, level)
            codes_BS = codes_BS.masked_fill(~distribution.real[:, 0, : codes_BS.shape[1]], 0)
            values.append(F.pad(codes_BS, (0, size - codes_BS.shape[1])))
            laws += [] if q is None else [q]
        return trees.chain_draft(state.pending, torch.stack(values, 1), Maps.chain(laws, size) if laws else None)

    def _catch_up(self, state: State, memory: SmallVARState) -> tuple[list[int], Maps]:
        """Read what was committed since the last draft. Returns each image's last node, and the distributions."""
        unread, size = memory.unread, state.pending.shape[1]
        most = max(map(len, unread))
        none = state.pending.new_zeros(size)
        value_BNS = torch.stack([torch.stack([*maps, *[none] * (most - len(maps))]) for maps in unread])
        groups = memory.reading.read(value_BNS)
        counts = [len(maps) for maps in unread]
        memory.reading.keep(counts)
        memory.marks, memory.unread = [memory.reading.mark()], [[] for _ in unread]
        state.calls["draft"] += 1
        return [count - 1 for count in counts], self.family.distributions(state, groups, most)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Keep the state of accepted scales; queue the others and the next one."""
        memory: SmallVARState = state.memory
        lengths, count = [len(path) for path in outcome.path], len(memory.marks)
        if count:
            memory.reading.back([memory.marks[min(n, count) - 1] for n in lengths])
        memory.unread = [
            [*unread, *draft.value[b, max(1, count) : n], verdict.next[b]]
            for b, (unread, n) in enumerate(zip(memory.unread, lengths))
        ]
        memory.marks = []

    def select(self, state: State, keep: list[int]) -> None:
        memory: SmallVARState = state.memory
        memory.reading.select(keep)
        memory.unread = [memory.unread[b] for b in keep]


@dataclass
class SmallVARState:
    """The small model's state, and each image's maps (S,) that it has not read, the pending one last."""

    reading: ConditionState
    unread: list[list[Tensor]]
    marks: list[Mark] = field(default_factory=list)  # after each pass of the latest draft


def _latest(distribution: Maps, node: list[int]) -> Maps:
    """Select the distributions (B, 1) of one node per image."""
    index = torch.arange(len(node), device=distribution.count.device)
    at = to_device(node, distribution.count.device)
    return Maps(distribution.logits[index, at][:, None], distribution.count[index, at][:, None])
