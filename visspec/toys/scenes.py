"""Held-out scenes of a world as a bench takes them (`io.included.Scenes`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from visspec.eval.metrics.detection import Detector
from visspec.io.included import load
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
