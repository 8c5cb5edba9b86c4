"""Held-out scenes of a world as a bench takes them (`io.included.Scenes`): nothing to download."""

from __future__ import annotations

from visspec.toys.world.worlds import World, known_to, world
from visspec.types import Processor

WORDS = {"captions": "captions", "prompts": "suite"}  # use: the module of a world that has the words


def scenes_of(name: str | None, processor: Processor | None, use: str) -> World:
    """As `io.included.scenes`."""
    if name is None and processor is not None:
        return known_to(processor, lambda place: getattr(place, WORDS[use]).vocabulary())
    return world(name or "shapes")
