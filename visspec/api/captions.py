"""Captioning of image files in batches, with an error entry for each unreadable file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visspec.api.accelerate import Accelerated
from visspec.eval.metrics.images import MAX_PIXELS, open_image
from visspec.loop.stats import Stats, ended_by

PROMPT = "describe the picture in detail ."


@dataclass(frozen=True)
class Caption:
    """One image's result: if the file can't be read, `text` is None and `error` is the reason."""

    path: str
    text: str | None
    tokens: int = 0
    error: str | None = None
    pieces: tuple[tuple[str, str], ...] = ()  # (text, origin) of every token
    ended: str | None = None  # as `stats.ended_by`


def chat_prompt(processor, request: str) -> str:
    """One user turn of an image and a request, in the processor's chat template (plain text if it has none)."""
    content = [{"type": "image"}, {"type": "text", "text": request}]
    if getattr(processor, "chat_template", None):
        return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return f"{getattr(processor, 'image_token', '<image>')} {request}"


def prepare(processor, images: Sequence, request: str | Sequence[str], model) -> dict[str, Any]:
    """A model's inputs for a batch of PIL images, under one request or one each; left-padded, on its device."""
    processor.tokenizer.padding_side = "left"
    requests = [request] * len(images) if isinstance(request, str) else request
    chats = [chat_prompt(processor, text) for text in requests]
    inputs = processor(text=chats, images=[[image] for image in images], return_tensors="pt", padding=True)
    moved = inputs.to(model.device)
    return {k: v.to(model.dtype) if torch.is_floating_point(v) else v for k, v in moved.items()}


def caption_files(
    fast: Accelerated,
    processor,
    paths: Sequence[str | Path],
    *,
    request: str = PROMPT,
    batch_size: int = 1,
    max_pixels: int = MAX_PIXELS,
    **generate: Any,
) -> Iterator[tuple[Caption, Stats | None]]:
    """Caption files in order, `batch_size` at a time. An unreadable file yields its error; the others are processed.

    Extra arguments go to `generate`; the int `seed` is used for each image, so results do not depend on the batch.
    """
    seed = generate.pop("seed", None)
    for start in range(0, len(paths), batch_size):
        opened: list[tuple[str, Any]] = []
        failed: dict[str, str] = {}
        group = [str(p) for p in paths[start : start + batch_size]]
        for path in group:
            try:
                opened.append((path, open_image(path, max_pixels)))
            except (ValueError, OSError) as error:
                failed[path] = str(error)
        done: dict[str, Caption] = {}
        stats = None
        if opened:
            seeds = {} if seed is None else {"seed": [seed] * len(opened)}
            done, stats = _caption_batch(fast, processor, opened, request, generate | seeds)
        for path in group:
            yield (done[path], stats) if path in done else (Caption(path, None, error=failed[path]), None)


def _caption_batch(fast: Accelerated, processor, opened, request: str, generate: dict[str, Any]):
    inputs = prepare(processor, [image for _, image in opened], request, fast.model)
    result = fast.run(**inputs, **generate)
    done = {}
    for row, ((path, _), tokens, pieces) in enumerate(zip(opened, result.state.tokens, result.stats.pieces)):
        text = processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        done[path] = Caption(path, text, len(tokens), pieces=tuple(pieces), ended=ended_by(result.state, row))
    return done, result.stats
