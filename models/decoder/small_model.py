"""A smaller transformers model as drafter. Vision-language models get the image; text models get the prompt without it.

transformers' assisted generation passes no pixels to a vision-language assistant, only supports batch size 1, and
repeats its prefill. Here the small model has a slot cache per request, and rollback copies nothing. Shapes: B rows,
M tokens to catch up with, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Categorical, categorical
from visspec.models.attention.pass_inputs import CACHE
from visspec.models.decoder.target import HFDecoder, describe
from visspec.models.drafting.base import Chain, StructuredDrafter
from visspec.models.runner.compiled import compiled_passes
from visspec.types import Draft, DrafterTraits, Outcome, Request, Scores, State, Verdict

READS = 4096  # tokens; reading a long prompt costs a share of the target's prefill, so small models skip most of it
VOCABULARY_PADDING = 1024  # models of one family pad their vocabulary differently; the used ids are the same


class SmallModel(StructuredDrafter):
    """Drafts chains with a loaded transformers model that has the target's tokenizer.

    Args:
        small: The drafter's model.
        model: The target.
        reads: How many tokens of a prompt a small text model reads at most, its first one and the last ones; None: all.

    Raises:
        ValueError: The vocabularies differ by more than padding.
    """

    saved_as = "model"

    traits = DrafterTraits(levels=5, joins=True)

    def __init__(self, small: PreTrainedModel, model: PreTrainedModel, reads: int | None = READS):
        if reads is not None and reads < 1:
            raise ValueError(f"reads: got {reads}, expected at least 1 or None.")
        if not hasattr(small, "prepare_inputs_for_generation"):
            raise ValueError(f"drafter: {type(small).__name__} does not generate. Pass a causal language model.")
        self.target, self.reads = HFDecoder(small), reads
        if self.target.states:
            raise ValueError(f"drafter: got {type(small).__name__} with recurrent layers, expected attention.")
        ours, theirs = self.target.capabilities, describe(model)
        if abs(ours.vocab - theirs.vocab) > VOCABULARY_PADDING:
            raise ValueError(
                f"drafter: vocabulary of {ours.vocab}, expected the target's {theirs.vocab}. For a model with another"
                " tokenizer use transformers' universal assisted decoding: generate(assistant_model=..., tokenizer=...,"
                " assistant_tokenizer=...)."
            )
        self.vocab, self.full = min(ours.vocab, theirs.vocab), theirs.vocab
        self.content = sorted(theirs.never_drafted)
        self.sees = bool(ours.never_drafted)

    def compile(self) -> None:
        if self.passes is None:
            self.passes = self.target.passes = compiled_passes(self.target.model, self.target.decoder)

    def record(self) -> None:
        if self.recorder is None:
            self.target.record(None)
            self.recorder = self.target.recorder

    def start(self, state: State, scores: Scores) -> None:
        request = state.request
        pixels = any(name.startswith("pixel") for name in request.media)
        if self.sees and not pixels and bool(self._is_content(request.prompt).any()):
            raise ValueError("drafter: got no pixels, expected a call through visspec.accelerate(...).generate.")
        if self.sees:
            inputs = {**request.media, "input_ids": request.prompt[:: request.copies]}
            inputs |= {"num_return_sequences": request.copies, "do_sample": request.copies > 1}
        else:
            inputs = self._blind(request)
        memory: dict[str, Any] = {}

        def prefill(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            model_kwargs.pop(CACHE, None)
            # no sampling arguments, so that distributions are not warped
            own = Request(inputs=model_kwargs, prompt=input_ids, max_new_tokens=request.max_new_tokens)
            memory["state"] = self.target.prefill(own)[0]
            return input_ids

        self.target.model.generate(**inputs, custom_generate=prefill, max_new_tokens=1)
        state.memory = _SmallModelState(memory["state"], state)

    def _is_content(self, ids: Tensor) -> Tensor:
        return torch.isin(ids, torch.tensor(self.content, device=ids.device, dtype=ids.dtype))

    def _blind(self, request: Request) -> dict[str, Any]:
        """Return the prompt without image content, left-padded again."""
        prompt = request.prompt
        keep = ~self._is_content(prompt)
        if (attention := request.inputs.get("attention_mask")) is not None:
            keep &= attention.bool()
        order = keep.long().argsort(dim=1, stable=True)  # move dropped ids to the left as padding
        longest = int(keep.sum(dim=1).max())
        ids, keep = torch.where(keep, prompt, 0).gather(1, order)[:, -longest:], keep.gather(1, order)[:, -longest:]
        if self.reads is not None and self.reads < longest:
            # longer rows keep their first token, without which many models degenerate
            first = keep.long().argmax(dim=1, keepdim=True)
            start = torch.arange(longest - self.reads, longest, device=ids.device).expand(len(ids), -1).clone()
            start[:, :1] = torch.minimum(start[:, :1], first)
            ids, keep = ids.gather(1, start), keep.gather(1, start)
        return {"input_ids": ids, "attention_mask": keep.long()}

    def propose(self, state: State, depth: int) -> Draft:
        memory: _SmallModelState = state.memory
        depth = self.levels(state, depth)
        logits_BV = self._catch_up(state, memory)
        chain = Chain(state)
        for level in range(depth):
            if level:
                logits_BV = self._logits(memory, trees.empty_draft(chain.tokens[-1]))[:, -1]
                memory.advance([1] * len(state.rows))
            chain.add(logits_BV[:, : self.vocab])
        memory.drafted = depth - 1  # the last token was proposed, but not read
        draft = chain.finish()
        if draft.q is None:
            return draft
        q = categorical(draft.q).p  # over the target's vocabulary
        return replace(draft, q=Categorical(p=nn.functional.pad(q, (0, self.full - q.shape[-1]))))

    def _logits(self, memory: _SmallModelState, draft: Draft) -> Tensor:
        """Return logits (B, M, V) after each token of a draft for the small model."""
        return categorical(self.target.verify(memory.own, draft).distribution).logits

    def _catch_up(self, state: State, memory: _SmallModelState) -> Tensor:
        """Process tokens committed since the last draft and return logits (B, V) after each row's pending token."""
        unread = memory.unread
        width = max(map(len, unread))
        padded = [tokens + [0] * (width - len(tokens)) for tokens in unread]
        tokens = to_device(padded, state.pending.device)
        draft = Draft(tokens, trees.chain(width - 1, str(tokens.device)))
        logits_BMV = self._logits(memory, draft)
        last = to_device([len(t) - 1 for t in unread], tokens.device)
        memory.advance([len(t) for t in unread])
        memory.unread = [[] for _ in unread]
        return logits_BMV[torch.arange(len(unread), device=tokens.device), last]

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        state.memory.commit(outcome)

    def select(self, state: State, keep: list[int]) -> None:
        memory: _SmallModelState = state.memory
        self.target.select(memory.own, keep)
        memory.own.position = memory.own.position[keep]
        memory.unread = [memory.unread[b] for b in keep]

    def join(self, state: State, other: State, take: list[int]) -> None:
        memory, new = state.memory, other.memory
        self.target.join(memory.own, new.own, take)
        memory.own.position = torch.cat([memory.own.position, new.own.position[take]])
        memory.unread = memory.unread + [new.unread[b] for b in take]


class _SmallModelState:
    """The small model's state and the tokens that it has not processed."""

    def __init__(self, own: State, state: State):
        self.own = own
        self.drafted = 0  # drafted tokens in the small model's cache
        self.own.position = self.own.position + 1
        self.unread = [state.tokens[row][-1:] for row in state.rows]

    def advance(self, counts: list[int]) -> None:
        slots = self.own.cache.slots
        slots.lengths = [n + c for n, c in zip(slots.lengths, counts)]
        self.own.position = self.own.position + to_device(counts, self.own.position.device)

    def commit(self, outcome: Outcome) -> None:
        """Keep accepted drafted tokens in the cache, drop the others, and queue the tokens to be processed."""
        lengths = [min(len(path) - 1, self.drafted) for path in outcome.path]
        self.advance([h - self.drafted for h in lengths])
        self.unread = [unread + tokens[h:] for unread, tokens, h in zip(self.unread, outcome.tokens, lengths)]
        self.drafted = 0
