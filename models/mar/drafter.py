"""A smaller MAR as drafter of a MAR: it drafts chains coupled to the target's noise, in each row's order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from visspec import tree as trees
from visspec.distributions import Denoising, Trajectory
from visspec.models.mar.layout import MARImageModel
from visspec.models.mar.target import DrawnVectors, MARImages, MARTarget
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict


class SmallMAR(Drafter):
    """small: the drafter's network, with the target's number of steps and guidance schedule."""

    traits = DrafterTraits(levels=4, samples=True, distribution=Denoising)

    def __init__(self, small: MARImages):
        self.small = MARTarget(small)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: Any) -> SmallMAR:
        """Load a checkpoint folder, strictly.

        Args:
            target: A model, whose device is used.
        """
        return cls(MARImages(MARImageModel.read(folder).to(target.device)))

    def attach(self, target: MARImages) -> None:
        """Attach to a target. Raises ValueError unless its tokens, classes and steps are the drafter's."""
        ours, theirs = self.small.model.config, target.model.config
        if (ours.tokens, ours.size, ours.classes) != (theirs.tokens, theirs.size, theirs.classes):
            actual = f"{ours.tokens} tokens of {ours.size} numbers and {ours.classes} classes"
            raise ValueError(f"drafter: got {actual}, expected {theirs.tokens} of {theirs.size} and {theirs.classes}.")
        steps, expected = (len(family.steps) for family in (self.small.family, target))
        if steps != expected:
            raise ValueError(f"drafter: got {steps} denoising steps, expected {expected} as the target has.")

    def start(self, state: State, scores: Scores) -> None:
        state.memory = DrawnVectors.empty(state.request.inputs, self.small.model.config.size).select(state.rows)

    def propose(self, state: State, depth: int) -> Draft:
        vectors: DrawnVectors = state.memory
        counts = [len(state.tokens[row]) for row in state.rows]
        depth = min(depth, self.small.model.config.tokens - min(counts))
        if depth < 1:
            return trees.empty_draft(state.pending)
        values, paths, tokens = [], [], self.small.model.config.tokens
        number_B1 = state.position[:, None]
        vectors.put(number_B1, state.pending[:, None])
        for level in range(depth):
            number_B1 = number_B1 + 1  # number of the token to draw, which is also the number of known tokens
            prefixes = range(min(counts) + level, min(max(counts) + level, tokens) + 1)
            distribution = self.small.next_vector(
                vectors, number_B1, number_B1, prefixes, state.request.sampling, state.calls, "draft_head"
            )
            assert state.noise is not None
            value, path = state.noise.draft(distribution, level)
            vectors.put(number_B1, value[:, None])
            values.append(value)
            paths.append(path)
        return trees.chain_draft(state.pending, torch.stack(values, dim=1), Trajectory.chain(paths))

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        index = torch.arange(draft.tree.size, device=state.position.device)
        # rejected nodes are written too; later ones replace them before they count
        state.memory.put((state.position - verdict.length)[:, None] + index, draft.value)

    def select(self, state: State, keep: list[int]) -> None:
        state.memory = state.memory.select(keep)
