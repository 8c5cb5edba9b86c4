"""The pictures of the emoji world: tiles of one image file and their names.

The pictures are Google's Noto Color Emoji, under the SIL Open Font License 1.1 (OFL.txt next to this file).
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

FOLDER = Path(__file__).parent
IMAGE, NAMES = "atlas.webp", "atlas.json"
TILE = 64  # side in pixels; the longer side of a picture leaves a margin of one pixel on each side
COLUMNS = 32
DIGEST = "bf72b705405db9fb82736d0fd1428dd26f0c49d635d0c8c1c9a2d51c52b2ee31"  # of the files of this version


@cache
def tiles() -> dict[str, Image.Image]:
    """Return the tiles (RGBA, TILE pixels a side) by name, read once."""
    names = json.loads((FOLDER / NAMES).read_text(encoding="utf-8"))["names"]
    with Image.open(FOLDER / IMAGE, formats=["WEBP"]) as stored:
        page = stored.convert("RGBA")
    corners = [(i % COLUMNS * TILE, i // COLUMNS * TILE) for i in range(len(names))]
    return {name: page.crop((x, y, x + TILE, y + TILE)) for name, (x, y) in zip(names, corners)}


@cache
def names() -> tuple[str, ...]:
    """Return every name, in the order of the code points."""
    return tuple(tiles())


@cache
def premultiplied_tiles() -> np.ndarray:
    """Return all tiles, float32 (pictures, TILE, TILE, 4): colours 0..255 times coverage, and coverage 0..1."""
    every = np.stack([np.asarray(tile, np.float32) for tile in tiles().values()])
    alpha = every[..., 3:] / 255
    return np.concatenate([every[..., :3] * alpha, alpha], -1)
