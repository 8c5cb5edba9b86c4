"""Pictures of results: grids of images with captions, maps of token origins, and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from visspec.eval.report.figures import ticks
from visspec.eval.report.images import origin_image as origin_image

MARGIN = 8
SMOOTH = 2  # charts are drawn this much larger, then reduced, for smooth lines
INK, GREY, RULE = "#1b1b1b", "#5f5f5f", "#d9d9d9"


def grid(images: Sequence[Image.Image], captions: Sequence[str] = (), columns: int | None = None) -> Image.Image:
    """Arrange images of one size in rows, each with a wrapped caption below it. By default the grid is about square."""
    columns = columns or round(len(images) ** 0.5)
    width, height = images[0].size
    font = font_of(max(9, width // 9))
    lines = [wrap_text(text, font, width) for text in captions]
    line = sum(font.getmetrics())
    foot = max(map(len, lines), default=0) * line
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (width + MARGIN) + MARGIN, rows * (height + foot + MARGIN) + MARGIN), "white")
    pen = ImageDraw.Draw(sheet)
    for i, image in enumerate(images):
        x, y = MARGIN + (i % columns) * (width + MARGIN), MARGIN + (i // columns) * (height + foot + MARGIN)
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


def chart(
    series: Mapping[str, tuple[str, Sequence[tuple[float, float]]]],
    across: str,
    up: str,
    size: tuple[int, int] = (560, 340),
) -> Image.Image:
    """Draw lines with points, on axes that begin at 0, with a legend.

    Args:
        series: By name, the colour and the points (x, y).
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
        size: Width and height in pixels.
    """
    width, height = (SMOOTH * side for side in size)
    font, small = font_of(16 * SMOOTH), font_of(14 * SMOOTH)
    left, right, top, bottom = 56 * SMOOTH, width - 16 * SMOOTH, 44 * SMOOTH, height - 52 * SMOOTH
    points = [point for _, line in series.values() for point in line]
    end, high = max(x for x, _ in points), 1.05 * max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / end, bottom - (bottom - top) * y / high

    page = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(page)
    for mark in ticks(0, high):
        pen.line([at(0, mark), at(end, mark)], fill=RULE, width=SMOOTH)
        pen.text((left - 6 * SMOOTH, at(0, mark)[1]), f"{mark:g}", fill=GREY, font=small, anchor="rm")
    for mark in ticks(0, end):
        pen.text((at(mark, 0)[0], bottom + 6 * SMOOTH), f"{mark:g}", fill=GREY, font=small, anchor="ma")
    pen.line([(left, top), (left, bottom), (right, bottom)], fill=INK, width=SMOOTH)
    pen.text((left, 2 * SMOOTH), up, fill=INK, font=font)
    pen.text((right, height - 26 * SMOOTH), across, fill=INK, font=font, anchor="ra")
    legend = right
    for name, (colour, line) in reversed([*series.items()]):
        pen.line([at(*point) for point in line], fill=colour, width=2 * SMOOTH)
        for x, y in (at(*point) for point in line):
            pen.ellipse((x - 4 * SMOOTH, y - 4 * SMOOTH, x + 4 * SMOOTH, y + 4 * SMOOTH), fill=colour)
        pen.text((legend, 22 * SMOOTH), name, fill=colour, font=font, anchor="ra")
        legend -= round(font.getlength(name)) + 24 * SMOOTH
    return page.resize(size, Image.Resampling.LANCZOS)
