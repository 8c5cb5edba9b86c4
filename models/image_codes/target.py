"""Discrete autoregressive image models as targets, including guidance.

Classifier-free guidance is implemented here: each request has two cache rows, conditional rows first, in one forward
pass; logits are mixed and warped. A `Family` (one file each) defines how a model differs; the decoder itself is the
stock module, called with embeddings, an additive mask, positions and our cache.

Shapes: B requests, R = B or 2 B cache rows, L prompt, N nodes, V ids (codes, then grammar ids), T image positions,
A axes of position ids, d hidden size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec import tree as trees
from visspec.cache import GROW, SlotCache, to_device
from visspec.distributions import Categorical
from visspec.grammar import constrain
from visspec.loop.decode import TokenBuffer
from visspec.models.attention import draft_attention
from visspec.models.attention.pass_inputs import CACHE, NAME, AttentionInputs, Masks, SlotLayers, cache_argument
from visspec.models.image_codes.family import EncodedPrompt, Family
from visspec.models.runner.compiled import CompiledPasses
from visspec.models.runner.graphs import GraphedForward, graphed_forward
from visspec.models.runner.widths import PassWidths
from visspec.sampling import process, warp
from visspec.types import Capabilities, Draft, Outcome, Request, Scores, State, Target, Tree

TAKES_MASKS = {"sdpa", "eager"}


class ImageAR(Target):
    """A `Family` as a `Target`.

    Args:
        features: Whether to return hidden states; those of both guidance rows are concatenated.
        compile: See `compiled_passes`.
    """

    passes: CompiledPasses | None = None
    recorder: GraphedForward | None = None

    def __init__(self, family: Family, features: bool = False, compile: bool = False):
        decoder = family.decoder
        self.cache_name = cache_argument(type(decoder).forward) or CACHE
        attention = draft_attention.implementation(decoder.config) or draft_attention.STOCK
        if attention not in TAKES_MASKS:
            raise ValueError(f"attn_implementation: got {attention!r}, expected 'sdpa' or 'eager'.")
        self.family, self.features = family, features
        self.configs = draft_attention.configurations(decoder)
        shared = draft_attention.groups(decoder, probed=False) if attention == draft_attention.STOCK else 1
        self.masks = Masks(next(decoder.parameters()).dtype, groups=shared)
        self.passes = family.passes if compile else None
        self.widths: PassWidths | None = None
        self.capabilities = Capabilities(
            vocab=family.codes + family.grammar,
            never_drafted=frozenset(range(family.codes, family.codes + family.grammar)),
            feature_layers=(-1,) if features else (),
            codebook=family.codebook,
        )

    @property
    def device(self) -> torch.device:
        return next(self.family.decoder.parameters()).device

    def fix_widths(self) -> None:
        if type(self) is not ImageAR:
            super().fix_widths()
        config, head = self.family.decoder.config, getattr(self.family.model, "lm_head", None)
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        parts = [self.family.decoder, *(self.family.mlp_head or ()), *([] if head is None else [head])]
        shape = heads // self.masks.groups, self.masks.groups, size
        self.widths = PassWidths(parts, [shape], self.masks.dtype, self.device)
        self.widths.nodes(1, 1)

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Run the prompts (`request.inputs` is an `EncodedPrompt`). Scores: logits (B, 1, V), features (B, L, F)."""
        alone = self.widths is None or len(request.inputs.ids) == 1
        state, hidden = self._prefill(request) if alone else self._prefill_each(request)
        last = hidden[:, -1:]
        if self.widths is not None:
            last = last.expand(-1, self.widths.nodes(len(last), 1), -1)
        return state, self._scores(state, trees.empty_draft(state.pending), last, hidden)

    def _prefill_each(self, request: Request) -> tuple[State, Tensor]:
        """Run `_prefill` for each request by itself, without the padding that other rows need, and combine them."""
        prompt: EncodedPrompt = request.inputs
        rows, length = prompt.ids.shape
        count = len(prompt.embeds)
        own = [self._prefill(replace(request, inputs=prompt.row(b), prompt=prompt.ids[b : b + 1])) for b in range(rows)]
        order = [(b, half) for half in range(count // rows) for b in range(rows)]
        caches = [state.cache for state, _ in own]
        cache = SlotLayers(count)
        stores = [[store[half] for store in (*caches[b].slots.keys, *caches[b].slots.values)] for b, half in order]
        starts = [(each, caches[b].slots.length) for each, (b, _) in zip(stores, order)]
        cache.slots.fill(starts, GROW + request.max_new_tokens)
        cache.adopt(caches[0])
        cache.slots.extents = caches[0].slots.extents
        if not bool(prompt.attention.all()):
            cache.slots.padding = prompt.attention.new_ones(count, length)
            for row, (b, half) in zip(cache.slots.padding, order):
                real = caches[b].slots.padding
                if real is not None:
                    row[: real.shape[1]] = real[half]
        parts = [own[b][1][half] for b, half in order]
        hidden = torch.stack([F.pad(part, (0, 0, length - len(part), 0)) for part in parts])
        pending, output = self._open_buffer(request)
        newest = torch.full((rows,), length - 1, device=self.device)
        if prompt.positions is None:  # positions are slot numbers, which count padding
            newest = torch.cat([state.position for state, _ in own])
        return State(request, pending, newest, cache, list(range(rows)), output), hidden

    def _prefill(self, request: Request) -> tuple[State, Tensor]:
        """Return the state after the prompts, and their hidden states (R, L, d)."""
        prompt: EncodedPrompt = request.inputs
        rows, length = prompt.ids.shape
        cache = SlotLayers(prompt.embeds.shape[0], request.max_new_tokens)
        cache.slots.open(length, self.device)
        if self.passes is not None:
            self.passes.open(cache.slots)
        if self.recorder is not None:
            self.recorder.open()
        padded = not bool(prompt.attention.all())
        newest = torch.full((rows,), length - 1, device=self.device)
        pending, output = self._open_buffer(request)
        state = State(request, pending, newest, cache, list(range(rows)), output)
        index = torch.arange(length, device=self.device).expand(prompt.embeds.shape[0], length)
        attention: AttentionInputs = {"attention_mask": None}
        if padded:
            causal = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
            attention = {"attention_mask": self.masks.additive(causal & prompt.attention[:, None])}
        hidden = self._run(prompt.embeds, attention, self.places(index, state), cache)
        cache.slots.commit([list(range(length))] * prompt.embeds.shape[0])
        if padded:
            cache.slots.padding = prompt.attention
        if self.widths is not None:
            cache.slots.extents = self.widths.extent
        return state, hidden

    def _open_buffer(self, request: Request) -> tuple[Tensor, Any]:
        """Return the node before the first, (B, *X), and the output buffer of a request."""
        ids = request.inputs.ids
        return ids[:, -1], TokenBuffer(request, len(ids))

    def _embed(self, state: State, draft: Draft, index: Tensor) -> Tensor:
        """Return inputs (B, N, d) of the draft's nodes at positions `index` (B, N)."""
        return self.family.embed(draft.value)

    def verify(self, state: State, draft: Draft) -> Scores:
        """Run one pass over all nodes of all rows and their guidance rows. Returns scores for (B, N)."""
        replayed = None if self.recorder is None else self._recorded_pass(self.recorder, state, draft)
        hidden = self._eager(state, draft) if replayed is None else replayed
        return self._scores(state, draft, hidden, hidden[:, : draft.tree.size])

    def _eager(self, state: State, draft: Draft) -> Tensor:
        """Return hidden states (R, N, d) of a pass without a CUDA graph."""
        decoder = self.family.decoder
        if self.passes is not None:
            decoder = self.passes.choice(state, lambda decoder, dummy: self._pass(decoder, state, dummy))
        return self._pass(decoder, state, draft)

    def _recorded_pass(self, recorder: GraphedForward, state: State, draft: Draft) -> Tensor | None:
        """Return hidden states (R, N, d) of a CUDA graph's pass, or None if there is no graph."""
        twice, index = _twice(state), state.position[:, None] + draft.tree.depth
        tree = draft.tree if draft.tree.parent.shape[0] == 1 else _repeat_tree(draft.tree, twice)
        embeds = self._embed(state, draft, index).repeat(twice, 1, 1)
        places = self.places(index.repeat(twice, 1), state).movedim((-2, -1), (0, 1))

        def forward(
            decoder: nn.Module, cache: SlotLayers, attention: AttentionInputs, embeds: Tensor, places: Tensor
        ) -> tuple[Tensor]:
            return (self._run(embeds, attention, places.movedim((0, 1), (-2, -1)), cache, decoder),)

        outputs = recorder.run(state, tree, (embeds, places), forward, lambda: self._eager(state, draft))
        return None if outputs is None else outputs[0]

    def record(self, asked: bool | None, compile: bool = False) -> None:
        decoder = self.family.decoder
        if self.family.recorder is None or self.family.recorder.compile != compile:
            self.family.recorder = graphed_forward(asked, compile, decoder, decoder, self.masks, decoder.config)
        self.recorder = self.family.recorder
        if self.recorder is not None:
            self.passes = None

    def _pass(self, decoder: nn.Module, state: State, draft: Draft) -> Tensor:
        """Return hidden states (R, N, d) of a pass over a draft, including the nodes that pad its width."""
        twice = _twice(state)
        if self.widths is not None:
            draft = self.widths.pad(draft, twice)
        tree, index = draft.tree, state.position[:, None] + draft.tree.depth
        embeds = self._embed(state, draft, index)
        if twice == 2:
            embeds, index = embeds.repeat(2, 1, 1), index.repeat(2, 1)
        with self._products(embeds):
            slots: SlotCache = state.cache.slots
            extent = slots.open(tree.size, self.device)
            attention = self.masks(slots, tree if tree.parent.shape[0] == 1 else _repeat_tree(tree, twice), extent)
            return self._run(embeds, attention, self.places(index, state), state.cache, decoder)

    def places(self, index: Tensor, state: State) -> Tensor:
        """Return the decoder's position ids for linear indices (R, N), which count from the prompt's first slot."""
        prompt: EncodedPrompt = state.request.inputs
        if prompt.positions is None:
            return index
        rows, table = len(prompt.ids), prompt.positions
        if len(state.rows) < rows:
            live = [half * rows + row for half in range(len(prompt.embeds) // rows) for row in state.rows]
            table = table.index_select(-2, to_device(live, table.device))
        index = index.clamp(max=table.shape[-1] - 1)  # a draft may extend beyond the end
        return table.gather(-1, index.expand(*table.shape[:-1], -1))

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        state.cache.slots.commit(outcome.path * _twice(state))

    def finish(self, state: State) -> None:
        if self.recorder is not None:
            self.recorder.finish(state.cache.slots, state.request.keep_cache)

    def select(self, state: State, keep: list[int]) -> None:
        slots: SlotCache = state.cache.slots
        twice = _twice(state)
        rows = len(slots.lengths) // twice
        slots.select([half * rows + k for half in range(twice) for k in keep])

    def revise(self, state: State, tokens: Tensor, places: Tensor, seen: Tensor) -> Scores:
        """Run tokens (B, N) at given positions of the image (B, N), in raster order, with -1 as padding.

        Keys and values at those positions are overwritten. A node attends to the prompt, itself, and earlier positions
        allowed by `seen` (B, T). Returns scores for (B, N), the distributions of the next positions: mixed and warped,
        without processors and grammar. The state's cache must contain only the prompt.
        """
        slots: SlotCache = state.cache.slots
        twice, (rows, size), start, total = _twice(state), places.shape, slots.length, seen.shape[1]
        at_BN = torch.where(places < 0, total, places)  # padding nodes are written to a slot after the image
        slots.open_at((start + at_BN).repeat(twice, 1), start + total + 1)
        place = torch.arange(total + 1, device=self.device)
        before_BNS = (place < at_BN[..., None]) & F.pad(seen, (0, 1))[:, None]
        image_RNS = (before_BNS | (place == at_BN[..., None])).repeat(twice, 1, 1)
        prompt_RL = slots.padding
        if prompt_RL is None:
            prompt_RL = torch.ones(twice * rows, start, dtype=torch.bool, device=self.device)
        seen_RNS = torch.cat([prompt_RL[:, None].expand(-1, size, -1), image_RNS], dim=-1)
        attention = self.masks.inputs(self.masks.additive(seen_RNS, self.masks.groups))
        embeds = self.family.embed(tokens).repeat(twice, 1, 1)
        index = (start + at_BN.clamp(max=total - 1)).repeat(twice, 1)
        hidden = self._run(embeds, attention, self.places(index, state), state.cache)
        logits, uncond, features = self._parts(state, self.family.head(hidden), hidden)
        return Scores(Categorical(warp(logits, state.request.sampling, uncond)), features)

    def _run(
        self,
        embeds: Tensor,
        attention: AttentionInputs,
        positions: Tensor,
        cache: SlotLayers,
        decoder: nn.Module | None = None,
    ) -> Tensor:
        with draft_attention.switch_attention(self.configs) if NAME in attention else nullcontext():
            output = (decoder or self.family.decoder)(
                inputs_embeds=embeds,
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{self.cache_name: cache},
                **attention,
            )
        return output.last_hidden_state

    def _products(self, x: Tensor) -> AbstractContextManager[object]:
        """Return the context of a pass over the rows of x (..., d)."""
        return nullcontext() if self.widths is None else self.widths.in_parts(x.shape[:-1].numel())

    def _scores(self, state: State, draft: Draft, last: Tensor, hidden: Tensor) -> Scores:
        """Return scores of the nodes with hidden states `last` (R, N, d); `hidden` (R, L, d) are the whole pass's."""
        with self._products(last):
            logits = self.family.head(last)  # includes padding nodes, which are rows of this product
        if self.widths is not None:
            logits = logits[:, : draft.tree.size]
        logits, uncond, features = self._parts(state, logits, hidden)
        logits = process(logits, draft, state, uncond)
        if state.request.fixed is not None:
            logits = constrain(logits, draft, state)
        return Scores(Categorical(logits), features)

    def _parts(self, state: State, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return conditional logits (B, N, V), unconditional logits under guidance (else None), and the drafter's
        features.
        """
        rows = len(state.rows)
        if self.family.grammar:
            logits = F.pad(logits, (0, self.family.grammar), value=float("-inf"))
        features = self._drafter_features(state, hidden)
        if logits.shape[0] == rows:
            return logits, None, features
        return logits[:rows], logits[rows:], features

    def _drafter_features(self, state: State, hidden: Tensor) -> Tensor | None:
        """Return hidden states (B, L, F) for a drafter, with both guidance rows concatenated."""
        if not self.features:
            return None
        rows = len(state.rows)
        return hidden if len(hidden) == rows else torch.cat([hidden[:rows], hidden[rows:]], dim=-1)


def _twice(state: State) -> int:
    """Return the number of cache rows per request."""
    return 1 if state.request.sampling.guidance == 1.0 else 2


def _repeat_tree(tree: Tree, times: int) -> Tree:
    parent, depth, ancestor = (t.repeat(times, *[1] * (t.dim() - 1)) for t in (tree.parent, tree.depth, tree.ancestor))
    return Tree(parent, depth, ancestor, tree.levels, tree.chain)
