"""Decoding of an image out of raster order (`loop.orders`).

A position may be generated before all of its raster predecessors. Its distribution is computed from the token at the
previous position, which attends to all final tokens. Every final token is run again in the pass after the one that
generated it, so that the cache has its keys and values. The schedule does not depend on tokens, so the host plans all
passes and only synchronises after each verified draft and at the end.

The distribution of a position depends on the earlier positions in raster order and on the draft. The total variation
between the output and plain decoding is at most the expected sum, over positions, of the total variation between the
distribution used and the distribution given all previous positions. `audit` measures this sum, the drift, in one extra
pass.

Shapes: B rows, T places of the image in raster order, grammar included, N nodes of a pass, F decisions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visspec.accept.local import sampled_distributions
from visspec.cache import to_device
from visspec.distributions import categorical
from visspec.loop.decode import stage
from visspec.sampling import Gumbel
from visspec.types import FREE, Request, Round, State, Target, Trace

Places = list[int]
NOWHERE = -1  # position of padding nodes


@torch.inference_mode()
def decode_wavefront(target: Target, request: Request, schedule: Callable[[OutOfOrderDecoder], None]) -> State:
    """Decode a batch of images; `schedule` generates all positions. Raises ValueError for unsupported requests.

    In the returned state, `trace.rounds` has an entry for each pass of the target except prefill and audit,
    `trace.origin` is "drafted" for accepted codes and "plain" for the others, and `memory` has the pass number of each
    token, (B, T).
    """
    for name, value in (("processors", request.sampling.processors), ("stop", request.stop), ("eos", request.eos)):
        if value:
            raise ValueError(f"{name}: This option needs raster order. Leave it out, or pass order='raster'.")
    trace = Trace()
    with stage(trace, "prefill"):
        state, scores = target.prefill(request)
        state.trace = trace
        if request.generators is not None and not request.sampling.greedy:
            state.noise = Gumbel(request.generators, scores.distribution.width)
        decoder = OutOfOrderDecoder(target, state, categorical(scores.distribution).logits[:, -1])
    for place in decoder.preview:
        decoder.step([[place]] * decoder.rows)
    schedule(decoder)
    with stage(trace, "audit"):
        state.drift = audit(decoder)
    decoder.finish()
    return state


class OutOfOrderDecoder:
    """A batch of unfinished images: final tokens and their cache slots. `free` are the places of the image's codes,
    `preview` those of a smaller image that some models generate first. `known` and `cached` are host flags by row and
    place. `fresh` places are generated but not yet in the cache.
    """

    def __init__(self, target: Target, state: State, first_BV: Tensor):
        request = state.request
        assert request.grid is not None
        self.target, self.state, self.first_BV = target, state, first_BV
        self.total, self.columns = request.max_new_tokens, request.grid[1]
        fixed = [FREE] * self.total if request.fixed is None else request.fixed[: self.total].tolist()
        self.grammar = [f != FREE for f in fixed]
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
        self.accepted_mask = torch.zeros(self.rows, self.total, dtype=torch.bool, device=device)
        self.passes = [[0] * self.total for _ in range(self.rows)]
        self.noise_BTV = None if state.noise is None else state.noise.window(self.total)
        self.used_BTV = first_BV.new_zeros(self.rows, self.total, first_BV.shape[-1])

    def due(self, b: int) -> Places:
        """Return the positions to run in a row's next pass: the fresh ones, each with the following grammar tokens."""
        return [at for place in self.fresh[b] for at in self.tail(place)]

    def tail(self, place: int) -> Places:
        """Return a place and the grammar that follows it."""
        end = place + 1
        while end < self.total and self.grammar[end]:
            end += 1
        return list(range(place, end))

    def row_above(self, place: int, window: int) -> Places:
        """Return up to `window` places of the image row above, starting at this column."""
        n = self.number[place]
        end = min(n % self.columns + window, self.columns) - n % self.columns
        return self.free[n - self.columns : n - self.columns + end] if n >= self.columns else []

    def step(self, places_by_row: list[Places]) -> None:
        """Run one pass that generates the wanted positions of each row, from the fresh tokens and the predecessors of
        the wanted positions.

        A predecessor that is not final is replaced by the code above the wanted position, or by the fixed end of row.
        No other token attends to this replacement, and the position is run again when it is final.
        """
        final, extra = [], []
        for b, places in enumerate(places_by_row):
            final.append(set(self.due(b) if places else ()))
            sources = {u - 1: self.above.get(u, u - 1) for u in places if u > 0 and u - 1 not in final[b]}
            final[b] |= {t for t in sources if self.cached[b][t]}
            extra.append({t: t if self.known[b][t] else s for t, s in sources.items() if t not in final[b]})
        distributions, at = self._run(final, extra)
        for b, places in enumerate(places_by_row):
            self.fresh[b] = list(places) or self.fresh[b]
        pairs, ran = [(b, u) for b, places in enumerate(places_by_row) for u in places], [bool(nodes) for nodes in at]
        self.decide(pairs, self._after(distributions, at, pairs), self.pass_number(any(ran)))
        self.record([len(places) for places in places_by_row], ran)

    def score_draft(self, drafted_BN: Tensor) -> Tensor:
        """Run one pass over a drafted image, treated as final. Returns the distributions of its codes, (B, N, V)."""
        places = self.free
        self.tokens_BT[:, places] = drafted_BN
        first = max(places[0] - 1, 0)
        while first > 0 and self.grammar[first]:
            first -= 1
        final = [{*self.due(b), *range(first, places[-1] + 1)} for b in range(self.rows)]
        for b in range(self.rows):
            self.fresh[b] = []
            for u in places:
                self.known[b][u], self.passes[b][u] = True, self.pass_number()
        distributions, at = self._run(final, [{} for _ in final])
        pairs = [(b, u) for b in range(self.rows) for u in places]
        return self._after(distributions, at, pairs).unflatten(0, (self.rows, len(places)))

    def reject(self, todo: list[Places]) -> None:
        """Mark these positions of each row, and the grammar after them, as not final."""
        for b, places in enumerate(todo):
            for u in places:
                self.known[b][u] = False
                for t in self.tail(u):
                    self.cached[b][t] = False

    def pass_number(self, ran: bool = True) -> int:
        return len(self.state.trace.rounds) + ran

    def decide(self, pairs: list[tuple[int, int]], logits_FV: Tensor, now: int) -> None:
        """Sample the tokens of (row, position) pairs from their distributions, with the noise of each position."""
        if not pairs:
            return
        with stage(self.state.trace, "accept"):
            b_F, u_F = (to_device(x, logits_FV.device) for x in zip(*pairs))
            noise_FV = 0.0 if self.noise_BTV is None else self.noise_BTV[b_F, u_F]
            self.tokens_BT[b_F, u_F] = (logits_FV + noise_FV).argmax(-1)
            self.used_BTV[b_F, u_F] = sampled_distributions(logits_FV.softmax(-1), self.noise_BTV is None)
        for b, u in pairs:
            self.known[b][u], self.passes[b][u] = True, now

    def _run(self, final: list[set[int]], extra: list[dict[int, int]]) -> tuple[Tensor | None, list[dict[int, int]]]:
        """Run final positions and replacements {position: other position}. Returns distributions, {position: node}."""
        tables = [{**{t: t for t in sorted(f)}, **e} for f, e in zip(final, extra)]
        width = max(map(len, tables))
        if width == 0:
            return None, [{} for _ in tables]
        for b, places in enumerate(final):
            for t in places:
                self.cached[b][t] = True
        device = self.tokens_BT.device
        where_BN = to_device([[*t, *[NOWHERE] * (width - len(t))] for t in tables], device)
        source_BN = to_device([[*t.values(), *[0] * (width - len(t))] for t in tables], device)
        seen_BT = to_device(self.cached, device)
        with stage(self.state.trace, "verify"):
            scores = self.target.revise(self.state, self.tokens_BT.gather(1, source_BN), where_BN, seen_BT)
        return categorical(scores.distribution).logits, [{t: n for n, t in enumerate(table)} for table in tables]

    def _after(self, laws_BNV: Tensor | None, at: list[dict[int, int]], pairs: list[tuple[int, int]]) -> Tensor:
        if not pairs:
            return self.first_BV[:0]
        after_BNV = self.first_BV[:, None] if laws_BNV is None else torch.cat([self.first_BV[:, None], laws_BNV], 1)
        node = [(b, at[b][u - 1] + 1 if u else 0) for b, u in pairs]
        return after_BNV[tuple(to_device(x, after_BNV.device) for x in zip(*node))]

    def record(self, committed: list[int], ran: list[bool]) -> None:
        if any(ran):
            committed = [g for g, r in zip(committed, ran) if r]
            self.state.trace.rounds.append(Round(0, committed, [False] * len(committed)))
            if self.state.request.on_round is not None:
                self.state.request.on_round(self.state)

    def finish(self) -> None:
        state, trace = self.state, self.state.trace
        state.output.tokens, state.rows, state.memory = self.tokens_BT.tolist(), [], self.passes
        trace.origin = [["drafted" if d else "plain" for d in row] for row in self.accepted_mask.tolist()]
        state.output.finished = set(range(self.rows))


def audit(decoder: OutOfOrderDecoder) -> Tensor:
    """Return the drift (B,): the total variation from the distributions given all predecessors, summed over places."""
    state = decoder.state
    device, last = decoder.tokens_BT.device, decoder.total - 1
    where_BN = torch.arange(last, device=device).expand(decoder.rows, -1)
    seen_BT = torch.ones(decoder.rows, decoder.total, dtype=torch.bool, device=device)
    scores = decoder.target.revise(state, decoder.tokens_BT[:, :last], where_BN, seen_BT)
    full_BTV = torch.cat([decoder.first_BV[:, None], categorical(scores.distribution).logits], dim=1).softmax(-1)
    full_BTV = sampled_distributions(full_BTV, decoder.noise_BTV is None)[:, decoder.free]
    here_BT = full_BTV.gather(2, decoder.tokens_BT[:, decoder.free, None])[..., 0]
    moved_BT = 0.5 * (decoder.used_BTV[:, decoder.free] - full_BTV).abs().sum(-1)
    return torch.where(decoder.accepted_mask[:, decoder.free], 1 - here_BT, moved_BT).sum(1)
