"""What a pass of the target costs by its number of nodes, measured.

It is not a line: on some CPUs a float32 product of two or three rows takes longer than one of eight, and on a GPU a
pass over thirty nodes costs what one costs. So the seconds of each size are kept, and a draft is padded to the cheapest
size that holds it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from visspec.types import DraftLengthPolicy, State, Trace

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # nodes of a pass, its root included
FORGET = 0.9  # of the seconds of a size, when it is measured again
OUTLIER = 1.5  # times the known seconds; more counts as so much
FIRST = 0.9  # share of a first measurement that counts, since new shapes start slowly: it is soon measured again
FADE = 0.9995  # of the seconds of all sizes a round, so that a size that was slow once is tried again
REACH = 4  # times the largest measured size: larger ones are not tried yet
GAIN = 1.02  # over plain decoding that a draft must promise
PATIENCE, REST = 8, 32  # rounds in turn that do not pay before the drafter rests, and most rounds of a rest
SHORT = 1024  # tokens; behind fewer the cost of a pass hardly depends on their number


def averaged(known: float, seconds: float) -> float:
    """The moving average of a time with a new measurement, whose outliers are clipped."""
    return FORGET * known + (1 - FORGET) * min(seconds, OUTLIER * known)


class PassCosts:
    """Seconds of passes over 1, 2, 3, 4, 6, ... nodes. A size that was not measured is taken to cost what the cheaper
    of its measured neighbours costs, so that it is tried where that would make it the best.
    """

    def __init__(self, seconds: dict[int, float] | None = None):
        self.seconds = dict(seconds or {})

    def add(self, nodes: int, seconds: float) -> None:
        """Learn from a pass. Other sizes than those of the table are not learned from."""
        for size in self.seconds:
            self.seconds[size] *= FADE
        if nodes in SIZES:
            known = self.seconds.get(nodes)
            self.seconds[nodes] = FIRST * seconds if known is None else averaged(known, seconds)

    def at(self, nodes: int) -> float:
        """Seconds of a pass, as far as known."""
        if nodes in self.seconds:
            return self.seconds[nodes]
        known = sorted(self.seconds)
        i = bisect_left(known, nodes)
        return min((self.seconds[size] for size in known[max(i - 1, 0) : i + 1]), default=0.0)

    def best(self, expected: Sequence[float], overhead: float = 0.0) -> int:
        """The size with the most expected tokens a second; 1 for plain decoding.

        Args:
            expected: Tokens that a pass over 1, 2, ... nodes is expected to commit.
            overhead: Seconds of a round beside the pass.
        """
        if 1 not in self.seconds:
            return 1
        best, speed = 1, GAIN * expected[0] / (self.seconds[1] + overhead)
        for size in SIZES[1:]:
            if size > min(REACH * max(self.seconds), 2 * len(expected)):  # a draft may be padded to a cheaper size
                break
            found = expected[min(size, len(expected)) - 1] / (self.at(size) + overhead)
            if found > speed:
                best, speed = size, found
        return best


class AdaptiveNodes(DraftLengthPolicy):
    """As many nodes as pay, for drafters that say how many tokens a draft of each size is expected to commit.

    Costs are kept by rows of the batch and by doublings of the context, and shared by all requests of a model.
    """

    def __init__(self, levels: int = 16):
        super().__init__(levels)
        self.costs: dict[tuple[int, int], PassCosts] = defaultdict(PassCosts)
        self.overhead = 0.0  # seconds of a round beside its pass
        self.vain = 0  # rounds in turn that did not pay
        self.resting, self.rest = 0, 1  # rounds of this rest and of the next one
        self._lock = threading.Lock()  # held for a few microseconds a round

    def depth(self, state: State) -> int:
        state.worth = partial(self._worth, state.trace)  # not of the state, which would keep itself alive
        limit = self.limit(state)
        with self._lock:
            if self.resting:
                self.resting, limit = self.resting - 1, 0
        state.trace.requested = limit
        return limit

    def _worth(self, trace: Trace, expected: Sequence[float]) -> int:
        with self._lock:
            size = self._at(trace).best(expected, self.overhead)
            if size > 1:
                self.vain, self.rest = 0, 1
            else:
                self.vain += 1
                if self.vain >= PATIENCE:
                    self.resting, self.rest = self.rest, min(2 * self.rest, REST)
            return size

    def _at(self, trace: Trace) -> PassCosts:
        """The costs behind a context; those of the nearest one are where new ones begin."""
        key = (len(trace.origin).bit_length(), max(trace.context // SHORT, 0).bit_length())
        if key not in self.costs:
            known = [other for other in self.costs if other[0] == key[0]]
            nearest = min(known, key=lambda other: abs(other[1] - key[1]), default=None)
            self.costs[key] = PassCosts(None if nearest is None else self.costs[nearest].seconds)
        return self.costs[key]

    def observe(self, trace: Trace) -> None:
        latest = trace.latest
        with self._lock:
            self._at(trace).add(trace.nodes, latest["verify"] + latest["accept"])
            if trace.requested:
                beside = latest["draft"] + latest["observe"]
                self.overhead = averaged(self.overhead, beside) if self.overhead else beside
