"""`flipbook`: what compressing the pictures is worth to drafters of video captions (FLASH, arXiv 2505.12728).

A flip-book has eight frames of one scene of emoji; behind every second frame another picture appears. Stage `target`
teaches the text model of `captioner-emoji` to name the pictures in the order in which they appear, behind 288 visual
tokens; stage `drafters` trains `eagle2`, `vispec` and `flash` on its sampled answers, equally many steps each, and
prints tau on clips that neither has seen. Nothing of it is included; docs/decisions.md has the figures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from visspec.accept.exact import Exact
from visspec.api import loading as targets
from visspec.api import zoo
from visspec.api.captions import prepare
from visspec.api.drafter_presets import of_preset
from visspec.api.train_drafter import STEP_ROWS, TextValidation, fresh_or_resumed, request_of, train
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.toys.recipes.captioner import FIRST_SEED, CaptionBatch, Encoder, caption_loss
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.captioner_drafter import MAX_NEW_TOKENS, SceneBatches
from visspec.toys.recipes.captioner_vision import patch_features
from visspec.toys.recipes.recipe import Options, Recipe, TrainingStage, mixed_precision
from visspec.toys.world.captions import FIRST, PLACES, REQUESTS, pick
from visspec.toys.world.emoji.captions import EmojiCaptions
from visspec.toys.world.emoji.scene import EmojiScene, sample_scene
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.worlds import world
from visspec.train.loop import Trainer
from visspec.train.options import TrainingOptions
from visspec.types import Request

THINGS, FRAMES = 4, 8
EMOJI, WORDS = world("emoji"), EmojiCaptions()
PRESETS = ("eagle2", "vispec", "flash")


def clip(seed: int) -> EmojiScene:
    """The last frame of flip-book number `seed`; its pictures are in the order in which they appear."""
    rng = np.random.default_rng(seed)
    scene = sample_scene(rng, counts=(THINGS,))
    return replace(scene, things=tuple(scene.things[i] for i in rng.permutation(THINGS)))


def stages_of(scene: EmojiScene) -> list[EmojiScene]:
    """The different frames of a flip-book: one picture, two, ..."""
    return [replace(scene, things=scene.things[: i + 1]) for i in range(THINGS)]


def caption(scene: EmojiScene, rng: np.random.Generator | None = None) -> str:
    """The ground, and every picture in the order of its appearance."""
    things = [pick(rng, FIRST).format(d=WORDS.phrase(thing), p=PLACES[thing.cell]) for thing in scene.things]
    return " ".join([pick(rng, WORDS.ground).format(g=WORDS.of_ground(scene)), *things, pick(rng, WORDS.closing)])


class FlipbookStage(TrainingStage):
    """The text model and projector of the captioner of emoji, on the frozen tower, fresh clips at every step."""

    name, seed, warm = "target.pt", 0, 0.05

    def build(self, options: argparse.Namespace) -> dict:
        folder = zoo.CHECKPOINTS / "captioner-emoji"
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).train()
        self.model.model.vision_tower.requires_grad_(False)
        self.encoder = Encoder(self.processor.tokenizer, EMOJI)
        self.encoder.prefix += self.encoder.prefix[self.encoder.first_image :] * (FRAMES - 1)
        return {"model": self.model}

    def loss(self) -> torch.Tensor:
        rng, rows = np.random.default_rng(FIRST_SEED + self.step), self.options.rows
        scenes = [clip(FIRST_SEED + self.step * rows + i) for i in range(rows)]
        coded = [(s, *self.encoder.row([(str(rng.choice(REQUESTS)), caption(s, rng))])) for s in scenes]
        batch: CaptionBatch = self.encoder.collate(coded)
        frames = [frame for scene in scenes for frame in stages_of(scene)]
        with torch.no_grad(), mixed_precision():
            seen = patch_features(self.model.model.vision_tower, EMOJI.pixels(frames)).float()
        seen = seen.unflatten(0, (rows, THINGS)).repeat_interleave(FRAMES // THINGS, dim=1).flatten(1, 2)
        return caption_loss(self.model, batch, seen, self.encoder.first_image)

    @torch.no_grad()
    def figures(self) -> dict:
        """Held-out captions as they have to be, and facts right of those stated."""
        clips, good, stated, same = Flipbooks(self.model, self.processor, 32, HELD_OUT_SEED), 0, 0, 0
        request = clips.inputs(0, REQUESTS[0])
        new = self.model.generate(**request, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        for row, scene in zip(new[:, request["input_ids"].shape[1] :], clips.scenes(0)):
            text = self.processor.tokenizer.decode(row, skip_special_tokens=True)
            right, said = EMOJI.captions.score(text, scene)
            good, stated, same = good + right, stated + said, same + (text == self._spelled(caption(scene)))
        return {"right": good, "stated": stated, "as_is": same, "of": 32}

    def _spelled(self, text: str) -> str:
        return self.processor.tokenizer.decode(self.processor.tokenizer(text).input_ids, skip_special_tokens=True)


class Flipbooks(SceneBatches):
    """Batches of requests about flip-books."""

    def __init__(self, model, processor, rows: int, first: int = 3 * FIRST_SEED // 2):
        super().__init__(model, processor, EMOJI, rows, first)

    def scenes(self, number: int) -> list[EmojiScene]:
        """The clips of a batch."""
        return [clip(self.first + number * self.rows + i) for i in range(self.rows)]

    def inputs(self, number: int, text: str) -> dict:
        """Arguments of the model for a batch."""
        different = [[EMOJI.to_image(stage) for stage in stages_of(scene)] for scene in self.scenes(number)]
        frames = [[image for image in own for _ in range(FRAMES // THINGS)] for own in different]
        return prepare(self.processor, frames, text, self.model)

    def request(self, number: int, temperature: float, rng: np.random.Generator, asking: bool = False) -> Request:
        seed, inputs = self.first + number * self.rows, self.inputs(number, str(rng.choice(REQUESTS)))
        return request_of(self.model, inputs, temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, seed=seed)


def drafters(options: argparse.Namespace) -> None:
    """Train each preset on the target's answers, and print tau."""
    folder = options.out / "target"
    fresh = FlipbookStage(options, 0)
    fresh.restore()
    save(fresh.model, fresh.processor, folder, torch.float32)
    model, processor = targets.load(str(folder))
    prompts = Flipbooks(model, processor, options.batch)
    held_out = Flipbooks(model, processor, 24, HELD_OUT_SEED + (1 << 20))
    for name in PRESETS:
        network, preset = of_preset(name, model, {})
        kind = zoo.drafter_class(preset.kind)
        drafter = fresh_or_resumed(model, options.out / name, options.resume, 0, kind, preset.draft, **network)
        sizes = {"steps": options.drafter_steps, "batch": options.batch, "rows": STEP_ROWS, "group": 4}
        plan = TrainingOptions(**{**sizes, "validate_every": options.drafter_steps, **preset.plan})
        held = TextValidation(model, drafter, lambda t: [held_out.request(0, t, np.random.default_rng(0))])
        record = provenance(model, seed=0, recipe="flipbook", preset=name)
        trainer = Trainer(held.target, drafter, Exact(), prompts, plan, options.out / name, record, held)
        figures = train(trainer, options.resume)
        print(json.dumps({"preset": name, **figures[-1]}), flush=True)


@dataclass
class FlipbookOptions(Options):
    steps: int = option("steps of the target's text model", 400)
    rows: int = option("clips in a batch", 8)
    rate: float = option("peak learning rate of the text model", 6e-4)
    batch: int = option("answers that the target makes together", 16)
    drafter_steps: int = option("steps of each drafter", 480)


FLIPBOOK = Recipe(
    "flipbook",
    "Train a captioner of flip-books and three drafters of it, and measure tau.",
    FlipbookOptions,
    {"target": FlipbookStage, "drafters": drafters},
)
