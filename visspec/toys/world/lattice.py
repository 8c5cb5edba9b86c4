"""The lattice tier: 64-pixel images, encoded without loss by a table of 8x8 patches, 64 tokens per image.

24-pixel sprites (radius 10) stand on an 8-pixel grid, at least one cell apart, on the plain canvas. All sprites
together use few distinct patches, so the tokenizer is a lookup table: no training, exact round trip. The scenes
of a prompt are uniform over a finite set, so the distribution of the tokens can be enumerated.
"""

from functools import cache
from itertools import product

import numpy as np

from visspec.toys.world.palette import CANVAS, CLASSES, COLOURS
from visspec.toys.world.render import render
from visspec.toys.world.scene import Shape, ShapeScene
from visspec.toys.world.suite import Metadata, colours_for, holds, wanted

SIDE = 64
PATCH = 8
CELLS = SIDE // PATCH  # 8 x 8 tokens per image
TOKENS = CELLS * CELLS
SPRITE = 3  # cells
RADIUS = 10.0
PLACES = CELLS - SPRITE + 1  # 6 x 6 positions of a sprite


def shape_at(kind: str, colour: str, place: int) -> Shape:
    """The sprite whose top left cell is (place % 6, place // 6)."""
    row, column = divmod(place, PLACES)
    x, y = ((PATCH * cell + SPRITE * PATCH / 2) / SIDE for cell in (column, row))
    return Shape(kind, colour, x, y, RADIUS / SIDE)


def picture(scene: ShapeScene) -> np.ndarray:
    """Pixels of a lattice scene, uint8 (64, 64, 3)."""
    return render(scene, SIDE)


@cache
def codebook() -> np.ndarray:
    """Every distinct patch, uint8 (n, 8, 8, 3), the canvas first, then in the order of colours, classes and cells."""
    seen: dict[bytes, np.ndarray] = {}
    canvas = np.empty((PATCH, PATCH, 3), np.uint8)
    canvas[:] = CANVAS
    seen[canvas.tobytes()] = canvas
    for colour, kind in product(COLOURS, CLASSES):
        for patch in _patches(picture(ShapeScene((shape_at(kind, colour, 0),)))):
            seen.setdefault(patch.tobytes(), patch)
    book = np.stack(list(seen.values()))
    book.flags.writeable = False
    return book


def vocabulary_size() -> int:
    """Number of tokens."""
    return len(codebook())


def _patches(image: np.ndarray) -> np.ndarray:
    """(64, 64, 3) -> (64, 8, 8, 3) in raster order."""
    return image.reshape(CELLS, PATCH, CELLS, PATCH, 3).swapaxes(1, 2).reshape(TOKENS, PATCH, PATCH, 3)


@cache
def _index() -> dict[bytes, int]:
    return {patch.tobytes(): i for i, patch in enumerate(codebook())}


def encode(image: np.ndarray) -> np.ndarray:
    """Tokens int64 (64,) in raster order of one picture uint8 (64, 64, 3). Raises ValueError for a patch that is in no
    sprite.
    """
    image = np.asarray(image)
    if image.shape != (SIDE, SIDE, 3) or image.dtype != np.uint8:
        raise ValueError(f"image must be uint8 (64, 64, 3), not {image.dtype} {image.shape}")
    patches = np.ascontiguousarray(_patches(image))
    tokens = np.array([_index().get(patch.tobytes(), -1) for patch in patches], np.int64)
    for i in np.flatnonzero(tokens < 0):
        raise ValueError(f"the patch in row {i // CELLS}, column {i % CELLS} is in no sprite of the lattice tier")
    return tokens


def decode(tokens: np.ndarray) -> np.ndarray:
    """Pixels uint8 (..., 64, 64, 3) of tokens (..., 64); ValueError for a token outside the codebook."""
    tokens = np.asarray(tokens)
    if tokens.shape[-1:] != (TOKENS,) or tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers (..., {TOKENS}), not {tokens.dtype} {tokens.shape}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary_size():
        raise ValueError(f"tokens must lie in 0..{vocabulary_size() - 1}, found {tokens.min()}..{tokens.max()}")
    grid = codebook()[tokens.reshape(-1, CELLS, CELLS)].swapaxes(2, 3)
    return grid.reshape(*tokens.shape[:-1], SIDE, SIDE, 3)


def _apart(a: int, b: int) -> bool:
    """Whether at least one cell lies between two sprites."""
    (y, x), (v, u) = divmod(a, PLACES), divmod(b, PLACES)
    return max(abs(x - u), abs(y - v)) > SPRITE


@cache
def layouts(count: int, relation: str | None = None) -> tuple[tuple[int, ...], ...]:
    """Every ordered placement of `count` sprites; with a relation, those in which the second has it to the first."""
    out: list[tuple[int, ...]] = [()]
    for _ in range(count):
        out = [(*done, p) for done in out for p in range(PLACES**2) if all(_apart(p, q) for q in done)]
    if relation is not None:
        centre = [((p % PLACES), p // PLACES) for p in range(PLACES**2)]
        out = [places for places in out if holds(relation, centre[places[1]], centre[places[0]])]
    return tuple(out)


def _relation(metadata: Metadata) -> str | None:
    return next((item["position"][0] for item in metadata["include"] if "position" in item), None)


def _scene(items: list[tuple[str, str | None]], colours: tuple[str, ...], places: tuple[int, ...]) -> ShapeScene:
    order = np.argsort(places)
    return ShapeScene(tuple(shape_at(items[i][0], colours[i], places[i]) for i in order))


def sample_scene(metadata: Metadata, rng: np.random.Generator) -> ShapeScene:
    """A scene that matches a prompt: placement and unspecified colours uniform."""
    items = wanted(metadata)
    options = layouts(len(items), _relation(metadata))
    places = options[int(rng.integers(len(options)))]
    return _scene(items, tuple(colours_for(rng, items)), places)
