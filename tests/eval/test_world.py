"""Scenes of the prompts, and the exact detector on clean renders."""

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from visspec.eval.metrics.detection import DetectedColours, Detection, DetectionResult
from visspec.eval.metrics.geneval import judge, select_detections, strictly
from visspec.io import included
from visspec.toys.world import detector
from visspec.toys.world.detector import Analysis, ShapeDetector, _moments, components, noise_level
from visspec.toys.world.palette import GROUNDS
from visspec.toys.world.prompts import scene_of
from visspec.toys.world.render import render
from visspec.toys.world.scene import Scene, Shape, scene_from_seed

ROWS = included.scenes("shapes").prompts()


def agrees(seen: Analysis, scene: Scene, side: int) -> bool:
    """Whether detections and shapes match one to one: class, colour, centre and radius within a pixel."""
    left = list(scene.things)
    for found in seen.shapes:
        match = next(
            (k for k in left if (k.kind, k.colour) == (found.label, found.colour) and near(k, found, side)), None
        )
        if match is None:
            return False
        left.remove(match)
    return not left


def near(shape, found, side: int) -> bool:
    offsets = (shape.x * side - found.x, shape.y * side - found.y, shape.radius * side - found.radius)
    return max(abs(v) for v in offsets) <= 1


def truth(scene: Scene, side: int, seen: tuple[Detection, ...] = ()) -> dict[str, list[Detection]]:
    """The scene itself as GenEval's objects, ranked as the detections in the same places are (else all equal)."""
    found = []
    for s in scene.things:
        x0, y0, x1, y1 = (v * s.radius for v in _moments(s.kind)[2])
        box = ((s.x + x0) * side, (s.y + y0) * side, (s.x + x1) * side, (s.y + y1) * side)
        rank = min(seen, key=lambda d: abs(d.box[0] - box[0]) + abs(d.box[1] - box[1])).score if seen else 1.0
        found.append(Detection(s.kind, rank, box, None, s.colour))
    return select_detections(DetectionResult(tuple(found)), 0.0)


def test_scenes_show_what_the_prompt_asks_for():
    """The ground truth satisfies its own prompt under GenEval's rules, for the whole suite."""
    rng = np.random.default_rng(1)
    for row in ROWS:
        scene = scene_of(row, rng)
        assert judge(None, truth(scene, 96), row, DetectedColours())[0], (row["prompt"], scene)


# --- detector ---


def test_components_match_scipy():
    ndimage = pytest.importorskip("scipy.ndimage")
    rng = np.random.default_rng(4)
    for density in (0.1, 0.4, 0.6, 0.9):
        mask = rng.random((40, 53)) < density
        labels, n = components(mask)
        expected, m = ndimage.label(mask, np.ones((3, 3)))
        assert n == m and np.array_equal(labels > 0, mask)
        assert len({(a, b) for a, b in zip(labels[mask], expected[mask])}) == n


@pytest.mark.parametrize("side", [64, 96])
def test_detector_is_exact(side: int):
    """Every shape's class, colour, centre and radius, on every fourth prompt; nothing else; nothing unexplained."""
    rng, detector = np.random.default_rng(5), ShapeDetector()
    grounds = Counter()
    for row in ROWS[::4]:
        scene = scene_of(row, rng)
        image = render(scene, side)
        seen = detector.analyse(image)
        assert agrees(seen, scene, side), (row["prompt"], scene, seen.shapes)
        assert seen.unexplained == 0
        assert strictly(select_detections(detector.detect(Image.fromarray(image)), 0.0), row)
        grounds[scene.ground] += 1
    assert set(grounds) == set(GROUNDS)


def test_detector_finds_the_small_shapes_of_caption_scenes():
    detector = ShapeDetector(0.07, 0.135)
    for seed in range(40):
        scene = scene_from_seed(seed)
        assert agrees(detector.analyse(render(scene, 96)), scene, 96), seed


def test_images_it_cannot_explain_are_refused():
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


def test_touching_shapes_of_two_colours_are_separated():
    pair = (Shape("square", "red", 20 / 64, 0.5, 10 / 64), Shape("square", "blue", 38 / 64, 0.5, 10 / 64))
    image = render(Scene(pair), 64)
    assert components(np.abs(image.astype(int) - 153).max(-1) > 20)[1] == 1  # they do touch
    assert agrees(ShapeDetector().analyse(image), Scene(pair), 64)


def test_noise_level():
    rng = np.random.default_rng(9)
    scene = Scene((), "speckled", 1)
    image = render(scene, 96).astype(np.float32)
    assert noise_level(image) < 0.5
    for sigma in (5.0, 20.0):
        noisy = image + rng.normal(0, sigma, image.shape)
        assert abs(noise_level(noisy) - sigma) < 0.1 * sigma


def jpeg(image: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=75)
    return np.asarray(Image.open(buffer, formats=["JPEG"]).convert("RGB"))


def test_blurred_templates_explain_lost_resolution(monkeypatch):
    """Stars at 64 pixels through JPEG, which halves the resolution of colour; without such templates they are lost."""
    steps = range(6)
    scenes = [
        Scene((Shape("star", "purple", (8 * i + 12) / 64, (8 * j + 12) / 64, 10 / 64),)) for i in steps for j in steps
    ]
    damaged = [jpeg(render(scene, 64)) for scene in scenes[::3]]

    def stars() -> int:
        found = [ShapeDetector().analyse(image).shapes for image in damaged]
        return sum([(s.label, s.colour) for s in shapes] == [("star", "purple")] for shapes in found)

    assert stars() >= 11
    monkeypatch.setattr(detector, "SOFT", ())
    assert stars() <= 6
