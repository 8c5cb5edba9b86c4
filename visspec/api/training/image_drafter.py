"""Distillation of a drafter of image codes, from pictures that the target draws itself.

Used by `visspec train drafter --target MODEL --prompts FILE --out FOLDER`.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from visspec import registry
from visspec.accept.exact import Exact
from visspec.api import sources
from visspec.api.images.call import encode_prompts, request_of
from visspec.api.images.pipeline import ImagePipeline
from visspec.api.training import export as drafter_export
from visspec.api.training.data import HELD_OUT
from visspec.api.training.drafter import (
    begin,
    device_of,
    fresh_or_resumed,
    keep_answers,
    lessons_of,
    network_of,
    options_of,
    requests_of,
    train,
)
from visspec.api.training.structure import measure
from visspec.io import included
from visspec.io.provenance import provenance
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.models.eagle.image_drafter import CaptureTarget
from visspec.models.image_codes.family import ImageLayout
from visspec.train.loop import Trainer, checkpoint
from visspec.types import Request

EVAL_ROWS = 16  # number of prompts for validation
TEXT_ONLY = "answers ignore epochs max_new_tokens max_pixels max_bad".split()  # options
TEXT_ONLY += "image_latents draft_vocab block images structure".split()
USE = """from visspec import ImagePipeline

pipe = ImagePipeline.from_pretrained({target!r}, drafter={spec!r})"""


class ImagePrompts:
    """Batches of requests for pictures of texts as a pure function of their number, epoch by epoch in a seeded order,
    with the model's own guidance and temperature. No two requests use the same noise.
    """

    def __init__(self, pipe: ImagePipeline, layout: ImageLayout, texts: list[str], rows: int, seed: int):
        self.family, self.layout, self.sampling = pipe.family, layout, pipe.sampling()
        self.texts, self.rows, self.seed = texts, rows, seed

    def __call__(self, number: int) -> Request:
        first = number * self.rows
        texts = [self.text(n) for n in range(first, first + self.rows)]
        seeds = range((self.seed << 40) + first, (self.seed << 40) + first + self.rows)
        with torch.no_grad():
            prompt = encode_prompts(self.family, texts, None, self.layout, self.sampling.guidance)
        return request_of(prompt, self.layout, self.sampling, seeds)

    def text(self, number: int) -> str:
        epoch, place = divmod(number, len(self.texts))
        order = torch.randperm(len(self.texts), generator=torch.Generator().manual_seed(self.seed + epoch))
        return self.texts[int(order[place])]


def run(target: str | ImagePipeline, out: str | Path, **options: Any) -> list[dict]:
    """Train a drafter for an image model that draws code after code, and save the one with the best validation.

    Args:
        target: A folder, a hub id, an included model, or a pipeline.
        out: The folder of the drafter.
        options: As in `drafter.run`, with `prompts`, a file with a prompt on each line (default: the prompts of
            an included model's world), `height` and `width` of the pictures in pixels (default: the model's own), and a
            `preset`, "image-eagle" (default) or "distilled".

    Returns:
        The validations.

    Raises:
        ValueError: If the model does not draw code after code, or there are no prompts.
    """
    arguments = {"eval_rows": EVAL_ROWS, **options, "target": str(target), "out": Path(out)}
    arguments["preset"] = options.get("preset") or "image-eagle"
    if options.get("prompts") is None and target not in included.table().models:
        raise ValueError("prompts: got none. Pass --prompts FILE with a prompt on each line, or --data for text.")
    training, plan, recipe = begin(arguments, TEXT_ONLY, "codes")
    name, prompts, rows, seed = training.preset, training.prompts, training.rows, training.seed
    planned = options_of(training, plan)
    device, several = device_of(training)
    texts = None if prompts is None else sources.texts(prompts)
    if isinstance(target, ImagePipeline):
        pipe, where = target, str(getattr(target.model.config, "name_or_path", ""))
    else:
        remote, where = training.trust_remote_code, str(target)
        pipe = ImagePipeline.from_pretrained(where, device=device, dtype=training.dtype, trust_remote_code=remote)
    family = pipe.family
    if family.draws != "codes":
        raise ValueError(f"target: {family.name} draws {family.draws}, expected one that draws code after code.")
    texts = texts or [row["prompt"] for row in included.scenes(None, pipe.processor, "prompts").prompts()]
    layout = family.layout(training.height, training.width)
    grid = {"rows": layout.grid[0], "columns": layout.positions // layout.grid[0]}
    resumed = training.resume and checkpoint(out) is not None
    lessons, kind = lessons_of(out, resumed, planned, several), registry.drafter_class(recipe.kind)
    drafter = fresh_or_resumed(family, out, resumed, seed, kind, **{**recipe.network, **grid, **network_of(training)})
    eval_rows = training.eval_rows
    digest = f"{len(texts)} prompts, sha256 {hashlib.sha256(chr(10).join(texts).encode()).hexdigest()[:16]}"
    shared = {"target": Path(where).name, "data": digest, "answers": "target", "dtype": str(pipe.model.dtype), **grid}
    record = provenance(pipe.model, seed=seed, target=where, data=str(prompts), recipe="train_drafter", preset=name)
    record["settings"] = {**shared, "eval_rows": eval_rows, "preset": name}
    record["settings"] |= {"layers": training.layers, "intermediate": training.intermediate}
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    texts, validating = [texts[n] for n in order], max(1, min(int(HELD_OUT * len(texts)), eval_rows))
    capturing = CaptureTarget(family)
    checks = [
        ImagePrompts(pipe, layout, part, len(part), seed + 1 + n)
        for n, part in enumerate(texts[first : min(first + rows, validating)] for first in range(0, validating, rows))
    ]

    def validate() -> dict[str, float]:
        """Return tau on pictures of held-out prompts, at the drafter's own depth."""
        fixed = FixedLength(drafter.traits.levels)
        decoder = partial(decode, capturing, drafter, Exact(), length_policy=fixed)
        return {"tau_sampled": measure(decoder, [each(0) for each in checks])}

    training_prompts = ImagePrompts(pipe, layout, texts[validating:] or texts, rows, seed)
    trainer = Trainer(capturing, drafter, Exact(), training_prompts, planned, out, record, validate, several)
    if training.store is not None:
        settings = {**shared, "batch": rows, "seed": seed}
        keep_answers(trainer, training.store, settings, requests_of(planned, lessons))
    history = train(trainer, training.resume)
    drafter_export.finish(trainer, history, validating, use=USE)
    return history
