"""Decoding an image in an order that is not raster: ZipAR, and islands of a low-resolution draft (MuLo-SD).

A place may be decided before all of its raster predecessors exist. Its law comes from the token at the place before it,
run where it stands and seeing whatever is final so far; every final token is run once more in the pass after its
decision, so that keys and values follow the tokens. Which place is decided when never depends on a token, so the host
plans all passes and waits for the device once for each draft that was judged, and at the end.

The law of a place is a function of places before it in raster order (ZipAR), or of those and the draft (islands). So
the total variation between the output and plain decoding is at most the expected sum, over places, of that between the
law used and the law given the whole image before it: `audit` measures that sum in one more pass, and it is the drift.

Shapes: B rows, T places of the image in raster order, grammar included, N nodes of a pass, F decisions, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from visspec.accept.local import Local, settled
from visspec.cache import told
from visspec.loop.view import View
from visspec.sampling import Noise
from visspec.types import ABSENT, Request, Round, State, Trace

Places = list[int]


class Sketcher(Protocol):
    """Drafts whole images."""

    def sketch(self, state: State) -> Tensor:
        """(B, rows * columns) codes in raster order for the live rows of a request after its prefill."""


@torch.inference_mode()
def decode_wavefront(target: Any, plan: ZipAR | Islands, request: Request) -> State:
    """Decode a batch of images. Returns the finished state, as `engine.decode` does.

    `trace.rounds` has an entry for each pass of the target but the prefill and the audit; `trace.origin` says "drafted"
    of codes that stayed, "plain" of the others; `state.memory` holds the pass that gave each token, (B, T) as lists.
    Raises ValueError for a request that can't be decoded out of order.
    """
    _check(request)
    plan.bind(target.capabilities)
    trace = Trace()
    with trace.stage("prefill"):
        state, scores = target.prefill(request)
        state.trace = trace
        if request.generators is not None and not request.sampling.greedy:
            state.noise = Noise(request.generators, scores.logits.shape[-1])
        canvas = Canvas(target, state, scores.logits[:, -1], plan.audit)
    for place in canvas.preview:
        canvas.step([[place]] * canvas.rows)
    plan.paint(canvas)
    if plan.audit:
        with trace.stage("audit"):
            state.meters["drift"] = audit(canvas)
    canvas.finish()
    return state


def _check(request: Request) -> None:
    for name, value in (("processors", request.sampling.processors), ("stop", request.stop), ("eos", request.eos)):
        if value:
            raise ValueError(f"{name}: got {value!r}, expected none: images are not decoded in raster order here")
    if request.keep_logits:
        raise ValueError("keep_logits: got True, expected False: images are not decoded in raster order here")
    total = request.max_new_tokens
    if request.grid is None:
        raise ValueError("grid: got None, expected the rows and columns of an image")
    free = total if request.fixed is None else int((request.fixed[:total] == ABSENT).sum())
    if free < request.grid[0] * request.grid[1]:
        raise ValueError(f"grid: got {request.grid} and {free} places for codes, expected one for each")


class Canvas:
    """A batch of images under way: what is decided, and which slots of the cache hold it.

    free: places of the image's codes; preview: those of codes before them, a smaller image that some models draw first.
    known, cached: by row and place, on the host. fresh: decided, not yet run.
    """

    def __init__(self, target: Any, state: State, first_BV: Tensor, audited: bool):
        request = state.request
        assert request.grid is not None
        self.target, self.state, self.first_BV = target, state, first_BV
        self.total, self.columns = request.max_new_tokens, request.grid[1]
        fixed = [ABSENT] * self.total if request.fixed is None else request.fixed[: self.total].tolist()
        self.grammar = [f != ABSENT for f in fixed]
        places = [t for t in range(self.total) if not self.grammar[t]]
        ahead = len(places) - request.grid[0] * self.columns
        self.preview, self.free = places[:ahead], places[ahead:]
        self.number = {t: n for n, t in enumerate(self.free)}
        self.above = dict(zip(self.free[self.columns :], self.free))
        self.rows, device = len(state.rows), first_BV.device
        self.tokens_BT = torch.tensor(fixed, device=device).clamp(min=0).repeat(self.rows, 1)
        self.known = [list(self.grammar) for _ in range(self.rows)]
        self.cached = [[False] * self.total for _ in range(self.rows)]
        self.fresh: list[Places] = [[0] if self.grammar[0] else [] for _ in range(self.rows)]
        self.stayed = torch.zeros(self.rows, self.total, dtype=torch.bool, device=device)
        self.passes = [[0] * self.total for _ in range(self.rows)]
        self.noise_BTV = None if state.noise is None else state.noise.window(self.total)
        self.used_BTV = first_BV.new_zeros(self.rows, self.total, first_BV.shape[-1]) if audited else None

    def due(self, b: int) -> Places:
        """What the next pass of a row must run: its fresh places, each with the grammar that follows it."""
        found = []
        for place in self.fresh[b]:
            found += self.tail(place)
        return found

    def tail(self, place: int) -> Places:
        """A place and the grammar that follows it."""
        end = place + 1
        while end < self.total and self.grammar[end]:
            end += 1
        return list(range(place, end))

    def over(self, place: int, window: int) -> Places:
        """The places of the image row above from this column on, `window` of them at most."""
        n = self.number[place]
        end = min(n % self.columns + window, self.columns) - n % self.columns
        return self.free[n - self.columns : n - self.columns + end] if n >= self.columns else []

    def step(self, wanted: list[Places]) -> None:
        """One pass that decides the wanted places of each row: the fresh tokens and those before the wanted places.

        Where the place before is not final (ZipAR) the code above the wanted one stands in for it, or the row's end
        that grammar knows; nobody else sees it, and it is run again once it is final.
        """
        final, extra = [], []
        for b, places in enumerate(wanted):
            final.append(set(self.due(b) if places else ()))  # a row without a wish waits for the next block
            before = {u - 1: self.above.get(u, u - 1) for u in places if u > 0 and u - 1 not in final[b]}
            final[b] |= {t for t in before if self.cached[b][t]}
            extra.append({t: t if self.known[b][t] else s for t, s in before.items() if t not in final[b]})
        laws, at = self._run(final, extra)
        for b, places in enumerate(wanted):
            self.fresh[b] = list(places) or self.fresh[b]
        pairs, ran = [(b, u) for b, places in enumerate(wanted) for u in places], [bool(nodes) for nodes in at]
        self.decide(pairs, self._after(laws, at, pairs), self.pass_number(any(ran)))
        self.record([len(places) for places in wanted], ran)

    def judge(self, places: Places, drafted_BN: Tensor) -> Tensor:
        """One pass over a block of drafted codes, all of them final for now. The law at each place, (B, N, V)."""
        self.tokens_BT[:, places] = drafted_BN.clamp(min=0)
        first = max(places[0] - 1, 0)
        while first > 0 and self.grammar[first]:
            first -= 1
        final = [{*self.due(b), *range(first, places[-1] + 1)} for b in range(self.rows)]
        for b in range(self.rows):
            self.fresh[b] = []
            for u in places:
                self.known[b][u], self.passes[b][u] = True, self.pass_number()
        laws, at = self._run(final, [{} for _ in final])
        pairs = [(b, u) for b in range(self.rows) for u in places]
        return self._after(laws, at, pairs).unflatten(0, (self.rows, len(places)))

    def reject(self, todo: list[Places]) -> None:
        """What was judged last is not final at these places of each row, nor is the grammar behind them as it ran."""
        for b, places in enumerate(todo):
            for u in places:
                self.known[b][u] = False
                for t in self.tail(u):
                    self.cached[b][t] = False

    def pass_number(self, ran: bool = True) -> int:
        return len(self.state.trace.rounds) + ran

    def decide(self, pairs: list[tuple[int, int]], logits_FV: Tensor, now: int) -> None:
        """Draw the tokens of (row, place) pairs from their laws, with the noise of each place."""
        if not pairs:
            return
        with self.state.trace.stage("accept"):
            b_F, u_F = (told(x, logits_FV.device) for x in zip(*pairs))
            noise_FV = 0.0 if self.noise_BTV is None else self.noise_BTV[b_F, u_F]
            self.tokens_BT[b_F, u_F] = (logits_FV + noise_FV).argmax(-1)
            if self.used_BTV is not None:
                self.used_BTV[b_F, u_F] = settled(logits_FV.softmax(-1), self.noise_BTV is None)
        for b, u in pairs:
            self.known[b][u], self.passes[b][u] = True, now

    def _run(self, final: list[set[int]], extra: list[dict[int, int]]) -> tuple[Tensor | None, list[dict[int, int]]]:
        """A pass over final places and stand-ins {place: where its token is}. Laws, and each row's {place: node}."""
        tables = [{**{t: t for t in sorted(f)}, **e} for f, e in zip(final, extra)]
        width = max(map(len, tables))
        if width == 0:
            return None, [{} for _ in tables]
        for b, places in enumerate(final):
            for t in places:
                self.cached[b][t] = True
        device = self.tokens_BT.device
        where_BN = told([[*t, *[ABSENT] * (width - len(t))] for t in tables], device)
        source_BN = told([[*t.values(), *[0] * (width - len(t))] for t in tables], device)
        seen_BT = told(self.cached, device)
        with self.state.trace.stage("verify"):
            scores = self.target.revise(self.state, self.tokens_BT.gather(1, source_BN), where_BN, seen_BT)
        return scores.logits, [{t: n for n, t in enumerate(table)} for table in tables]

    def _after(self, laws_BNV: Tensor | None, at: list[dict[int, int]], pairs: list[tuple[int, int]]) -> Tensor:
        """The law at each (row, place), (F, V): that of the node before it, of the prompt at place 0."""
        if not pairs:
            return self.first_BV[:0]
        after_BNV = self.first_BV[:, None] if laws_BNV is None else torch.cat([self.first_BV[:, None], laws_BNV], 1)
        node = [(b, at[b][u - 1] + 1 if u else 0) for b, u in pairs]
        return after_BNV[tuple(told(x, after_BNV.device) for x in zip(*node))]

    def record(self, gained: list[int], ran: list[bool]) -> None:
        if any(ran):
            gained = [g for g, r in zip(gained, ran) if r]
            self.state.trace.rounds.append(Round(0, gained, [False] * len(gained)))
            if self.state.request.on_round is not None:
                self.state.request.on_round(self.state)

    def finish(self) -> None:
        state, trace = self.state, self.state.trace
        state.tokens, state.rows, state.memory = self.tokens_BT.tolist(), [], self.passes
        trace.origin = [["drafted" if d else "plain" for d in row] for row in self.stayed.tolist()]
        state.finished = set(range(self.rows))


