"""Draft-length policies: how much a round drafts. They change the speed of decoding and never its output.

`FixedLength` always drafts the maximum. `AdaptiveLength` maximises the expected tokens per second, from measured costs
and acceptance. The cost of a pass is a table by its number of nodes, because it is not a line: on some CPUs a float32
product of two rows takes longer than one of eight, and on a GPU thirty nodes cost what one costs.

Two kinds of drafters use it. Those that draft level by level get a depth and one of their structures
(`types.Structure`): d levels commit 1 + sum_i prod_{j<=i} a_j tokens, a_j being the acceptance rate at depth j. Those
that know the probability of each node (`DrafterTraits.counts_nodes`) ask `State.worth` how many of their nodes pay.

Three things bound what drafting costs where it does not pay:

* Plain passes are timed now and then, so the cost of plain decoding is measured and not extrapolated.
* While nothing pays, drafting rests for a number of rounds that doubles.
* An account is kept of the seconds that rounds took beyond plain decoding of the same tokens. While it is overdrawn by
  more than `share` of all seconds and `SLACK` plain passes, drafting rests. Gains pay debts back, and some are saved
  up, so a hard passage does not end drafts that pay elsewhere.

A policy is shared by all requests and threads of an accelerated model.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from visspec.types import MAX_NODES, OWN, State, Structure, Trace

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # nodes of a pass that a drafter of nodes may ask for
WARM_UP = 2  # rounds whose times are ignored because of lazy initialisation
FORGET = 0.97  # of acceptance, a round
MEMORY = 10  # measurements that the seconds of a size are averaged over
OUTLIER, STALLED = 1.5, 3.0  # times the known seconds; more counts as so much. The second for a first measurement
OPTIMISM = 0.95  # of the seconds on the line through measured sizes, so that a size that was not measured is tried
REACH = 2  # times the largest measured size: larger ones are not tried yet
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0
MISSES = 2 / 3  # share of a narrower structure's misses that are expected of a wider one before it was drafted
GAIN, DOUBTED_GAIN = 1.02, 1.06  # over plain decoding that a draft must promise; the second after drafts did not pay
COPY_GAIN = 1.1  # over drafts by levels that the context alone must promise, because its probabilities are estimates
FIRST_REST, LONGEST_REST = 8, 256  # rounds
VAIN = 8  # rounds in turn in which no node pays before a drafter of nodes rests
FIRST_PROBE, PROBES = 16, 512  # rounds before the second plain pass, and most rounds between two
SURE = 3.0  # plain passes that drafting and verifying hardly ever cost
SLACK, SAVED = 4.0, 16.0  # plain passes that drafting may cost, and that gains are saved up to
SHORT = 1024  # tokens; the cost of a pass behind fewer hardly depends on their number
LOCK = threading.Lock()  # of the numbers of all policies, held for a few microseconds a round


class CostTable:
    """Measured seconds by size: nodes of a pass, or levels of a draft. Sizes that were not measured are interpolated.

    Args:
        seconds: A table measured in other circumstances, used as a start. The first measurement scales all of it.
    """

    def __init__(self, seconds: dict[int, float] | None = None):
        self.seconds, self.foreign = dict(seconds or {}), seconds is not None
        self.counts: dict[int, int] = {}  # of measurements
        self.used: set[int] = set()  # sizes measured since `forget_unused`

    def add(self, size: int, seconds: float, warm: bool = True) -> None:
        """Learn from a measurement. One that is not warm, and too long, only bounds the next ones."""
        expected, count = self.at(size), self.counts.get(size, 0)
        if not warm:
            self.seconds[size] = min(seconds, expected or seconds)
            return
        if expected > 0 and self.foreign:
            self.seconds, self.foreign = {n: t * seconds / expected for n, t in self.seconds.items()}, False
        elif expected > 0:
            seconds = min(seconds, (OUTLIER if count else STALLED) * expected)
        self.counts[size] = count = min(count + 1, MEMORY)
        average = self.seconds.get(size, seconds)
        self.seconds[size] = average + (seconds - average) / count
        self.used.add(size)

    def at(self, size: int) -> float:
        """Seconds of a size; 0.0 where nothing is known."""
        if size in self.seconds:
            return self.seconds[size]
        sizes = sorted(self.seconds)
        i = bisect_left(sizes, size)
        if i == 0:
            return self.seconds[sizes[0]] if sizes else 0.0
        if i == len(sizes):
            if i < 3:  # the step from one node to two says nothing about the next ones
                return self.seconds[sizes[-1]]
            i -= 1
        low, high = sizes[i - 1 : i + 1]
        first, last = self.seconds[low], self.seconds[high]
        seconds = OPTIMISM * (first + (last - first) * (size - low) / (high - low))
        return max(seconds, last) if size > high else seconds

    def padded(self, size: int) -> int:
        """The cheapest measured size that holds `size`, itself unless another costs clearly less."""
        least = 0.95 * self.at(size)
        larger = [n for n, seconds in self.seconds.items() if size < n <= 2 * size + 2 and seconds < least]
        return min(larger, key=self.seconds.__getitem__, default=size)

    def forget_unused(self, keep: int) -> None:
        """Forget sizes that were not measured since the last call: they may have had a bad start."""
        for size in set(self.seconds) - self.used - {keep}:
            del self.seconds[size]
            self.counts.pop(size, None)
        self.used.clear()


@dataclass
class AcceptanceRates:
    """Measured acceptance of the drafts of a structure, by depth.

    Args:
        narrower: The rates of the structure that this one is judged by before it was drafted.
    """

    levels: int
    narrower: AcceptanceRates | None = None
    reached: list[float] = field(init=False)  # rows whose path reached the depth above
    attempts: list[float] = field(init=False)  # of these, rows with a node at this depth
    accepted: list[float] = field(init=False)  # of these, rows that accepted one

    def __post_init__(self) -> None:
        self.reached, self.attempts, self.accepted = ([0.0] * self.levels for _ in range(3))

    def rates(self) -> list[float]:
        """Accepted / attempts by depth. The prior is the rate of all depths; for a wider structure, that it misses the
        same share of what the narrower one misses at every depth.
        """
        if self.narrower is None:
            priors = [(sum(self.accepted) + PRIOR_RATE) / (sum(self.attempts) + 1)] * self.levels
        else:
            narrower = self.narrower.rates()
            misses = sum(n * (1 - rate) for n, rate in zip(self.attempts, narrower))
            share = min((sum(self.attempts) - sum(self.accepted) + MISSES) / (misses + 1), 1.0)
            priors = [1 - share * (1 - rate) for rate in narrower]
        return [
            (accepted + prior * PRIOR_WEIGHT) / (attempts + PRIOR_WEIGHT)
            for accepted, attempts, prior in zip(self.accepted, self.attempts, priors)
        ]

    def offer_rates(self) -> list[float]:
        """How often a draft has a node at a depth that its path reaches. Rows of a batch may have shorter drafts."""
        return [(n + PRIOR_WEIGHT) / (reached + PRIOR_WEIGHT) for n, reached in zip(self.attempts, self.reached)]

    def expected(self, limit: int) -> Iterator[float]:
        """Expected tokens of a round that drafts 1, 2, ... levels."""
        expected = reach = 1.0
        for offered, rate, _ in zip(self.offer_rates(), self.rates(), range(limit)):
            reach *= offered * rate
            expected += reach
            yield expected

    def learn(self, levels: int, committed: list[int], had_rejection: list[bool]) -> None:
        """Learn from a round: the tokens of each row, and whether the row ended at a rejection."""
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
class Costs:
    """Costs of rounds under the same circumstances, and whether drafting rests there."""

    passes: CostTable = field(default_factory=CostTable)  # by nodes, the root included
    drafts: dict[Structure, CostTable] = field(default_factory=dict)  # by levels: `draft` and `observe`
    counted: CostTable = field(default_factory=CostTable)  # the same of drafts asked for by nodes, as one level
    resting: int = 0  # rounds left
    rest: int = FIRST_REST  # rounds of the next rest
    vain: int = 0  # rounds in turn in which no node paid
    doubted: bool = False  # whether drafting has rested and no draft was accepted since
    rounds: int = 0
    next_probe: int = FIRST_PROBE  # the round from which on plain decoding is timed again
    dearest: float = 0.0  # seconds of the longest drafted round
    after_plain: bool = False  # whether the latest round was plain: the draft behind it catches up, and is no measure

    def draft(self, structure: Structure) -> CostTable:
        """The table of a structure; a new one starts with that of the widest narrower one."""
        if structure not in self.drafts:
            narrower = max((other for other in self.drafts if other < structure), default=None)
            self.drafts[structure] = CostTable(None if narrower is None else self.drafts[narrower].seconds)
            self.drafts[structure].seconds[0] = 0.0
        return self.drafts[structure]

    @property
    def step(self) -> float:
        """Seconds of a plain pass, or of the narrowest pass until a plain one was timed."""
        return max(self.passes.at(1), 1e-9)

    def start(self) -> Costs:
        """Return what is known, as a start under other circumstances."""
        drafts = {structure: CostTable(table.seconds) for structure, table in self.drafts.items()}
        passes, counted = CostTable(self.passes.seconds), CostTable(self.counted.seconds)
        return Costs(passes, drafts, counted, rounds=WARM_UP, next_probe=WARM_UP + FIRST_PROBE)


class DraftLengthPolicy:
    """Base class of draft-length policies. `depth` is called before each round, `observe` after it.

    Args:
        levels: Maximum number of levels.
    """

    structures: Sequence[Structure] = (OWN,)  # offered by the drafter; the chosen one is `state.trace.structure`
    counts_nodes, copies = False, 0  # traits of the drafter

    def __init__(self, levels: int = 8):
        if not isinstance(levels, int) or not 1 <= levels < MAX_NODES:
            raise ValueError(f"levels: got {levels!r}, expected a whole number from 1 to {MAX_NODES - 1}.")
        self.levels = levels

    def limit(self, state: State) -> int:
        """Return the maximum levels of this round's draft. One token of the budget is reserved for the target's own.

        Args:
            state: The request.
        """
        return max(min(self.levels, state.budget - 1), 0)

    def depth(self, state: State) -> int:
        """Return the levels to draft in this round, 0 for none, and store them in `state.trace.requested`.

        Args:
            state: The request.
        """
        raise NotImplementedError

    def pad(self, state: State, nodes: int) -> int:
        """Return a size to which to pad a draft of `nodes` nodes, because a pass of that size is faster.

        Args:
            state: The request.
            nodes: Nodes of the draft, with the pending token.
        """
        return nodes

    def observe(self, trace: Trace) -> None:
        """Process the latest round: `trace.rounds[-1]` and `trace.latest`.

        Args:
            trace: The request's trace.
        """


class FixedLength(DraftLengthPolicy):
    """Always drafts the maximum depth."""

    def depth(self, state: State) -> int:
        state.trace.requested = self.limit(state)
        return state.trace.requested


class AdaptiveLength(DraftLengthPolicy):
    """The draft with the most expected tokens per second.

    Args:
        levels: Most levels of a draft.
        share: Share of all seconds that drafting may cost.
    """

    def __init__(self, levels: int = 8, share: float = 0.01):
        super().__init__(levels)
        if not 0 < share:
            raise ValueError(f"share must be above 0, got {share}.")
        self.share = share
        self.costs: dict[tuple[int, int], Costs] = {}  # by doublings of rows and of the context beyond `SHORT`
        self.accepted: dict[Structure, AcceptanceRates] = {}
        self.beside = 0.0  # nodes of other drafters in the same pass, averaged over rounds
        self.rounds, self.committed = 0, 0.0  # rounds, and tokens of a row
        self.elapsed = self.overhead = 0.0  # seconds of all rounds, and those beyond plain decoding

    def acceptance(self, structure: Structure = OWN) -> AcceptanceRates:
        """Return the measured acceptance of a structure."""
        if structure not in self.accepted:
            narrower = max((other for other in self.structures if other < structure), default=None)
            rates = None if narrower is None else self.acceptance(narrower)
            self.accepted[structure] = AcceptanceRates(self.levels, rates)
        return self.accepted[structure]

    def at(self, rows: int = 1, context: int = 0) -> Costs:
        """The costs of so many rows behind a context; new ones start with those of the nearest."""
        key = (rows.bit_length(), max(context // SHORT, 0).bit_length())
        if key not in self.costs:
            nearest = min(self.costs, key=lambda k: (abs(k[0] - key[0]), abs(k[1] - key[1])), default=None)
            self.costs[key] = Costs() if nearest is None else self.costs[nearest].start()
        return self.costs[key]

    def depth(self, state: State) -> int:
        trace, limit = state.trace, self.limit(state)
        trace.requested, trace.structure = 0, OWN
        if limit < 1:
            return 0
        with LOCK:
            costs = self.at(len(state.rows), trace.context)
            state.worth, trace.counted = partial(self._worth, costs, 0.0), self.counts_nodes
            if not self._rests(costs):
                if self.counts_nodes:
                    trace.requested = limit
                elif self.copies:
                    speed, offered, structure = self._fastest(limit, costs)
                    state.offer = offered, structure, 1 - self.acceptance(structure).rates()[0]
                    state.worth = partial(self._worth, costs, speed if offered else 0.0)
                    trace.requested = max(limit, min(self.copies, state.budget - 1))
                else:
                    trace.requested, trace.structure = self.best(limit, costs)
                    if trace.requested == 0:
                        self._rest(costs)
            trace.gave_up += costs.resting > 0
        return trace.requested

    def _rests(self, costs: Costs) -> bool:
        """Return whether nothing is drafted in this round, whatever it promises."""
        if costs.resting > 0:
            costs.resting -= 1
            return True
        timed = 1 in costs.passes.seconds
        unsure = not timed and not self.counts_nodes and self.committed < SURE * self.rounds
        if costs.rounds >= (WARM_UP if unsure else max(costs.next_probe, WARM_UP)):
            costs.next_probe = max(FIRST_PROBE, min(4 * costs.rounds, costs.rounds + PROBES))
            costs.passes.forget_unused(1)
            for structure, table in costs.drafts.items():  # what was unlucky once is tried again
                self.acceptance(structure).fade(0.5 if table.used else 0.0)
                table.forget_unused(0)
            return True
        allowed = self.share * costs.step  # that a plain pass pays back
        overdrawn = self.overhead - self.share * self.elapsed - SLACK * costs.step
        if overdrawn > 0:  # a machine that stood still once is no reason never to draft again: the debt has a limit
            due = min(overdrawn, max(LONGEST_REST * allowed, costs.dearest))
            self.overhead -= overdrawn - due
            costs.resting, costs.doubted = math.ceil(due / allowed), True
            return True
        return False

    def _rest(self, costs: Costs) -> None:
        """Nothing pays: rest, and twice as long the next time."""
        costs.resting, costs.doubted = costs.rest, True
        costs.rest = min(2 * costs.rest, LONGEST_REST)
        for each in self.accepted.values():
            each.fade()

    def best(self, limit: int, costs: Costs | None = None) -> tuple[int, Structure]:
        """The levels and the structure with the most expected tokens per second; (0, OWN) for plain decoding."""
        _, levels, structure = self._fastest(limit, costs or self.at())
        return levels, structure

    def _fastest(self, limit: int, costs: Costs) -> tuple[float, int, Structure]:
        """The expected tokens per second of the best levels and structure, and these; the first 0.0 while unknown."""
        if self.rounds <= WARM_UP:
            return 0.0, limit, self.structures[0]
        winner, speed = (0, OWN), (DOUBTED_GAIN if costs.doubted else GAIN) / costs.step
        for structure in self.structures:
            draft = costs.draft(structure)
            for d, expected in enumerate(self.acceptance(structure).expected(limit), 1):
                nodes = costs.passes.padded(structure.size(d) + 1 + round(self.beside))
                rate = expected / max(costs.passes.at(nodes) + draft.at(d), 1e-9)
                if rate > speed:
                    winner, speed = (d, structure), rate
        return speed, *winner

    def _worth(self, costs: Costs, offer: float, expected: Sequence[float]) -> int:
        """How many nodes pay, the root included; 1 for plain decoding, or where drafts by levels are faster.

        Args:
            offer: Tokens per second of drafts by levels; 0.0 where these do not pay.
            expected: Tokens that a pass over 1, 2, ... nodes is expected to commit.
        """
        with LOCK:
            passes, drafting = costs.passes, costs.counted.at(1)
            if 1 not in passes.seconds:
                return 1
            best, speed = 1, max(GAIN * expected[0] / (passes.seconds[1] + drafting), COPY_GAIN * offer)
            for size in SIZES[1:]:
                if size > min(REACH * max(passes.seconds), 2 * len(expected)):  # it may be padded to a cheaper size
                    break
                rate = expected[min(size, len(expected)) - 1] / (passes.at(size) + drafting)
                if rate > speed:
                    best, speed = size, rate
            return best

    def pad(self, state: State, nodes: int) -> int:
        with LOCK:
            return self.at(len(state.rows), state.trace.context).passes.padded(nodes)

    def observe(self, trace: Trace) -> None:
        """Learn the times of a round, and the accepted depth of each row."""
        with LOCK:
            self._learn(trace, self.at(len(trace.rounds[-1].committed), trace.context))

    def _learn(self, trace: Trace, costs: Costs) -> None:
        latest, structure = trace.latest, trace.structure
        levels, committed, had_rejection = trace.rounds[-1]
        self.rounds += 1
        costs.rounds += 1
        self.committed += sum(committed) / len(committed)
        # On CUDA the pass is queued in `verify` and finishes in `accept`.
        verified, drafting = latest["verify"] + latest["accept"], latest["draft"] + latest["observe"]
        warm = self.rounds > WARM_UP - self.counts_nodes
        self._time(trace, costs, verified, drafting, warm)
        if warm:
            self._charge(trace, costs, verified + drafting, drafting)
            self.elapsed += verified + drafting
        if (self.counts_nodes or self.copies) and trace.requested:
            costs.vain = 0 if levels else costs.vain + 1
            if costs.vain >= VAIN:
                costs.vain = 0
                self._rest(costs)
        if not levels:
            return
        if not trace.counted:
            beside = max(trace.nodes - structure.size(levels) - 1, 0) if self.copies else 0
            self.beside = FORGET * self.beside + (1 - FORGET) * beside
            self.acceptance(structure).learn(levels, committed, had_rejection)
            if structure != self.structures[0]:  # a tree tells what a chain is worth
                rejected = [r or c < g for r, c, g in zip(had_rejection, trace.chain, committed)]
                self.acceptance(self.structures[0]).learn(levels, trace.chain, rejected)
        if max(committed) > 1:
            costs.rest, costs.doubted = FIRST_REST, False

    def _time(self, trace: Trace, costs: Costs, verified: float, drafting: float, warm: bool) -> None:
        """Add the seconds of a round's pass, and those beside it, to the tables."""
        levels = trace.rounds[-1].levels
        after_plain, costs.after_plain = costs.after_plain, not levels or trace.counted
        if trace.counted:
            costs.passes.add(trace.nodes, verified, warm)
            if trace.requested:
                costs.counted.add(1, drafting, warm)
        elif not levels:
            costs.passes.add(1, verified, warm)
        elif not after_plain:
            costs.passes.add(trace.nodes, verified, warm)
            costs.draft(trace.structure).add(levels, drafting, warm)

    def _charge(self, trace: Trace, costs: Costs, seconds: float, drafting: float) -> None:
        """Charge the account, which saves up some gains, with the seconds of a round."""
        levels, committed, _ = trace.rounds[-1]
        if levels:
            drafting = costs.counted.at(1) if trace.counted else costs.draft(trace.structure).at(levels)
            usual = costs.passes.at(trace.nodes) + drafting
            measured = costs.passes.counts.get(trace.nodes, 0) > 1  # then the draft is not charged for a stall
            seconds = usual if measured else min(seconds, 2 * usual)
            costs.dearest = max(costs.dearest, seconds)
            spent = seconds - costs.step * sum(committed) / len(committed)
        elif trace.requested:  # nothing was found
            spent = drafting
        else:  # reading while it rests, of which only a part is charged: a debt could grow while it is paid
            spent = min(trace.latest["observe"], self.share * costs.step / 2)
        self.overhead = max(self.overhead + spent, -SAVED * costs.step)
