"""Pictures of the report: thumbnails, difference maps and maps of token origins."""

import base64
import binascii
import io

import numpy as np
from PIL import Image, ImageColor

from visspec.io.images import png_bytes, read_image
from visspec.loop.stats import COLOURS

SIDE = 128  # longest side of a thumbnail, pixels
SMALL = 96  # longest side in a result file
LOSSLESS = 4096  # maximum size of a PNG thumbnail, bytes
MAX_PIXELS = 16_000_000


def picture(png: str, where: str) -> Image.Image:
    """Return the RGB image of a PNG in base64. Raises ValueError."""
    try:
        return read_image(base64.b64decode(png, validate=True), f"{where}: png", MAX_PIXELS)
    except binascii.Error:
        raise ValueError(f"{where}: png is not base64.") from None


def data_uri(image: Image.Image, lossless: bool = False) -> str:
    """Return a PNG if that is small, else a JPEG."""
    data, kind = png_bytes(image), "png"
    if not lossless and len(data) > LOSSLESS:
        image.save(file := io.BytesIO(), "JPEG", quality=78)
        data, kind = file.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def thumbnail(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return data_uri(small)


def small_png(image: Image.Image) -> str:
    """Return a thumbnail for a result file, a PNG in base64."""
    small = image.convert("RGB")
    small.thumbnail((SMALL, SMALL), Image.Resampling.LANCZOS)
    return base64.b64encode(png_bytes(small, optimize=True)).decode()


def difference(image: Image.Image, baseline: Image.Image) -> tuple[str, float] | None:
    """Return a map as a data URI and the share of pixels that differ; None if the sizes differ. The map is the largest
    channel difference, black if equal. Any difference is at least dark grey.
    """
    if image.size != baseline.size:
        return None
    apart = np.abs(np.asarray(image, np.int16) - np.asarray(baseline, np.int16)).max(axis=-1)
    lifted = np.where(apart > 0, 40 + apart * (215 / 255), 0).astype(np.uint8)
    block = -(-max(lifted.shape) // SIDE)
    padded = np.pad(lifted, [(0, -n % block) for n in lifted.shape])
    blocks = padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block)
    largest = blocks.max(axis=(1, 3))  # a mean would hide a single pixel
    return data_uri(Image.fromarray(largest)), float((apart > 0).mean())


def origin_image(origins: np.ndarray, side: int | None = None) -> Image.Image:
    """Draw a map of token origins (rows, columns; indices into `stats.COLOURS`) as an image of `side` pixels, or with a
    pixel per token.
    """
    palette = np.array([ImageColor.getrgb(colour) for colour in COLOURS.values()], np.uint8)
    image = Image.fromarray(palette[origins])
    return image if side is None else image.resize((side, side), Image.Resampling.NEAREST)
