"""Continuous batching: rows enter the running batch as others leave.

Requests of one row wait in a queue. A group of them is prefilled together and kept ready. When slots are free, its rows
join the running batch (`join`, the counterpart of `decode.select`). Each row keeps its own limit, ends, processors and
random numbers (`types.Request.each`), so its tokens do not depend on the batch.

A batch is a *lane*. Its rows share temperature, top-k, top-p, and whether they are drafted for: a drafter that failed
is not called again for the rows of that batch, but for later ones it is. Usually there is one lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from visspec.cache import to_device
from visspec.loop.decode import advance, select, start
from visspec.loop.setup import DecodingSetup
from visspec.loop.stats import finish_reason
from visspec.types import Drafter, NodeProcessor, Request, Round, RowProcessor, Sampling, State, Target

# merges requests of one row into a batch; None if they must be prefilled one at a time
Together = Callable[[Sequence[Request]], Request | None]


@dataclass(frozen=True)
class Answer:
    """The result of one request. If there is an error, `tokens` are those generated before it."""

    id: Any
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None  # see `stats.finish_reason`
    origin: list[str] = field(default_factory=list)  # origin of each token, as in `types.Trace`
    rounds: list[Round] = field(default_factory=list)  # rounds of this row, with the levels of its own drafts
    drift: float = 0.0  # summed over tokens
    error: Exception | None = None
    text: str | None = None
    reused: int = 0  # prompt tokens taken from the prefix cache

    @property
    def tau(self) -> float:
        """Tokens per round, bonus included."""
        return sum(r.committed[0] for r in self.rounds) / max(len(self.rounds), 1)


class Row:
    """A request of one row. An exception in its stop function, processors or `on_tokens` only ends this row."""

    def __init__(self, id: object, request: Request):
        self.id = id
        self.error: Exception | None = None
        self.rounds: list[Round] = []
        self.reused = 0
        processors = tuple(
            each if isinstance(each, NodeProcessor) else CaughtProcessor(self, each)
            for each in request.sampling.processors
        )
        guards = processors or request.stop is not None
        self.request = replace(
            request,
            sampling=replace(request.sampling, processors=processors),
            stop=self._caught(request.stop) if guards else None,
            on_tokens=self._caught(request.on_tokens) if request.on_tokens else None,
        )

    def _caught(self, call: Callable | None) -> Callable[..., Any]:
        """Wrap a function so that the row ends if it returns true or raises."""

        def caught(*arguments: Tensor | list[int]) -> Any:
            result = None if call is None else self.call_user(call, *arguments)
            return result if self.error is None else True

        return caught

    def call_user(self, call: Callable, *arguments: object) -> Any:
        """Call a function of the user. Returns None if it raises, or if one has raised before."""
        if self.error is None:
            try:
                return call(*arguments)
            except Exception as error:
                self.error = error
        return None


class CaughtProcessor(RowProcessor):
    """A processor of one row's request. Its exceptions end the row."""

    def __init__(self, caught: Row, processor: Callable[[Tensor, Tensor], Tensor]):
        self.caught, self.processor = caught, processor

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        scores = self.caught.call_user(self.processor, ids_L[None], scores_V[None].clone())
        return scores_V if scores is None else scores[0]

    def forced_token(self, index: int, ids: list[int]) -> int | None:
        inner = self.processor
        return self.caught.call_user(inner.forced_token, index, ids) if isinstance(inner, RowProcessor) else None


class RunningBatch:
    """A batch: its state, and its rows by number. `left` has the indices of the live rows of a group that is ready."""

    def __init__(self, state: State, rows: list[Row]):
        self.state, self.rows = state, dict(enumerate(rows))
        self.left = list(range(len(state.rows)))

    @property
    def kind(self) -> tuple[Sampling, bool]:
        """Return what the rows of a batch share."""
        return replace(self.state.request.sampling, processors=()), self.state.drafting

    def leavers(self) -> Iterator[Answer]:
        """Return the results of the rows that have ended, and forget these rows."""
        for number in [n for n in self.rows if n in self.state.finished]:
            yield self._answer(number, self.rows.pop(number))

    def _answer(self, number: int, row: Row) -> Answer:
        tokens, request, drift = self.state.tokens[number], row.request, self.state.drift
        return Answer(
            row.id,
            tokens,
            None if row.error else finish_reason(tokens, request),
            self.state.trace.origin[number],
            row.rounds,
            0.0 if drift is None else float(drift[number]),
            row.error,
            reused=row.reused,
        )


