"""Prompt lookup: drafts what followed the last occurrence of the newest tokens (Saxena, "Prompt lookup decoding",
2023).

Works for all targets, uses no device time, and helps if the output repeats the prompt or itself. The search runs on
the host on ids that are already there; image placeholders are never drafted (the guard rejects them).

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
        state.memory = _Histories(state.request.prompt.tolist(), self.longest)

    def propose(self, state: State, depth: int) -> Draft:
        for row in state.rows:
            state.memory.extend(row, state.tokens[row])
        most = PATIENCE if state.doubted else None
        found = [state.memory.continuation(r, depth, self.shortest, most) for r in state.rows]
        return trees.ragged_draft(state.pending, found)

    def join(self, state: State, other: State, take: list[int]) -> None:
        for b, row in zip(take, state.rows[-len(take) :]):
            state.memory.place(row, other.memory, other.rows[b])


class _Histories:
    """Per row: prompt + output, for every n-gram where its newest continuation starts, and for every n how often in
    turn the continuation was wrong (before any was right: `PATIENCE`).
    """

    def __init__(self, prompts: list[list[int]], longest: int):
        self.longest = longest
        self.ids: list[list[int]] = [[] for _ in prompts]
        self.prompt = [len(p) for p in prompts]
        self.seen: list[dict[tuple[int, ...], int]] = [{} for _ in prompts]
        self.wrong = [[PATIENCE] * (longest + 1) for _ in prompts]
        for row, prompt in enumerate(prompts):
            self._append(row, prompt)

    def place(self, row: int, other: _Histories, theirs: int) -> None:
        """Row `theirs` of other histories becomes this row, which may be the next one."""
        for name in ("ids", "prompt", "seen", "wrong"):
            mine, new = getattr(self, name), getattr(other, name)
            mine[row : row + 1] = new[theirs : theirs + 1]

    def extend(self, row: int, tokens: list[int]) -> None:
        self._append(row, tokens[len(self.ids[row]) - self.prompt[row] :])

    def _append(self, row: int, tokens: list[int]) -> None:
        ids, seen, wrong = self.ids[row], self.seen[row], self.wrong[row]
        for token in tokens:
            for n in range(1, min(self.longest, len(ids)) + 1):
                gram = tuple(ids[-n:])
                if (start := seen.get(gram)) is not None:
                    wrong[n] = 0 if ids[start] == token else wrong[n] + 1
                seen[gram] = len(ids)
            ids.append(token)

    def continuation(self, row: int, limit: int, shortest: int, most: int | None = None) -> list[int]:
        """Up to `limit` ids; most: only by lengths that were wrong fewer times in turn."""
        ids, seen, wrong = self.ids[row], self.seen[row], self.wrong[row]
        for n in range(min(self.longest, len(ids)), shortest - 1, -1):
            start = seen.get(tuple(ids[-n:]))
            if start is not None and (most is None or wrong[n] < most):
                return ids[start : start + limit]
        return []
