"""Tasks on rendered shapes for `visspec eval vqa`: nothing to download."""

from __future__ import annotations

from functools import partial

import numpy as np

from visspec.eval.metrics.tasks import Sample, Task, exact
from visspec.toys.world import captions
from visspec.toys.world.render import to_image
from visspec.toys.world.scene import held_out_scenes


def shape_captions(count: int = 100, size: int = 96, seed: int = 0) -> Task:
    """Caption held-out scenes; the score of a caption is the F1 of its facts against the scene's."""

    def score(sample: Sample, text: str) -> float:
        right, stated = captions.score(text, sample.extra["scene"])
        total = len(captions.facts(sample.extra["scene"])) + stated
        return 2 * right / total

    samples = tuple(
        Sample(
            f"scene-{i}",
            partial(to_image, scene, size),
            captions.REQUESTS[0],
            (captions.caption(scene),),
            (),
            {"scene": scene},
        )
        for i, scene in enumerate(held_out_scenes(count, seed))
    )
    return Task("shape-captions", samples, 128, score)


def shape_questions(count: int = 100, size: int = 96, seed: int = 0) -> Task:
    """One question with an exact answer about each of `count` held-out scenes."""
    rng, samples = np.random.default_rng(seed), []
    for i, scene in enumerate(held_out_scenes(count, seed)):
        pairs = captions.questions(scene)
        question, answer = pairs[int(rng.integers(len(pairs)))]
        samples.append(Sample(f"scene-{i}", partial(to_image, scene, size), question, (answer,), (), {"scene": scene}))
    return Task("shape-questions", tuple(samples), 16, exact)
