"""A context n-gram over the grid: drafts the code that was seen most beside a neighbour's code, in the same image.

For any-order targets, whose next codes may have neighbours on all sides: every pair of codes side by side that is known
of a row is counted with its direction, as a bigram; a place takes the code with most counts over its known neighbours,
drafted ones among them, or a neighbour's own code where none was seen. Codes that are given count from the start, so it
suits inpainting. It runs on the host on ids that are there already, and uses no device time.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from visspec import tree as trees
from visspec.types import FREE, Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

SIDES = ((0, -1), (-1, 0), (0, 1), (1, 0))  # rows and columns to a neighbour; opposite ones are two apart


class Neighbours(Drafter):
    """levels: codes of a draft, which ends early at a place without a known neighbour."""

    def __init__(self, levels: int = 8):
        if not 1 <= levels <= 64:
            raise ValueError(f"levels: got {levels}, expected 1..64")
        self.traits = DrafterTraits(levels=levels, any_order=True)

    def start(self, state: State, scores: Scores) -> None:
        request = state.request
        assert request.grid is not None  # any-order targets ask for one
        state.memory = {row: Patchwork(request.grid, request.visits(row)) for row in state.rows}
        if request.known is not None:
            for row in state.rows:
                state.memory[row].give(request.known[row].tolist())
        self._extend(state)

    def propose(self, state: State, depth: int) -> Draft:
        return trees.ragged_draft(state.pending, [state.memory[row].following(depth) for row in state.rows])

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        self._extend(state)

    def _extend(self, state: State) -> None:
        for row in state.rows:
            state.memory[row].extend(state.tokens[row])


class Patchwork:
    """One image: known codes by place, and how often each code was seen on each side of each code."""

    def __init__(self, grid: tuple[int, int], order: list[int]):
        self.grid, self.order = grid, order
        self.codes: dict[int, int] = {}
        self.given = 0
        self.seen: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)

    def give(self, codes: list[int]) -> None:
        """Codes of all places, FREE where there is none."""
        for place, code in enumerate(codes):
            if code != FREE:
                self._add(place, code)
        self.given = len(self.codes)

    def extend(self, tokens: list[int]) -> None:
        """All codes drawn so far, in the order; those that are new are added."""
        for number in range(len(self.codes) - self.given, len(tokens)):
            self._add(self.order[self.given + number], tokens[number])

    def _add(self, place: int, code: int) -> None:
        self.codes[place] = code
        for side, beside in self._neighbours(place):
            if (other := self.codes.get(beside)) is not None:
                self.seen[side, other][code] += 1
                self.seen[(side + 2) % 4, code][other] += 1

    def _neighbours(self, place: int) -> list[tuple[int, int]]:
        """(side, place) of the neighbours that there are."""
        row, column = divmod(place, self.grid[1])
        around = [(side, row + i, column + j) for side, (i, j) in enumerate(SIDES)]
        return [(s, i * self.grid[1] + j) for s, i, j in around if 0 <= i < self.grid[0] and 0 <= j < self.grid[1]]

    def following(self, depth: int) -> list[int]:
        """Guesses of the next places' codes, up to the first place that has no known neighbour."""
        drafted: dict[int, int] = {}
        for place in self.order[len(self.codes) : len(self.codes) + depth]:
            known = [(s, self.codes.get(at, drafted.get(at))) for s, at in self._neighbours(place)]
            beside = [(side, code) for side, code in known if code is not None]
            if not beside:
                break
            votes: Counter[int] = Counter()
            for side, code in beside:
                votes.update(self.seen.get((side, code), {}))
            drafted[place] = votes.most_common(1)[0][0] if votes else beside[0][1]
        return list(drafted.values())
