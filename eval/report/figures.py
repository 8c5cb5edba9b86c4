"""Figures of the report as inline SVG: no script, 340 units wide, so that text stays readable on a phone.

Colours are never the only cue: points carry numbers, bars carry values, cells carry n. Values from fewer than
`FEW` observations are grey.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup

from visspec.eval.report.data import Interval

WIDTH, LEFT, RIGHT = 340, 8, 332
FEW = 20  # observations below which a figure is grey
INK, FAINT, RULE, GREY = "#1b1b1b", "#5f5f5f", "#d9d9d9", "#9a9a9a"
BLUE, ORANGE, GREEN = "#0b5cad", "#b34700", "#00724d"
CIVIDIS = ((0, 34, 78), (65, 77, 107), (124, 123, 120), (188, 175, 111), (254, 232, 56))  # safe for all colour vision
LARGEST_GRID = 32  # larger acceptance maps are pooled to this many cells per side


def svg(height: float, parts: Sequence[Markup], label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, label, Markup("").join(parts)
    )


def text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = INK, size: float = 11, halo: bool = True
) -> Markup:
    """Text; the halo keeps it readable over lines, and is off for text on a colour."""
    mark = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" fill="{}" font-size="{}"{}>{}</text>')
    return mark.format(x, y, anchor, colour, size, Markup(' class="halo"') if halo else "", words)


def line(x1: float, y1: float, x2: float, y2: float, colour: str = RULE, width: float = 1, dash: str = "") -> Markup:
    return Markup(
        '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="{}" stroke-width="{}" stroke-dasharray="{}"/>'
    ).format(x1, y1, x2, y2, colour, width, dash)


def rect(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> Markup:
    return Markup(
        '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}"><title>{}</title></rect>'
    ).format(x, y, max(width, 0.5), height, colour, title)


def dot(x: float, y: float, radius: float, colour: str, opacity: float = 1.0, title: str = "") -> Markup:
    return Markup(
        '<circle cx="{:.1f}" cy="{:.1f}" r="{}" fill="{}" fill-opacity="{}"><title>{}</title></circle>'
    ).format(x, y, radius, colour, opacity, title)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that span [low, high], linear, about `wanted` of them."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / wanted))
    step *= next((m for m in (1, 2, 5) if span / (step * m) <= wanted), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def columns(
    x: Callable[[float], float], marks: Sequence[float], top: float, bottom: float, size: float = 11, dash: str = ""
) -> list[Markup]:
    """Lines down at the marks of a scale, with their numbers below."""
    parts = [line(x(t), top, x(t), bottom, dash=dash) for t in marks]
    return parts + [text(x(t), bottom + 13, f"{t:g}", "middle", FAINT, size) for t in marks]


def rows(
    y: Callable[[float], float], marks: Sequence[float], left: float, right: float, size: float = 11
) -> list[Markup]:
    """Lines across at the marks of a scale, with their numbers on the left."""
    parts = [line(left, y(t), right, y(t)) for t in marks]
    return parts + [text(left - 4, y(t) + round(0.35 * size), f"{t:g}", "end", FAINT, size) for t in marks]


class Scale:
    """Maps values to units: linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        self.log = log
        self.low, self.high = (math.log(low), math.log(high)) if log else (low, high)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        value = math.log(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def bounds(values: Sequence[float], margin: float = 0.06, log: bool = False) -> tuple[float, float]:
    """The range of values with a margin, never empty; if all have one sign, it doesn't include the other."""
    low, high = min(values), max(values)
    if log:
        factor = max(high / low, 1.2) ** margin
        return low / factor, high * factor
    short_of = max(0.2 * abs(high), 0.01) - (high - low)
    room = margin * (high - low) + max(short_of, 0.0) / 2
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def strip(entries: Sequence[tuple[str, Sequence[float], float, Interval]]) -> Markup:
    """Paired ratios, one dot per prompt, one strip per method; mean and 95 % interval below. Log axis; 1 is no gain.

    entries: (label, ratios, geometric mean, interval).
    """
    every = [1.0] + [r for _, ratios, _, _ in entries for r in ratios]
    low, high = bounds(every, log=True)
    x, pitch = Scale(low, high, LEFT + 6, RIGHT - 6, log=True), 58
    bottom = pitch * len(entries) + 4
    marks = [t for t in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if low <= t <= high]
    marks = marks if len(marks) > 2 else sorted({1.0, *ticks(low, high, 8)})
    parts = [*columns(x, marks, 16, bottom, dash="2 3"), line(x(1), 16, x(1), bottom, INK)]
    for i, (label, ratios, mean, interval) in enumerate(entries):
        y, colour = i * pitch, BLUE if len(ratios) >= FEW else GREY
        parts.append(text(LEFT, y + 12, f"{short(label)} (n={len(ratios)})"))
        for k, ratio in enumerate(ratios):
            jitter = (k * 0.618 % 1 - 0.5) * 18
            parts.append(dot(x(ratio), y + 30 + jitter, 2.6, colour, 0.45, f"prompt {k}: {ratio:.2f}"))
        if interval:
            parts.append(line(x(interval[0]), y + 48, x(interval[1]), y + 48, INK, 2.5))
        parts.append(dot(x(mean), y + 48, 4, INK, title=f"geometric mean {mean:.2f}"))
    parts.append(text(WIDTH / 2, bottom + 28, "times faster, log scale; left of 1 is a slowdown", "middle", FAINT))
    return svg(bottom + 34, parts, "Paired speed-up of every prompt, one strip a method")


def waterfall(steps: Sequence[tuple[str, float]]) -> Markup:
    """From the first value to the last, step by step: the loss (orange) or gain (green) of each term."""
    x = Scale(0, max(v for _, v in steps) * 1.02, LEFT, RIGHT - 38)
    parts, before = [], 0.0
    for i, (name, value) in enumerate(steps):
        y, total = i * 32, i in (0, len(steps) - 1)
        left, right = sorted((0.0 if total else before, value))
        colour = BLUE if total else ORANGE if value < before else GREEN
        change = "" if total else f" ({value - before:+.2f})"
        parts.append(text(LEFT, y + 11, f"{name}{change}"))
        parts.append(rect(x(left), y + 15, x(right) - x(left), 11, colour, f"{name}: {value:.2f}{change}"))
        parts.append(text(x(right) + 4, y + 25, f"{value:.2f}"))
        before = value
    return svg(32 * len(steps) + 4, parts, "Gap from tau to the measured speed-up, term by term")


def depth_bars(rates: Sequence[float], reached: Sequence[int] | None) -> Markup:
    """Acceptance by depth of the draft: bars are accepted / reached, the mark is reached and accepted / drafts."""
    pitch, top, bottom = min((RIGHT - LEFT - 24) / max(len(rates), 1), 60), 32, 132
    parts, through = rows(Scale(0, 1, bottom, top), (0, 0.5, 1), LEFT + 24, RIGHT), 1.0
    for i, rate in enumerate(rates):
        n = reached[i] if reached and i < len(reached) else None
        through *= rate
        x, height = LEFT + 24 + i * pitch, rate * (bottom - top)
        colour = GREY if n is not None and n < FEW else BLUE
        parts.append(rect(x + 3, bottom - height, pitch - 6, height, colour, f"depth {i + 1}: {rate:.3f}"))
        parts.append(line(x + 3, bottom - through * 100, x + pitch - 3, bottom - through * 100, ORANGE, 2.5))
        parts.append(text(x + pitch / 2, bottom - height - 4, f"{rate:.2f}", "middle", size=9))
        parts.append(text(x + pitch / 2, bottom + 13, str(i + 1), "middle", FAINT))
        if n is not None:
            lower = 10 * (i % 2) if pitch < 34 else 0  # narrow bars: every other n one line lower
            parts.append(text(x + pitch / 2, bottom + 25 + lower, f"n={n}", "middle", FAINT, 9))
    parts.append(text(LEFT, 10, "bar: accepted / reached; orange: accepted / drafts", colour=FAINT, size=10))
    parts.append(text(RIGHT, bottom + 49, "depth in the draft", "end", FAINT))
    return svg(bottom + 54, parts, "Acceptance by depth of the draft")


def heat(total: Sequence[Sequence[float]], count: Sequence[Sequence[int]]) -> Markup:
    """Mean acceptance over the token grid. total and count are sums over images, one entry per token (row, column).

    Cells with few observations are grey. Small grids print value and n in each cell, large ones have them as titles.
    """
    sums, counts = pool_grid(total), pool_grid(count)
    rows, columns = len(sums), max(map(len, sums))
    cell = (RIGHT - LEFT) / max(columns, rows * 0.75)
    means = [[t / n if n else None for t, n in zip(ts, ns)] for ts, ns in zip(sums, counts)]
    top = max([1.0] + [m for row in means for m in row if m is not None])
    parts, written = [], cell >= 34
    for r, row in enumerate(means):
        for c, mean in enumerate(row):
            n, x, y = counts[r][c], LEFT + c * cell, r * cell
            words = f"row {r}, column {c}: " + ("never drafted" if mean is None else f"{mean:.2f}") + f", n={n:g}"
            colour = "#f2f2f2" if mean is None else shade(mean / top, n < FEW)
            parts.append(rect(x, y, cell, cell, colour, words))
            if written and mean is not None:
                ink = "#ffffff" if mean / top < 0.6 else INK
                parts.append(text(x + cell / 2, y + cell / 2, f"{mean:.2f}", "middle", ink, 10, halo=False))
                parts.append(text(x + cell / 2, y + cell / 2 + 11, f"n={n:g}", "middle", ink, 9, halo=False))
    y = rows * cell + 8
    for i in range(40):
        parts.append(rect(LEFT + i * 4, y, 4.2, 8, shade(i / 39)))
    parts += [text(LEFT, y + 20, "0", colour=FAINT), text(LEFT + 160, y + 20, f"{top:g}", "end", FAINT)]
    parts.append(text(RIGHT, y + 8, f"grey: n under {FEW}", "end", FAINT))
    return svg(y + 26, parts, "Mean acceptance over the token grid")


def pool_grid(grid: Sequence[Sequence[float]]) -> list[list[float]]:
    """The grid summed in blocks, so that no side is longer than LARGEST_GRID."""
    return blocks(np.asarray(grid), LARGEST_GRID).sum(axis=(1, 3)).tolist()


def blocks(cells: np.ndarray, most: int) -> np.ndarray:
    """(rows, height, columns, width): square blocks of a grid, padded with 0, so that no side has more than `most`."""
    block = -(-max(cells.shape) // most)
    padded = np.pad(cells, [(0, -n % block) for n in cells.shape])
    return padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block)


def rgb(share: float, grey: bool = False) -> tuple[int, int, int]:
    """A share in [0, 1] on the cividis map; `grey` keeps its lightness only."""
    places = np.linspace(0, 1, len(CIVIDIS))
    red, green, blue = (float(np.interp(share, places, channel)) for channel in zip(*CIVIDIS))
    if grey:
        red = green = blue = 0.3 * red + 0.59 * green + 0.11 * blue
    return round(red), round(green), round(blue)


def shade(share: float, grey: bool = False) -> str:
    return "#{:02x}{:02x}{:02x}".format(*rgb(share, grey))


def short(label: str, most: int = 46) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
