"""What drafting would save on a user's model and images, predicted from measured costs and acceptance.

A drafter is run on a handful of images with drafts of all lengths in random order. That gives, for every length d, the
seconds of a round, and how often a path that reached depth i - 1 goes on to depth i, s_i. A run with drafts of d levels
then takes

    seconds(d) = prefill + rounds * (tau_mixed / tau(d)) * round(d),   tau(d) = 1 + sum_i prod_{j<=i} s_j

with the rounds of the mixed run and its tau by the same formula: rows that end early, and last rounds that are cut
short, are in the measured rounds. This is the model by which `loop.draft_length` chooses depths while it decodes. The
interval resamples batches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from visspec.api import requests
from visspec.api.accelerate import Accelerated
from visspec.loop.draft_length import DraftLengthPolicy, expected_tokens
from visspec.types import State, Trace

# Times the median of a length's rounds; longer ones count as so long, as in `loop.draft_length.LinearCost`.
OUTLIER = 2.0
RESAMPLES = 1000


class MixedLengths(DraftLengthPolicy):
    """Drafts of all lengths in random order, and what each round took and gained."""

    def __init__(self, lengths: Sequence[int], seed: int):
        super().__init__(max(lengths))
        self.lengths, self.random = list(lengths), random.Random(seed)
        self.seen: list[tuple[int, list[int], float]] = []  # length asked for, tokens gained by row, seconds
        self.begun = 0.0

    def depth(self, state: State) -> int:
        self.begun = time.perf_counter()
        state.trace.requested = min(self.random.choice(self.lengths), self.limit(state))
        return state.trace.requested

    def observe(self, trace: Trace) -> None:
        self.seen.append((trace.requested, list(trace.rounds[-1].committed), time.perf_counter() - self.begun))


@dataclass
class MeasuredBatch:
    """One batch of images under one drafter: seconds outside rounds, its rounds, tokens by row."""

    prefill: float
    rounds: list[tuple[int, list[int], float]]  # as `MixedLengths.seen`; without a drafter of length 0
    tokens: list[list[int]]


@dataclass
class DrafterMeasurement:
    """All batches of one size under one drafter."""

    drafter: str
    size: int
    lengths: list[int]  # (0,) without a drafter
    batches: list[MeasuredBatch] = field(default_factory=list)


def observe(
    fast: Accelerated, inputs: Mapping[str, Any], lengths: Sequence[int], seed: int, **options: Any
) -> MeasuredBatch:
    """Decode a batch with drafts of these lengths, (0,) for none; sampled rows draw from seeds after `seed`."""
    mixed = MixedLengths(lengths, seed) if lengths != (0,) and fast.drafter is not None else None
    setup = fast.setup if mixed is None else replace(fast.setup, length_policy=mixed)
    start = time.perf_counter()
    request = requests.of_generate(fast.model, dict(inputs), **options)
    if not request.sampling.greedy:
        request.generators = requests.generators(None, seed, request.prompt)
    state = setup.decode(request)
    whole = time.perf_counter() - start
    if mixed is None:
        inside = sum(s for stage, s in state.trace.times.items() if stage not in ("prefill", "draft_prefill"))
        count = max(len(state.trace.rounds), 1)
        rounds = [(0, list(found.committed), inside / count) for found in state.trace.rounds]
    else:
        rounds, inside = mixed.seen, sum(seconds for *_, seconds in mixed.seen)
    return MeasuredBatch(whole - inside, rounds, [list(row) for row in state.tokens])


def predict_speed(seen: DrafterMeasurement, plain: DrafterMeasurement, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each length: speed-up over plain decoding of the same batches, 95 % interval, images a second, tau."""
    draws = np.random.default_rng(seed)
    count = len(seen.batches)
    weights_RG = np.concatenate([np.ones((1, count)), draws.multinomial(count, [1 / count] * count, RESAMPLES)])
    base_R = _seconds(plain, weights_RG)[0][0]
    seconds_DR, tau_DR = _seconds(seen, weights_RG)
    images = sum(len(batch.tokens) for batch in seen.batches)
    rows = []
    for length, seconds_R, tau_R in zip(seen.lengths, seconds_DR, tau_DR):
        ratio_R = base_R / seconds_R
        rows.append(
            {
                "drafter": seen.drafter,
                "levels": length,
                "batch_size": seen.size,
                "tau": float(tau_R[0]),
                "predicted_speedup": float(ratio_R[0]),
                "predicted_ci95": [float(edge) for edge in np.nanquantile(ratio_R[1:], (0.025, 0.975))],
                "images_per_second": images / float(seconds_R[0]),
            }
        )
    return rows


def _seconds(seen: DrafterMeasurement, weights_RG: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of all batches, and tau, by length and by weights of the batches: (D, R) each."""
    deepest = max(seen.lengths)
    limits = {n: _limit([s for b in seen.batches for d, _, s in b.rounds if d == n]) for n in seen.lengths}
    groups = len(seen.batches)
    spent_GD, met_GD = np.zeros((groups, len(seen.lengths))), np.zeros((groups, len(seen.lengths)))
    open_GL, kept_GL = np.zeros((groups, deepest)), np.zeros((groups, deepest))
    for g, batch in enumerate(seen.batches):
        for asked, committed, seconds in batch.rounds:
            if asked in limits:  # near the end of a budget drafts are shorter
                at = seen.lengths.index(asked)
                spent_GD[g, at] += min(seconds, limits[asked])
                met_GD[g, at] += 1
            for reached in committed:
                open_GL[g, : min(reached, asked)] += 1
                kept_GL[g, : min(reached - 1, asked)] += 1
    with np.errstate(invalid="ignore", divide="ignore"):
        share_LR = np.nan_to_num((weights_RG @ kept_GL) / (weights_RG @ open_GL)).T
        round_DR = ((weights_RG @ spent_GD) / (weights_RG @ met_GD)).T
    tau_LR = np.stack([np.ones(len(weights_RG)), *expected_tokens(share_LR)])  # type: ignore[call-overload]
    tau_DR = tau_LR[seen.lengths]
    met_DR = (weights_RG @ met_GD).T
    mixed_R = (tau_DR * met_DR).sum(0) / met_DR.sum(0)
    rounds_R = weights_RG @ np.array([len(batch.rounds) for batch in seen.batches])
    prefill_R = weights_RG @ np.array([batch.prefill for batch in seen.batches])
    return prefill_R + rounds_R * mixed_R / tau_DR * round_DR, tau_DR


def _limit(seconds: Sequence[float]) -> float:
    return OUTLIER * float(np.median(seconds)) if seconds else float("inf")


def best(rows: Sequence[dict[str, Any]], least: float, count: int = 1) -> list[dict[str, Any]]:
    """The rows with the most images a second; those that draft have to be `least` times as fast as plain decoding."""
    paying = [row for row in rows if row["levels"] == 0 or row["predicted_speedup"] >= least]
    return sorted(paying, key=lambda row: -row["images_per_second"])[:count]
