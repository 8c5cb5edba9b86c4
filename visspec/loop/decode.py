"""The decode loop: draft, verify, accept, commit, observe.

The same loop serves plain decoding (nothing drafted), text of vision-language models and discrete image tokens. It does
not depend on model classes: targets, drafters and rules are arguments (`types.Target`, `types.Drafter`,
`types.Acceptance`). Values and distributions are opaque, and the output is stored in `State.output`. Each round
synchronises host and device once, in `apply_verdict`. Lengths, paths and rows are copied to the device from pinned
memory, which does not block. A request's processors, stop function and grammar may synchronise as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from visspec import grammar
from visspec import tree as trees
from visspec.cache import to_device
from visspec.loop.draft_length import DraftLengthPolicy
from visspec.types import (
    Acceptance,
    Draft,
    Drafter,
    Outcome,
    Request,
    Round,
    Scores,
    State,
    Target,
    Trace,
    Verdict,
)

Part = TypeVar("Part")


@torch.inference_mode()
def decode(
    target: Target, drafter: Drafter | None, rule: Acceptance, request: Request, length_policy: DraftLengthPolicy
) -> State:
    """Decode a batch. Returns the finished state with its `output` (trimmed at stops) and `trace`. Exceptions of the
    target are raised. If the drafter fails, its draft is empty (`loop.safe_drafter`).

    Args:
        target: The target.
        drafter: The drafter; None for plain decoding.
        rule: The acceptance rule.
        request: The request.
        length_policy: Chooses the levels of each draft.
    """
    state = start(target, drafter, rule, request)
    while state.live:
        advance(state, target, drafter, rule, length_policy)
        retire(state, target, drafter)
        if request.on_round is not None:
            request.on_round(state)
    return state


def start(target: Target, drafter: Drafter | None, rule: Acceptance, request: Request) -> State:
    """Prefill the target and the drafter, and draw the first token of every row."""
    state, scores = open_request(target, rule, request)
    if drafter is not None and state.live:
        with stage(state.trace, "draft_prefill"):
            drafter.start(state, scores)
    return state


def advance(
    state: State, target: Target, drafter: Drafter | None, rule: Acceptance, length_policy: DraftLengthPolicy
) -> Outcome:
    """Run one round of all live rows."""
    trace = state.trace
    with stage(trace, "draft"):
        forced = grammar.draft_forced(state)
        depth = length_policy.depth(state) if forced is None and drafter is not None and state.drafting else 0
        draft = (
            drafter.propose(state, depth)
            if drafter is not None and depth
            else forced or trees.empty_draft(state.pending)
        )
        levels = draft.tree.levels
        if levels:
            draft = trees.pad(draft, length_policy.pad(state, draft.tree.size), state.budget - 1)
    trace.nodes = draft.tree.size
    with stage(trace, "verify"):
        scores = target.verify(state, draft)
    with stage(trace, "accept"):
        verdict = rule(draft, scores, state.noise)
        outcome = apply_verdict(state, draft, scores, verdict)
        trace.rounds[-1] = trace.rounds[-1]._replace(levels=levels)  # without padding
    with stage(trace, "commit"):
        target.commit(state, draft, outcome)
    if drafter is not None:
        with stage(trace, "observe"):
            drafter.observe(state, draft, scores, verdict, outcome)
        if forced is None:
            length_policy.observe(trace)
    return outcome


@contextmanager
def stage(trace: Trace, name: str) -> Iterator[None]:
    """Measure the host seconds of a stage."""
    start = time.perf_counter()
    yield
    trace.latest[name] = time.perf_counter() - start
    trace.times[name] = trace.times.get(name, 0.0) + trace.latest[name]


def open_request(target: Target, rule: Acceptance, request: Request) -> tuple[State, Scores]:
    """Prefill the target and draw the first token of every row, by accepting an empty draft after the prompt."""
    trace = Trace()
    with stage(trace, "prefill"):
        state, scores = target.prefill(request)
        trace.calls, trace.origin = state.trace.calls, [[] for _ in state.rows]
        state.trace, state.target = trace, target
        if request.generators is not None and not request.sampling.greedy:
            state.noise = rule.make_noise(request.generators, scores.distribution.width)
        draft = trees.empty_draft(state.pending)
        apply_verdict(state, draft, scores, rule(draft, scores, state.noise))
    trace.rounds.clear()  # the prefill is not a round: tau counts passes over drafts
    trace.context = request.prompt.shape[1] + 1
    retire(state, target, None)
    return state, scores


class Columns(NamedTuple, Generic[Part]):
    """What a round copies to the host: integer tensors (B, *), or the lists of one row."""

    length: Part  # length of the path
    path: Part
    real: Part  # which nodes are real; empty if all are
    parent: Part  # parents of the nodes; empty for a chain
    values: Part  # values of the nodes, in the form of the output buffer
    following: Part  # value of the next node


def columns(state: State, draft: Draft, verdict: Verdict) -> Columns[Tensor]:
    """Return the tensors that a round copies to the host."""
    tree, nothing = draft.tree, verdict.path[:, :0]
    return Columns(
        verdict.length[:, None],
        verdict.path,
        nothing if draft.real is None else draft.real,
        nothing if tree.chain else tree.parent.expand(len(state.rows), -1),
        *state.output.columns(draft, verdict),
    )


def apply_verdict(state: State, draft: Draft, scores: Scores, verdict: Verdict) -> Outcome:
    """Copy the verdict to the host (the round's only synchronisation) and append new tokens up to a stop."""
    tree, output, origin = draft.tree, state.output, state.trace.origin
    parts = columns(state, draft, verdict)
    ends = [0, *accumulate([part.shape[1] for part in parts])]
    outcome, had_rejection, state.trace.chain = Outcome(path=[], tokens=[]), [], []
    for b, numbers in enumerate(torch.cat(parts, dim=1).tolist()):
        host = Columns(*[numbers[i:j] for i, j in pairwise(ends)])
        path = host.path[: host.length[0]]
        end, row = path[-1], state.rows[b]
        below = range(end + 1, tree.size)[:1] if tree.chain else children(host.parent, end)
        state.trace.chain.append(len(path) if tree.chain else first_children(host.parent, path))
        new_tokens = output.new_tokens(path, host.values, host.following)
        had_rejection.append(any([host.real[n] for n in below]) if host.real else len(below) > 0)
        last = "corrected" if had_rejection[b] else "bonus" if len(path) > 1 else "plain"
        count = output.append(row, new_tokens)
        origin[row] += [*["drafted"] * (len(path) - 1), last][:count]
        output.record(row, b, path, count, scores)
        output.tell(row, count)
        outcome.path.append(path)
        offered = sum(host.real[1:]) if host.real else tree.size - 1
        outcome.draft_lengths.append(offered if tree.chain else tree.levels)
        outcome.tokens.append(new_tokens)
    if verdict.drift is not None:
        add_drift(state, verdict.drift)
    lengths = [len(path) for path in outcome.path]
    state.trace.rounds.append(Round(tree.levels, lengths, had_rejection))
    state.trace.context += max(lengths)
    state.pending, state.position = verdict.next, state.position + verdict.length
    if state.noise is not None:
        state.noise.advance(lengths)
    return outcome


def add_drift(state: State, drift_B: Tensor) -> None:
    """Add a round's drift to that of the live rows."""
    if state.drift is None:
        state.drift = drift_B.new_zeros(len(state.trace.origin))
    state.drift.index_add_(0, to_device(state.rows, drift_B.device), drift_B)


def children(parents: list[int], node: int) -> list[int]:
    return [n for n, parent in enumerate(parents) if parent == node]


def first_children(parents: list[int], path: list[int]) -> int:
    """Return the number of nodes of a path, root included, before the first one that is not a first child."""
    ends = (n for n, (above, node) in enumerate(pairwise(path), 1) if parents.index(above) != node)
    return next(ends, len(path))


def retire(state: State, target: Target, drafter: Drafter | None) -> None:
    keep = [b for b, row in enumerate(state.rows) if row not in state.finished]
    if len(keep) < len(state.rows):
        select(state, target, drafter, keep)


def select(state: State, target: Target, drafter: Drafter | None, keep: list[int]) -> None:
    """Keep only these live rows."""
    state.rows = [state.rows[b] for b in keep]
    if not keep:
        return
    index = to_device(keep, state.pending.device)
    state.pending, state.position = state.pending[index], state.position[index]
    if state.noise is not None:
        state.noise.select(keep)
    target.select(state, keep)
    if drafter is not None:
        drafter.select(state, keep)
