"""Draft-length policies: how many levels a round drafts, in which structure, decided here and nowhere else.

`FixedLength` drafts as deep as it may. `AdaptiveLength` maximises the expected tokens per second from measured costs
and acceptance rates: drafting d levels is expected to commit 1 + sum_i prod_{j<=i} a_j tokens (a_j: acceptance rate at
depth j) and to cost draft(d) + verify(n) seconds, n being the nodes of d levels, both lines fitted to the measured
rounds. The best d is used; d = 0 is plain decoding. A drafter of trees offers smaller ones and chains, too
(`types.Structure`), and the best pair of structure and d is used. Chains come first. A wider structure that was not
drafted yet is judged as the next narrower one, with fewer misses and a pass over its own nodes: where it promises more
it is drafted, and then known. Costs are fitted anew where the context doubles, since a pass behind a long prompt costs
more, and other drafts pay. While d = 0 is best, drafting is off for a number of rounds that doubles after every
unsuccessful probe.
Rounds without a draft are run on purpose now and then, so that the price of plain decoding is measured and not only
extrapolated: the first one at once if rounds commit few tokens, else after `FIRST_PROBE`. By it an account is kept of
the seconds that drafted rounds took beyond plain decoding of the tokens they gave; gains pay debts back, and some of
them are saved up, so that a hard passage rests no drafts that pay elsewhere. Drafting is off while the account is
overdrawn: `share` of all seconds and `slack` plain passes, for `LONGEST_COOLDOWN` rounds at most. So drafting costs
little more than that over all rounds, and `SAVED` times `slack` passes more over some of them, whatever is accepted and
whenever that changes. What a drafter reads of plain rounds is charged in part, or a debt could grow while it is paid.

A policy is shared by all requests and threads of an accelerated model, so measurements carry over between requests, and
rounds are counted over all threads. The output does not depend on it (see `sampling`).
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from visspec.types import OWN, DraftLengthPolicy, State, Structure, Trace

WARM_UP = 2  # rounds whose times are ignored because of lazy initialisation
FORGET = 0.97
RIDGE = 2.0  # weight of the slope that a line has before it is known, in rounds one level off the mean
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 1.0
GAIN, DOUBTED_GAIN = 1.02, 1.06  # over plain decoding, that drafting must promise; the second after it did not pay
MISSES = 2 / 3  # share of a narrower structure's misses that are expected of a wider one before it was drafted
FIRST_COOLDOWN, LONGEST_COOLDOWN = 8, 256
FIRST_PROBE = 16  # rounds before the first plain one; it comes at once where a round commits less than `SURE` tokens
SAVED = 4.0  # times `slack` that gains are saved up to
SURE = 3.0  # plain passes that drafting and verifying hardly ever cost
STALLED = 4.0  # times what a narrower structure takes: more was not the first draft of a wider one
SHORT = 1024  # tokens; the cost of a pass behind fewer hardly depends on their number


@dataclass
class LinearCost:
    """seconds = base + slope * levels, least squares with exponential forgetting; outliers are clipped."""

    moments: list[float] = field(default_factory=lambda: [0.0] * 5)  # weight, x, y, xx, xy
    first: list[tuple[float, float]] = field(default_factory=list)  # the points before the line is known
    known: bool = False
    start: float | None = None  # the slope to begin with; None: 2 % of the mean a level

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
        moments = [s / max(self.moments[0], 1.0) for s in self.moments]
        return LinearCost(moments, self.first, self.known, self.slope() if self.moments[0] else None)

    def slope(self, start: float | None = None) -> float:
        """Seconds a level. start: what it is while little is known."""
        w, sx, sy, sxx, sxy = self.moments
        if start is None:
            start = 0.02 * sy / w if self.start is None else self.start
        return max((sxy - sx * sy / w + RIDGE * start) / (sxx - sx * sx / w + RIDGE), 0.0)

    def at(self, x: float) -> float:
        return self.over([x])[0]

    def over(self, levels: Iterable[float], origin: float | None = None) -> list[float]:
        """Seconds by levels. origin: those of none. While little is known of the slope, the line below the mean leads
        there, so that short drafts are tried that are not known.
        """
        w, sx, sy, *_ = self.moments
        if w == 0:
            return [0.0 for _ in levels]
        middle, mean, above = sx / w, sy / w, self.slope()
        lead = origin is not None and self.start is None and sx > 0
        below = self.slope(max(mean - (origin or 0.0), 0.0) / middle) if lead else above
        return [max(mean + (x - middle) * (below if x < middle else above), 0.0) for x in levels]


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
class AcceptanceRates:
    """What is accepted of the drafts of a structure, by depth. narrower: that of the structure that it is judged by."""

    levels: int
    narrower: AcceptanceRates | None = None
    reached: list[float] = field(init=False)  # rows whose path reached the depth above
    attempts: list[float] = field(init=False)  # of these, rows with a node at this depth
    accepted: list[float] = field(init=False)  # of these, rows that accepted one

    def __post_init__(self) -> None:
        self.reached, self.attempts, self.accepted = ([0.0] * self.levels for _ in range(3))

    def rates(self) -> list[float]:
        """Accepted / attempts by depth, with a prior: the rate of all depths; for a wider structure, that it misses the
        same share of what the narrower one misses at every depth.
        """
        if self.narrower is None:
            priors = [(sum(self.accepted) + PRIOR_RATE) / (sum(self.attempts) + 1)] * self.levels
        else:
            narrower = self.narrower.rates()
            known = sum(n * (1 - rate) for n, rate in zip(self.attempts, narrower))
            share = min((sum(self.attempts) - sum(self.accepted) + MISSES) / (known + 1), 1.0)
            priors = [1 - share * (1 - rate) for rate in narrower]
        return [
            (accepted + prior * PRIOR_WEIGHT) / (attempts + PRIOR_WEIGHT)
            for accepted, attempts, prior in zip(self.accepted, self.attempts, priors)
        ]

    def offered(self) -> list[float]:
        """How often a draft has a node at a depth reached by its path; rows of a batch may have shorter drafts, and
        trees have leaves. With a prior of 1.
        """
        return [(n + PRIOR_WEIGHT) / (reached + PRIOR_WEIGHT) for n, reached in zip(self.attempts, self.reached)]

    def expected(self, limit: int) -> Iterator[float]:
        """Expected tokens of a round that drafts 1, 2, ... levels."""
        return expected_tokens(a * b for a, b, _ in zip(self.offered(), self.rates(), range(limit)))

    def learn(self, levels: int, committed: list[int], had_rejection: list[bool]) -> None:
        rows = len(committed)
        for d in range(min(levels, self.levels)):
            accepted = sum(g > d + 1 for g in committed)
            at_end = [t for g, t in zip(committed, had_rejection) if g == d + 1]
            self.reached[d] = FORGET * self.reached[d] + (accepted + len(at_end)) / rows
            self.attempts[d] = FORGET * self.attempts[d] + (accepted + sum(at_end)) / rows
            self.accepted[d] = FORGET * self.accepted[d] + accepted / rows

    def fade(self, share: float = 0.2) -> None:
        """Start from the prior again, with a share of what is known."""
        for counts in (self.reached, self.attempts, self.accepted):
            counts[:] = [share * n for n in counts]


@dataclass
class RoundCosts:
    """Seconds of a round's stages, behind contexts of similar length, and whether drafting rests there."""

    verify: LinearCost = field(default_factory=LinearCost)  # by nodes
    draft: dict[Structure, LinearCost] = field(default_factory=lambda: defaultdict(LinearCost))  # by levels
    plain: LinearCost = field(default_factory=LinearCost)  # of passes over no draft alone
    cooling: int = 0  # rounds left
    cooldown: int = FIRST_COOLDOWN  # rounds of the next rest
    used: set[Structure] = field(default_factory=set)  # that were drafted since plain decoding was last measured
    rounds: int = 0
    next_probe: int = FIRST_PROBE  # the round from which on plain decoding is measured again
    doubted: bool = False  # whether drafting has rested and no draft was accepted since
    after_plain: bool = False  # whether the latest round was plain: the draft behind it catches up, and is no measure

    @property
    def priced(self) -> bool:
        """Whether plain decoding was measured."""
        return self.plain.moments[0] > 0

    @property
    def step(self) -> float:
        """Seconds of a plain pass; before one was measured, of a wider one at least a part."""
        if self.priced:
            return max(self.plain.at(0), 1e-9)
        seen, _, seconds, *_ = self.verify.moments
        return max(self.verify.at(0), seconds / max(seen, 1.0) / SURE, 1e-9)

    def drafted(self, depths: Iterable[int], structure: Structure = OWN) -> list[float]:
        """Seconds of rounds with so many levels; of a structure that was not drafted yet with the draft of the widest
        narrower one.
        """
        depths = list(depths)
        verified = self.verify.over(map(structure.size, depths), self.plain.at(0) if self.priced else None)
        line = max(((s, line) for s, line in self.draft.items() if line.moments[0] and s <= structure), default=None)
        return verified if line is None else list(map(sum, zip(verified, line[1].over(depths, 0.0))))

    def ceiling(self, levels: int, structure: Structure) -> float:
        """Most seconds that count of a round."""
        line = self.draft[structure]
        if self.verify.known and not line.moments[0]:
            return STALLED * self.drafted([levels], structure)[0]
        return self.verify.ceiling(structure.size(levels)) + line.ceiling(levels)

    def lighter(self) -> RoundCosts:
        """What is known as a start, which new rounds soon outweigh."""
        draft = defaultdict(LinearCost, {structure: line.lighter() for structure, line in self.draft.items()})
        lines = self.verify.lighter(), draft, self.plain.lighter()
        return RoundCosts(*lines, rounds=WARM_UP, next_probe=WARM_UP + FIRST_PROBE)


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
        self.accepted: dict[Structure, AcceptanceRates] = {}
        self.rounds, self.committed = 0, 0.0  # rounds, and tokens of a row
        self.elapsed = self.overhead = 0.0  # seconds of all rounds, and those beyond plain decoding
        self._lock = threading.Lock()  # held for a few microseconds a round

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def acceptance(self, structure: Structure = OWN) -> AcceptanceRates:
        """What is accepted of a structure."""
        if structure not in self.accepted:
            narrower = [s for s in self.structures if s < structure]
            self.accepted[structure] = AcceptanceRates(
                self.levels, self.acceptance(max(narrower)) if narrower else None
            )
        return self.accepted[structure]

    def depth(self, state: State) -> int:
        limit = self.limit(state)
        if limit < 1:
            state.trace.requested = 0
            return 0
        with self._lock:
            costs = self.at(state.trace.context)
            cooling = costs.cooling
            best, state.trace.structure = self._choose(limit, costs)
            state.trace.cooldown, state.trace.doubted = costs.cooling, costs.doubted
        state.trace.requested = best
        state.trace.gave_up += best == 0 and max(cooling, costs.cooling) > 0
        return best

    def at(self, context: int) -> RoundCosts:
        """The costs behind a context; those of the nearest one are where new ones begin."""
        doublings = max(context // SHORT, 0).bit_length()
        if doublings not in self.costs:
            nearest = self.costs[min(self.costs, key=lambda known: abs(known - doublings))]
            self.costs[doublings] = nearest.lighter()
        return self.costs[doublings]

    def _choose(self, limit: int, costs: RoundCosts) -> tuple[int, Structure]:
        if costs.cooling > 0:
            costs.cooling -= 1
            return 0, OWN
        unsure = not costs.priced and self.committed < SURE * self.rounds
        if costs.rounds >= (WARM_UP if unsure else max(costs.next_probe, WARM_UP)):
            costs.next_probe = max(FIRST_PROBE, min(4 * costs.rounds, costs.rounds + self.probe_interval))
            self._forget_unused(costs)
            return 0, OWN
        overdrawn = self.overhead - self.share * self.elapsed - self.slack * costs.step
        if overdrawn > 0:  # every further plain pass pays its share of it
            due = min(overdrawn, max(*costs.drafted([limit]), LONGEST_COOLDOWN * self.share * costs.step))
            self.overhead -= overdrawn - due  # a machine that stood still once is no reason never to draft again
            costs.cooling, costs.doubted = math.ceil(due / (self.share * costs.step)), True
            return 0, OWN
        best, structure = self.best(limit, costs)
        if best == 0:
            costs.cooling, costs.doubted = costs.cooldown, True
            costs.cooldown = min(2 * costs.cooldown, LONGEST_COOLDOWN)
            for each in self.accepted.values():
                each.fade()
        return best, structure

    def _forget_unused(self, costs: RoundCosts) -> None:
        """Forget wider structures that were not drafted since the last call: they may have had a bad start."""
        for structure in set(self.structures[1:]) - costs.used:
            costs.draft.pop(structure, None)
            self.acceptance(structure).fade(0.0)
        costs.used.clear()

    def best(self, limit: int, costs: RoundCosts | None = None) -> tuple[int, Structure]:
        """The levels and the structure with the most expected tokens per second; (0, OWN) for plain decoding."""
        if self.rounds <= WARM_UP:
            return limit, self.structures[0]
        costs = costs or self.costs[0]
        winner, speed = (0, OWN), 1.0 / costs.step
        for structure in self.structures:
            found = zip(self.acceptance(structure).expected(limit), costs.drafted(range(1, limit + 1), structure))
            for d, (expected, seconds) in enumerate(found, 1):
                rate = expected / max(seconds, 1e-9)
                if rate > speed * (1.0 if winner[0] else DOUBTED_GAIN if costs.doubted else GAIN):
                    winner, speed = (d, structure), rate
        return winner

    def observe(self, trace: Trace) -> None:
        """Learn stage times, and the accepted depth of each row."""
        with self._lock:
            self._learn(trace, self.at(trace.context))

    def _learn(self, trace: Trace, costs: RoundCosts) -> None:
        latest, structure = trace.latest, trace.structure
        levels, committed, had_rejection = trace.rounds[-1]
        self.rounds += 1
        costs.rounds += 1
        tokens = sum(committed) / len(committed)
        self.committed += tokens
        # On CUDA the pass is queued in `verify` and finishes in `accept`.
        verified, drafted = latest["verify"] + latest["accept"], latest["draft"] + latest["observe"]
        nodes, draft = structure.size(levels), costs.draft[structure]
        if self.rounds > WARM_UP:
            behind, costs.after_plain = costs.after_plain, not levels
            if levels:  # a second node may cost as much as the first: plain passes would bend the line
                seconds = min(verified + drafted, costs.ceiling(levels, structure))
                costs.used.add(structure)
                if not behind:
                    costs.verify.add(nodes, verified)
                    draft.add(levels, drafted)
                self.charge(seconds - costs.step * tokens, costs)
            else:
                costs.plain.add(0, verified)
                reading = min(latest["observe"], self.share * costs.step / 2)  # of what a round pays back
                self.charge(drafted if trace.requested else reading, costs)  # nothing was found, or drafts rest
            self.elapsed += verified + drafted
        else:
            first = (costs.verify, nodes, verified), (costs.plain, 0, verified), (draft, levels, drafted)
            for line, x, seconds in first:
                line.see(x, seconds)  # lazy initialisation makes them slow, never fast
        if levels:
            self.acceptance(structure).learn(levels, committed, had_rejection)
            if structure != self.structures[0]:  # a tree tells what a chain is worth
                rejected = [r or c < g for r, c, g in zip(had_rejection, trace.chain, committed)]
                self.acceptance(self.structures[0]).learn(levels, trace.chain, rejected)
        if levels and max(committed) > 1:
            costs.cooldown, costs.doubted = FIRST_COOLDOWN, False

    def charge(self, seconds: float, costs: RoundCosts) -> None:
        """Charge the account, which saves up some gains."""
        self.overhead = max(self.overhead + seconds, -SAVED * self.slack * costs.step)
