"""How good a drafter is, by the only measure that counts: tau of the real loop on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from visspec.engine import decode
from visspec.pace import Pace
from visspec.types import Acceptance, Drafter, Request, Target


@dataclass(frozen=True)
class Tau:
    """tau counts the bonus token; by_depth is accepted / reached at each depth."""

    tau: float
    tokens: int
    by_depth: list[float]

    @property
    def without_bonus(self) -> float:
        return self.tau - 1.0


def measure(target: Target, drafter: Drafter, rule: Acceptance, requests: Iterable[Request], levels: int) -> Tau:
    """Decode requests with a fixed draft depth. Tokens are counted after stop trimming, without the prefill's own."""
    passes = gained = tokens = 0
    reached, accepted = [0] * levels, [0] * levels
    for request in requests:
        state = decode(target, drafter, rule, request, Pace(levels, adaptive=False))
        tokens += sum(map(len, state.tokens))
        gained += sum(len(t) - 1 for t in state.tokens)
        for drafted, counts in state.trace.rounds:
            passes += len(counts)
            for count in counts:
                for d in range(min(count, drafted)):
                    reached[d] += 1
                    accepted[d] += count - 1 > d
    by_depth = [round(a / r, 4) for a, r in zip(accepted, reached) if r]
    return Tau(gained / max(passes, 1), tokens, by_depth)
