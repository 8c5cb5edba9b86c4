"""Prompt lookup: drafts what followed the last occurrence of the newest tokens (Saxena, "Prompt lookup decoding",
2023).

Works for all targets, uses no device time, and helps if the output repeats the prompt or itself. The search runs on
the host on ids that are already there; image placeholders are never drafted (`SafeDrafter` masks them).

What every match would have drafted is known as tokens come, drafted or not. Where drafts were measured not to pay
(`State.doubted`), a length of match that was wrong the last `PATIENCE` times drafts nothing until it was right once, so
that text which never repeats is decoded by plain passes.
"""

from __future__ import annotations

from visspec import tree as trees
from visspec.types import Draft, Drafter, DrafterTraits, Scores, State

PATIENCE = 8


class NGram(Drafter):
    """Drafts what followed the longest match (at most `longest`, at least `shortest` tokens) in prompt + output."""

    traits = DrafterTraits(joins=True, observes="none")

    def __init__(self, longest: int = 3, shortest: int = 1):
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest: got {shortest} with longest {longest}, expected 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest

    def start(self, state: State, scores: Scores) -> None:
        state.memory = [_History(prompt, self.longest) for prompt in state.request.prompt.tolist()]

    def propose(self, state: State, depth: int) -> Draft:
        most = PATIENCE if state.doubted else None
        found = []
        for row in state.rows:
            history: _History = state.memory[row]
            history.append(state.tokens[row][len(history.ids) - history.prompt :])
            found.append(history.continuation(depth, self.shortest, most))
        return trees.ragged_draft(state.pending, found)

    def join(self, state: State, other: State, take: list[int]) -> None:
        for b, row in zip(take, state.rows[-len(take) :]):
            state.memory[row : row + 1] = [other.memory[other.rows[b]]]


class _History:
    """Prompt and output of a row, for every n-gram where its newest continuation starts, and for every n how often in
    turn the continuation was wrong (before any was right: `PATIENCE`).
    """

    def __init__(self, prompt: list[int], longest: int):
        self.longest, self.prompt = longest, len(prompt)
        self.ids: list[int] = []
        self.seen: dict[tuple[int, ...], int] = {}
        self.wrong = [PATIENCE] * (longest + 1)
        self.append(prompt)

    def append(self, tokens: list[int]) -> None:
        ids, seen, wrong = self.ids, self.seen, self.wrong
        for token in tokens:
            for n in range(1, min(self.longest, len(ids)) + 1):
                gram = tuple(ids[-n:])
                if (start := seen.get(gram)) is not None:
                    wrong[n] = 0 if ids[start] == token else wrong[n] + 1
                seen[gram] = len(ids)
            ids.append(token)

    def continuation(self, limit: int, shortest: int, most: int | None) -> list[int]:
        """Up to `limit` ids; most: only by lengths that were wrong fewer times in turn."""
        for n in range(min(self.longest, len(self.ids)), shortest - 1, -1):
            start = self.seen.get(tuple(self.ids[-n:]))
            if start is not None and (most is None or self.wrong[n] < most):
                return self.ids[start : start + limit]
        return []
