"""Discrete autoregressive image models as targets, including guidance.

Classifier-free guidance is implemented here: each request has two cache rows, conditional rows first, in one forward
pass; logits are mixed and warped. A `Family` (one file each) defines how a model differs; the decoder itself is the
stock module, called with embeddings, an additive mask, positions and our cache.

Shapes: B requests, R = B or 2 B cache rows, L prompt, N nodes, V ids (codes, then grammar ids), T image positions,
A axes of position ids, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
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
from visspec.models.runner.compiled import CompiledPasses, compiled_passes
from visspec.models.runner.graphs import GraphedForward, graphed_forward
from visspec.models.runner.widths import PassWidths
from visspec.sampling import process, warp
from visspec.types import (
    FREE,
    Capabilities,
    Draft,
    DrafterTraits,
    Outcome,
    Request,
    Sampling,
    Scores,
    State,
    Target,
    Tree,
)

TAKES_MASKS = {"sdpa", "eager"}


@dataclass(frozen=True)
class ImageLayout:
    """The order of an image's tokens: `fixed` (T,) holds a position's grammar id, or FREE for a code."""

    grid: tuple[int, int]  # rows, columns of codes
    fixed: Tensor
    preview: int = 0  # number of codes before the image's own: a smaller image generated first

    @property
    def positions(self) -> int:
        return len(self.fixed)

    @property
    def free(self) -> Tensor:
        """Positions of the image's codes, (rows * columns,) int64, in raster order."""
        return (self.fixed == FREE).nonzero()[self.preview :, 0]

    @property
    def length(self) -> int:
        """Number of values in an image, including grammar."""
        return self.positions

    def codes(self, values: Tensor) -> Tensor:
        """Select the image's own values in raster order from (B, length, ...)."""
        return values[:, self.free]

    def latents(self, codes: Tensor) -> Tensor:
        """Reshape the image's values (B, rows * columns, ...) to (B, rows, columns, ...)."""
        return codes.unflatten(1, self.grid)

    def placed(self, items: np.ndarray) -> np.ndarray:
        """Arrange per-node items (positions,) by their place in the image: (rows, columns)."""
        return items[self.free.numpy()].reshape(self.grid)

    @classmethod
    def plain(cls, rows: int, columns: int) -> ImageLayout:
        return cls.lines(rows, columns, None)

    @classmethod
    def lines(cls, rows: int, columns: int, end: int | None, tail: tuple[int, ...] = ()) -> ImageLayout:
        """Build a layout with the grammar id `end` (if not None) after each row of codes and `tail` after the image."""
        row = [FREE] * columns + ([] if end is None else [end])
        return cls((rows, columns), torch.tensor(row * rows + list(tail)))

    @classmethod
    def only(cls, side: int, pixels: int, height: int | None, width: int | None, why: str) -> ImageLayout:
        """Build the square layout of `side` x `side` codes. Raises ValueError for an image size other than `pixels`."""
        if (height or pixels, width or pixels) != (pixels, pixels):
            raise ValueError(f"height, width: got {height} x {width}, expected {pixels} x {pixels}, {why}")
        return cls.plain(side, side)


def grid_of(height: int, width: int, factor: int) -> tuple[int, int]:
    """Return the grid of codes of `factor` pixels. Raises ValueError for sizes that are not multiples of it."""
    if min(height, width) < factor or height % factor or width % factor:
        raise ValueError(f"height, width: got {height} x {width}, expected multiples of {factor}.")
    return height // factor, width // factor


@dataclass(frozen=True)
class EncodedPrompt:
    """Encoded prompts: ids (B, L), and the decoder's inputs for R rows, conditional rows first."""

    ids: Tensor
    embeds: Tensor  # (R, L, d)
    attention: Tensor  # (R, L) bool, false at padding
    positions: Tensor | None = None  # (R, L + T) or (A, R, L + T) position ids of all slots; None: slot numbers
    tokens: Tensor | None = None  # (R, L) ids of all rows, if the prompt was built from ids

    def row(self, b: int) -> EncodedPrompt:
        """Return one prompt, without slots that are padding in all of its rows."""
        own = slice(b, None, len(self.ids))
        first = int(self.attention[own].any(dim=0).int().argmax())
        return EncodedPrompt(
            self.ids[b : b + 1, first:],
            self.embeds[own, first:],
            self.attention[own, first:],
            None if self.positions is None else self.positions[..., own, first:],
            None if self.tokens is None else self.tokens[own, first:],
        )


