"""The decode loop: draft, verify, accept, commit, observe.

The same loop serves plain decoding (nothing drafted), text of vision-language models and discrete image tokens. It does
not depend on model classes: targets, drafters and rules are arguments (`types.Target`, `types.Drafter`,
`types.Acceptance`). Values and distributions are opaque. The output is stored in `State.output`, a `TokenBuffer`, or
the subclass that the target needs. Each round synchronises host and device once, in `apply_verdict`: a buffer adds what
it needs to that copy and receives its part of it. Lengths, paths and rows are copied to the device from pinned
memory, which does not block. A request's processors, stop function and grammar may synchronise as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from visspec import grammar
from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import categorical
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
    while state.rows:
        advance(state, target, drafter, rule, length_policy)
        retire(state, target, drafter)
        if request.on_round is not None:
            request.on_round(state)
    return state


def start(target: Target, drafter: Drafter | None, rule: Acceptance, request: Request) -> State:
    """Prefill the target and the drafter, and draw the first token of every row."""
    state, scores = open_request(target, rule, request)
    if drafter is not None and state.rows:
        with stage(state.trace, "draft_prefill"):
            drafter.start(state, scores)
    return state


def advance(
    state: State, target: Target, drafter: Drafter | None, rule: Acceptance, length_policy: DraftLengthPolicy
) -> Outcome:
    """Run one round of all live rows."""
    trace = state.trace
    with stage(trace, "draft"):
        forces = any([own.row_processors for own in state.request.samplings])
        forced = grammar.draft_forced(state) if forces else None
        depth = length_policy.depth(state) if forced is None and drafter is not None and state.drafting else 0
        draft = (
            drafter.propose(state, depth)
            if drafter is not None and depth
            else forced or trees.empty_draft(state.pending)
        )
        levels = draft.tree.levels
        if levels and (size := length_policy.pad(state, draft.tree.size)) > draft.tree.size:
            draft = trees.pad(draft, size, state.budget - 1)
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


def apply_verdict(state: State, draft: Draft, scores: Scores, verdict: Verdict) -> Outcome:
    """Copy the verdict to the host (the round's only synchronisation) and append new tokens up to a stop."""
    tree, output, origin, nothing = draft.tree, state.output, state.trace.origin, verdict.path[:, :0]
    parts = (
        verdict.length[:, None],
        verdict.path,
        nothing if draft.real is None else draft.real,  # nothing if all nodes are real
        nothing if tree.chain else tree.parent.expand(len(state.rows), -1),
        *output.columns(draft, verdict),
    )
    ends = [0, *accumulate([part.shape[1] for part in parts])]
    outcome, had_rejection, state.trace.chain = Outcome(path=[], tokens=[]), [], []
    for b, numbers in enumerate(torch.cat(parts, dim=1).tolist()):
        (length,), path, real, parent, values, following = [numbers[i:j] for i, j in pairwise(ends)]
        path = path[:length]
        end, row = path[-1], state.rows[b]
        next_nodes = range(end + 1, tree.size)[:1] if tree.chain else children(parent, end)
        state.trace.chain.append(len(path) if tree.chain else first_children(parent, path))
        new_tokens = output.new_tokens(row, path, values, following)
        had_rejection.append(any([real[n] for n in next_nodes]) if real else len(next_nodes) > 0)
        last = "corrected" if had_rejection[b] else "bonus" if len(path) > 1 else "plain"
        count = output.append(row, new_tokens)
        origin[row] += [*["drafted"] * (len(path) - 1), last][:count]
        output.record(row, b, path, count, scores)
        outcome.path.append(path)
        offered = sum(real[1:]) if real else tree.size - 1
        outcome.draft_lengths.append(offered if tree.chain else tree.levels)
        outcome.tokens.append(new_tokens)
    if verdict.drift is not None:
        if state.drift is None:
            state.drift = verdict.drift.new_zeros(len(origin))
        state.drift.index_add_(0, to_device(state.rows, verdict.drift.device), verdict.drift)
    lengths = [len(path) for path in outcome.path]
    state.trace.rounds.append(Round(tree.levels, lengths, had_rejection))
    state.trace.context += max(lengths)
    state.pending, state.position = verdict.next, state.position + verdict.length
    if state.noise is not None:
        state.noise.advance(lengths)
    return outcome


def children(parents: list[int], node: int) -> list[int]:
    return [n for n, parent in enumerate(parents) if parent == node]


def first_children(parents: list[int], path: list[int]) -> int:
    """Return the number of nodes of a path, root included, before the first one that is not a first child."""
    ends = (n for n, (parent, node) in enumerate(pairwise(path), 1) if parents.index(parent) != node)
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


class TokenBuffer:
    """Output of a request: the tokens of every original row, on the host. Subclasses hold other values, on the device.

    A row ends at an end-of-sequence id, a stop function or the limit. `distributions` and `raw` hold the warped and the
    raw logits (V,) of every token, if requested with `keep_logits` and `keep_raw`. `finished` holds the rows that have
    ended.
    """

    def __init__(self, request: Request, rows: int):
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.distributions: list[list[Tensor]] = [[] for _ in range(rows)]
        self.raw: list[list[Tensor]] = [[] for _ in range(rows)]
        self.finished: set[int] = set()

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """Return what the buffer needs on the host: the ids of all nodes (B, N), and of the next one (B, 1)."""
        return draft.value, verdict.next[:, None]

    def new_tokens(self, row: int, path: list[int], values: list[int], following: list[int]) -> list[int]:
        """Return the ids that a row gained: those of its path without the root, then the next one."""
        return [values[n] for n in path[1:]] + following

    def append(self, row: int, new_tokens: list[int]) -> int:
        """Add a row's new tokens up to its first stop, as in plain decoding, and call the request's `on_tokens` with
        them. Returns how many were added.
        """
        request, tokens = self.request.of(row)[0], self.tokens[row]
        first = len(tokens)
        for token in new_tokens:
            tokens.append(token)
            ended = token in request.eos or len(tokens) >= request.max_new_tokens
            if ended or (request.stop is not None and request.stop(self.ids(row))):
                self.finished.add(row)
                break
        if request.on_tokens is not None and request.on_tokens(tokens[first:]):
            self.finished.add(row)
        return len(tokens) - first

    def record(self, row: int, b: int, path: list[int], count: int, scores: Scores) -> None:
        """Store the distributions of the tokens just added, if the request asks for them."""
        nodes = path[:count]
        if self.request.keep_logits:
            self.distributions[row].extend(categorical(scores.distribution).logits[b, nodes])
        if self.request.keep_raw:
            self.raw[row].extend(scores.aux["raw"][b, nodes])

    def in_raster_order(self, row: int, items: list[Any]) -> list[Any]:
        """Return items of a row's nodes in the order of `values`."""
        return items

    def values(self, row: int) -> Tensor:
        """Return the tokens of an original row, (T,) on the CPU."""
        return torch.tensor(self.tokens[row], dtype=torch.long)

    def ids(self, row: int) -> Tensor:
        """Return prompt and tokens of an original row, (1, length)."""
        request, index = self.request.of(row)
        new_tokens = torch.tensor([self.tokens[row]], dtype=torch.long, device=request.prompt.device)
        return torch.cat([request.prompt[index : index + 1], new_tokens], dim=1)

    def join(self, other: TokenBuffer, rows: list[int], places: list[int]) -> None:
        """Copy rows of another buffer to these places; a place beyond the end is appended."""
        for row, place in zip(rows, places):
            if place == len(self.tokens):
                for columns in (self.tokens, self.distributions, self.raw):
                    columns.append([])
            self.tokens[place], self.distributions[place], self.raw[place] = (
                other.tokens[row],
                other.distributions[row],
                other.raw[row],
            )
            self.finished.discard(place)


class VectorBuffer(TokenBuffer):
    """Vectors of every original row; a row ends at the limit. `tokens` are their numbers 0, 1, 2, ... in each row.
    `distributions` and `raw` stay empty, since vectors have no logits.
    """

    def __init__(self, request: Request, rows: int):
        super().__init__(request, rows)
        self.held: list[list[Tensor]] = [[] for _ in range(rows)]  # one entry (gained, d) per round
        self._round: tuple[Draft, Verdict] | None = None

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """Return nothing for the nodes, and whether the next vector is finite, (B, 1)."""
        self._round = draft, verdict
        return verdict.path[:, :0], verdict.next.isfinite().all(dim=-1, keepdim=True).long()

    def new_tokens(self, row: int, path: list[int], values: list[int], following: list[int]) -> list[int]:
        """Return the numbers of the vectors that a row gained. Raises ValueError if the next one is not finite."""
        if following == [0]:
            raise ValueError("model: The head returned a vector that is not finite.")
        start = len(self.tokens[row])
        return list(range(start, start + len(path)))

    def record(self, row: int, b: int, path: list[int], count: int, scores: Scores) -> None:
        """Store the vectors just added, on the device. The path of a chain is a range of its nodes."""
        assert self._round is not None
        draft, verdict = self._round
        self.held[row] += [draft.value[b, 1 : len(path)], verdict.next[b, None]]

    def ids(self, row: int) -> Tensor:
        """Return the prompt of an original row, (1, length), since vectors have no ids."""
        return self.request.prompt[row : row + 1]

    def values(self, row: int) -> Tensor:
        """Return the vectors of an original row, (T, d)."""
        return torch.cat(self.held[row])[: len(self.tokens[row])]


class ScaleBuffer(VectorBuffer):
    """Maps of codes of every original row, padded to one size. Node k has sizes[k] codes. A row ends at the limit."""

    def __init__(self, request: Request, rows: int, sizes: Sequence[int]):
        super().__init__(request, rows)
        self.sizes = sizes

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        self._round = draft, verdict
        return verdict.path[:, :0], verdict.path[:, :0]

    def maps(self, row: int) -> Tensor:
        """Return the padded maps of an original row, (n, S)."""
        return super().values(row)

    def values(self, row: int) -> Tensor:
        """Return the codes of an original row, map after map."""
        return torch.cat([codes[:size] for codes, size in zip(self.maps(row), self.sizes)])
