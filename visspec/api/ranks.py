"""Acceptance by rank: how often the target takes the first, the second, ... candidate of a drafter at each depth.

A drafter is run with a wide static tree. Every node that is reached says of each of its children whether it was
accepted. `models.drafting.structure` makes the optimal static tree of these rates (Sequoia).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from visspec.api import zoo
from visspec.api.accelerate import accelerate
from visspec.api.tuned_preset import preset_target
from visspec.io.files import write_json
from visspec.models.drafting.structure import RANKS, StructuredDrafter
from visspec.types import ConfiguredModel, Draft, Drafter, Outcome, Scores, State, Verdict

WIDE = "8-12-10-8-6-5"  # nodes of each depth, while rates are measured


class RankMeter(Drafter):
    """A drafter of static trees, and what became of its nodes."""

    def __init__(self, inner: StructuredDrafter):
        self.inner, self.traits = inner, inner.traits
        ranks = [max(path[-1] for path in inner.paths if len(path) == d + 1) + 1 for d in range(inner.traits.levels)]
        self.reached, self.accepted = ([[0] * count for count in ranks] for _ in range(2))

    def attach(self, target: PreTrainedModel) -> None:
        self.inner.attach(target)

    def start(self, state: State, scores: Scores) -> None:
        self.inner.start(state, scores)

    def propose(self, state: State, depth: int) -> Draft:
        return self.inner.propose(state, depth)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        nodes = [(), *(path for path in self.inner.paths if len(path) <= draft.levels)]
        for path in outcome.path if draft.levels else []:
            taken = [nodes[n] for n in path]
            for above, below in zip(taken, [*taken[1:], None]):
                for child in nodes[1:]:
                    if child[:-1] == above:
                        self.reached[len(above)][child[-1]] += 1
                        self.accepted[len(above)][child[-1]] += child == below
        self.inner.observe(state, draft, scores, verdict, outcome)

    def select(self, state: State, keep: list[int]) -> None:
        self.inner.select(state, keep)

    @property
    def rates(self) -> list[list[float]]:
        """Accepted of reached, by depth and rank; 0 where none was reached."""
        return [[a / max(r, 1) for a, r in zip(*rows)] for rows in zip(self.accepted, self.reached)]


def measure(
    model: PreTrainedModel, spec: str, inputs: Iterable[Mapping[str, Any]], seed: int = 0, **options: Any
) -> RankMeter:
    """Decode batches of one prompt with wide trees of a drafter. spec: as in `accelerate`; options: of `generate`.

    Raises ValueError for a drafter that builds no trees.
    """
    drafter, _ = zoo.drafter(f"{spec}{',' if ':' in spec else ':'}tree={WIDE}", model)
    watched = RankMeter(drafter)
    fast = accelerate(model, watched, adaptive=False)
    for number, each in enumerate(inputs):
        fast.generate(**each, **options, **({"seed": seed + number} if options.get("do_sample") else {}))
    return watched


def write(path: str | Path, model: ConfiguredModel, spec: str, watched: RankMeter) -> None:
    """Write what the option `tree=FILE` of a drafter reads."""
    rates = [[round(rate, 5) for rate in row] for row in watched.rates]
    write_json(path, {RANKS: rates, "reached": watched.reached, "drafter": spec, "made_for": preset_target(model)})
