"""Suffix automaton: drafts what most often followed the longest ending of the text that occurred before (after Hu et
al., "SAM decoding", arXiv 2411.10666). Nothing is trained, no device time is used.

`ngram` knows endings of a few tokens and their newest continuation; the automaton knows endings of any length and
how often each continuation occurred, in constant time a token. It works on the host, on ids that are already there.
"""

from __future__ import annotations

import threading

from visspec import tree as trees
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

COUNTED = 16  # endings of a new token, the longest first, whose occurrences are counted: a bound for repeated ids
BEFORE = 4  # ids of the prompt's end that stand before a shared answer
MOST_SHARED = 1 << 16  # ids of shared answers, about 40 MB; beyond, the memory starts anew


class SuffixDrafter(Drafter):
    """Chains from an automaton of each row's prompt and output; `shortest` is the least number of matching tokens.

    shared: also from an automaton of the answers that ended before, of all requests, where it matches at least as much.
    Drafts then depend on what was decoded before, and so do the tokens of a seed with rules that toss uniform numbers
    of their own (`rejection`, whose distribution stays the same, and the relaxed ones); with the rule `exact` tokens
    depend on no draft.
    """

    def __init__(self, shortest: int = 1, shared: bool = False):
        if shortest < 1:
            raise ValueError(f"shortest: got {shortest}, expected a count of at least 1")
        self.shortest, self.shared = shortest, shared
        self.traits = DrafterTraits(joins=True, observes="all" if shared else "none")
        self._answers = SharedSuffixes()

    def start(self, state: State, scores: Scores) -> None:
        state.memory = [_IndexedRow(prompt) for prompt in state.request.prompt.tolist()]

    def propose(self, state: State, depth: int) -> Draft:
        self._extend(state)
        return trees.ragged_draft(state.pending, [self._ahead(state.memory[row], depth) for row in state.rows])

    def _ahead(self, row: _IndexedRow, depth: int) -> list[int]:
        own = row.text
        best, length, at = own, own.length[own.link[own.last]], own.link[own.last]
        if self.shared:
            with self._answers.lock:
                if row.pool is not self._answers.text:
                    row.pool, row.at, row.matched = self._answers.text, 0, 0
                    row.follow(row.ids[-COUNTED:])
                if row.matched >= length:
                    best, length, at = row.pool, row.matched, row.at
                return best.continuation(at, depth) if length >= self.shortest else []
        return best.continuation(at, depth) if length >= self.shortest else []

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Only with `shared`."""
        self._extend(state)
        for row in state.rows:
            if row in state.finished:
                kept: _IndexedRow = state.memory[row]
                self._answers.add(kept.ids[max(kept.prompt - BEFORE, 0) :])

    def join(self, state: State, other: State, take: list[int]) -> None:
        for b, row in zip(take, state.rows[-len(take) :]):
            state.memory[row : row + 1] = [other.memory[other.rows[b]]]

    def _extend(self, state: State) -> None:
        for row in state.rows:
            kept: _IndexedRow = state.memory[row]
            new = state.tokens[row][len(kept.ids) - kept.prompt :]
            if not self.shared:
                kept.append(new)
                continue
            with self._answers.lock:
                kept.append(new)
                kept.follow(new)


class SharedSuffixes:
    """An automaton of answers, for several threads."""

    def __init__(self) -> None:
        self.text, self.lock = SuffixAutomaton(), threading.Lock()

    def add(self, ids: list[int]) -> None:
        with self.lock:
            if self.text.size + len(ids) > MOST_SHARED:
                self.text = SuffixAutomaton()
            self.text.last = 0  # texts do not run into one another
            for token in ids:
                self.text.append(token)


class _IndexedRow:
    """Prompt and output of a row, and where it stands among the shared answers."""

    def __init__(self, prompt: list[int]):
        self.text, self.ids, self.prompt = SuffixAutomaton(), list(prompt), len(prompt)
        self.pool: SuffixAutomaton | None = None
        self.at = self.matched = 0
        for token in prompt:
            self.text.append(token)

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            self.text.append(token)
            self.ids.append(token)

    def follow(self, tokens: list[int]) -> None:
        """Keep the longest ending that occurs in the shared answers."""
        pool = self.pool
        if pool is None:
            return
        for token in tokens:
            while token not in pool.following[self.at] and self.at:
                self.at = pool.link[self.at]
                self.matched = pool.length[self.at]
            if token in pool.following[self.at]:
                self.at, self.matched = pool.following[self.at][token], self.matched + 1


class SuffixAutomaton:
    """The suffix automaton of texts that grow at their end (Blumer et al., 1985). State 0 is the empty text; a state
    stands for endings that occur at the same places, the longest of them of `length` tokens; `link` is the longest
    ending of another state.
    """

    def __init__(self) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.seen = [-1], [0], [0]
        self.last = self.size = 0

    def _state(self, following: dict[int, int], link: int, length: int, seen: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.length.append(length)
        self.seen.append(seen)
        return len(self.link) - 1

    def append(self, token: int) -> None:
        """Add a token to the text that ends at `last`."""
        self.size += 1
        at = self.following[self.last].get(token)
        if at is not None:  # of an earlier text
            self.last = self._split(self.last, token, at)
        else:
            new = self._state({}, 0, self.length[self.last] + 1, 0)
            above = self.last
            while above >= 0 and token not in self.following[above]:
                self.following[above][token] = new
                above = self.link[above]
            if above >= 0:
                self.link[new] = self._split(above, token, self.following[above][token])
            self.last = new
        state = self.last
        for _ in range(COUNTED):
            if state <= 0:
                break
            self.seen[state] += 1
            state = self.link[state]

    def _split(self, above: int, token: int, at: int) -> int:
        """The state of the endings of `above` with the token: `at`, or a part of it where `at` has longer ones."""
        if self.length[at] == self.length[above] + 1:
            return at
        part = self._state(dict(self.following[at]), self.link[at], self.length[above] + 1, self.seen[at])
        self.link[at] = part
        while above >= 0 and self.following[above].get(token) == at:
            self.following[above][token] = part
            above = self.link[above]
        return part

    def continuation(self, state: int, limit: int) -> list[int]:
        """What most often followed a state, token by token; of equals the newest."""
        found: list[int] = []
        while len(found) < limit:
            while state > 0 and not self.following[state]:
                state = self.link[state]
            if state <= 0:
                break
            following, seen = self.following[state], self.seen
            token = max(reversed(following), key=lambda token: seen[following[token]])
            found.append(token)
            state = following[token]
        return found
