"""Validation of a drafter: tau of the decode loop on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.stats import acceptance_by_depth
from visspec.types import Acceptance, Drafter, Request, Round, Target


@dataclass(frozen=True)
class Tau:
    """tau includes the bonus token; by_depth is accepted / reached at each depth."""

    tau: float
    tokens: int
    by_depth: list[float]


def measure(target: Target, drafter: Drafter, rule: Acceptance, requests: Iterable[Request], levels: int) -> Tau:
    """Decode requests with a fixed draft depth. Tokens are counted after stop trimming, without the prefill's token."""
    passes = committed = tokens = 0
    rounds: list[Round] = []
    for request in requests:
        state = decode(target, drafter, rule, request, FixedLength(levels))
        tokens += sum(map(len, state.tokens))
        committed += sum(len(t) - 1 for t in state.tokens)
        passes += sum(len(r.committed) for r in state.trace.rounds)
        rounds += state.trace.rounds
    by_depth = [round(share, 4) for share in acceptance_by_depth(rounds)]
    return Tau(committed / max(passes, 1), tokens, by_depth)
