"""Drafts of vectors from a small model of the target's own form, on the target's hidden states where it reads them.

Each drafted vector is a chain of the target's steps under the small head, whose realised points the rule couples the
target's own chain with. The small head may be asked at some steps only, its estimate kept in between: the drafted
distribution is that of this cheaper chain, known at every step.

Shapes: B rows, R = B or 2 B cache rows, U tokens not read yet, d size of a token, F features of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Denoising, Trajectory
from visspec.models.continuous.model import ContinuousImageModel, load
from visspec.models.continuous.target import ContinuousImages
from visspec.models.image_codes.target import EncodedPrompt
from visspec.models.vectors.target import ContinuousAR
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Request, Scores, State, Verdict


class ContinuousDrafter(Drafter):
    """levels: maximum draft length. skip: share of the steps left from one call of the head to the next, 0 for every
    step. wait: share of a picture's vectors, at its begin, that the target draws alone (token pre-filling in CSpD).

    Raises ValueError if its vectors, places or steps are not the target's.
    """

    def __init__(
        self, small: ContinuousImageModel, target: Any, *, levels: int = 4, skip: float = 0.1, wait: float = 0.0
    ):
        if levels < 1:
            raise ValueError(f"levels: got {levels}, expected at least 1")
        for name, share in (("skip", skip), ("wait", wait)):
            if not 0 <= share < 1:
                raise ValueError(f"{name}: got {share}, expected a share in [0, 1)")
        ours, theirs = small.config, target.config
        for name in ("token", "grid", "denoising_steps"):
            found, wanted = getattr(ours, name), getattr(theirs, name)
            if found != wanted:
                raise ValueError(f"drafter: got {name} {found}, expected {wanted} as the target has")
        width = theirs.text_config.hidden_size
        if ours.feature not in (0, width):
            raise ValueError(f"drafter: got feature {ours.feature}, expected {width}, the target's hidden size, or 0")
        if ours.feature and (own := ours.text_config.hidden_size) != ours.feature:  # it reads its own conditions too
            raise ValueError(f"drafter: got hidden size {own}, expected {ours.feature}, the size of what it reads")
        self.family, self.skip = ContinuousImages(small, None, settings=target.generation_config), skip
        self.own = ContinuousAR(self.family)
        self.feature, self.alone = ours.feature, int(wait * theirs.grid**2)
        self.traits = DrafterTraits(levels, (-1,) if ours.feature else (), samples=True, distribution=Denoising)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: ContinuousImageModel, **options: Any) -> ContinuousDrafter:
        """Load a checkpoint folder, strictly; `options` as in the constructor."""
        small: Any = load(folder)
        return cls(small.to(target.device), target, **options)

    def attach(self, target: ContinuousImages) -> None:
        """Raises ValueError unless the family's vectors take the drafter's steps."""
        steps, wanted = len(self.family.steps), len(target.steps)
        if steps != wanted:
            raise ValueError(f"drafter: got {steps} denoising steps, expected {wanted} as the target takes")

    def start(self, state: State, scores: Scores) -> None:
        request, rows = state.request, state.rows
        prompt = request.inputs
        ids = prompt.tokens
        if ids is None:
            raise ValueError("prompt: got embeddings, expected ids (`ContinuousImages.from_ids`)")
        inner = EncodedPrompt(prompt.ids, self.family.embed_prompt(ids), prompt.attention, tokens=ids)
        own = Request(inner, prompt.ids, request.max_new_tokens, request.sampling)
        memory = ContinuousMemory(self.own.prefill(own)[0])
        self.own.select(memory.own, rows)
        memory.own.rows, memory.own.position = rows, memory.own.position[rows] + 1
        memory.queue(list(state.pending[:, None]), self._path_states(scores, rows, [[-1]] * len(rows)))
        state.memory = memory

    def propose(self, state: State, depth: int) -> Draft:
        memory: ContinuousMemory = state.memory
        if min(len(state.tokens[row]) for row in state.rows) < self.alone:
            return trees.empty_draft(state.pending)
        own, slots = memory.own, memory.own.cache.slots
        counts = [len(row) for row in memory.values]
        known = pad_sequence(memory.features, batch_first=True) if self.feature else None
        hidden = self._read(memory, pad_sequence(memory.values, batch_first=True), known)
        last = to_device([count - 1 for count in counts] * (len(hidden) // len(counts)), hidden.device)
        hidden = hidden[torch.arange(len(hidden), device=hidden.device), last][:, None]
        memory.advance(counts)
        memory.values, memory.features = [], []
        committed, position = list(slots.lengths), own.position
        values: list[Tensor] = []
        paths: list[Trajectory] = []
        noise = state.noise
        assert noise is not None
        for level in range(depth):
            if level:
                hidden = self._read(memory, values[-1][:, None], hidden if self.feature else None)
                memory.advance([1] * len(state.rows))
            distribution = self.family.distributions(
                hidden, None, own.request.sampling, state.calls, "draft_head", self.skip
            )
            value, path = noise.draft(distribution, level)
            values.append(value)
            paths.append(path)
        slots.lengths, own.position = committed, position  # drafted tokens are read again with the target's features
        return trees.chain_draft(state.pending, torch.stack(values, dim=1), Trajectory.chain(paths))

    def _read(self, memory: ContinuousMemory, values_BUd: Tensor, features: Tensor | None) -> Tensor:
        """Hidden states (R, U, C) of the small decoder over tokens below what it has read."""
        if self.feature and features is None:
            features = values_BUd.new_zeros(len(memory.own.cache.slots.lengths), values_BUd.shape[1], self.feature)
        tree = trees.chain(values_BUd.shape[1] - 1, str(values_BUd.device))
        return self.own.read(memory.own, Draft(values_BUd, tree), features)

    def _path_states(self, scores: Scores, rows: list[int], paths: list[list[int]]) -> list[Tensor]:
        """The target's hidden states (u, F) at the nodes of each row's path, for all R rows; empty if none are read."""
        if not self.feature:
            return []
        assert scores.features is not None
        halves = scores.features.split(self.feature, dim=-1)
        return [half[row, path] for half in halves for row, path in zip(rows, paths)]

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Queue the accepted vectors and the next one, with the hidden states that they were drawn from."""
        rows = range(len(outcome.path))
        values = [torch.cat([draft.value[b, outcome.path[b][1:]], verdict.next[b, None]]) for b in rows]
        state.memory.queue(values, self._path_states(scores, list(rows), outcome.path))

    def select(self, state: State, keep: list[int]) -> None:
        memory: ContinuousMemory = state.memory
        rows = len(state.memory.own.rows)
        self.own.select(memory.own, keep)
        memory.own.rows = [memory.own.rows[b] for b in keep]
        memory.own.position = memory.own.position[to_device(keep, memory.own.position.device)]
        memory.values = [memory.values[b] for b in keep]
        halves = range(0, len(memory.features), rows)
        memory.features = [memory.features[start + b] for start in halves for b in keep]


@dataclass
class ContinuousMemory:
    """The small model's state, and what it has not read: vectors (u, d) of each row, hidden states (u, F) of all R."""

    own: State
    values: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)

    def queue(self, values: list[Tensor], features: list[Tensor]) -> None:
        self.values = [torch.cat(pair) for pair in zip(self.values, values)] if self.values else values
        self.features = [torch.cat(pair) for pair in zip(self.features, features)] if self.features else features

    def advance(self, counts: list[int]) -> None:
        slots = self.own.cache.slots
        slots.lengths = [n + c for n, c in zip(slots.lengths, counts * (len(slots.lengths) // len(counts)))]
        self.own.position = self.own.position + to_device(counts, self.own.position.device)
