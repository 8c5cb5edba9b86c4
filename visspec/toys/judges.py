"""Warns where the included captioner is given pictures of another kind than it was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from visspec.io.images import open_image
from visspec.toys.world.detector import ShapeDetector

SIDE = 96  # pixels of a rendered scene
WARNING = (
    "the embedded captioner knows rendered scenes of coloured shapes only, so what it says of {} is made up; --model"
    " names another"
)


def foreign(paths: Iterable[Path], max_pixels: int) -> str | None:
    """A sentence about the first image that is no rendered scene of shapes; None where all are. Files that can't be
    read are skipped.
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
