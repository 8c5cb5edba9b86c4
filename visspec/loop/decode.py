"""The decode loop: draft, verify, accept, commit, observe.

One loop for plain decoding (nothing drafted), text of vision-language models and discrete image tokens. It knows no
model class: targets, drafters and rules are passed in (`types.Target`, `types.Drafter`, `types.Acceptance`). Each round
synchronises host and device once, in `settle`; what the loop and the cache tell the device of a round (lengths, paths,
rows) is queued from pinned memory and makes nobody wait. A request's processors, stop function and grammar wait too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import told
from visspec.loop.pace import Pace
from visspec.types import (
    ABSENT,
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
def decode(target: Target, drafter: Drafter | None, accept: Acceptance, request: Request, pace: Pace) -> State:
    """Decode a batch. Returns the finished state: `tokens` per row (stop trimmed), `trace`, `laws` when asked for.

    A fault of the target raises; a fault of the drafter has been turned into an empty draft before it gets here.
    """
    state, scores = open_request(target, accept, request)
    if not state.live:
        return state
    trace = state.trace
    if drafter is not None:
        with trace.stage("draft_prefill"):
            drafter.start(state, scores)
    while state.live:
        depth = pace.depth(state) if drafter is not None and state.drafting else 0
        with trace.stage("draft"):
            draft = drafter.propose(state, depth) if depth else trees.undrafted(state.pending)
        with trace.stage("verify"):
            scores = target.verify(state, draft)
        with trace.stage("accept"):
            verdict = accept(draft, scores, state.noise)
            outcome = settle(state, draft, scores, verdict)
        with trace.stage("commit"):
            target.commit(state, draft, outcome)
        if drafter is not None:
            with trace.stage("observe"):
                drafter.observe(state, draft, scores, verdict, outcome)
            pace.observe(trace)
        retire(state, target, drafter)
        if request.on_round is not None:
            request.on_round(state)
    return state


def open_request(target: Target, accept: Acceptance, request: Request) -> tuple[State, Scores]:
    """Prefill, and the first token of every row: the acceptance of an empty draft below the prompt's last token."""
    trace = Trace()
    with trace.stage("prefill"):
        state, scores = target.prefill(request)
        rows = len(state.rows)
        state.trace, trace.origin = trace, [[] for _ in range(rows)]
        state.tokens, state.laws, state.raw = ([[] for _ in range(rows)] for _ in range(3))
        if request.generators is not None and not request.sampling.greedy:
            state.noise = accept.make_noise(request.generators, scores.logits.shape[-1])
        draft = trees.undrafted(state.pending)
        settle(state, draft, scores, accept(draft, scores, state.noise))
    trace.rounds.clear()  # the prefill is not a round: tau counts passes over drafts
    retire(state, target, None)
    return state, scores


def settle(state: State, draft: Draft, scores: Scores, verdict: Verdict) -> Outcome:
    """Bring the verdict to the host (the round's one synchronisation), trim at stops, and hand the tokens out."""
    width, tree = verdict.path.shape[1], draft.tree
    parts = [verdict.length[:, None], verdict.next[:, None], verdict.path, draft.tokens]
    if not tree.chain:
        parts.append(tree.parent.expand_as(draft.tokens))
    outcome, tried = Outcome(path=[], tokens=[]), []
    for b, (length, following, *rest) in enumerate(torch.cat(parts, dim=1).tolist()):
        path, nodes, parents = rest[:length], rest[width : width + tree.size], rest[width + tree.size :]
        end = path[-1]
        below = nodes[end + 1 : end + 2] if tree.chain else [t for t, p in zip(nodes, parents) if p == end]
        tried.append(any(t != ABSENT for t in below))
        outcome.path.append(path)
        outcome.tokens.append([*(nodes[n] for n in path[1:]), following])
        emit(state, b, outcome.tokens[b], tried[b])
        if state.request.keep_logits:
            add_laws(state.laws, state, b, scores.logits, path)
        if state.request.keep_raw:
            add_laws(state.raw, state, b, scores.aux["raw"], path)
    for name in ("drift", "displacement"):
        if (gained := getattr(verdict, name)) is not None:
            meter = state.meters.setdefault(name, gained.new_zeros(len(state.tokens)))
            meter.index_add_(0, told(state.rows, gained.device), gained)
    state.trace.rounds.append(Round(draft.levels, [len(t) for t in outcome.tokens], tried))
    state.pending, state.position = verdict.next, state.position + verdict.length
    if state.noise is not None:
        state.noise.advance([len(t) for t in outcome.tokens])
    return outcome


def emit(state: State, b: int, gained: list[int], tried: bool) -> None:
    """Append a live row's new tokens up to its first stop. tried: a drafted token stood where the last one stands.

    Tokens behind a stop inside an accepted block are dropped, so the output is what plain decoding gives.
    """
    request, row = state.request, state.rows[b]
    tokens, origin = state.tokens[row], state.trace.origin[row]
    last = "corrected" if tried else "bonus" if len(gained) > 1 else "plain"
    before = len(tokens)
    for i, token in enumerate(gained):
        tokens.append(token)
        origin.append(last if i == len(gained) - 1 else "drafted")
        over = token in request.eos or len(tokens) >= request.max_new_tokens
        if over or (request.stop is not None and request.stop(state.ids(b))):
            state.finished.add(row)
            break
    if request.on_tokens is not None:
        request.on_tokens(tokens[before:])


def add_laws(kept: list[list[Tensor]], state: State, b: int, laws_BNV: Tensor, path: list[int]) -> None:
    """Add to a live row's laws those that gave its new tokens."""
    row = state.rows[b]
    kept[row].extend(laws_BNV[b, path[: len(state.tokens[row]) - len(kept[row])]])


def retire(state: State, target: Target, drafter: Drafter | None) -> None:
    """Let finished rows leave: the batch that goes on is as if they had never been in it."""
    keep = [b for b, row in enumerate(state.rows) if row not in state.finished]
    if len(keep) == len(state.rows):
        return
    state.rows = [state.rows[b] for b in keep]
    if not keep:
        return
    index = told(keep, state.pending.device)
    state.pending, state.position = state.pending[index], state.position[index]
    if state.noise is not None:
        state.noise.select(keep)
    target.select(state, keep)
    if drafter is not None:
        drafter.select(state, keep)
