"""A warning for pictures of another kind than those on which the included captioner was trained."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from visspec.io.images import open_image
from visspec.toys.world.detector import ShapeDetector, grow

SIDE = 96  # side of a rendered scene in pixels
FEWEST = 3  # minimum number of shapes in a caption scene; pictures of the included painter mostly have fewer
TINT = 0.01  # maximum difference between channels of a grey ground; the included painter's grounds are slightly tinted
WARNING = (
    "the included captioner only knows rendered scenes of coloured shapes, so its caption of {} is meaningless; choose"
    " another with --model"
)


def foreign(paths: Iterable[Path], max_pixels: int) -> str | None:
    """Return a sentence about the first readable image that is not a rendered scene of shapes, or None."""
    detector = ShapeDetector(min_radius=0.07, max_radius=0.135)  # radii of caption scenes
    for path in paths:
        try:
            image = open_image(path, max_pixels).resize((SIDE, SIDE))
        except (ValueError, OSError):
            continue
        result = detector.analyse(image)
        lossless = path.suffix.lower() == ".png"  # compression also tints grounds
        strange = result.unexplained > detector.max_unexplained or len(result.shapes) < FEWEST
        if strange or (lossless and tint(image, result.coverage) > TINT):
            return WARNING.format(path)
    return None


def tint(image: Image.Image, coverage: np.ndarray) -> float:
    """Return the difference between the channels of the ground, averaged over pixels well outside all shapes."""
    shape = np.any(coverage > 0.01, axis=0)
    for _ in range(4):
        shape = grow(shape)
    return float(np.ptp(np.asarray(image, dtype=np.float32)[~shape], axis=-1).mean())
