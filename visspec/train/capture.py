"""Training batches recorded from the target while it generates answers in the decode loop.

A recorder takes the drafter's place and drafts nothing, so features and distributions are recorded at every token of an
answer, without a second pass or disk access. Instead of a distribution, the state that the target's head reads is kept
in the target's dtype: 2 d bytes per token instead of 4 V. If the head does not reproduce the distribution, or
processors change it, the distributions themselves are kept.

Shapes: B rows, L prompt, M longest answer, F features, V vocabulary, X numbers of a state, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import categorical
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.train.batches import TrainingBatch
from visspec.types import Acceptance, Draft, Drafter, Outcome, Request, Scores, State, Target, Verdict


@dataclass
class AnsweredRequest(Request):
    """A request with known answers, for which `capture` records the target's scores."""

    answers: Sequence[list[int]] = ()  # at least one id for each row, stop token included


class Recorder(Drafter):
    """A drafter that drafts nothing and records the target's scores. Each round adds one answer token to every row."""

    needs = frozenset({"features", "embeddings"})

    def __init__(self, target: Target):
        self.target = target

    def start(self, state: State, scores: Scores) -> None:
        self.scores, self.law, self.count = scores, _law(self.target, state.request, scores), 0
        first, logits = features_of(scores, state.request.prompt), categorical(scores.distribution).logits
        like = logits if self.law is None else scores.aux["states"]
        (rows, length, width), most = first.shape, max(state.request.max_new_tokens - 1, 0)
        with torch.inference_mode(False):  # training saves them for its backward pass
            self.features = torch.zeros(rows, length + most, width, dtype=first.dtype, device=first.device)
            self.states = torch.zeros(rows, most, like.shape[-1], dtype=like.dtype, device=first.device)
            self.best = torch.zeros(rows, most, dtype=torch.long, device=first.device)
        self.features[:, :length] = first

    def propose(self, state: State, depth: int) -> Draft:
        return trees.empty_draft(state.pending)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        rows, place = to_device(state.rows, self.best.device), self.count
        prompt = state.request.prompt.shape[1]
        logits_BV = categorical(scores.distribution).logits[:, 0]
        self.features[rows, prompt + place] = features_of(scores, draft.value)[:, 0]
        self.states[rows, place] = logits_BV if self.law is None else scores.aux["states"][:, 0]
        self.best[rows, place] = logits_BV.argmax(dim=-1)
        self.count += 1

    def select(self, state: State, keep: list[int]) -> None:
        """Do nothing, because records are stored by row."""


def _law(target: Target, request: Request, prefill: Scores) -> Callable[[Tensor], Tensor] | None:
    """Return the target's function from states to distributions if it reproduces the one after the prompt."""
    law, states = target.law(request), prefill.aux.get("states")
    if law is None or states is None:
        return None
    actual, expected = (logits.softmax(dim=-1) for logits in (law(states), categorical(prefill.distribution).logits))
    close = 1e-3 if states.dtype in (torch.float32, torch.float64) else 0.1
    same = actual.shape == expected.shape and bool((actual - expected).abs().sum(dim=-1).max() < close)
    return law if same else None


def identity(states: Tensor) -> Tensor:
    """Return states that are log-distributions unchanged."""
    return states


def features_of(scores: Scores, ids_BN: Tensor) -> Tensor:
    """Return the features (B, N, F) after a prompt or the nodes of a draft; F = 0 if the target has none."""
    if scores.features is None:
        return ids_BN.new_zeros(*ids_BN.shape, 0, dtype=torch.float32)
    return scores.features


def _padded(answers: Sequence[list[int]], device: torch.device) -> Tensor:
    longest = max(map(len, answers))
    return torch.tensor([ids + [0] * (longest - len(ids)) for ids in answers], device=device)


def capture(target: Target, rule: Acceptance, request: Request) -> TrainingBatch:
    """Generate answers to a batch of prompts and return the recorded batch. F = 0 if the target has no features. With
    temperature 1 and without top-k and top-p, the recorded distributions are the target's unmodified ones.
    """
    if isinstance(request, AnsweredRequest):
        return capture_answers(target, request)
    recorder = Recorder(target)
    ended = decode(target, recorder, rule, request, FixedLength(1))
    prompt, length = request.prompt, request.prompt.shape[1]
    lengths = [len(t) for t in ended.tokens]
    more, answer = max(lengths) - 1, _padded(ended.tokens, prompt.device)
    features, states, best = recorder.features[:, : length + more], recorder.states[:, :more], recorder.best[:, :more]
    return _batch(recorder.scores, prompt, answer, lengths, features, states, recorder.law, best)