class Family:
    """Base class of model families, with defaults for the common case: codes are ids of a text model (`vocabulary`).

    The loop's ids are codes 0..codes-1, then grammar ids, which only occur at fixed positions of a layout.
    """

    name: str
    codes: int
    grammar: int = 0  # number of grammar ids after the codes
    target: type[Any]  # the `Target` class that runs it, built from the family and `features`
    guided: bool = True  # whether the model supports an unconditional prompt
    decoder: Any  # the stock transformer
    processor: Any = None  # texts -> ids; None if prompts are ids
    codebook: Tensor | None = None  # (codes, E) as the image decoder uses it, normalized if it normalizes
    default_guidance: float = 1.0
    mlp_head: tuple[nn.Linear, nn.Linear] | None = None  # the layers of `head`, if it is two with a GELU between
    model: Any
    vocabulary: Any = None  # `Vocabulary`, if codes are ids of a text model
    codec: Any = None  # a decoder of codes outside the model, such as `codecs.vq_layout.ImageCodec`
    draws: str = "codes"  # or "vectors", "maps" of codes, or codes in "any order"
    labels: tuple[str, ...] = ()  # class names; empty if prompts are texts, or class numbers only
    default_drafter: str = "jacobi:window=12"  # with the default rule, this is the preset "gumbel"
    default_rule: str = "exact"
    default_order: str | None = None
    running: bool = True  # whether its target can compile passes and return hidden states
    recorder: GraphedForward | None = None  # CUDA graphs of the decoder's passes, shared by its targets
    load: Callable[[Path, torch.dtype], Any] | None = None  # loader of folders whose network transformers lacks
    no_pixels: str = ""  # reason why decoding to pixels is not supported; empty if it is

    def make_target(self, traits: DrafterTraits, compile: bool) -> Target:
        """Build the target for a drafter with these traits. Raises ValueError if the family does not support them."""
        if self.running:
            return self.target(self, bool(traits.feature_layers), compile)
        if compile:
            raise ValueError(f"compile: got True, expected False: passes of {self.name} are not compiled.")
        if traits.feature_layers:
            raise ValueError(f"drafter: got one that reads hidden states, which {self.name} does not return.")
        return self.target(self)

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 3, height, width) float32 in [0, 1] to codes (B, rows * columns). Raises ValueError for a
        family without an encoder.
        """
        raise ValueError(f"image: got pixels, expected none: {self.name} has no VQ encoder.")

    @cached_property
    def passes(self) -> CompiledPasses | None:
        """Compiled passes of the decoder, shared by its targets, so that several drafters and rules compile once."""
        return compiled_passes(self.decoder, self.decoder)

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        """Return the layout for an image size in pixels. Raises ValueError for an unsupported size."""
        raise NotImplementedError

    def prompt(self, texts: list[str], guided: bool, layout: ImageLayout | None = None) -> EncodedPrompt:
        """Encode prompts to ids and embeddings, padded on the left.

        Args:
            texts: The prompts.
            guided: Whether to append the unconditional rows.
            layout: The image's layout, by default that of the default size, if prompts or positions depend on it.
        """
        raise NotImplementedError

    def require_processor(self) -> Any:
        """Return the processor, which encodes texts. Raises ValueError if it is None."""
        if self.processor is None:
            raise ValueError(
                f"processor: got None, expected that of {self.name} (transformers.AutoProcessor), or anything that"
                " turns texts into ids in the same way."
            )
        return self.processor

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed ids (..., N) as (..., N, d)."""
        return self.model.get_input_embeddings()(self.vocabulary(tokens))

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits (..., codes) over the codes from hidden states (..., d)."""
        return self.vocabulary.logits(self.model.lm_head, hidden)

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        """Decode codes (B, rows * columns) to float (B, 3, height, width) in [0, 1]. Raises ValueError if it can't."""
        if self.codec is None:
            raise ValueError(f"output_type: got pixels, expected 'latent': {self.no_pixels}.")
        return self.codec.decode(tokens, layout.grid).permute(0, 3, 1, 2) / 2 + 0.5

    def render(self, tokens: Tensor, layout: ImageLayout, texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        """Like `pixels`, for images generated from these texts with these seeds, which some decoders use."""
        return self.pixels(tokens, layout)

    def stock(self, texts: list[str], sampling: Sampling, layout: ImageLayout, **options: object) -> Tensor:
        """Generate loop ids (B, T) with the model's own `generate` and torch's global generator, as a baseline for
        benchmarks. `options` are passed to it. Raises NotImplementedError if transformers' class can't generate images.
        """
        raise NotImplementedError(f"{self.name}: its stock class has no generate for images.")

    def grid_rope(self) -> Tensor | None:
        """Return rotations by row and column, complex64 (L + T or more, C); None if the model's RoPE is another one."""
        return None

    def check(self, prompt: EncodedPrompt, layout: ImageLayout, guidance: float) -> None:
        """Raise ValueError for unsupported arguments, before any pass."""
        if guidance != 1.0 and not self.guided:
            raise ValueError(f"guidance_scale: got {guidance}, expected 1: {self.name} has no unconditional prompt.")
        room = getattr(self.decoder.config, "max_position_embeddings", None)
        needed = prompt.ids.shape[1] + layout.positions
        if room is not None and needed > room:
            raise ValueError(f"prompt: got {needed} tokens including the image's, expected at most {room}.")

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ValueError for settings that have no meaning for the model."""

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


class Vocabulary:
    """Codes and grammar ids in a text model's vocabulary: `ids` (V,) maps loop ids to vocabulary ids."""

    def __init__(self, ids: Tensor, codes: int):
        self.ids, self.codes, used = ids, codes, ids[:codes]
        self.first, self.last = int(used.min()), int(used.max()) + 1
        self.order = None if used.tolist() == list(range(self.first, self.last)) else used - self.first

    def __call__(self, tokens: Tensor) -> Tensor:
        """Map loop ids to vocabulary ids."""
        self._follow(tokens.device)
        return self.ids[tokens]

    def logits(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """Return logits (..., codes) of hidden states (..., d), using only the head's rows from first to last code."""
        if type(head) is nn.Linear:  # sliced in every call, because weights may be moved
            bias = None if head.bias is None else head.bias[self.first : self.last]
            logits = F.linear(hidden, head.weight[self.first : self.last], bias)
        else:
            logits = head(hidden)[..., self.first : self.last]
        self._follow(hidden.device)
        return logits if self.order is None else logits[..., self.order]

    def loop_ids(self, ids: Tensor) -> Tensor:
        """Map vocabulary ids to loop ids, and other ids to 0."""
        table = torch.zeros(int(self.ids.max()) + 1, dtype=torch.long)
        table[self.ids.cpu()] = torch.arange(len(self.ids))
        return table[ids.cpu().clamp(max=len(table) - 1)].to(ids.device)

    def _follow(self, device: torch.device) -> None:
        if self.ids.device != device:
            with torch.inference_mode(False):  # training may use the tensors, too
                self.ids = self.ids.to(device)
                self.order = None if self.order is None else self.order.to(device)


def generate_options(sampling: Sampling) -> dict[str, Any]:
    """Convert sampling settings to arguments of transformers' `generate`, except guidance."""
    if sampling.greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


def generate_codes(
    model: Any,
    vocabulary: Vocabulary,
    given: dict[str, Tensor],
    layout: ImageLayout,
    sampling: Sampling,
    **options: object,
) -> Tensor:
    """Generate loop ids (B, T) of a layout with a text model's own `generate`. `given` are its inputs."""
    length, last = given["input_ids"].shape[1], layout.positions - 1
    codes = vocabulary.ids[: vocabulary.codes]
    fixed = vocabulary.ids[layout.fixed.clamp(min=0)]

    def allowed(row: int, ids: Tensor) -> Tensor:  # faster than a list, as used on transformers' page on Emu3
        now = min(len(ids) - length, last)
        return codes if layout.fixed[now] == FREE else fixed[now : now + 1]

    ids = model.generate(
        **given,
        max_new_tokens=layout.positions,
        prefix_allowed_tokens_fn=allowed,
        **generate_options(sampling),
        **options,
    )
    return vocabulary.loop_ids(ids[:, length:])


def left_padded(rows: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pad ids of unequal lengths. Returns them as one tensor (R, L), and the mask of real ids (R, L)."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=device)
    first = torch.tensor([length - len(row) for row in rows], device=device)
    return ids, torch.arange(length, device=device) >= first[:, None]


def positions_from_mask(attention: Tensor, ahead: int) -> Tensor:
    """Return position ids (R, L + ahead) counted from each row's first real slot, for the prompt and `ahead` tokens."""
    ahead_RT = torch.ones(len(attention), ahead, dtype=torch.bool, device=attention.device)
    return (torch.cat([attention, ahead_RT], dim=1).cumsum(dim=1) - 1).clamp(min=0)


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
        hidden = self._run(prompt.embeds, attention, self.family.places(index, state), cache)
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
        places = self.family.places(index.repeat(twice, 1), state).movedim((-2, -1), (0, 1))

        def forward(cache: SlotLayers, attention: AttentionInputs, embeds: Tensor, places: Tensor) -> tuple[Tensor]:
            return (self._run(embeds, attention, places.movedim((0, 1), (-2, -1)), cache),)

        outputs = recorder.run(state, tree, (embeds, places), forward, lambda: self._eager(state, draft))
        return None if outputs is None else outputs[0]

    def record(self, asked: bool | None) -> None:
        decoder = self.family.decoder
        if self.family.recorder is None:
            self.family.recorder = graphed_forward(asked, decoder, decoder, self.masks, decoder.config)
        self.recorder = self.family.recorder

    def _pass(self, decoder: nn.Module, state: State, draft: Draft) -> Tensor:
        """Return hidden states (R, N, d) of a pass over a draft, including the nodes that pad its width."""
        if self.widths is not None:
            draft = self.widths.pad(draft, _twice(state))
        embeds = self._embed(state, draft, state.position[:, None] + draft.tree.depth)
        return self._attend(state, draft.tree, embeds if _twice(state) == 1 else embeds.repeat(2, 1, 1), decoder)

    def _attend(self, state: State, tree: Tree, embeds: Tensor, decoder: nn.Module | None = None) -> Tensor:
        """Return hidden states (R, N, d) of a pass over a tree's nodes, given their inputs."""
        slots: SlotCache = state.cache.slots
        twice, index = _twice(state), state.position[:, None] + tree.depth
        if tree.parent.shape[0] > 1:
            tree = _repeat_tree(tree, twice)
        extent = slots.open(tree.size, self.device)
        if twice == 2:
            index = index.repeat(2, 1)
        attention = self.masks(slots, tree, extent)
        return self._run(embeds, attention, self.family.places(index, state), state.cache, decoder)

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
        hidden = self._run(embeds, attention, self.family.places(index, state), state.cache)
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
        with draft_attention.switched(self.configs) if NAME in attention else nullcontext():
            output = (decoder or self.family.decoder)(
                inputs_embeds=embeds,
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{self.cache_name: cache},
                **attention,
            )
        return output.last_hidden_state

    def _scores(self, state: State, draft: Draft, last: Tensor, hidden: Tensor) -> Scores:
        """Return scores of the nodes with hidden states `last` (R, N, d); `hidden` (R, L, d) are the whole pass's."""
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


Family.target = ImageAR
