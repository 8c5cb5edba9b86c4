"""Scenes of the prompts, and the exact detector on clean renders."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from visspec.eval.metrics.detection import DetectionResult
from visspec.eval.metrics.geneval import select_detections, strictly
from visspec.io import included
from visspec.toys.world.detector import Analysis, ShapeDetector
from visspec.toys.world.palette import GROUNDS
from visspec.toys.world.prompts import scene_of
from visspec.toys.world.render import render
from visspec.toys.world.scene import Scene, scene_from_seed

ROWS = included.scenes("shapes").prompts()


def agrees(seen: Analysis, scene: Scene, side: int) -> bool:
    """Whether detections and shapes match one to one: class, colour, centre and radius within a pixel."""
    left = list(scene.things)
    for result in seen.shapes:
        alike = [k for k in left if (k.kind, k.colour) == (result.label, result.colour)]
        match = next((k for k in alike if near(k, result, side)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def near(shape, found, side: int) -> bool:
    offsets = (shape.x * side - found.x, shape.y * side - found.y, shape.radius * side - found.radius)
    return max(abs(v) for v in offsets) <= 1


# --- detector ---


@pytest.mark.parametrize("side", [64, 96])
def test_detector_is_exact(side: int):
    """Every shape's class, colour, centre and radius, on every eighth prompt; nothing else; nothing unexplained."""
    rng, detector = np.random.default_rng(5), ShapeDetector()
    grounds = Counter()
    for row in ROWS[::8]:
        scene = scene_of(row, rng)
        image = render(scene, side)
        seen = detector.analyse(image)
        assert agrees(seen, scene, side), (row["prompt"], scene, seen.shapes)
        assert seen.unexplained == 0
        assert strictly(select_detections(detector.detect(Image.fromarray(image)), 0.0), row)
        grounds[scene.ground] += 1
    assert set(grounds) == set(GROUNDS)


def test_detector_finds_small_shapes():
    detector = ShapeDetector(0.07, 0.135)
    for seed in range(20):
        scene = scene_from_seed(seed)
        assert agrees(detector.analyse(render(scene, 96)), scene, 96), seed


def test_unexplained_images_refused():
    rng, detector = np.random.default_rng(8), ShapeDetector()
    noise = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    blob = render(Scene(()), 64)
    yy, xx = np.indices((64, 64))
    blob[(np.hypot(xx - 30, yy - 30) < 20) & (np.abs(xx - yy) > 3)] = (214, 32, 32)  # two half discs, far too large
    red = Image.new("RGB", (64, 64), (214, 32, 32))
    foreign = render(Scene(()), 64)
    foreign[20:40, 20:40] = (0, 214, 240)  # cyan: nearest to a colour on the other side of grey
    for image in (noise, Image.fromarray(blob), red, Image.fromarray(foreign)):
        assert "unexplained" in detector.detect(image).refused
    assert detector.detect(Image.new("RGB", (64, 64), (153, 153, 153))) == DetectionResult(())