def _batch(
    prefill: Scores,
    prompt: Tensor,
    answer: Tensor,
    lengths: list[int],
    features: Tensor,
    states: Tensor,
    law: Callable[[Tensor], Tensor] | None,
    best: Tensor,
) -> TrainingBatch:
    ids, embeddings, attention = torch.cat([prompt, answer], dim=1), *map(prefill.aux.get, ("embeddings", "attention"))
    positions = _positions(prefill.aux["positions"], *answer.shape)
    return TrainingBatch(
        ids,
        prompt.shape[1],
        lengths,
        features,
        states,
        law or identity,
        prefill.distribution.width,
        best,
        positions,
        attention,
        None if embeddings is None else embeddings.clone(),
        ids.cpu(),
        None if attention is None else attention.cpu(),
        max(int(positions.max()), ids.shape[1]) + 1,
    )


def capture_answers(target: Target, request: AnsweredRequest) -> TrainingBatch:
    """Like `capture`, for known answers, in a single pass."""
    lengths, longest = list(map(len, request.answers)), max(map(len, request.answers))
    answer = _padded(request.answers, request.prompt.device)
    with torch.inference_mode():
        state, first = target.prefill(request)
        state.pending, state.position = answer[:, 0], state.position + 1
        draft = trees.chain_draft(state.pending, answer[:, 1 : max(longest - 1, 1)])
        scores = target.verify(state, draft)
    law, logits_BTV = _law(target, request, first), categorical(scores.distribution).logits[:, : longest - 1]
    states_BTX = logits_BTV.float() if law is None else scores.aux["states"][:, : longest - 1]
    features = torch.cat([features_of(first, request.prompt), features_of(scores, draft.value)], dim=1)
    features = features[:, : request.prompt.shape[1] + longest - 1]
    return _batch(first, request.prompt, answer, lengths, features, states_BTX.clone(), law, logits_BTV.argmax(dim=-1))


def _positions(prompt: Tensor, rows: int, answer: int) -> Tensor:
    """Return positions of the prompt and the answer without its last token: (B, L + M - 1) or (3, B, L + M - 1)."""
    positions = prompt if prompt.dim() == 2 else prompt[-3:]
    positions = positions.expand(*positions.shape[:-2], rows, positions.shape[-1])
    steps = torch.arange(1, answer, device=positions.device)
    return torch.cat([positions, positions[..., -1:] + steps], dim=-1)


def split(batch: TrainingBatch, rows: int) -> list[TrainingBatch]:
    """Split into batches of at most `rows` rows, sorted by answer length, each padded to its longest answer."""
    order = sorted(range(len(batch.lengths)), key=lambda b: batch.lengths[b])
    return [_part(batch, order[i : i + rows]) for i in range(0, len(order), rows)]


def _part(batch: TrainingBatch, rows: list[int]) -> TrainingBatch:
    lengths = [batch.lengths[b] for b in rows]
    more = max(lengths)
    end = batch.prompt_length + more

    def own(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[rows]

    return replace(
        batch,
        ids=batch.ids[rows, :end],
        lengths=lengths,
        features=batch.features[rows, : end - 1],
        states=batch.states[rows, : more - 1],
        best=batch.best[rows, : more - 1],
        positions=batch.positions[..., rows, : end - 1],
        host_ids=batch.host_ids[rows, :end],
        attention=own(batch.attention),
        embeddings=own(batch.embeddings),
        host_attention=own(batch.host_attention),
    )


def to(batch: TrainingBatch, dtype: torch.dtype) -> TrainingBatch:
    """Cast features and embeddings, so that a half-precision target can train a drafter in float32."""
    embeddings = None if batch.embeddings is None else batch.embeddings.to(dtype)
    return replace(batch, features=batch.features.to(dtype), embeddings=embeddings)
