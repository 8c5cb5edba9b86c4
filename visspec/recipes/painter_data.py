"""Pairs of a prompt and a picture for the painter: GenEval sentences of the shape world and free-tier scenes."""

import numpy as np
import torch

from visspec.eval.world.palette import CLASSES, COLOURS, GROUNDS
from visspec.eval.world.render import render
from visspec.eval.world.scene import HELD_OUT_SEED, Scene, Shape
from visspec.eval.world.suite import FREE_MARGIN, FREE_RADIUS, Metadata, free_scene, sample_prompt

SIDE = {False: 96, True: 48}  # pixels of the full and of the low-resolution painter
# Half of the pictures are plain. The speckles of the fourth ground are smaller than a patch: no code can hold them.
GROUNDS_DRAWN = ("plain", "plain", "striped", "cloudy")
FIRST_SEED = {"vq": 0, "composed": 1 << 27, "tokens": 1 << 28, "decoder": 1 << 29}  # all below HELD_OUT_SEED


def pair(seed: int) -> tuple[Metadata, Scene]:
    """Prompt and scene number `seed`: task uniform, then prompt uniform in the task; every prompt may be drawn."""
    rng = np.random.default_rng(seed)
    metadata = sample_prompt(rng)
    return metadata, free_scene(metadata, rng, GROUNDS_DRAWN)


def crowded(seed: int, tries: int = 24) -> Scene:
    """A scene of up to about ten shapes that do not touch: what the VQ model has to learn, with little ground."""
    rng = np.random.default_rng(seed)
    shapes: list[Shape] = []
    for _ in range(tries):
        radius = float(rng.uniform(*FREE_RADIUS))
        x, y = (float(v) for v in rng.uniform(radius + FREE_MARGIN, 1 - radius - FREE_MARGIN, size=2))
        kind, colour = CLASSES[int(rng.integers(len(CLASSES)))], list(COLOURS)[int(rng.integers(len(COLOURS)))]
        if all(max(abs(x - s.x), abs(y - s.y)) > radius + s.radius for s in shapes):
            shapes.append(Shape(kind, colour, x, y, radius))
    return Scene(tuple(shapes), GROUNDS[int(rng.integers(len(GROUNDS)))], int(rng.integers(1 << 31)))


def pixels(scenes: list[Scene], side: int) -> torch.Tensor:
    """Rendered pictures in -1..1, float32 (B, 3, side, side), as the VQ model reads and writes them."""
    batch = torch.from_numpy(np.stack([render(scene, side) for scene in scenes]))
    return batch.permute(0, 3, 1, 2).float() / 127.5 - 1


def held_out_scenes(rows: list[Metadata], seed: int = HELD_OUT_SEED) -> list[Scene]:
    """One scene a prompt, drawn with seeds no training pair has."""
    return [free_scene(row, np.random.default_rng(seed + i), GROUNDS_DRAWN) for i, row in enumerate(rows)]
