"""Prompts about pictures of the emoji world: tasks are those without colours.

The subjects are the atlas's animals, of prompts of one object a third of them, which a small painter can learn.
"""

from collections.abc import Mapping
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from visspec.toys.world.emoji.atlas import names, numbers
from visspec.toys.world.emoji.scene import GROUNDS, MOST_TURN, TINTS, EmojiScene, PlacedEmoji, sample_ground
from visspec.toys.world.suite import NUMBERS, Metadata, Suite, placements, required_objects, some, with_article

RUNS = (("rat", "chipmunk"), ("crab", "seal"))  # of animals in the order of the code points
ALONE = 3  # every third animal is the subject of prompts of one object
TWELVE = (
    "penguin,fox face,octopus,tropical fish,flamingo,pig,lion face,unicorn face,t rex,honeybee,spouting whale,llama"
)
NOT_ALIVE = {"pig nose", "paw prints", "spiral shell", "microbe"}
SIDES = {1: (0.5, 0.66), 2: (0.32, 0.4), 3: (0.28, 0.34), 4: (0.28, 0.32)}  # of pictures, by their number
GAP = 0.02  # between the tiles' boxes
PAINTED_SIDES, OFFSET, PAINTED_TURN = (0.64, 0.68), 0.02, 2.0  # of animals in pictures that painters learn


@cache
def subjects() -> tuple[str, ...]:
    """The names that prompts use: animals."""
    found = [name for first, last in RUNS for name in names()[numbers()[first] : numbers()[last] + 1]]
    return tuple(name for name in found if name not in NOT_ALIVE)


class EmojiSuite(Suite):
    """360 prompts about animals; sentences about any picture of the atlas are understood."""

    world = "emoji"
    sizes: Mapping[str, int] = MappingProxyType(
        {"single_object": 160, "two_object": 60, "counting": 40, "position": 100}
    )
    seed = 20260102
    grounds = tuple(product(GROUNDS, TINTS))
    words = f"on ground times {' '.join(GROUNDS)} {' '.join(TINTS)}"

    def names(self) -> tuple[str, ...]:
        return subjects()

    def alone(self) -> tuple[str, ...]:
        return subjects()[::ALONE]

    def known(self) -> tuple[str, ...]:
        return names()

    def many(self, kind: str, count: int) -> str:
        return f"{NUMBERS[count]} times {with_article(kind)}"

    def chosen(self, tag: str, rng: np.random.RandomState) -> list[Metadata]:
        """Of one object, up to half without a ground."""
        if tag != "single_object":
            return super().chosen(tag, rng)
        rows = list(self.every(tag))
        bare = [row for row in rows if "ground" not in row]
        half = min(self.sizes[tag] // 2, len(bare))
        bare = [bare[i] for i in sorted(rng.permutation(len(bare))[:half])]
        return bare + some([row for row in rows if "ground" in row], self.sizes[tag] - half, rng)

    def free_scene(self, metadata: Mapping[str, Any], rng: np.random.Generator) -> EmojiScene:
        """A scene that matches a prompt exactly, with GAP between the tiles' boxes."""
        items = [name for name, _ in required_objects(metadata)]
        placed = placements(metadata, rng, SIDES[len(items)], 0.5, GAP)
        turns = [float(turn) for turn in rng.uniform(-MOST_TURN, MOST_TURN, size=len(items))]
        pictures = [PlacedEmoji(name, *where, turn) for name, where, turn in zip(items, placed, turns)]
        ground, tint, seed = sample_ground(rng)
        ground, tint = metadata.get("ground", (ground, tint))
        return EmojiScene(tuple(sorted(pictures, key=lambda p: (p.y, p.x))), ground, seed, tint)


def paint_scene(metadata: Mapping[str, Any], rng: np.random.Generator) -> EmojiScene:
    """A scene of one animal near the middle, on the prompt's ground or a random one."""
    x, y = (0.5 + float(v) for v in rng.uniform(-OFFSET, OFFSET, size=2))
    side, turn = float(rng.uniform(*PAINTED_SIDES)), float(rng.uniform(-PAINTED_TURN, PAINTED_TURN))
    picture = PlacedEmoji(metadata["include"][0]["class"], x, y, side, turn)
    ground, tint, seed = sample_ground(rng)
    ground, tint = metadata.get("ground", (ground, tint))
    return EmojiScene((picture,), ground, seed, tint)


def paint_animal(metadata: Mapping[str, Any], rng: np.random.Generator) -> EmojiScene:
    """Like `paint_scene`, on one of the grounds of `AnimalSuite`."""
    grounds = AnimalSuite.grounds
    return paint_scene({"ground": grounds[int(rng.integers(len(grounds)))], **metadata}, rng)


class AnimalSuite(EmojiSuite):
    """48 prompts of twelve of the animals, alone or on a ground without grain: what painters of 64 tokens can learn."""

    sizes: Mapping[str, int] = MappingProxyType({"single_object": 48})
    grounds = tuple(product(("smooth", "cloudy"), TINTS))
    words = f"on ground smooth cloudy {' '.join(TINTS)}"

    def names(self) -> tuple[str, ...]:
        return tuple(TWELVE.split(","))

    alone = names
