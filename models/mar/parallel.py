"""Published MAR as an order of generation: each pass draws several tokens, given those of earlier passes."""

from __future__ import annotations

import torch

from visspec.distributions import Denoising
from visspec.loop.decode import VectorBuffer, stage
from visspec.models.mar.target import MARTarget, revealed_counts, revealing
from visspec.types import Acceptance, Drafter, Order, Request, Round, State, Target


class ParallelMAR(Order):
    """iterations: passes per image; a cosine schedule determines how many tokens each draws. With one token per pass it
    is plain decoding. With fewer passes it is a faster but different distribution, the baseline of speculation.
    """

    drafts = False
    distribution = Denoising

    def __init__(self, iterations: int = 16):
        self.iterations = iterations

    def bind(self, rule: Acceptance, drafter: Drafter | None) -> Order:
        if drafter is not None:
            raise ValueError("drafter: got one with the order parallel, expected none, because it does not draft")
        return self

    @torch.inference_mode()
    def decode(
        self, target: Target, drafter: Drafter | None, rule: Acceptance, request: Request, length_policy: object
    ) -> State:
        """Decode a batch. Raises ValueError, before any pass, if the target is not a MAR or iterations are too many."""
        if not isinstance(target, MARTarget):
            raise ValueError(f"order: got parallel for a {type(target).__name__}, expected a MAR")
        tokens = target.model.config.tokens
        revealed_counts(tokens, self.iterations)
        state = target.open_state(request)
        assert request.generators is not None
        state.noise = noise = rule.make_noise(request.generators, 0)
        trace, known, rows, passes = state.trace, state.cache, state.rows, []
        steps = revealing(target, known, noise, self.iterations, request.sampling, trace.calls)
        trace.origin = [[] for _ in rows]
        for step in range(self.iterations):
            with stage(trace, "verify" if step else "prefill"):
                numbers = next(steps)
            for row in rows:
                assert isinstance(state.output, VectorBuffer)
                state.output.held[row].append(known.values[row, numbers.start : numbers.stop])
                state.output.append(row, list(numbers))
                trace.origin[row] += ["plain"] * len(numbers)
            passes += [step] * len(numbers)
            if step:  # the first pass is the prefill's, as in other orders
                trace.rounds.append(Round(0, [len(numbers)] * len(rows), [False] * len(rows)))
            if numbers.stop == tokens:
                state.memory = [state.output.in_raster_order(row, passes) for row in rows]
            if request.on_round is not None:
                request.on_round(state)
        return state
