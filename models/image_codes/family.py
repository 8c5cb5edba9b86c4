"""Families of image models: how each model of image codes differs, its prompts, and the order of its tokens.

A `Family` (one file each) is run by a `Target`, usually `target.ImageAR`, or by one of its own.

Shapes: B requests, R = B or 2 B rows with guidance, conditional rows first, L prompt, N nodes, V ids (codes, then
grammar ids), T image positions, A axes of position ids, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec import registry
from visspec.models.runner.compiled import CompiledPasses, compiled_passes
from visspec.models.runner.graphs import GraphedForward
from visspec.types import FREE, DrafterTraits, Sampling, Target


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
    target: type[Any]  # the `Target` class that runs it, built from the family and `features`: mostly `target.ImageAR`
    guided: bool = True  # whether the model supports an unconditional prompt
    decoder: Any  # the stock transformer
    processor: Any = None  # texts -> ids; None if prompts are ids
    codebook: Tensor | None = None  # (codes, E) as the image decoder uses it, normalized if it normalizes
    default_guidance: float = 1.0
    mlp_head: tuple[nn.Linear, nn.Linear] | None = None  # the layers of `head`, if it is two with a GELU between
    model: Any
    vocabulary: Any = None  # `Vocabulary`, if codes are ids of a text model
    vq: Any = None  # a stock VQ model whose `encode` takes pixels
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
        if self.vq is None:
            raise ValueError(f"image: got pixels, expected none: {self.name} has no VQ encoder.")
        return self.vq.encode(2 * pixels.to(self.vq.dtype) - 1).image_tokens.view(len(pixels), -1)

    @cached_property
    def passes(self) -> CompiledPasses | None:
        """Compiled passes of the decoder, shared by its targets, so that several drafters and rules compile once."""
        return compiled_passes(self.decoder, self.decoder)

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        """Return the layout for an image size in pixels. Raises ValueError for an unsupported size."""
        raise NotImplementedError

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> EncodedPrompt:
        """Encode prompts to ids and embeddings, padded on the left.

        Args:
            texts: The prompts.
            guided: Whether to append the unconditional rows.
            layout: The image's layout, by default that of the default size, if prompts or positions depend on it.
            negative: A text for each unconditional row; "" selects the model's own unconditional prompt.

        Raises:
            ValueError: If the texts can't be encoded, or the model takes no negative prompts.
        """
        raise NotImplementedError

    def refuse_negative(self, negative: list[str] | None) -> None:
        """Raise ValueError for negative prompts, which the model does not take."""
        if negative is not None:
            raise ValueError(f"negative_prompt: got {negative[0]!r}, expected None: {self.name} does not support it.")

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
        length = prompt.ids.shape[1] + layout.positions
        if room is not None and length > room:
            raise ValueError(f"prompt: got {length} tokens including the image's, expected at most {room}.")

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ValueError for settings that have no meaning for the model."""


class Vocabulary:
    """Codes and grammar ids in a text model's vocabulary: `ids` (V,) maps loop ids to vocabulary ids."""

    def __init__(self, ids: Tensor, codes: int):
        self.ids, self.codes, code_ids = ids, codes, ids[:codes]
        self.first, self.last = int(code_ids.min()), int(code_ids.max()) + 1
        self.order = None if code_ids.tolist() == list(range(self.first, self.last)) else code_ids - self.first

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
    inputs: dict[str, Tensor],
    layout: ImageLayout,
    sampling: Sampling,
    **options: object,
) -> Tensor:
    """Generate loop ids (B, T) of a layout with a text model's own `generate`."""
    length, last = inputs["input_ids"].shape[1], layout.positions - 1
    codes = vocabulary.ids[: vocabulary.codes]
    fixed = vocabulary.ids[layout.fixed.clamp(min=0)]

    def allowed(row: int, ids: Tensor) -> Tensor:  # faster than a list, as used on transformers' page on Emu3
        now = min(len(ids) - length, last)
        return codes if layout.fixed[now] == FREE else fixed[now : now + 1]

    ids = model.generate(
        **inputs,
        max_new_tokens=layout.positions,
        prefix_allowed_tokens_fn=allowed,
        **generate_options(sampling),
        **options,
    )
    return vocabulary.loop_ids(ids[:, length:])


def class_numbers(texts: list[str], classes: int, name: str, labels: Sequence[str] = ()) -> Tensor:
    """Parse class numbers, or names if there are labels, into (B,) int64. Raises ValueError for any other text, with
    `name` as the argument's name.
    """
    named = {label: str(number) for number, label in enumerate(labels)}
    for text in texts:
        if named and text not in named and not text.strip().isdecimal():
            some = ", ".join(map(repr, list(named)[:2]))
            raise ValueError(f"{name}: got {text!r}, expected one of the {len(named)} classes ({some}, ...).")
    numbers = [named.get(text, text) for text in texts]
    for number in numbers:
        if not (number.strip().isdecimal() and int(number) < classes):
            raise ValueError(f"{name}: got {number!r}, expected a class number 0..{classes - 1}.")
    return torch.tensor([int(number) for number in numbers])


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


def family_of(model: nn.Module, processor: Callable[..., Any] | None, **parts: Any) -> Family:
    """Return the family that runs a model. `parts` are optional arguments of some families: a codec, a style, ...

    Raises ValueError if the model does not generate images here, or if its family does not take a part.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in (families := registry.table("family")):
        raise ValueError(
            f"model: type {kind!r} does not generate images; `visspec list families` shows the types that do. `visspec"
            " caption`, `bench caption`, `bench text`, `tune --images` and `serve` are for models that generate text."
        )
    family = families[kind].load()
    unknown = sorted(set(parts) - set(signature(family).parameters))
    if unknown:
        raise ValueError(f"{unknown[0]}: models of type {kind!r} do not take it. Leave it out.")
    codec: Any = parts.get("codec")
    if hasattr(codec, "to"):  # it may be on another device than the model
        codec.to(cast(Any, model).device)
    return family(model, processor, **parts)
