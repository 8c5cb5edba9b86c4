"""Pairs of a prompt and a picture for the painter: GenEval sentences of the shape world and free-tier scenes."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from visspec.toys.world.palette import CLASSES, COLOURS, GROUNDS
from visspec.toys.world.scene import HELD_OUT_SEED, Scene, Shape
from visspec.toys.world.suite import FREE_MARGIN, FREE_RADIUS, Metadata, free_scene, sample_prompt
from visspec.toys.world.worlds import world

SIDE = {False: 96, True: 48}  # pixels of the full and of the low-resolution painter
# Half of the pictures are plain. The speckles of the fourth ground are smaller than a patch: no code can hold them.
GROUNDS_DRAWN = ("plain", "plain", "striped", "cloudy")
CROWD = 24  # shapes that are tried in a crowded scene
TEXTURES = 4  # of each kind: what is new in every picture is the scene
# Shapes stand on a grid of half patches and have one of three radii. With continuous places nearly all the information
# in a picture's codes is where edges cut through patches, which no prompt says.
STEP = 4 / 96
RADII = (11 / 96, 13 / 96, 15 / 96)
GAP = 2 / 96  # what settled shapes keep between their boxes
# all below HELD_OUT_SEED
FIRST_SEED = {"vq": 0, "composed": 1 << 27, "tokens": 1 << 28, "decoder": 1 << 29, "bound": 3 << 28}

Drawn = TypeVar("Drawn")
pixels = world("shapes").pixels


def snap_to_grid(scene: Scene) -> Scene | None:
    """The scene with shapes on the nearest places of a grid and one of TEXTURES; None where two come too close."""
    shapes: list[Shape] = []
    for shape in scene.things:
        radius = min(RADII, key=lambda r: abs(r - shape.radius))
        x, y = (round(at / STEP) * STEP for at in (shape.x, shape.y))
        inside = radius <= min(x, y) and max(x, y) <= 1 - radius
        if not inside or any(max(abs(x - s.x), abs(y - s.y)) < radius + s.radius + GAP for s in shapes):
            return None
        shapes.append(Shape(shape.kind, shape.colour, x, y, radius))
    return Scene(tuple(sorted(shapes, key=lambda s: (s.y, s.x))), scene.ground, scene.texture_seed % TEXTURES)


def paint_scene(metadata: Metadata, rng: np.random.Generator) -> Scene:
    """A settled scene that shows what a prompt asks for."""
    while True:
        if (scene := snap_to_grid(free_scene(metadata, rng, GROUNDS_DRAWN))) is not None:
            return scene


def pair(seed: int, tag: str | None = None) -> tuple[Metadata, Scene]:
    """Prompt and scene number `seed`: task uniform unless given, then prompt uniform in the task; every prompt may be
    drawn.
    """
    rng = np.random.default_rng(seed)
    metadata = sample_prompt(rng, tag=tag)
    return metadata, paint_scene(metadata, rng)


bound_pair = partial(pair, tag="color_attr")  # of the task that binds two colours to two classes


def crowded_scene(seed: int) -> Scene:
    """A scene of up to about ten shapes that do not touch: what the VQ model has to learn, with little ground."""
    rng = np.random.default_rng(seed)
    shapes: list[Shape] = []
    for _ in range(CROWD):
        radius = float(rng.uniform(*FREE_RADIUS))
        x, y = (float(v) for v in rng.uniform(radius + FREE_MARGIN, 1 - radius - FREE_MARGIN, size=2))
        kind, colour = CLASSES[int(rng.integers(len(CLASSES)))], list(COLOURS)[int(rng.integers(len(COLOURS)))]
        if all(max(abs(x - s.x), abs(y - s.y)) > radius + s.radius for s in shapes):
            shapes.append(Shape(kind, colour, x, y, radius))
    return Scene(tuple(shapes), GROUNDS[int(rng.integers(len(GROUNDS)))], int(rng.integers(1 << 31)))


def held_out(rows: list[Metadata], painted: Callable[[Metadata, np.random.Generator], Drawn]) -> list[Drawn]:
    """One scene a prompt, drawn with seeds no training pair has."""
    return [painted(row, np.random.default_rng(HELD_OUT_SEED + i)) for i, row in enumerate(rows)]
