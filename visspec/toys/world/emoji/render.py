"""Rendering of scenes of the emoji world: photo-like grounds with turned and scaled pictures on top."""

from functools import cache
from math import ceil, floor

import numpy as np
from PIL import Image

from visspec.toys.world.emoji.atlas import TILE, tiles
from visspec.toys.world.emoji.scene import TINTS, EmojiScene

SLOPE = 26.0  # grey levels between the middle of the canvas and the end of its gradient
CLOUDS = 13.0  # standard deviations in grey levels
GRAIN = 7.0
REDUCED = (11, 16, 23, 32, 45, TILE)  # sides to which tiles are reduced before they are placed


def ground(kind: str, tint: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a ground, float32 (size, size, 3) in 0..255: tint and gradient, soft clouds (`cloudy`, `rough`), grain
    (`grainy`, `rough`). Clouds and gradient scale with the canvas; grain is per pixel.
    """
    axis = (np.arange(size, dtype=np.float32) + 0.5) * 2 / size - 1
    angle, slope = rng.uniform(0, 2 * np.pi), SLOPE * rng.uniform(0.3, 1)
    image = np.asarray(TINTS[tint], np.float32) + 8 * rng.standard_normal(3).astype(np.float32)
    image = image + (slope * (np.cos(angle) * axis + np.sin(angle) * axis[:, None]))[..., None]
    if kind in ("cloudy", "rough"):
        coarse = Image.fromarray(rng.standard_normal((6, 6)).astype(np.float32))
        cloud = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))
        image = image + CLOUDS * cloud[..., None] * np.asarray([1, 0.9, 0.75], np.float32)
    if kind in ("grainy", "rough"):
        image = image + GRAIN * rng.standard_normal((size, size, 1), dtype=np.float32)
    return image.astype(np.float32)


@cache
def _scale_tile(name: str, side: int) -> Image.Image:
    """Return a premultiplied tile with `side` pixels, in the middle of a canvas with a transparent edge."""
    page = Image.new("RGBa", (side + 2, side + 2), (0, 0, 0, 0))
    page.paste(tiles()[name].convert("RGBa").resize((side, side), Image.Resampling.BOX), (1, 1))
    return page


def stamp(name: str, x: float, y: float, side: float, turn: float) -> tuple[np.ndarray, int, int]:
    """Return premultiplied pixels float32 (n, n, 4), colours 0..255 and coverage 0..1, and the column and row of the
    first one on the canvas. x, y and side are in pixels; the centre may be anywhere.
    """
    source = next((s for s in REDUCED if s >= side), TILE)
    reach = side * 0.66 + 1  # enough for a tile turned by up to 15 degrees
    left, top = floor(x - reach), floor(y - reach)
    n = ceil(2 * reach) + 1
    scale, angle = source / side, np.deg2rad(turn)
    c, s = float(np.cos(angle)) * scale, float(np.sin(angle)) * scale
    dx, dy, middle = left - x, top - y, source / 2 + 1
    matrix = (c, s, middle + c * dx + s * dy, -s, c, middle - s * dx + c * dy)
    cut = _scale_tile(name, source).transform((n, n), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    pixels = np.asarray(cut, np.float32).copy()
    pixels[..., 3] /= 255
    return pixels, left, top


def stamp_on(
    size: int, name: str, x: float, y: float, side: float, turn: float
) -> tuple[np.ndarray, tuple[slice, slice]]:
    """Return the part of a stamp on a canvas of `size` pixels a side, and its rows and columns there."""
    pixels, left, top = stamp(name, x, y, side, turn)
    n = len(pixels)
    rows, columns = (slice(max(0, at), min(size, at + n)) for at in (top, left))
    return pixels[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left], (rows, columns)


def render(scene: EmojiScene, size: int = 120) -> np.ndarray:
    """Return the pixels of a scene, uint8 (size, size, 3), sRGB. Later pictures cover earlier ones."""
    image = ground(scene.ground, scene.tint, size, np.random.default_rng(scene.texture_seed))
    for picture in scene.things:
        lengths = (picture.x * size, picture.y * size, picture.side * size)
        part, there = stamp_on(size, picture.name, *lengths, picture.turn)
        image[there] = image[there] * (1 - part[..., 3:]) + part[..., :3]
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)
