"""Held-out scenes of a world as a bench takes them (`io.included.Scenes`), and tasks on rendered shapes for `visspec
eval vqa`: nothing to download.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from visspec.eval.metrics.tasks import Sample, Task, exact
from visspec.toys.world import captions
from visspec.toys.world.render import to_image
from visspec.toys.world.scene import Scene, held_out_scenes
from visspec.toys.world.worlds import World, known_to, world
from visspec.types import Processor

WORDS = {"captions": "captions", "prompts": "suite"}  # use: the module of a world that has the words


def scenes_of(name: str | None, processor: Processor | None, use: str) -> World:
    """As `io.included.scenes`."""
    if name is None and processor is not None:
        return known_to(processor, lambda place: getattr(place, WORDS[use]).vocabulary())
    return world(name or "shapes")


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


def _samples(asked: list[tuple[Scene, str, str]], size: int) -> tuple[Sample, ...]:
    """One a scene, with its question and answer."""
    return tuple(
        Sample(f"scene-{i}", partial(to_image, scene, size), question, (answer,), (), {"scene": scene})
        for i, (scene, question, answer) in enumerate(asked)
    )
