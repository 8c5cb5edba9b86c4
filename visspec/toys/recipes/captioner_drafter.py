"""`captioner-vispec` and `captioner-emoji-vispec`: drafters of the captioners, on scenes that these were not shown.

With --latents 0 it drafts without the image: the control of what sight is worth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from visspec.accept.exact import Exact
from visspec.api import loading as targets
from visspec.api import zoo
from visspec.api.captions import prepare
from visspec.api.train_drafter import TextValidation, fresh_or_resumed, plan_of, request_of, train
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.models.drafting.checkpoint import PROVENANCE
from visspec.models.eagle.drafter import FeatureDrafter
from visspec.toys.recipes.captioner import NAMES
from visspec.toys.recipes.recipe import DrafterOptions, Recipe
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.worlds import WORLDS, World, world
from visspec.train.loop import Trainer
from visspec.types import Request

FIRST_SEED = 3 << 28  # scenes of neither stage of the captioner's own training, still below the held-out ones
MAX_NEW_TOKENS = 160
QUESTION_SHARE = 16  # one batch of so many asks questions, which have short answers


class SceneBatches:
    """Batches of requests about rendered scenes: a pure function of their number. One of `greedy` is answered greedily,
    the others at temperature 1.
    """

    def __init__(self, model, processor, world: World, rows: int, first: int = FIRST_SEED, greedy: int = 8):
        self.model, self.processor, self.rows, self.first = model, processor, rows, first
        self.world, self.greedy = world, greedy

    def __call__(self, number: int) -> Request:
        rng = np.random.default_rng(self.first + number)
        asking = number % QUESTION_SHARE == QUESTION_SHARE - 1
        return self.request(number, 0.0 if number % self.greedy == self.greedy - 2 else 1.0, rng, asking)

    def request(self, number: int, temperature: float, rng: np.random.Generator, asking: bool = False) -> Request:
        """One batch. All rows share a prompt length where they can: unpadded batches decode faster."""
        seed = self.first + number * self.rows
        scenes = [self.world.captioned(seed + i) for i in range(self.rows)]
        if asking:
            asked = [self.world.captions.questions(s) for s in scenes]
            texts = [turns[int(rng.integers(len(turns)))][0] for turns in asked]
        else:
            requests = self.world.captions.requests
            texts = [requests[int(rng.integers(len(requests)))]] * self.rows
        inputs = prepare(self.processor, [self.world.to_image(s) for s in scenes], texts, self.model)
        return request_of(self.model, inputs, temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, seed=seed)


def export(run: Path, folder: Path, model, levels: int) -> None:
    """Write a finished run's weights in half precision, with its provenance and the depth to ask for."""
    drafter = FeatureDrafter.from_pretrained(run, model)
    drafter.head.config = dataclasses.replace(drafter.config, levels=levels)
    record = json.loads((run / PROVENANCE).read_text()) | {"stored_as": "float16"}
    drafter.save_pretrained(folder, record, torch.float16)


@dataclass
class CaptionerDrafterOptions(DrafterOptions):
    world: str = option("whose scenes the captioner describes", "shapes", choices=WORLDS)
    latents: int = option("elements that an image run is compressed to; 0 drafts without the image", 8)
    greedy: int = option("one batch of so many is answered greedily", 8)
    layers: tuple[int, ...] = option("hidden states of the target to draft on", (-1,))


def run(options: argparse.Namespace) -> None:
    """Train, and with --export write what is finished."""
    torch.set_num_threads(options.threads)
    seen, target = world(options.world), options.target or zoo.CHECKPOINTS / NAMES[options.world][False]
    model, processor = targets.load(str(target))
    sizes = {"image_latents": options.latents, "feature_layers": tuple(options.layers)}
    sizes |= {"levels": options.levels, "intermediate": options.middle}
    drafter = fresh_or_resumed(model, options.out, options.resume, options.seed, **sizes)
    if options.greedy < 2:
        raise ValueError(f"--greedy: got {options.greedy}, expected at least 2")
    record = provenance(
        model, seed=options.seed, recipe="captioner_drafter", batch=options.batch, greedy=options.greedy
    )
    held_out = SceneBatches(model, processor, seen, 8, HELD_OUT_SEED)
    rng = np.random.default_rng
    validate = TextValidation(model, drafter, lambda temperature: [held_out.request(0, temperature, rng(0))])
    scenes = SceneBatches(model, processor, seen, options.batch, greedy=options.greedy)
    plan = plan_of(options)
    train(Trainer(validate.target, drafter, Exact(), scenes, plan, options.out, record, validate), options.resume)
    if options.export:
        export(options.out, options.export, model, options.levels)


DEFAULTS = {"levels": 16, "middle": 512, "save_every": 200}
SHAPES = Recipe(
    "captioner-vispec",
    "Train the drafter of the captioner of shapes.",
    CaptionerDrafterOptions,
    {"train": run},
    DEFAULTS | {"steps": 6000, "greedy": 2},
)
EMOJI = Recipe(
    "captioner-emoji-vispec",
    "Train the drafter of the captioner of emoji.",
    CaptionerDrafterOptions,
    {"train": run},
    DEFAULTS | {"world": "emoji"},
)
