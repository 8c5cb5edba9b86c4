"""The worlds behind one interface: scenes by seed, their pixels, captions with facts, prompts, and a detector.

`world("shapes")` and `world("emoji")` are two; "animals" has fewer of the emoji's prompts, for small painters. What
takes a `World` works with each: for a bench it is `io.included.Scenes`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from visspec.eval.metrics.detection import Detector
from visspec.io.included import load
from visspec.toys.world import captions, palette, render, scene, suite
from visspec.toys.world.captions import WorldCaptions
from visspec.toys.world.emoji import atlas
from visspec.toys.world.emoji import render as emoji_render
from visspec.toys.world.emoji import scene as emoji_scene
from visspec.toys.world.emoji.captions import EmojiCaptions
from visspec.toys.world.emoji.suite import AnimalSuite, EmojiSuite
from visspec.toys.world.scene import HELD_OUT_SEED, Scene
from visspec.toys.world.suite import Suite

WORLDS = ("shapes", "emoji", "animals")


@dataclass(frozen=True)
class World:
    """One world. A scene's `at(cell)` is what a cell of the 3 x 3 layout holds, or None."""

    name: str
    side: int  # pixels a side of captioned pictures
    captioned: Callable[[int], Scene]  # the captioned scene of a number
    draw: Callable[[Any, int], np.ndarray]  # pixels of a scene, uint8 (size, size, 3)
    captions: WorldCaptions
    suite: Suite
    detectors: str  # "module:class" of the detector
    facts: dict[str, tuple[str, ...]]  # of what a cell holds: the attribute's name and all of its words
    settings: dict[str, tuple[str, ...]]  # the same, of a whole scene
    counts: tuple[int, ...]  # of things in a captioned scene
    lesson: Callable[[int], Scene]  # scene number n to learn to see by, with any count
    tasks: tuple[str, ...]  # those of the suite that its painter is taught
    painted: str = ""  # "module:function": a scene of a prompt as its painter is taught it, where not the suite's own

    def detector(self) -> Detector:
        """A fresh detector of what the world's pictures show."""
        return load(self.detectors)()

    def scenes(self, count: int, first: int = 0) -> list[Scene]:
        """Held-out scenes number first..first+count, on which nothing is trained."""
        return [self.captioned(HELD_OUT_SEED + first + i) for i in range(count)]

    def prompt(self, rng: np.random.Generator) -> dict:
        """A random prompt of those that the world's painter is taught, as metadata."""
        return self.suite.sample_prompt(rng, tag=self.tasks[0] if len(self.tasks) == 1 else None)

    def prompts(self) -> list[dict]:
        """The prompts of the suite that the world's painter is taught."""
        return [row for row in self.suite.suite() if row["tag"] in self.tasks]

    def render(self, prompt: Mapping[str, Any], rng: np.random.Generator, side: int) -> np.ndarray:
        """A random picture of what a prompt says, uint8 (side, side, 3)."""
        scene = load(self.painted) if self.painted else self.suite.free_scene
        return self.draw(scene(prompt, rng), side)

    def pixels(self, scenes: Sequence[Scene], side: int | None = None) -> torch.Tensor:
        """Pictures in -1..1, float32 (B, 3, side, side), as models read and write them; default the world's side."""
        batch = torch.from_numpy(np.stack([self.draw(scene, side or self.side) for scene in scenes]))
        return batch.permute(0, 3, 1, 2).float() / 127.5 - 1

    def to_image(self, scene: Scene) -> Image.Image:
        """A captioned scene as a PIL image."""
        return Image.fromarray(self.draw(scene, self.side))

    def images(self, count: int, first: int = 0) -> list[Image.Image]:
        """Held-out scenes number first..first+count as PIL images."""
        return [self.to_image(scene) for scene in self.scenes(count, first)]

    def questions(self, count: int, first: int = 0) -> list[list[str]]:
        """What can be asked of each of them."""
        found = (self.captions.questions(scene) for scene in self.scenes(count, first))
        return [[question for question, _ in pairs] for pairs in found]


@cache
def world(name: str) -> World:
    """The world of a name; ValueError for any other."""
    if name not in WORLDS:
        raise ValueError(f"world: got {name!r}, expected one of {WORLDS}")
    return {"shapes": _shapes, "emoji": _emoji, "animals": _animals}[name]()


def known_to(processor: object, words: Callable[[World], Iterable[str]]) -> World:
    """The world all of whose words a model's processor or tokenizer has, or whose prompts are all classes of a model;
    shapes for other models.
    """
    labels = set(getattr(getattr(processor, "config", None), "labels", None) or ())
    if labels:
        named = (world(name) for name in WORLDS)
        return next((one for one in named if {row["prompt"] for row in one.prompts()} <= labels), world("shapes"))
    tokenizer = getattr(processor, "tokenizer", processor)
    there = set(tokenizer.get_vocab()) if hasattr(tokenizer, "get_vocab") else set()
    return next((world(name) for name in WORLDS if set(words(world(name))) <= there), world("shapes"))


def _shapes() -> World:
    return World(
        "shapes",
        96,
        scene.scene_from_seed,
        render.render,
        captions.SHAPES,
        suite.SHAPES,
        detectors="visspec.toys.world.detector:ShapeDetector",
        facts={"kind": palette.CLASSES, "colour": tuple(palette.COLOURS), "size": palette.SIZES},
        settings={"ground": palette.GROUNDS},
        counts=scene.COUNTS,
        lesson=scene.scene_from_seed,
        tasks=suite.TASKS,
    )


def _emoji() -> World:
    return World(
        "emoji",
        120,
        emoji_scene.scene_from_seed,
        emoji_render.render,
        EmojiCaptions(),
        EmojiSuite(),
        detectors="visspec.toys.world.emoji.detector:EmojiDetector",
        facts={"name": atlas.names(), "size": tuple(emoji_scene.SIZES)},
        settings={"ground": emoji_scene.GROUNDS, "tint": tuple(emoji_scene.TINTS)},
        counts=emoji_scene.COUNTS,
        lesson=emoji_scene.crowded_scene,
        tasks=("single_object",),
        painted="visspec.toys.world.emoji.suite:paint_scene",
    )


def _animals() -> World:
    return replace(
        _emoji(),
        name="animals",
        side=64,
        suite=AnimalSuite(),
        detectors="visspec.toys.world.emoji.detector:animal_detector",
        painted="visspec.toys.world.emoji.suite:paint_animal",
    )
