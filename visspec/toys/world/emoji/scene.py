"""Scenes of the emoji world and their sampling: one to five pictures on a ground with texture and tint.

Lengths are fractions of the canvas side, the origin is the top left corner, y points down; turns are clockwise degrees.
"""

from dataclasses import dataclass

import numpy as np

from visspec.toys.world.emoji.atlas import names
from visspec.toys.world.scene import GRID, PlacedThing, Scene

SIZES = {"small": 0.2, "large": 0.28}
SIZE_JITTER = 0.01
CENTRE_JITTER = 0.02
MOST_TURN = 15.0
COUNTS = (1, 2, 3, 4, 5)
GROUNDS = ("smooth", "grainy", "cloudy", "rough")
TINTS = {
    "grey": (132, 132, 134),
    "blue": (96, 124, 166),
    "green": (104, 140, 96),
    "brown": (142, 110, 84),
    "pink": (188, 132, 146),
    "violet": (124, 100, 154),
}


@dataclass(frozen=True)
class PlacedEmoji(PlacedThing):
    """One picture: its name in the atlas, centre, side of its tile, turn."""

    name: str
    x: float
    y: float
    side: float
    turn: float = 0.0

    @property
    def size(self) -> str:
        """`small` or `large`, whichever nominal side is nearer."""
        return "small" if self.side < sum(SIZES.values()) / 2 else "large"


@dataclass(frozen=True)
class EmojiScene(Scene):
    """Pictures on a ground with texture and tint."""

    ground: str = "smooth"
    tint: str = "grey"


def sample_ground(rng: np.random.Generator) -> tuple[str, str, int]:
    """Sample ground, tint and texture seed, each uniformly."""
    return GROUNDS[int(rng.integers(len(GROUNDS)))], [*TINTS][int(rng.integers(len(TINTS)))], int(rng.integers(1 << 31))


def scene_from_seed(seed: int) -> EmojiScene:
    """Return scene number `seed`, sampled uniformly without repeated pictures. Those from HELD_OUT_SEED are held
    out.
    """
    rng = np.random.default_rng(seed)
    choices = [(size, name) for name in names() for size in SIZES]
    n = int(rng.choice(COUNTS))
    cells = np.sort(rng.choice(GRID * GRID, size=n, replace=False))
    jitter = rng.uniform(-1, 1, size=(n, 4))
    pictures: list[PlacedEmoji] = []
    for cell, (dx, dy, bigger, turn) in zip(cells, jitter):
        size, name = choices[int(rng.integers(len(choices)))]
        while any(name == picture.name for picture in pictures):
            size, name = choices[int(rng.integers(len(choices)))]
        x = (cell % GRID + 0.5) / GRID + CENTRE_JITTER * dx
        y = (cell // GRID + 0.5) / GRID + CENTRE_JITTER * dy
        side = SIZES[size] + SIZE_JITTER * bigger
        pictures.append(PlacedEmoji(name, float(x), float(y), float(side), float(MOST_TURN * turn)))
    ground, tint, seed = sample_ground(rng)
    return EmojiScene(tuple(pictures), ground, seed, tint)