class ZipAR:
    """Place (i, j) is decided once columns j .. j + window - 1 of row i - 1 are (He et al., ICML 2025).

    A window of at least the image's columns is plain raster decoding. audit: measure the drift, one pass.
    """

    guarantee = "approximate"
    needs: frozenset[str] = frozenset()

    def __init__(self, window: int = 4, audit: bool = True):
        if window < 1:
            raise ValueError(f"window: got {window}, expected at least 1")
        self.window, self.audit = window, audit

    def bind(self, capabilities: Any) -> None:
        pass

    def paint(self, canvas: Canvas) -> None:
        rows = len(canvas.free) // canvas.columns
        for wave in zip_waves(rows, canvas.columns, self.window):
            places = [canvas.free[i * canvas.columns + j] for i, j in wave]
            canvas.step([places] * canvas.rows)


def zip_waves(rows: int, columns: int, window: int) -> Iterator[list[tuple[int, int]]]:
    """The (row, column) pairs of each pass, first image row first."""
    done = [0] * rows
    while done[-1] < columns:
        wave = [
            (i, j) for i, j in enumerate(done) if j < columns and (i == 0 or done[i - 1] >= min(j + window, columns))
        ]
        for i, _ in wave:
            done[i] += 1
        yield wave


class Islands:
    """A drafted image, judged place by place by a `Local` rule; what it rejects is drawn again.

    The places to draw fall into islands, 8-connected components. All islands go on at once, each in raster order, and
    wait where the place before their next one is not final; with the rule's `window` the rows of an island overlap as
    in `ZipAR`. Codes that stay keep the keys and values they were judged with, except where they precede a place that
    is drawn again. Without a usable draft everything is drawn.
    """

    guarantee = "approximate"
    needs: frozenset[str] = frozenset()

    def __init__(self, rule: Local, drafter: Sketcher, audit: bool = True):
        if not hasattr(drafter, "sketch"):
            raise ValueError(f"drafter: got {type(drafter).__name__}, expected one that drafts whole images (lowres)")
        self.rule, self.drafter, self.audit = rule, drafter, audit

    def bind(self, capabilities: Any) -> None:
        self.rule.bind(capabilities)

    def paint(self, canvas: Canvas) -> None:
        state, columns = canvas.state, canvas.columns
        with state.trace.stage("draft"):
            drafted_BN = self._drafted(canvas)
        high = len(canvas.free) // columns
        step = self.rule.rows or high
        for top in range(0, high, step):
            block = slice(top * columns, (top + step) * columns)
            self._block(canvas, canvas.free[block], drafted_BN[:, block])

    def _drafted(self, canvas: Canvas) -> Tensor:
        """The draft, all ABSENT where the drafter failed: that costs speed, never output."""
        state, shape = canvas.state, (canvas.rows, len(canvas.free))
        try:
            drafted_BN = self.drafter.sketch(View(state))
            if drafted_BN.shape != shape or drafted_BN.dtype != torch.long:
                raise ValueError(
                    f"codes: got shape {tuple(drafted_BN.shape)} of {drafted_BN.dtype}, expected {shape} of torch.int64"
                )
        except Exception as error:
            name, what = type(self.drafter).__name__, f"{type(error).__name__}: {error}"
            warnings.warn(f"drafter {name}: {what}; decoding goes on without it", RuntimeWarning, stacklevel=2)
            state.trace.faults += 1
            return torch.full(shape, ABSENT, device=canvas.tokens_BT.device)
        codes = len(canvas.target.capabilities.codebook)
        return torch.where((drafted_BN >= 0) & (drafted_BN < codes), drafted_BN, ABSENT).to(canvas.tokens_BT.device)

    def _block(self, canvas: Canvas, places: Places, drafted_BN: Tensor) -> None:
        logits_BNV = canvas.judge(places, drafted_BN)
        state, greedy = canvas.state, canvas.noise_BTV is None
        with state.trace.stage("accept"):
            p_BNV = logits_BNV.softmax(-1)
            again_BN = self.rule.again(p_BNV, drafted_BN, canvas.columns)
            costs = self.rule.cost(settled(p_BNV, greedy), drafted_BN, ~again_BN)
            for name, gained_B in zip(("drift", "displacement"), costs):
                state.meters[name] = state.meters.get(name, 0.0) + gained_B
            canvas.stayed[:, places] = ~again_BN
            todo = [[u for u, a in zip(places, row) if a] for row in again_BN.tolist()]
        canvas.reject(todo)
        # all before a row's first place stays, so the law that rejected it there is its law
        first = [(b, row[0]) for b, row in enumerate(todo) if row]
        begin = canvas.number[places[0]]
        laws_FV = logits_BNV[[b for b, _ in first], [canvas.number[u] - begin for _, u in first]]
        canvas.decide(first, laws_FV, canvas.pass_number())
        for b, u in first:
            canvas.fresh[b] = [u]
        canvas.record([len(places) - max(len(row) - 1, 0) for row in todo], [True] * canvas.rows)
        where = {u: divmod(canvas.number[u], canvas.columns) for u in places}
        queues = [islands(row, where) for row in todo]
        for row in queues:
            if row:
                row[0].pop(0)  # the row's first place is decided
        while any(island for row in queues for island in row):
            ready = [[self._ready(canvas, b, island) for island in row] for b, row in enumerate(queues)]
            canvas.step([[u for island in row for u in island] for row in ready])
            queues = [
                [[u for u in island if u not in now] for island, now in zip(row, nows)]
                for row, nows in zip(queues, ready)
            ]

    def _ready(self, canvas: Canvas, b: int, island: Places) -> Places:
        """What can be decided now of an island's open places: one, or with a window one in each image row."""
        known = canvas.known[b]
        if self.rule.window is None:
            return [u for u in island[:1] if known[canvas.free[canvas.number[u] - 1]]]
        first: dict[int, int] = {}
        for u in island:
            first.setdefault(canvas.number[u] // canvas.columns, u)
        return [u for u in first.values() if all(known[t] for t in canvas.over(u, self.rule.window))]


def islands(places: Places, where: dict[int, tuple[int, int]]) -> list[Places]:
    """8-connected components of the places, `where` giving their row and column; each sorted, by first place."""
    left, found = {where[u]: u for u in places}, []
    while left:
        edge, island = [next(iter(left))], []
        while edge:
            row, column = edge.pop()
            u = left.pop((row, column), None)
            if u is None:
                continue
            island.append(u)
            edge += [(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        found.append(sorted(island))
    return sorted(found)


def audit(canvas: Canvas) -> Tensor:
    """(B,) sum over places of the total variation between the law used and the law given all that stands before it."""
    state = canvas.state
    assert canvas.used_BTV is not None
    device, last = canvas.tokens_BT.device, canvas.total - 1
    where_BN = torch.arange(last, device=device).expand(canvas.rows, -1)
    seen_BT = torch.ones(canvas.rows, canvas.total, dtype=torch.bool, device=device)
    scores = canvas.target.revise(state, canvas.tokens_BT[:, :last], where_BN, seen_BT)
    full_BTV = torch.cat([canvas.first_BV[:, None], scores.logits], dim=1).softmax(-1)
    full_BTV = settled(full_BTV, canvas.noise_BTV is None)[:, canvas.free]
    here_BT = full_BTV.gather(2, canvas.tokens_BT[:, canvas.free, None])[..., 0]
    moved_BT = 0.5 * (canvas.used_BTV[:, canvas.free] - full_BTV).abs().sum(-1)
    return torch.where(canvas.stayed[:, canvas.free], 1 - here_BT, moved_BT).sum(1)
