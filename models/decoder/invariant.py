"""`batch_invariant=True` for text decoders: which models support it, and prefill of prompts one at a time.

`runner.widths` explains how it works. Rows of a batch are cut out without their padding, prefilled, and put together
again. Shapes: B rows, L prompt, F features, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec import tree as trees
from visspec.cache import GROW, to_device
from visspec.distributions import Categorical
from visspec.loop.decode import TokenBuffer
from visspec.models.attention.draft_attention import STOCK, implementation
from visspec.models.runner.widths import PassWidths
from visspec.sampling import process
from visspec.types import Request, Sampling, Scores, State

if TYPE_CHECKING:
    from visspec.models.decoder.target import HFDecoder

REFUSED = "batch_invariant: {} has {}, so its tokens depend on the other rows of a batch. Leave batch_invariant out."
ONE_ROW = "one row per call, or stream()"
BY_ROW = "batch_invariant: got {}, expected {}, as prompts are prefilled one at a time"


def pass_widths(target: HFDecoder) -> PassWidths:
    """Return the widths of a model's passes. Raises ValueError for models whose rows cannot be computed alike."""
    model, text, decoder = target.model, target.model.config.get_text_config(), target.decoder
    heads, groups = text.num_attention_heads, target.masks.groups
    sizes = {size for part in decoder.modules() if isinstance(size := getattr(part, "head_dim", None), int)}
    sizes = sizes or {getattr(text, "head_dim", None) or text.hidden_size // heads}
    reasons = {
        "layers that keep a state": target.states,
        "rotary frequencies that depend on the longest row": target.rotary,
        "experts": any("expert" in name for name, _ in decoder.named_modules()),
        "quantized weights": getattr(model, "is_quantized", False),
        f"attention of {implementation(text)!r}, not 'sdpa'": implementation(text) != STOCK,
    }
    if why := next((why for why, applies in reasons.items() if applies), None):
        raise ValueError(REFUSED.format(type(model).__name__, why))
    parts = [decoder, model.get_output_embeddings()]
    shapes = [(heads // groups, groups, size) for size in sorted(sizes)]
    widths = PassWidths(parts, shapes, target.masks.dtype, target.device)
    if target.device.type != "meta":
        widths.nodes(1, 1)
    return widths


def prefill(target: HFDecoder, request: Request) -> tuple[State, Scores]:
    """Run `HFDecoder.prefill` for a request with several rows or with padding."""
    prompt, mask = request.prompt, request.inputs.get("attention_mask")
    if not prompt.shape[1]:
        raise ValueError(BY_ROW.format("a batch of inputs_embeds", "input_ids"))
    real_BL = torch.ones_like(prompt, dtype=torch.bool) if mask is None else mask.bool()
    padded = [row.count(False) for row in real_BL.tolist()]
    if any(row != sorted(row) for row in real_BL.tolist()):
        raise ValueError(BY_ROW.format("padding inside or after a prompt", "padding in front"))
    own = [target.prefill(_row(target, request, b, padding)) for b, padding in enumerate(padded)]
    states, scores = [state for state, _ in own], [each for _, each in own]
    first = states[0].cache
    cache = target.cache(len(own), request.max_new_tokens)
    stores = [[store[0] for store in (*state.cache.slots.keys, *state.cache.slots.values)] for state in states]
    cache.slots.fill(
        [(each, state.cache.slots.length) for each, state in zip(stores, states)],
        GROW + min(request.max_new_tokens, prompt.shape[1]),
    )
    cache.adopt(first)
    cache.prompt, cache.slots.extents = prompt.shape[1], first.slots.extents
    request.keep_cache &= not any(padded)  # a transformers cache would have padding slots
    position = torch.cat([state.position for state in states])
    state = State(request, prompt[:, -1], position, cache, list(range(len(own))), TokenBuffer(request, len(own)))
    aux: dict[str, Any] = {"attention": real_BL if any(padded) else None}
    for name in ("positions", "embeddings", "raw", "states"):
        if name in scores[0].aux:
            aux[name] = _concatenate([each.aux[name] for each in scores], -1 if name == "positions" else 1)
    features = None if scores[0].features is None else _concatenate([each.features for each in scores], 1)
    logits = process(aux["raw"], trees.empty_draft(state.pending), state)
    return state, Scores(Categorical(logits), features, aux)


def _concatenate(parts: Sequence[Any], dim: int) -> Tensor:
    """Concatenate parts of one row each, padded in front of the prompt's dimension, along the dimension before it."""
    longest = max(part.shape[dim] for part in parts)
    trailing = 0 if dim == -1 else parts[0].dim() - 1 - dim
    padded = [F.pad(part, (*[0, 0] * trailing, longest - part.shape[dim], 0)) for part in parts]
    return torch.cat(padded, dim=dim - 1)


def _row(target: HFDecoder, request: Request, row: int, padding: int) -> Request:
    rows, length = request.prompt.shape
    inputs = {}
    for name, value in request.inputs.items():
        if isinstance(value, Tensor):
            if value.dim() > 1 and value.shape[-2:] == (rows, length) and not value.is_floating_point():
                value = value[..., row : row + 1, padding:]
            elif rows > 1:
                value = _media(target, request, name, value)[row : row + 1]
        elif rows > 1 and value != {} and not isinstance(value, int | float | str | None):
            raise ValueError(BY_ROW.format(f"{name} of several rows", ONE_ROW))  # images that were encoded together
        inputs[name] = value
    prompt = request.prompt[row : row + 1, padding:]
    # processors belong to the batch and run after it is joined
    return replace(request, inputs=inputs, prompt=prompt, sampling=Sampling(), keep_raw=True, each=[], prefix=None)


def _media(target: HFDecoder, request: Request, name: str, value: Tensor) -> Tensor:
    """Return a tensor of all rows' media if it has one entry per row. Raises ValueError otherwise."""
    content = to_device(sorted(target.capabilities.never_drafted), request.prompt.device)
    has_media_B = torch.isin(request.prompt, content).any(dim=1)
    if len(value) != len(request.prompt) or not bool(has_media_B.all()):
        raise ValueError(BY_ROW.format(f"{name} of {len(value)} for {len(has_media_B)} rows", ONE_ROW))
    return value
