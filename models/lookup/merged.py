"""Combines a trained drafter with the drafter `context`, which needs no training.

Where the context alone promises more tokens per second, as in repeated text, the trained drafter is not asked.
Elsewhere its draft and the context's most probable nodes share a root and one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from visspec.models.lookup.context import ContextDrafter
from visspec.types import Draft, Drafter, Outcome, Scores, State, Structure, Verdict


class MergedDrafter(Drafter):
    """Drafts from the context, from a trained drafter, or from both in one tree.

    Args:
        trained: A drafter whose drafts are requested by levels.
        context: A drafter whose drafts are requested by nodes.
    """

    def __init__(self, trained: Drafter, context: ContextDrafter):
        self.trained, self.context = trained, context
        self.saved_as = trained.saved_as
        self._take_traits()

    def _take_traits(self) -> None:
        self.traits = replace(self.trained.traits, copies=self.context.levels, trees=self.context.traits.trees)

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
        self.context.restrict_to_chains()
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
        state.memory = dict.fromkeys(("trained", "context"))  # the two drafters' own memories
        self._each(state, "start", scores)

    def propose(self, state: State, depth: int) -> Draft:
        draft = self._with("context", self.context.propose, state, depth)
        levels, structure, missed = state.offer or (depth, state.structure, 1.0)
        state.trace.counted = draft.tree.size > 1 and state.offer is not None
        if state.trace.counted or not levels:
            return draft
        state.trace.requested, state.trace.structure = levels, structure
        draft = self._with("trained", self.trained.propose, state, levels)
        return self._with("context", self.context.widen, state, draft, missed)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        self._each(state, "observe", draft, scores, verdict, outcome)

    def finish(self, state: State) -> None:
        if state.memory is not None:
            self._each(state, "finish")

    def select(self, state: State, keep: list[int]) -> None:
        self._each(state, "select", keep)

    def join(self, state: State, other: State, take: list[int]) -> None:
        both = other.memory
        for name in ("trained", "context"):
            other.memory = both[name]
            self._with(name, getattr(self, name).join, state, other, take)
        other.memory = both

    def _each(self, state: State, method: str, *arguments: object) -> None:
        for name in ("trained", "context"):
            self._with(name, getattr(getattr(self, name), method), state, *arguments)

    def _with(self, name: str, call: Callable[..., Any], state: State, *arguments: object) -> Any:
        """Call one of the drafters with its own memory in `state.memory`, and return the result."""
        both = state.memory
        state.memory = both[name]
        try:
            return call(state, *arguments)
        finally:
            both[name], state.memory = state.memory, both
