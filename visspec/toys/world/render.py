"""Rendering of scenes: supersampled coverage templates of the eight classes, and textured backgrounds.

A template is defined in the unit frame of its shape: (0, 0) is the centre, 1 is the radius, y points down.
"""

import numpy as np
from PIL import Image

from visspec.toys.world.palette import CANVAS, COLOURS
from visspec.toys.world.scene import Scene

SUPERSAMPLE = 4
ARM = 0.36  # half width of a bar and of a cross's arms
HOLE = 0.52  # inner radius of a ring
# A five-pointed star is the set of points inside at least four of its five long edges.
_STAR_ANGLES = np.deg2rad(90 + 72 * np.arange(5))
_STAR_EDGE = float(np.cos(np.deg2rad(72)))


def inside(kind: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return whether points (x, y), of any broadcastable shapes, are in the unit template of a class."""
    ax, ay = np.abs(x), np.abs(y)
    if kind == "circle":
        return x * x + y * y <= 1
    if kind == "ring":
        d2 = x * x + y * y
        return (d2 <= 1) & (d2 >= HOLE * HOLE)
    if kind == "square":
        return (ax <= 0.9) & (ay <= 0.9)
    if kind == "triangle":
        return (y <= 0.8) & (ax <= 0.56 * (y + 0.9))
    if kind == "diamond":
        return ax + ay <= 1
    if kind == "bar":
        return (ax <= ARM) & (ay <= 0.95)
    if kind == "cross":
        return ((ax <= ARM) & (ay <= 0.95)) | ((ay <= ARM) & (ax <= 0.95))
    assert kind == "star"
    return sum((x * np.cos(a) + y * np.sin(a) <= _STAR_EDGE).astype(np.int8) for a in _STAR_ANGLES) >= 4


def coverage(kind: str, x: float, y: float, radius: float, height: int, width: int) -> np.ndarray:
    """Return the fraction of each pixel covered by a shape, float32 (height, width); x, y and radius are in pixels."""
    s = SUPERSAMPLE
    px = ((np.arange(width * s, dtype=np.float32) + 0.5) / s - x) / radius
    py = ((np.arange(height * s, dtype=np.float32) + 0.5) / s - y) / radius
    mask = inside(kind, px[None, :], py[:, None])
    return mask.reshape(height, s, width, s).mean(axis=(1, 3), dtype=np.float32)


def ground(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a ground of one kind, float32 (size, size, 3) in 0..255, with a mean near CANVAS."""
    canvas = np.broadcast_to(np.asarray(CANVAS, np.float32), (size, size, 3)).copy()
    if kind == "plain":
        return canvas
    if kind == "speckled":
        pattern = 14 * rng.standard_normal((size, size), dtype=np.float32)
    elif kind == "striped":
        angle, phase = rng.uniform(0, np.pi), rng.uniform(0, 2 * np.pi)
        grid = np.arange(size, dtype=np.float32) * (2 * np.pi * 12 / size)
        pattern = 14 * np.sin(np.cos(angle) * grid[None, :] + np.sin(angle) * grid[:, None] + phase)
    else:
        assert kind == "cloudy"
        coarse = Image.fromarray(rng.standard_normal((6, 6), dtype=np.float32))
        pattern = 16 * np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))
    return canvas + np.clip(pattern, -30, 30)[..., None]


def render(scene: Scene, size: int = 96) -> np.ndarray:
    """Return the pixels of a scene, uint8 (size, size, 3), sRGB. Later shapes cover earlier ones."""
    image = ground(scene.ground, size, np.random.default_rng(scene.texture_seed))
    for shape in scene.things:
        x, y, radius = shape.x * size, shape.y * size, shape.radius * size
        left, top = max(0, int(x - radius)), max(0, int(y - radius))
        right, bottom = min(size, int(x + radius) + 2), min(size, int(y + radius) + 2)
        if right <= left or bottom <= top:
            continue
        alpha = coverage(shape.kind, x - left, y - top, radius, bottom - top, right - left)[..., None]
        box = image[top:bottom, left:right]
        box += alpha * (np.asarray(COLOURS[shape.colour], np.float32) - box)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)
