"""Draft-length policies: how many levels are drafted in each round, decided here and nowhere else.

`FixedLength` drafts as deep as it may. `AdaptiveLength` maximises the expected tokens per second from measured costs
and acceptance rates: drafting d levels is expected to commit 1 + sum_i prod_{j<=i} a_j tokens (a_j: acceptance rate at
depth j) and to cost draft(d) + verify(d) seconds, both lines fitted to the measured rounds. The best d is used; d = 0
is plain decoding. Costs are fitted anew where the context doubles, since a pass behind a long prompt costs more, and
other drafts pay. While d = 0 is best, drafting is off for a number of rounds that doubles after every unsuccessful
probe.
Rounds without a draft are run on purpose now and then, so that the price of plain decoding is measured and not only
extrapolated. By it an account is kept of the seconds that drafted rounds took beyond plain decoding of the tokens they
gave; gains pay debts back but are not saved up. Drafting is off while the account is overdrawn: `share` of all seconds
and `slack` plain passes, for `LONGEST_COOLDOWN` rounds at most. So drafting costs little more than that, whatever is
accepted and whenever that changes.

A policy is shared by all requests and threads of an accelerated model, so measurements carry over between requests, and
rounds are counted over all threads. The output does not depend on it (see `sampling`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from visspec.types import DraftLengthPolicy, Round, State, Trace

WARM_UP = 2  # rounds whose times are ignored because of lazy initialisation
FORGET = 0.97
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 1.0
FIRST_COOLDOWN, LONGEST_COOLDOWN = 8, 256
# Before the best length is taken, all levels and a third of them are drafted by turns: near depths tell little.
WARM_UP_DRAFTS = 15
SHORT = 1024  # tokens; the cost of a pass behind fewer hardly depends on their number


@dataclass
class LinearCost:
    """seconds = base + slope * levels, least squares with exponential forgetting; outliers are clipped."""

    moments: list[float] = field(default_factory=lambda: [0.0] * 5)  # weight, x, y, xx, xy
    first: list[tuple[float, float]] = field(default_factory=list)  # the points before the line is known
    known: bool = False

    def add(self, x: float, y: float) -> None:
        y = min(y, self.ceiling(x))
        if not self.known:
            self.see(x, y)
        self.moments = [FORGET * s + new for s, new in zip(self.moments, (1.0, x, y, x * x, x * y))]

    def see(self, x: float, y: float) -> None:
        """Remember a point that the line does not follow, like those of a warm-up."""
        self.first = [*self.first, (x, y)][:8]
        self.known = self.moments[0] > 2

    def ceiling(self, x: float) -> float:
        """Twice the usual seconds; before the line is known, of the fastest that had as many levels or more."""
        if self.known:
            return 2.0 * max(self.at(x), 1e-6)
        return 2.0 * min((y for levels, y in self.first if levels >= x), default=math.inf)

    def lighter(self) -> LinearCost:
        """The same line with the weight of one point, so that new ones soon outweigh it."""
        return LinearCost([s / max(self.moments[0], 1.0) for s in self.moments], self.first, self.known)

    def at(self, x: float) -> float:
        w, sx, sy, sxx, sxy = self.moments
        if w == 0:
            return 0.0
        spread = sxx - sx * sx / w
        slope = max((sxy - sx * sy / w) / spread, 0.0) if spread > 1e-3 * w else 0.02 * sy / w
        return max(sy / w + slope * (x - sx / w), 0.0)


def expected_tokens(shares: Iterable[float]) -> Iterator[float]:
    """Expected tokens of a round that drafts 1, 2, ... levels.

    shares: how often a path that has reached the level above goes on, by level.
    """
    expected = reach = 1.0
    for share in shares:
        reach = reach * share
        expected = expected + reach
        yield expected


@dataclass
class RoundCosts:
    """Seconds of a round's stages by levels, behind contexts of similar length, and whether drafting rests there."""

    verify: LinearCost = field(default_factory=LinearCost)
    draft: LinearCost = field(default_factory=LinearCost)
    plain: LinearCost = field(default_factory=LinearCost)  # of passes over no draft alone
    cooling: int = 0  # rounds left
    cooldown: int = FIRST_COOLDOWN  # rounds of the next rest
    rounds: int = 0
    measured: int = 0  # rounds with drafts that the lines know, those of the context they began with among them
    next_probe: int = 0  # the round from which on plain decoding is measured again
    doubted: bool = False  # whether drafting has rested and no draft was accepted since
    after_plain: bool = False  # whether the latest round was plain: the draft behind it catches up, and is no measure

    @property
    def step(self) -> float:
        """Seconds of a plain pass."""
        return max((self.plain if self.plain.moments[0] else self.verify).at(0), 1e-9)

    def drafted(self, levels: int) -> float:
        """Seconds of a round with so many levels."""
        return self.verify.at(levels) + self.draft.at(levels)


