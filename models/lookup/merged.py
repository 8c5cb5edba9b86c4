"""Combines a trained drafter with copies of repeated text.

Copies are continuations of matches of at least three tokens, in the row's own text and in earlier answers
(`lookup.context`). They need no pass of the trained drafter, and if text repeats nothing, the search takes only
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from visspec.models.lookup.context import LONG, ContextDrafter
from visspec.types import Draft, Drafter, Outcome, Scores, State, Structure, Verdict

NODES, LEVELS = 16, 16  # maximum size of a copy


class MergedDrafter(Drafter):
    """Drafts copies of repeated text, and a trained drafter's drafts elsewhere.

    Args:
        trained: A drafter whose drafts are requested by levels.
    """

    def __init__(self, trained: Drafter):
        self.trained = trained
        self.copies = ContextDrafter(NODES, LEVELS, "matches+answers", shortest=LONG)
        self.saved_as = trained.saved_as
        self._take_traits()

    def _take_traits(self) -> None:
        self.traits = replace(self.trained.traits, copies=LEVELS)
        if not self.trained.traits.trees:
            self.copies.restrict_to_chains()

    @property
    def structures(self) -> Sequence[Structure]:
        return self.trained.structures

    @property
    def passes(self) -> Any:
        return self.trained.passes

    @property
    def recorder(self) -> Any:
        return self.trained.recorder

    def restrict_to_chains(self) -> None:
        self.trained.restrict_to_chains()
        self._take_traits()

    def compile(self) -> None:
        self.trained.compile()

    def record(self) -> None:
        self.trained.record()

    def save_pretrained(self, folder: Path, record: dict[str, Any]) -> None:
        self.trained.save_pretrained(folder, record)

    def export(self, folder: str | Path, form: str, verifier: str | None = None) -> None:
        self.trained.export(folder, form, verifier)

    def attach(self, target: Any) -> None:
        self.trained.attach(target)
        self._take_traits()

    def start(self, state: State, scores: Scores) -> None:
        state.memory = dict.fromkeys(("trained", "copies"))  # the two drafters' own memories
        self._each(state, "start", scores)

    def propose(self, state: State, depth: int) -> Draft:
        draft = self._with("copies", self.copies.propose, state, depth)
        state.trace.counted = draft.tree.size > 1
        levels, structure = state.offer or (depth, state.structure)
        if state.trace.counted or not levels:
            return draft
        state.trace.requested, state.trace.structure = levels, structure
        return self._with("trained", self.trained.propose, state, levels)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        self._each(state, "observe", draft, scores, verdict, outcome)

    def finish(self, state: State) -> None:
        if state.memory is not None:
            self._each(state, "finish")

    def select(self, state: State, keep: list[int]) -> None:
        self._each(state, "select", keep)

    def join(self, state: State, other: State, take: list[int]) -> None:
        both = other.memory
        for name in ("trained", "copies"):
            other.memory = both[name]
            self._with(name, getattr(self, name).join, state, other, take)
        other.memory = both

    def _each(self, state: State, method: str, *arguments: object) -> None:
        for name in ("trained", "copies"):
            self._with(name, getattr(getattr(self, name), method), state, *arguments)

    def _with(self, name: str, call: Callable[..., Any], state: State, *arguments: object) -> Any:
        """Call one of the drafters with its own memory in `state.memory`, and return the result."""
        both = state.memory
        state.memory = both[name]
        try:
            return call(state, *arguments)
        finally:
            both[name], state.memory = state.memory, both
