"""Several drafters for one model: each request is decoded by the one that is expected to be the fastest.

Which drafter pays depends on the text. The choice is a bandit's: an arm's reward is the logarithm of the tokens a
second of a request, and the arm of the largest upper bound is taken (UCB1, Auer et al. 2002, with the measured spread
in place of a bound of rewards). Older requests count less and less (discounted UCB, Garivier and Moulines 2008), so
an arm that was slow is tried again, rarely. The choice depends on the measured rewards alone. Every arm has a pace of
its own; the seconds are those of the stages that the loop measures.

Only with rules that emit the same tokens whatever is drafted: the choice changes the speed and nothing else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields

from visspec.loop.setup import DecodingSetup, TargetT
from visspec.types import State

DISCOUNT = 0.98
SPREAD = 0.05  # least standard deviation that is assumed of rewards: five per cent of a speed


class Bandit:
    """Chooses between arms by rewards. Threads may share it."""

    def __init__(self, arms: int):
        self.requested = [0] * arms
        self.sums = [[0.0, 0.0, 0.0] for _ in range(arms)]  # discounted: number of rewards, their sum, and of squares
        self._lock = threading.Lock()

    def choose(self) -> int:
        """The arm of the next request: each one once, in their order, then the one of the largest upper bound."""
        with self._lock:
            waiting = [arm for arm, (count, *_) in enumerate(self.sums) if not count]
            arm = min(waiting or range(len(self.sums)), key=lambda a: self.requested[a] if waiting else -self.bound(a))
            self.requested[arm] += 1
            return arm

    def bound(self, arm: int) -> float:
        """Mean of an arm's rewards, and the width that is left to its knowledge."""
        total = sum(count for count, *_ in self.sums)
        within = sum(squares - s * s / count for count, s, squares in self.sums if count)
        variance = max(within / total, SPREAD**2)
        count, s, _ = self.sums[arm]
        return s / count + math.sqrt(2 * variance * math.log(max(total, 1.0)) / count)

    def learn(self, arm: int, reward: float) -> None:
        with self._lock:
            self.sums = [[DISCOUNT * x for x in row] for row in self.sums]
            self.sums[arm] = [x + new for x, new in zip(self.sums[arm], (1.0, reward, reward * reward))]


@dataclass(frozen=True, eq=False)
class Arm(DecodingSetup[TargetT]):
    """The setup of one drafter, that tells how fast it was."""

    bandit: Bandit
    number: int

    def finish(self, state: State) -> State:
        times = state.trace.times
        seconds, tokens = sum(times.values()) - times.get("prefill", 0.0), sum(map(len, state.tokens))
        if seconds > 0 and tokens > 1:
            self.bandit.learn(self.number, math.log(tokens / seconds))
        return super().finish(state)


@dataclass(frozen=True, eq=False)
class Arms(DecodingSetup[TargetT]):
    """The first setup of several, and the choice of one for each request."""

    arms: tuple[DecodingSetup[TargetT], ...]
    bandit: Bandit

    @property
    def each(self) -> tuple[DecodingSetup[TargetT], ...]:
        return self.arms

    def select(self) -> DecodingSetup[TargetT]:
        return self.arms[self.bandit.choose()]


def bandit_of(setups: Sequence[DecodingSetup[TargetT]]) -> Arms[TargetT]:
    """Setups of one target with several drafters. Raises ValueError for rules whose tokens depend on the draft."""
    values = [{f.name: vars(setup)[f.name] for f in fields(DecodingSetup)} for setup in setups]
    if not values:
        raise ValueError("drafter: got an empty list, expected one drafter or more")
    if not setups[0].promises_tokens(greedy=False):
        rule = type(setups[0].rule.inner).__name__
        raise ValueError(f"acceptance: got {rule} with several drafters, expected exact, of which none changes a token")
    bandit = Bandit(len(values))
    return Arms(**values[0], arms=tuple(Arm(**v, bandit=bandit, number=n) for n, v in enumerate(values)), bandit=bandit)