class Stream:
    """Decodes requests of one row in `slots` slots; up to `ahead` prompts are prefilled together. `kind` returns what
    requests must share to be prefilled together; `together` merges such requests.
    """

    def __init__(
        self, setup: DecodingSetup, kind: Callable[[Request], Hashable], together: Together, slots: int, ahead: int
    ):
        self.setup, self.kind, self.together = setup, kind, together
        self.slots, self.ahead = slots, min(ahead, slots)
        self.lanes: list[RunningBatch] = []
        self.ready: deque[RunningBatch] = deque()
        self.waiting: list[Row] = []
        self.over = False  # whether the queue has ended

    @torch.inference_mode()
    def run(self, requests: Iterable[tuple[Any, Request | Exception] | None]) -> Iterator[Answer]:
        """Decode requests as (id, request) and return the results in the order in which they end. An exception in place
        of a request is its result. None means that no request is waiting now; running rows continue.
        """
        queue = iter(requests)
        while not self.over or self.lanes or self.ready or self.waiting:
            yield from self._admit(queue)
            for lane in self.lanes:
                yield from self._round(lane)
            for lane in [lane for lane in self.lanes if not lane.state.rows]:
                self.setup.finish(lane.state)
                self.lanes.remove(lane)

    def _round(self, lane: RunningBatch) -> Iterator[Answer]:
        state, setup = lane.state, self.setup
        rows = [lane.rows[number] for number in state.rows]
        outcome = advance(state, setup.target, setup.drafter, setup.rule, setup.length_policy)
        _, committed, had_rejection = state.trace.rounds.pop()  # each row keeps its own, since a lane may run for days
        for row, drafted, count, missed in zip(rows, outcome.draft_lengths, committed, had_rejection):
            row.rounds.append(Round(drafted, [count], [missed]))
        if (keep := fill_places([row not in state.finished for row in state.rows])) is not None:
            select(state, setup.target, setup.drafter, keep)
        yield from lane.leavers()

    def _admit(self, queue: Iterator) -> Iterator[Answer]:
        while (free := self.slots - sum(len(lane.state.rows) for lane in self.lanes)) > 0:
            if not self.ready:
                yield from self._pull(queue)
                if not self.waiting:
                    return
                yield from self._open(self._group())
                continue
            ready = self.ready[0]
            lane = next((lane for lane in self.lanes if lane.kind == ready.kind), None)
            if lane is not None:
                self._move(ready, lane, ready.left[:free])
            elif len(ready.left) <= free:
                select(ready.state, self.setup.target, self.setup.drafter, ready.left)
                self.lanes.append(ready)
                ready.left = []
            else:
                return  # a batch of another kind waits for its own slots
            if not ready.left:
                self.ready.popleft()

    def _pull(self, queue: Iterator) -> Iterator[Answer]:
        while len(self.waiting) < self.ahead and not self.over:
            try:
                entry = next(queue)
            except StopIteration:
                self.over = True
                return
            if entry is None:
                return
            id, request = entry
            if isinstance(request, Exception):
                yield Answer(id, error=request)
            else:
                self.waiting.append(Row(id, request))

    def _group(self) -> list[Row]:
        kind = self.kind(self.waiting[0].request)
        group = [row for row in self.waiting if self.kind(row.request) == kind]
        self.waiting = [row for row in self.waiting if row not in group]
        return group

    def _open(self, group: list[Row]) -> Iterator[Answer]:
        """Prefill a group, or go row by row if its rows can't share a batch or one of them fails."""
        try:
            request = self.together([row.request for row in group])
            if request is None:
                for row in group:
                    yield from self._open([row])
                return
            request.each = [row.request for row in group]
            request.sampling = group[0].request.sampling
            if not request.sampling.greedy:  # copies, since a row may be opened twice
                request.generators = [g.clone_state() for row in group for g in row.request.generators or ()]
            state = start(self.setup.target, self.setup.drafter, self.setup.rule, request)
        except Exception as error:
            if len(group) == 1:
                yield Answer(group[0].id, error=error)
                return
            for row in group:
                yield from self._open([row])
            return
        state.request.inputs, state.request.media = {}, {}  # frees the pixels
        for row, reused in zip(group, state.request.reused or [0] * len(group)):
            row.request.inputs, row.reused = {}, reused
        opened = RunningBatch(state, group)
        yield from opened.leavers()
        if opened.left:
            self.ready.append(opened)

    def _move(self, ready: RunningBatch, lane: RunningBatch, take: list[int]) -> None:
        numbers = [ready.state.rows[b] for b in take]
        free = [n for n in range(len(lane.state.tokens)) if n not in lane.rows]
        more = range(len(lane.state.tokens), len(lane.state.tokens) + len(take))
        places = [*free, *more][: len(take)]
        lane.rows |= {place: ready.rows.pop(number) for place, number in zip(places, numbers)}
        ready.left = ready.left[len(take) :]
        join(lane.state, self.setup.target, self.setup.drafter, ready.state, take, places)


def fill_places(stay: list[bool]) -> list[int] | None:
    """Return the rows that stay, the last ones in the places of rows that leave. None if all stay."""
    if all(stay):
        return None
    count = sum(stay)
    last = [b for b in range(count, len(stay)) if stay[b]]
    return [b if stay[b] else last.pop() for b in range(count)]


def join(
    state: State, target: Target, drafter: Drafter | None, other: State, take: list[int], places: list[int]
) -> None:
    """Add the live rows `take` of another batch of the same kind, which is not changed, at `places`."""
    rows = [other.rows[b] for b in take]
    for row, place in zip(rows, places):
        state.request.each[place : place + 1] = other.request.each[row : row + 1]
        state.trace.origin[place : place + 1] = other.trace.origin[row : row + 1]
    state.output.join(other.output, rows, places)
    index = to_device(take, state.pending.device)
    state.pending = torch.cat([state.pending, other.pending[index]])
    state.position = torch.cat([state.position, other.position[index]])
    if state.noise is not None and other.noise is not None:
        state.noise.join(other.noise, take)
    if state.drift is not None or other.drift is not None:
        state.drift = _merged_drift(state, other, rows, places)
    target.join(state, other, take)
    state.rows = state.rows + places
    if drafter is not None:
        drafter.join(state, other, take)
    requests = ((state.request.of(row)[0], state.tokens[row]) for row in state.rows)
    state.trace.context = max(request.prompt.shape[1] + len(tokens) for request, tokens in requests)


def _merged_drift(state: State, other: State, rows: list[int], places: list[int]) -> Tensor:
    old, new = state.drift, other.drift
    meter = state.position.new_zeros(len(state.trace.origin), dtype=torch.float32 if old is None else old.dtype)
    if old is not None:
        meter[: len(old)] = old
    at = to_device(places, meter.device)
    meter[at] = meter.new_zeros(len(places)) if new is None else new[to_device(rows, meter.device)].to(meter.dtype)
    return meter
