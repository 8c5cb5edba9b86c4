"""Validation of a drafter: tau of the decode loop on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable

from visspec.accept.exact import Exact
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.types import Drafter, Request, Target


def measure(target: Target, drafter: Drafter, requests: Iterable[Request]) -> float:
    """tau: tokens committed a pass of the target, the bonus token among them, of drafts at the drafter's own depth.

    Tokens are counted after stop trimming, without the prefill's token.
    """
    passes = committed = 0
    for request in requests:
        state = decode(target, drafter, Exact(), request, FixedLength(drafter.traits.levels))
        committed += sum(len(t) - 1 for t in state.tokens)
        passes += sum(len(r.committed) for r in state.trace.rounds)
    return committed / max(passes, 1)
