"""Names and colours of the shape world, and CIE Lab (D65), in which rendered colours are compared."""

import numpy as np

CLASSES = ("circle", "square", "triangle", "diamond", "cross", "star", "ring", "bar")

# GenEval's ten colour words with fixed sRGB values, chosen to differ from each other and from the canvas.
COLOURS = {
    "red": (214, 32, 32),
    "orange": (245, 130, 16),
    "yellow": (246, 222, 40),
    "green": (30, 140, 52),
    "blue": (32, 72, 210),
    "purple": (122, 36, 158),
    "pink": (250, 130, 186),
    "brown": (112, 66, 28),
    "black": (16, 16, 16),
    "white": (250, 250, 250),
}

CANVAS = (153, 153, 153)  # GenEval's neutral grey, the mean of every ground

GROUNDS = ("plain", "speckled", "striped", "cloudy")

SIZES = ("small", "large")

NAMES = tuple(COLOURS)
_TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_FROM_SRGB = (_TO_XYZ / np.array([[0.95047], [1.0], [1.08883]])).T.astype(np.float32)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Convert sRGB values 0..255 (..., 3) to CIE Lab float32 (..., 3), white point D65 (IEC 61966-2-1, CIE 15)."""
    v = np.clip(np.asarray(rgb, np.float32) / 255, 0, 1)
    linear = np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)
    xyz = linear @ _FROM_SRGB
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


PALETTE_RGB = np.array(list(COLOURS.values()), np.float32)
CANVAS_RGB = np.array(CANVAS, np.float32)
PALETTE_LAB = lab(PALETTE_RGB)


def to_palette(pixels_lab: np.ndarray) -> np.ndarray:
    """Return the Lab distance of every pixel (..., 3) to the ten colours, float32 (..., 10) in the order of COLOURS."""
    squares = (pixels_lab**2).sum(-1)[..., None] + (PALETTE_LAB**2).sum(-1) - 2 * pixels_lab @ PALETTE_LAB.T
    return np.sqrt(np.maximum(squares, 0))
