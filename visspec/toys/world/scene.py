"""Scenes of the shape world and their sampling: a few coloured shapes in distinct cells of a 3x3 layout.

Lengths are fractions of the canvas side, the origin is the top left corner, y points down.
"""

from dataclasses import dataclass

import numpy as np

from visspec.toys.world.palette import CLASSES, COLOURS, GROUNDS

GRID = 3
RADIUS = {"small": 0.075, "large": 0.13}
RADIUS_JITTER = 0.005  # small is below 0.08, large above 0.125: they don't overlap
CENTRE_JITTER = 0.025
COUNTS = (3, 4, 5, 6)

HELD_OUT_SEED = 1 << 30  # smaller seeds are for training, others for held-out scenes


class PlacedThing:
    """An object with a place on a canvas."""

    x: float
    y: float

    @property
    def cell(self) -> int:
        """Index 0..8 of the layout cell that holds the centre, or of the nearest cell, in raster order."""
        column, row = (min(GRID - 1, max(0, int(v * GRID))) for v in (self.x, self.y))
        return row * GRID + column


@dataclass(frozen=True)
class Scene:
    """Objects in raster order on one ground. `texture_seed` determines the ground's pixels."""

    things: tuple
    ground: str = "plain"
    texture_seed: int = 0

    def at(self, cell: int):
        """Return the object in a layout cell, or None."""
        return next((thing for thing in self.things if thing.cell == cell), None)


@dataclass(frozen=True)
class Shape(PlacedThing):
    """One shape: class name, colour name, centre and radius (fractions of the canvas side)."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def size(self) -> str:
        """`small` or `large`, whichever nominal radius is nearer."""
        return "small" if self.radius < sum(RADIUS.values()) / 2 else "large"


def scene_from_seed(seed: int) -> Scene:
    """Return scene number `seed`, sampled uniformly. Scenes from HELD_OUT_SEED on are held out."""
    rng = np.random.default_rng(seed)
    choices = [(colour, kind) for kind in CLASSES for colour in COLOURS]
    n = int(rng.choice(COUNTS))
    cells = np.sort(rng.choice(GRID * GRID, size=n, replace=False))
    pair = rng.integers(len(choices), size=n)
    large = rng.integers(2, size=n)
    jitter = rng.uniform(-1, 1, size=(n, 3))
    shapes = []
    for i, cell in enumerate(cells):
        colour, kind = choices[pair[i]]
        radius = RADIUS["large" if large[i] else "small"] + RADIUS_JITTER * jitter[i, 2]
        x = (cell % GRID + 0.5) / GRID + CENTRE_JITTER * jitter[i, 0]
        y = (cell // GRID + 0.5) / GRID + CENTRE_JITTER * jitter[i, 1]
        shapes.append(Shape(kind, colour, float(x), float(y), float(radius)))
    ground = GROUNDS[int(rng.integers(len(GROUNDS)))]
    return Scene(tuple(shapes), ground, int(rng.integers(1 << 31)))
