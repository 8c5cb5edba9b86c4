"""The target drafts for itself with some of its layers left out, or stops early: nothing is trained, no weights are
added (Zhang et al., "Draft & verify", arXiv 2309.08168; the choice on the fly after "SWIFT", arXiv 2410.06916).

Layers that run share the target's cache; final norm and head are its own. Which layers run is chosen by what was
accepted for the layers that it took, not by the clock, so that the same requests give the same choices.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from visspec.models.drafting.structure import Chain
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

FORGET = 0.98
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 2.0  # before anything is known, so that every choice is tried
LEVELS = 4


@dataclass
class SkipPlan:
    """Layers that are left out, and how drafts without them have fared."""

    skip: frozenset[int]
    cost: float  # share of the layers that run
    kept: float = 0.0
    tried: float = 0.0

    @property
    def rate(self) -> float:
        return (self.kept + PRIOR_RATE * PRIOR_WEIGHT) / (self.tried + PRIOR_WEIGHT)

    @property
    def worth(self) -> float:
        """Expected tokens for the cost of a full pass, at the best depth."""
        rate = self.rate
        return max(sum(rate**n for n in range(d + 1)) / (1.0 + self.cost * d) for d in range(1, LEVELS + 1))

    def learn(self, lengths: list[int], levels: int) -> None:
        """Paths of these lengths (the root included) were accepted of a chain of `levels`."""
        rows = len(lengths)
        self.kept = FORGET * self.kept + sum(n - 1 for n in lengths) / rows
        self.tried = FORGET * self.tried + sum(min(n, levels) for n in lengths) / rows


class LayerSkip(Drafter):
    """Chains from some of the target's own layers.

    every: the first, the last and every n-th layer between them run. exit: only the first n run. Both 0: one of a few
    such choices, that whose drafts were accepted most for their cost so far, over all requests. With rules that toss
    uniform numbers of their own (`rejection`) the tokens of a seed depend on the choice, the distribution does not: fix
    it there.
    """

    traits = DrafterTraits(levels=LEVELS, joins=True, partial=True)

    def __init__(self, every: int = 0, exit: int = 0):
        if every < 0 or exit < 0 or (every and exit):
            raise ValueError(f"every: got {every} with exit {exit}, expected one of them, a count of at least 1")
        self.every, self.exit = every, exit
        self.choices: list[SkipPlan] = []
        self._lock = threading.Lock()

    def attach(self, target: PreTrainedModel) -> None:
        if not isinstance(target, nn.Module):
            raise ValueError(f"drafter: got {type(target).__name__}, expected a text model with layers to leave out")
        depth = target.config.get_text_config().num_hidden_layers
        if self.exit >= depth > 0 or self.every == 1:
            raise ValueError(f"exit: got {self.exit} with every {self.every}, expected fewer than {depth} layers")
        asked = [spaced_layers(depth, self.every)] if self.every else [frozenset(range(self.exit, depth))]
        skips = asked if self.every or self.exit else candidates(depth)
        self.choices = [SkipPlan(skip, 1.0 - len(skip) / depth) for skip in skips]
        if not self.choices:
            raise ValueError(f"drafter: got a model of {depth} layers, expected at least 2 to leave some out")

    def start(self, state: State, scores: Scores) -> None:
        state.memory = None

    def propose(self, state: State, depth: int) -> Draft:
        with self._lock:
            state.memory = chosen = max(self.choices, key=lambda choice: choice.worth)
        target = state.target
        assert target is not None
        chain, token = Chain(state), state.pending
        for level in range(depth):
            token = chain.add(target.partial(state, token, level, chosen.skip))
        state.calls["draft_pass"] += depth
        return chain.finish()

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        if draft.levels and state.memory is not None:
            with self._lock:
                state.memory.learn([len(path) for path in outcome.path], draft.levels)

    def join(self, state: State, other: State, take: list[int]) -> None:
        """Rows hold nothing of their own: their keys and values are the target's."""


def spaced_layers(depth: int, every: int) -> frozenset[int]:
    """All layers but the first, the last and every n-th."""
    return frozenset(n for n in range(1, depth - 1) if n % every)


def candidates(depth: int) -> list[frozenset[int]]:
    """Early exits after a quarter, a half and three quarters, and every second, third or fourth layer."""
    exits = [frozenset(range(max(math.ceil(depth * share), 1), depth)) for share in (0.25, 0.5, 0.75)]
    thin = [spaced_layers(depth, every) for every in (2, 3, 4)]
    return [skip for skip in dict.fromkeys(exits + thin) if skip]