class FixedLength(DraftLengthPolicy):
    """As many levels as there may be, in every round."""

    def depth(self, state: State) -> int:
        state.trace.requested = self.limit(state)
        return state.trace.requested


class AdaptiveLength(DraftLengthPolicy):
    """The depth with the most expected tokens per second.

    share, slack: what drafting may cost, of all seconds, and in plain passes beyond that. probe_interval: most rounds
    between two that measure plain decoding.
    """

    def __init__(self, levels: int = 8, share: float = 0.01, slack: float = 4.0, probe_interval: int = 512):
        super().__init__(levels)
        if not 0 < share:
            raise ValueError(f"share: got {share}, expected a number above 0")
        for name, value, least in (("slack", slack, 0), ("probe_interval", probe_interval, 1)):
            if not value >= least:
                raise ValueError(f"{name}: got {value}, expected a number of at least {least}")
        self.share, self.slack, self.probe_interval = share, slack, probe_interval
        self.costs = {0: RoundCosts()}  # by doublings of the context beyond `SHORT`
        self.reached = [0.0] * levels  # rows whose path reached the depth above
        self.attempts = [0.0] * levels  # of these, rows with a node at this depth
        self.accepted = [0.0] * levels  # of these, rows that accepted one
        self.rounds = 0
        self.elapsed = self.overhead = 0.0  # seconds of all rounds, and those beyond plain decoding
        self._lock = threading.Lock()  # held for a few microseconds a round

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def rate(self, depth: int) -> float:
        """Acceptance rate at a depth (1 is the first): accepted / reached, with a prior."""
        d = depth - 1
        return (self.accepted[d] + PRIOR_RATE * PRIOR_WEIGHT) / (self.attempts[d] + PRIOR_WEIGHT)

    def offered(self, depth: int) -> float:
        """How often a draft has a node at a depth reached by its path; rows of a batch may have shorter drafts, and
        trees have leaves. With a prior of 1.
        """
        d = depth - 1
        return (self.attempts[d] + PRIOR_WEIGHT) / (self.reached[d] + PRIOR_WEIGHT)

    def depth(self, state: State) -> int:
        limit = self.limit(state)
        if limit < 1:
            state.trace.requested = 0
            return 0
        with self._lock:
            costs = self.at(state.trace.context)
            cooling = costs.cooling
            best = self._choose(limit, costs)
            state.trace.cooldown, state.trace.doubted = costs.cooling, costs.doubted
        state.trace.requested = best
        state.trace.gave_up += best == 0 and max(cooling, costs.cooling) > 0
        return best

    def at(self, context: int) -> RoundCosts:
        """The costs behind a context; those of the nearest one are where new ones begin."""
        doublings = max(context // SHORT, 0).bit_length()
        if doublings not in self.costs:
            nearest = self.costs[min(self.costs, key=lambda known: abs(known - doublings))]
            verify, draft, plain = (line.lighter() for line in (nearest.verify, nearest.draft, nearest.plain))
            self.costs[doublings] = RoundCosts(verify, draft, plain, rounds=WARM_UP, measured=nearest.measured)
        return self.costs[doublings]

    def _choose(self, limit: int, costs: RoundCosts) -> int:
        if costs.cooling > 0:
            costs.cooling -= 1
            return 0
        if costs.rounds >= max(costs.next_probe, WARM_UP):
            costs.next_probe = min(4 * costs.rounds, costs.rounds + self.probe_interval)
            return 0
        overdrawn = self.overhead - self.share * self.elapsed - self.slack * costs.step
        if overdrawn > 0:  # every further plain pass pays its share of it
            due = min(overdrawn, max(costs.drafted(limit), LONGEST_COOLDOWN * self.share * costs.step))
            self.overhead -= overdrawn - due  # a machine that stood still once is no reason never to draft again
            costs.cooling, costs.doubted = math.ceil(due / (self.share * costs.step)), True
            return 0
        best = self.best(limit, costs)
        if 0 < best and costs.measured < WARM_UP_DRAFTS:
            return max(limit // 3, 1) if costs.measured % 2 else limit
        if best == 0:
            costs.cooling, costs.cooldown, costs.doubted = (
                costs.cooldown,
                min(2 * costs.cooldown, LONGEST_COOLDOWN),
                True,
            )
            # the probe starts from the prior again
            self.reached, self.attempts, self.accepted = (
                [0.2 * n for n in x] for x in (self.reached, self.attempts, self.accepted)
            )
        return best

    def best(self, limit: int, costs: RoundCosts | None = None) -> int:
        if self.rounds <= WARM_UP:
            return limit
        costs = costs or self.costs[0]
        winner, speed = 0, 1.0 / costs.step
        for d, expected in enumerate(expected_tokens(self.offered(d) * self.rate(d) for d in range(1, limit + 1)), 1):
            rate = expected / max(costs.drafted(d), 1e-9)
            if rate > speed * (1.02 if winner == 0 else 1.0):
                winner, speed = d, rate
        return winner

    def observe(self, trace: Trace) -> None:
        """Learn stage times, and the accepted depth of each row."""
        with self._lock:
            self._learn(trace.rounds[-1], trace.latest, trace.requested, self.at(trace.context))

    def _learn(self, newest: Round, latest: dict[str, float], requested: int, costs: RoundCosts) -> None:
        levels, committed, had_rejection = newest
        self.rounds += 1
        costs.rounds += 1
        # On CUDA the pass is queued in `verify` and finishes in `accept`.
        verified, drafted = latest["verify"] + latest["accept"], latest["draft"] + latest["observe"]
        if self.rounds > WARM_UP:
            ceiling = costs.verify.ceiling(levels) + costs.draft.ceiling(levels)
            behind, costs.after_plain = costs.after_plain, not levels
            if levels:  # a second node may cost as much as the first: plain passes would bend the line
                if not behind:
                    costs.measured += 1
                    costs.verify.add(levels, verified)
                    costs.draft.add(levels, drafted)
                seconds = min(verified + drafted, ceiling)
                self.overhead = max(self.overhead + seconds - costs.step * sum(committed) / len(committed), 0.0)
            else:
                costs.plain.add(0, verified)
                self.overhead += drafted if requested else latest["observe"]  # nothing was found to draft
            self.elapsed += verified + drafted
        else:
            for line, seconds in ((costs.verify, verified), (costs.plain, verified), (costs.draft, drafted)):
                line.see(levels, seconds)  # lazy initialisation makes them slow, never fast
        if not levels:
            return
        rows = len(committed)
        for d in range(min(levels, self.levels)):
            accepted = sum(g > d + 1 for g in committed)
            at_end = [t for g, t in zip(committed, had_rejection) if g == d + 1]
            self.reached[d] = FORGET * self.reached[d] + (accepted + len(at_end)) / rows
            self.attempts[d] = FORGET * self.attempts[d] + (accepted + sum(at_end)) / rows
            self.accepted[d] = FORGET * self.accepted[d] + accepted / rows
        if max(committed) > 1:
            costs.cooldown, costs.doubted = FIRST_COOLDOWN, False
