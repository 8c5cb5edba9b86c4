"""Pictures of GenEval prompts in the shape world: one to four shapes that show exactly what a prompt describes.

A prompt is GenEval's metadata (Ghosh et al. 2023, arXiv 2310.11513): {"tag", "include": [{"class", "count", "color"?,
"position"?}], "exclude"?, "prompt"}.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from visspec.toys.world.palette import COLOURS, GROUNDS
from visspec.toys.world.render import render
from visspec.toys.world.scene import Scene, Shape

# Fractions of the side.
RADIUS = (0.11, 0.16)
GAP = 0.04  # minimum gap between the boxes of two shapes
MARGIN = 0.02


def paint(prompt: Mapping[str, Any], rng: np.random.Generator, side: int) -> np.ndarray:
    """Draw a random picture of a prompt, uint8 (side, side, 3)."""
    return render(scene_of(prompt, rng), side)


def scene_of(prompt: Mapping[str, Any], rng: np.random.Generator) -> Scene:
    """Return a random scene that matches a prompt exactly."""
    items = [(item["class"], item.get("color")) for item in prompt["include"] for _ in range(item["count"])]
    relation = next((item["position"][0] for item in prompt["include"] if "position" in item), None)
    placed = _placements(len(items), relation, rng)
    colours = [colour or list(COLOURS)[int(rng.integers(len(COLOURS)))] for _, colour in items]
    shapes = [Shape(kind, c, *where) for (kind, _), c, where in zip(items, colours, placed)]
    ground = GROUNDS[int(rng.integers(len(GROUNDS)))]
    return Scene(tuple(sorted(shapes, key=lambda s: (s.y, s.x))), ground, int(rng.integers(1 << 31)))


def _placements(count: int, relation: str | None, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    while True:
        placed: list[tuple[float, float, float]] = []
        for _ in range(count):
            radius = float(rng.uniform(*RADIUS))
            x, y = (float(v) for v in rng.uniform(radius + MARGIN, 1 - radius - MARGIN, size=2))
            if any(max(abs(x - u), abs(y - v)) < radius + r + GAP for u, v, r in placed):
                break
            placed.append((x, y, radius))
        if len(placed) == count and (relation is None or _holds(relation, placed[1], placed[0])):
            return placed


def _holds(relation: str, subject: tuple[float, ...], reference: tuple[float, ...]) -> bool:
    """Return whether two centres clearly show a relation: the other axis differs by less than half as much."""
    dx, dy = subject[0] - reference[0], subject[1] - reference[1]
    main, cross = {"left of": (-dx, dy), "right of": (dx, dy), "above": (-dy, dx), "below": (dy, dx)}[relation]
    return main > 0 and abs(cross) < main / 2
