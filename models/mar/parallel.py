"""Published MAR as an order of generation: each pass draws several tokens, given those of earlier passes."""

from __future__ import annotations

import math

import torch

from visspec.distributions import Denoising
from visspec.loop.decode import VectorBuffer, stage
from visspec.models.mar.target import MARTarget
from visspec.types import Acceptance, Drafter, Order, Request, Round, State, Target


class ParallelMAR(Order):
    """iterations: passes per image; a cosine schedule determines how many tokens each draws. With one token per pass it
    is plain decoding. With fewer passes it is a faster but different distribution, the baseline of speculation.
    """

    distribution = Denoising

    def __init__(self, iterations: int = 16):
        self.iterations = iterations

    def bind(self, rule: Acceptance, drafter: Drafter | None) -> Order:
        if drafter is not None:
            raise ValueError("drafter: got one with the order parallel, expected none, because it does not draft.")
        return self

    @torch.inference_mode()
    def decode(
        self, target: Target, drafter: Drafter | None, rule: Acceptance, request: Request, length_policy: object
    ) -> State:
        """Decode a batch. Raises ValueError, before any pass, if the target is not a MAR or iterations are too many."""
        if not isinstance(target, MARTarget):
            raise ValueError(f"order: got parallel for a {type(target).__name__}, expected a MAR.")
        tokens, count = target.model.config.tokens, 0
        ends = revealed_counts(tokens, self.iterations)
        state = target.open_state(request)
        assert request.generators is not None
        state.noise = noise = rule.make_noise(request.generators, 0)
        trace, vectors, rows, passes = state.trace, state.cache, state.rows, []
        trace.origin = [[] for _ in rows]
        for step, end in enumerate(ends):
            more = end - count
            with stage(trace, "verify" if step else "prefill"):
                number_BP = torch.arange(count, end, device=target.device).expand(len(rows), -1)
                prefix_B1, prefixes = number_BP[:, :1], range(count, count + 1)
                arguments = vectors, prefix_B1, number_BP, prefixes, request.sampling, trace.calls
                numbers = noise.numbers(more)
                values = target.next_vector(*arguments, step=more).value(numbers.start, numbers.steps)
                vectors.put(number_BP, values.view(len(rows), more, -1))
                noise.advance([more] * len(rows))
            for row in rows:
                assert isinstance(state.output, VectorBuffer)
                state.output.held[row].append(vectors.values[row, count:end])
                state.output.append(row, list(range(count, end)))
                trace.origin[row] += ["plain"] * more
            passes += [step] * more
            count = end
            if step:  # the first pass is the prefill's, as in other orders
                trace.rounds.append(Round(0, [more] * len(rows), [False] * len(rows)))
            if end == tokens:
                state.memory = [state.output.in_raster_order(row, passes) for row in rows]
            if request.on_round is not None:
                request.on_round(state)
        return state


def revealed_counts(tokens: int, iterations: int) -> list[int]:
    """Return how many tokens are known after each step of published MAR: a cosine schedule with one or more each.

    Raises ValueError for more steps than tokens.
    """
    if not 1 <= iterations <= tokens:
        raise ValueError(f"iterations: got {iterations}, expected 1..{tokens}, at least one token per step.")
    counts: list[int] = [0]
    for step in range(1, iterations):
        hidden = math.floor(tokens * math.cos(math.pi / 2 * step / iterations))
        counts.append(tokens - max(1, min(tokens - counts[-1] - 1, hidden)))
    return [*counts[1:], tokens]
