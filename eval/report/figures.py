"""Figures of the report as inline SVG: no script, 340 units wide, so that text stays readable on a phone.

Colours are variables of the page's palette, which has a dark form, and never the only cue: points carry numbers, bars
values, cells n. Values from fewer than `FEW` observations are grey.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

from visspec.eval.report.data import GUARANTEES, Interval

WIDTH, LEFT, RIGHT = 340, 8, 332
FEW = 20  # figures with fewer observations are grey
INK, FAINT, RULE, GREY = "var(--ink)", "var(--faint)", "var(--rule)", "var(--grey)"
BLUE, ORANGE, GREEN = "var(--blue)", "var(--orange)", "var(--green)"
COLOUR = {"tokens": BLUE, "law": GREEN, "approximate": ORANGE, "unknown": GREY}  # by kind of guarantee


class Bar(NamedTuple):
    label: str
    value: float
    interval: Interval
    n: int
    colour: str
    mark: str = ""


class Point(NamedTuple):
    """A method in a figure of speed (x) and quality (y)."""

    number: int
    label: str
    kind: str  # a key of GUARANTEES
    x: float
    y: float
    across: Interval
    upwards: Interval
    n: int


def svg(height: float, parts: Sequence[Markup], label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, label, Markup("").join(parts)
    )


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK, size: float = 11) -> Markup:
    mark = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" font-size="{}" style="fill:{}">{}</text>')
    return mark.format(x, y, anchor, size, colour, words)


def line(x1: float, y1: float, x2: float, y2: float, colour: str = RULE, width: float = 1) -> Markup:
    mark = Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" style="stroke:{};stroke-width:{}"/>')
    return mark.format(x1, y1, x2, y2, colour, width)


def rect(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> Markup:
    mark = '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" style="fill:{}"><title>{}</title></rect>'
    return Markup(mark).format(x, y, max(width, 0.5), height, colour, title)


def dot(x: float, y: float, radius: float, colour: str, title: str = "") -> Markup:
    mark = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" style="fill:{}"><title>{}</title></circle>')
    return mark.format(x, y, radius, colour, title)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that span [low, high] linearly."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / count))
    step *= next((m for m in (1, 2, 5) if span / (step * m) <= count), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def columns(x: Callable[[float], float], marks: Sequence[float], top: float, bottom: float) -> list[Markup]:
    """Draw vertical lines at the marks of a scale, with their numbers below."""
    parts = [line(x(t), top, x(t), bottom) for t in marks]
    return parts + [text(x(t), bottom + 13, f"{t:g}", "middle", FAINT, 9) for t in marks]


def rows(y: Callable[[float], float], marks: Sequence[float], left: float, right: float) -> list[Markup]:
    """Draw horizontal lines at the marks of a scale, with their numbers on the left."""
    parts = [line(left, y(t), right, y(t)) for t in marks]
    return parts + [text(left - 4, y(t) + 3, f"{t:g}", "end", FAINT, 9) for t in marks]


class Scale:
    """Maps values to units: linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        self.log = log
        self.low, self.high = (math.log(low), math.log(high)) if log else (low, high)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        value = math.log(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def bounds(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    """Return the range of values with a margin, never empty. If all have the same sign, it excludes the other."""
    low, high = min(values), max(values)
    short_of = max(0.2 * abs(high), 0.01) - (high - low)
    room = margin * (high - low) + max(short_of, 0.0) / 2
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def bars(entries: Sequence[Bar], words: str, log: bool = False) -> Markup:
    """Draw ratios with their intervals, and a line at 1.

    Args:
        log: Whether the axis is logarithmic.
    """
    ends = [1.0] + [v for bar in entries for v in (bar.value, *(bar.interval or ()))]
    left, pitch = 130, 20
    high = 1.1 * max(ends)
    x = Scale(min(0.9, 0.9 * min(ends)), high, left, RIGHT - 28, True) if log else Scale(0, high, left, RIGHT - 28)
    bottom = pitch * len(entries) + 6
    marks = [t for t in (0.01, 0.1, 1, 10, 100, 1000) if min(ends) <= t <= high] if log else ticks(0, high)
    parts = columns(x, marks, 2, bottom)
    for i, bar in enumerate(entries):
        y, (start, end) = 4 + i * pitch, sorted((x(1 if log else 0), x(bar.value)))
        parts.append(text(left - 16, y + 12, short(bar.label, 20), "end", size=10))
        parts.append(text(left - 4, y + 12, bar.mark, "end", bar.colour, 9))
        title = f"{bar.label}: {bar.value:.2f}, n={bar.n}"
        parts.append(rect(start, y + 3, end - start, 11, bar.colour if bar.n >= FEW else GREY, title))
        if bar.interval:
            parts.append(line(x(bar.interval[0]), y + 8.5, x(bar.interval[1]), y + 8.5, INK, 1.5))
            end = max(end, x(bar.interval[1]))
        parts.append(text(end + 4, y + 12, f"{bar.value:.2f}", size=10))
    parts += [line(x(1), 2, x(1), bottom, INK), text(RIGHT, bottom + 25, words, "end", FAINT, 9)]
    return svg(bottom + 30, parts, words)


def scatter(points: Sequence[Point], words: str, lower_is_better: bool) -> Markup:
    """Draw a quality measure against speed. Points have the numbers of methods and the shapes of guarantees."""
    top, bottom, left = 26, 236, 40
    xs = bounds([1.0] + [v for p in points for v in (p.x, *(p.across or ()))])
    ys = bounds([v for p in points for v in (p.y, *(p.upwards or ()))])
    x, y = Scale(*xs, left, RIGHT - 6), Scale(*ys, bottom, top)
    parts = columns(x, ticks(*xs, 6), top, bottom) + rows(y, ticks(*ys), left, RIGHT - 6)
    for p in points:
        colour = COLOUR[p.kind] if p.n >= FEW else GREY
        if p.across:
            parts.append(line(x(p.across[0]), y(p.y), x(p.across[1]), y(p.y), colour, 0.8))
        if p.upwards:
            parts.append(line(x(p.x), y(p.upwards[0]), x(p.x), y(p.upwards[1]), colour, 0.8))
        title = f"{p.number}: {p.label}, {p.x:.2f} times, {words} {p.y:.4g}, n={p.n}"
        parts += [dot(x(p.x), y(p.y), 8, "transparent", title)]
        parts += [text(x(p.x), y(p.y) + 3.5, GUARANTEES[p.kind][0], "middle", colour, 10)]
        parts += [text(x(p.x) + 6, y(p.y) - 4, str(p.number), size=10)]
    direction = "lower is better" if lower_is_better else "higher is better"
    parts.append(text(LEFT, 11, f"{words} ({direction})", colour=FAINT, size=10))
    parts.append(text(RIGHT, bottom + 27, "times faster, 95 % intervals", "end", FAINT, 10))
    return svg(bottom + 33, parts, f"{words} over speed")


def depth_bars(rates: Sequence[float], reached: Sequence[int] | None) -> Markup:
    """Draw acceptance by depth: bars are accepted / reached, marks are reached and accepted / drafts."""
    pitch, top, bottom = min((RIGHT - LEFT - 24) / max(len(rates), 1), 60), 32, 132
    parts, through = rows(Scale(0, 1, bottom, top), (0, 0.5, 1), LEFT + 24, RIGHT), 1.0
    for i, rate in enumerate(rates):
        n = reached[i] if reached and i < len(reached) else None
        through *= rate
        x, height = LEFT + 24 + i * pitch, rate * (bottom - top)
        colour = GREY if n is not None and n < FEW else BLUE
        parts.append(rect(x + 3, bottom - height, pitch - 6, height, colour, f"depth {i + 1}: {rate:.3f}, n={n}"))
        parts.append(line(x + 3, bottom - through * 100, x + pitch - 3, bottom - through * 100, ORANGE, 2.5))
        parts.append(text(x + pitch / 2, bottom - height - 4, f"{rate:.2f}", "middle", size=9))
        parts.append(text(x + pitch / 2, bottom + 13, str(i + 1), "middle", FAINT))
    parts.append(text(LEFT, 10, "bar: accepted / reached; orange: accepted / drafts", colour=FAINT, size=10))
    parts.append(text(RIGHT, bottom + 29, f"depth in the draft; grey: n under {FEW}", "end", FAINT))
    return svg(bottom + 34, parts, "Acceptance by depth of the draft")


def curve(points: Sequence[tuple[float, float]], label: str, height: float = 120) -> Markup:
    """Draw a line through (step, value) points, with round numbers on the left and the last value."""
    steps, values = [x for x, _ in points], [y for _, y in points]
    marks, first, last = ticks(min(values), max(values), 4), min(steps), max(steps)
    low, high, left, right = min([*marks, *values]), max([*marks, *values]), LEFT + 34, RIGHT - 40
    x = Scale(first, max(last, first + 1e-9), left, right)
    y = Scale(low, max(high, low + 1e-9), 16 + height, 16)
    placed = [(x(step), y(value)) for step, value in points]
    parts = rows(y, marks, left, right) + [line(*a, *b, BLUE, 1.5) for a, b in pairwise(placed)]
    x_end, down = placed[-1]
    parts += [dot(x_end, down, 2.5, BLUE), text(x_end + 5, down + 4, f"{values[-1]:.3g}")]
    parts += [text(left, height + 32, f"step {first:g}"), text(right, height + 32, f"{last:g}", "end")]
    return svg(height + 40, parts, label)


def short(label: str, most: int = 46) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
