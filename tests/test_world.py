"""Pixels of the shape world."""

import numpy as np
import pytest

from visspec.toys.world.palette import CANVAS, CLASSES, COLOURS, GROUNDS
from visspec.toys.world.render import coverage, ground, inside, render
from visspec.toys.world.scene import Scene, Shape


@pytest.mark.parametrize("kind", CLASSES)
def test_coverage_is_the_area_of_the_template(kind):
    alpha = coverage(kind, 32, 32, 20, 64, 64)
    grid = np.linspace(-1, 1, 1001)
    area = inside(kind, grid[None, :], grid[:, None]).mean() * 4
    assert alpha.min() == 0 and alpha.max() == 1
    assert alpha.sum() / 400 == pytest.approx(area, rel=0.02)


def test_templates_differ_from_each_other():
    flat = np.stack([coverage(kind, 16, 16, 13, 32, 32).ravel() for kind in CLASSES])
    overlap = np.minimum(flat[:, None], flat).sum(-1) / np.maximum(flat[:, None], flat).sum(-1)
    assert overlap[~np.eye(len(CLASSES), dtype=bool)].max() < 0.85


def test_circle():
    image = render(Scene((Shape("circle", "green", 0.5, 0.5, 0.13),)), 96)
    assert image.shape == (96, 96, 3) and image.dtype == np.uint8
    assert tuple(image[48, 48]) == COLOURS["green"] and tuple(image[5, 5]) == CANVAS


@pytest.mark.parametrize("kind", GROUNDS)
def test_grounds(kind):
    first, again = (ground(kind, 64, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.ptp(first, axis=-1).max() == 0
    assert abs(first.mean() - CANVAS[0]) < 8 and np.abs(first - CANVAS[0]).max() <= 30
    assert (first.std() > 3) == (kind != "plain")
