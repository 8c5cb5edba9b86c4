"""Judges of pictures of shapes: the score of `generate --best-of`, and whether pictures are of the kind that the
included captioner was made for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visspec.eval.metrics import geneval
from visspec.eval.metrics.detection import DetectedColours
from visspec.io.images import open_image
from visspec.toys.world import suite
from visspec.toys.world.detector import ShapeDetector

if TYPE_CHECKING:
    from PIL import Image

    from visspec.api.best_of import Score

SIDE = 96  # pixels of a rendered scene
WARNING = (
    "the embedded captioner knows rendered scenes of coloured shapes only, so what it says of {} is made up; --model"
    " names another"
)


def scorer(prompts: Sequence[str]) -> Score:
    """A score by the detector. Raises ValueError for a prompt that it can't judge."""
    for prompt in prompts:
        suite.parse(prompt)
    return by_detector


def by_detector(images: Sequence[Image.Image], prompt: str) -> list[float]:
    """1 for a picture that is what its prompt says and 2 if nothing else is on it; for others, minus the number of
    things that are not as they should be.
    """
    detector, colours, metadata = ShapeDetector(), DetectedColours(), suite.parse(prompt)
    found = []
    for image in images:
        correct, strict, reasons, _ = geneval.judge_image(image, metadata, detector, colours)
        found.append(1.0 + bool(strict) if correct else -1.0 - reasons.count("\n"))
    return found


def foreign(paths: Iterable[Path], max_pixels: int) -> str | None:
    """A sentence about the first image that is no rendered scene of shapes; None where all are. Files that can't be
    read are passed by.
    """
    detector = ShapeDetector(min_radius=0.07, max_radius=0.135)  # of caption scenes
    for path in paths:
        try:
            image = open_image(path, max_pixels).resize((SIDE, SIDE))
        except (ValueError, OSError):
            continue
        if detector.analyse(image).unexplained > detector.max_unexplained:
            return WARNING.format(path)
    return None
