"""How far to draft, and when not to: expected tokens per second from what was measured so far.

Drafting d levels is expected to commit 1 + sum_i prod_{j<=i} a_j tokens (a_j: acceptance rate at depth j) and to cost
draft(d) + verify(d) seconds, both lines fitted to the measured rounds. The best d wins; d = 0 is plain decoding. While
0 wins, drafting rests for a while that doubles with every vain probe. One `Pace` lives as long as its accelerated
model, so what one request learned serves the next. Output never depends on it (see `sampling`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from visspec.types import Draft, Outcome, State

WARM_UP = 2  # rounds whose times are not believed: lazy initialisation
FORGET = 0.97
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 1.0
FIRST_REST, LONGEST_REST = 8, 256


@dataclass
class Line:
    """seconds = base + slope * levels, least squares with exponential forgetting; outliers are clipped."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # weight, x, y, xx, xy

    def add(self, x: float, y: float) -> None:
        if self.sums[0] > 3:
            y = min(y, 2.0 * max(self.at(x), 1e-6))
        self.sums = [FORGET * s + new for s, new in zip(self.sums, (1.0, x, y, x * x, x * y))]

    def at(self, x: float) -> float:
        w, sx, sy, sxx, sxy = self.sums
        if w == 0:
            return 0.0
        spread = sxx - sx * sx / w
        slope = max((sxy - sx * sy / w) / spread, 0.0) if spread > 1e-3 * w else 0.02 * sy / w
        return max(sy / w + slope * (x - sx / w), 0.0)


class Pace:
    """Chooses the depth of every round. With adaptive=False it always asks for `levels`."""

    def __init__(self, levels: int = 8, adaptive: bool = True):
        if levels < 1:
            raise ValueError(f"levels: got {levels}, expected at least 1")
        self.levels, self.adaptive = levels, adaptive
        self.verify, self.draft = Line(), Line()
        self.tried = [0.0] * levels
        self.kept = [0.0] * levels
        self.rounds = self.resting = 0
        self.rest = FIRST_REST

    def rate(self, depth: int) -> float:
        """Acceptance rate at a depth (1 is the first): accepted / reached, with a prior."""
        d = depth - 1
        return (self.kept[d] + PRIOR_RATE * PRIOR_WEIGHT) / (self.tried[d] + PRIOR_WEIGHT)

    def depth(self, state: State) -> int:
        """Levels to draft in this round; 0 for none."""
        limit = min(self.levels, state.budget - 1)
        if not self.adaptive or limit < 1:
            return max(limit, 0)
        if self.resting > 0:
            self.resting -= 1
            state.trace.gave_up += 1
            return 0
        best = self.best(limit)
        if best == 0:
            self.resting, self.rest = self.rest, min(2 * self.rest, LONGEST_REST)
            state.trace.gave_up += 1
            # the probe after the rest starts from the prior again, at its mercy for a round or two
            self.tried = [0.2 * t for t in self.tried]
            self.kept = [0.2 * k for k in self.kept]
        return best

    def best(self, limit: int) -> int:
        if self.rounds <= WARM_UP:
            return limit
        expected, reach, winner, speed = 1.0, 1.0, 0, 1.0 / max(self.verify.at(0), 1e-9)
        for d in range(1, limit + 1):
            reach *= self.rate(d)
            expected += reach
            rate = expected / max(self.verify.at(d) + self.draft.at(d), 1e-9)
            if rate > speed * (1.02 if winner == 0 else 1.0):
                winner, speed = d, rate
        return winner

    def observe(self, state: State, draft: Draft, outcome: Outcome) -> None:
        """Learn from a round: times of its stages, and how deep each row was followed."""
        self.rounds += 1
        latest = state.trace.latest
        if self.rounds > WARM_UP:
            # On a device the pass is queued under `verify` and waited for under `accept`.
            self.verify.add(draft.levels, latest["verify"] + latest["accept"])
            if draft.levels:
                self.draft.add(draft.levels, latest["draft"] + latest["observe"])
        if not draft.levels:
            return
        accepted = [len(path) - 1 for path in outcome.path]
        for d in range(min(draft.levels, self.levels)):
            tried = sum(a >= d for a in accepted) / len(accepted)
            self.tried[d] = FORGET * self.tried[d] + tried
            self.kept[d] = FORGET * self.kept[d] + sum(a > d for a in accepted) / len(accepted)
        if max(accepted) > 0:
            self.rest = FIRST_REST
