"""Pictures of prompts in the emoji world, with which its painters were trained: one large animal near the middle."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from visspec.toys.world.emoji.render import render
from visspec.toys.world.emoji.scene import TINTS, EmojiScene, PlacedEmoji, sample_ground

SIDES, OFFSET, MOST_TURN = (0.64, 0.68), 0.02, 2.0
ANIMAL_GROUNDS = tuple(product(("smooth", "cloudy"), TINTS))  # for painters with 64 tokens


def paint(prompt: Mapping[str, Any], rng: np.random.Generator, side: int) -> np.ndarray:
    """Draw a random picture of a prompt, uint8 (side, side, 3)."""
    return render(scene_of(prompt, rng), side)


def paint_animal(prompt: Mapping[str, Any], rng: np.random.Generator, side: int) -> np.ndarray:
    """Like `paint`, on a ground without grain."""
    ground = ANIMAL_GROUNDS[int(rng.integers(len(ANIMAL_GROUNDS)))]
    return paint({"ground": ground, **prompt}, rng, side)


def scene_of(prompt: Mapping[str, Any], rng: np.random.Generator) -> EmojiScene:
    """Return a random scene that matches a prompt, on its ground if it names one."""
    x, y = (0.5 + float(v) for v in rng.uniform(-OFFSET, OFFSET, size=2))
    side, turn = float(rng.uniform(*SIDES)), float(rng.uniform(-MOST_TURN, MOST_TURN))
    picture = PlacedEmoji(prompt["include"][0]["class"], x, y, side, turn)
    ground, tint, seed = sample_ground(rng)
    ground, tint = prompt.get("ground", (ground, tint))
    return EmojiScene((picture,), ground, seed, tint)
