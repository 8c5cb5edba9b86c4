"""Held-out scenes of a world as a bench takes them (`io.included.Scenes`), and tasks on rendered shapes for `visspec
eval vqa`: nothing to download.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from visspec.eval.metrics.detection import Detector
from visspec.eval.metrics.tasks import Sample, Task, exact
from visspec.io.included import load
from visspec.toys.world import captions
from visspec.toys.world.render import to_image
from visspec.toys.world.scene import ShapeScene, held_out_scenes
from visspec.toys.world.worlds import World, known_to, world

PAINTED = {"emoji": "visspec.toys.recipes.emoji_painter:painted"}  # pictures of prompts, where not the suite's own


def scenes_of(name: str | None, processor: Any, use: str) -> WorldScenes:
    """As `io.included.scenes`."""
    if name is None and processor is not None:
        return WorldScenes(known_to(processor, lambda place: getattr(place, WORDS[use]).vocabulary()))
    return WorldScenes(world(name or "shapes"))


WORDS = {"captions": "captions", "prompts": "suite"}  # use: the module of a world that has the words


@dataclass(frozen=True)
class WorldScenes:
    """A world for a bench."""

    world: World

    @property
    def name(self) -> str:
        return self.world.name

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.world.drawn

    def images(self, count: int, first: int = 0) -> list[Image.Image]:
        return [self.world.to_image(scene) for scene in self.world.scenes(count, first)]

    def questions(self, count: int, first: int = 0) -> list[list[str]]:
        found = (self.world.captions.questions(scene) for scene in self.world.scenes(count, first))
        return [[question for question, _ in pairs] for pairs in found]

    def prompts(self) -> list[dict[str, Any]]:
        return self.world.prompts()

    def render(self, prompt: Mapping[str, Any], rng: np.random.Generator, side: int) -> np.ndarray:
        scene = load(PAINTED[self.name]) if self.name in PAINTED else self.world.suite.free_scene
        return self.world.render(scene(prompt, rng), side)

    def detector(self) -> Detector:
        return self.world.detector()


def shape_captions(count: int = 100, size: int = 96, seed: int = 0) -> Task:
    """Caption held-out scenes; the score of a caption is the F1 of its facts against the scene's."""

    def score(sample: Sample, text: str) -> float:
        right, stated = captions.score(text, sample.extra["scene"])
        total = len(captions.facts(sample.extra["scene"])) + stated
        return 2 * right / total

    asked = [(scene, captions.REQUESTS[0], captions.caption(scene)) for scene in held_out_scenes(count, seed)]
    return Task("shape-captions", _samples(asked, size), 128, score)


def shape_questions(count: int = 100, size: int = 96, seed: int = 0) -> Task:
    """One question with an exact answer about each of `count` held-out scenes."""
    rng, asked = np.random.default_rng(seed), []
    for scene in held_out_scenes(count, seed):
        pairs = captions.questions(scene)
        asked.append((scene, *pairs[int(rng.integers(len(pairs)))]))
    return Task("shape-questions", _samples(asked, size), 16, exact)


def _samples(asked: list[tuple[ShapeScene, str, str]], size: int) -> tuple[Sample, ...]:
    """One a scene, with its question and answer."""
    return tuple(
        Sample(f"scene-{i}", partial(to_image, scene, size), question, (answer,), (), {"scene": scene})
        for i, (scene, question, answer) in enumerate(asked)
    )
