"""Warns where the included captioner is given pictures of another kind than it was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from visspec.io.images import open_image
from visspec.toys.world.detector import ShapeDetector, grow

SIDE = 96  # pixels of a rendered scene
FEWEST = 3  # shapes of a caption scene; pictures of the included painter mostly have one or two
TINT = 0.01  # levels between the channels of a ground; rendered grounds are grey, those of the included painter nearly
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
        seen = detector.analyse(image)
        lossless = path.suffix.lower() == ".png"  # compression tints grounds, too
        strange = seen.unexplained > detector.max_unexplained or len(seen.shapes) < FEWEST
        if strange or (lossless and tint(image, seen.coverage) > TINT):
            return WARNING.format(path)
    return None


def tint(image: Image.Image, coverage: np.ndarray) -> float:
    """How far apart the channels of the ground are, on average over the pixels well outside all shapes."""
    shape = np.any(coverage > 0.01, axis=0)
    for _ in range(4):
        shape = grow(shape)
    return float(np.ptp(np.asarray(image, dtype=np.float32)[~shape], axis=-1).mean())
