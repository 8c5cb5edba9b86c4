"""Pictures of results: grids of images with captions, and maps of token origins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from visspec.loop.stats import COLOURS

MARGIN = 8


def grid(images: Sequence[Image.Image], captions: Sequence[str] = (), columns: int | None = None) -> Image.Image:
    """Arrange images of one size in rows, each with a wrapped caption below it. By default the grid is about square."""
    columns = columns or round(len(images) ** 0.5)
    width, height = images[0].size
    font = font_of(max(9, width // 9))
    lines = [wrap_text(text, font, width) for text in captions]
    line = sum(font.getmetrics())
    below = max(map(len, lines), default=0) * line
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (width + MARGIN) + MARGIN, rows * (height + below + MARGIN) + MARGIN), "white")
    pen = ImageDraw.Draw(sheet)
    for i, image in enumerate(images):
        x, y = MARGIN + (i % columns) * (width + MARGIN), MARGIN + (i // columns) * (height + below + MARGIN)
        sheet.paste(image.convert("RGB"), (x, y))
        for n, text in enumerate(lines[i] if i < len(lines) else ()):
            pen.text((x, y + height + n * line), text, fill="black", font=font)
    return sheet


@cache
def font_of(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's own font in a size in pixels."""
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)  # true for every size
    return font


def wrap_text(text: str, font, width: int) -> list[str]:
    """Wrap words to lines of at most `width` pixels. A longer word gets its own line."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def origin_image(origins: np.ndarray, side: int) -> Image.Image:
    """Draw a map of token origins (rows, columns; indices into `stats.COLOURS`) as an image of `side` pixels."""
    palette = np.array([ImageColor.getrgb(colour) for colour in COLOURS.values()], np.uint8)
    return Image.fromarray(palette[origins]).resize((side, side), Image.Resampling.NEAREST)
