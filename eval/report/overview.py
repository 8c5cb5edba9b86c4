"""Figures of the report's first screen: speed-up by method, speed against quality, and swept rules.

A method's guarantee is its colour and its shape: a circle has the tokens of plain decoding, a diamond their
distribution, a triangle is approximate. Methods on the frontier (no other is as fast and as good) are filled and named;
the others are hollow and numbered as in the table.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from visspec.eval.report import figures
from visspec.eval.report.data import QUALITY, Interval, Method, positive
from visspec.eval.report.figures import BLUE, FAINT, FEW, GREEN, GREY, INK, LEFT, ORANGE, RIGHT, Scale

GUARANTEES = {  # kind -> (colour, mark, words)
    "tokens": (BLUE, "●", "exact, the tokens of plain decoding"),
    "law": (GREEN, "◆", "exact in law"),
    "approximate": (ORANGE, "▲", "approximate"),
    "unknown": (GREY, "○", "no guarantee stated"),
}
LETTER = 0.54  # mean width of a letter over its size


@dataclass(frozen=True)
class Point:
    """A method in a figure: speed or passes across, a quality measure upwards."""

    number: int
    label: str
    kind: str  # of GUARANTEES
    x: float
    y: float
    across: Interval
    upwards: Interval
    n: int


def kind_of(record: Mapping[str, Any]) -> str:
    guarantee = str(record.get("guarantee") or "")
    if guarantee.startswith("exact"):
        return "law" if record.get("promises_tokens") is False else "tokens"
    return "approximate" if guarantee else "unknown"


def headline(methods: Sequence[Method]) -> list[tuple[str, Method]]:
    """The fastest method of each kind of guarantee: (kind, it)."""
    timed = {kind: [m for m in methods if kind_of(m.record) == kind and m.speed] for kind in GUARANTEES}
    return [(kind, max(found, key=lambda m: m.speed or 0.0)) for kind, found in timed.items() if found]


def methods(found: Sequence[Method]) -> Markup | None:
    """The bars of methods that were timed."""
    timed = [(m, m.speed, positive(m.speed_interval)) for m in found if m.speed]
    entries = [(m.index, m.label, kind_of(m.record), speed, spread, m.n) for m, speed, spread in timed]
    return bars(entries) if entries else None


def frontiers(methods: Sequence[Method]) -> list[tuple[str, Markup]]:
    """Speed against the distance to real pictures, and against drift, where two methods differ in it."""
    found = []
    for field in (distance_of(methods), "drift_per_token"):
        if len({quality.value for m in methods if m.speed and (quality := m.quality(field))}) > 1:
            found.append((f"Speed against {QUALITY[field][0]}", against(methods, field)))
    return found


def pareto(methods: Sequence[Method], field: str) -> Markup | None:
    """Speed against a quality measure; None where it was not measured, or is 0 for all: no trade-off."""
    values = [quality.value for m in methods if m.speed and (quality := m.quality(field))]
    return against(methods, field) if values and (field != "drift_per_token" or any(values)) else None


def against(methods: Sequence[Method], field: str) -> Markup:
    """The figure of the methods that were timed and have this quality measure."""
    points = []
    for m in methods:
        if m.speed and (found := m.quality(field)):
            at = m.speed, found.value, positive(m.speed_interval), found.interval
            points.append(Point(m.index, m.label, kind_of(m.record), *at, min(m.n, found.n)))
    name, higher_is_better = QUALITY[field]
    start = 1.0 if field == "fd_ratio" else 0.0
    return frontier(points, name, "times faster, 95 % intervals", higher_is_better, start)


def distance_of(methods: Sequence[Method]) -> str:
    """The field of the Frechet distance, relative to plain decoding where that is known."""
    return "fd_ratio" if any(m.value("fd_ratio") is not None for m in methods) else "fd"


def bars(entries: Sequence[tuple[int, str, str, float, Interval, int]]) -> Markup:
    """Speed-up by method, the fastest first, with intervals. entries: (number, label, kind, speed-up, interval, n)."""
    entries = sorted(entries, key=lambda entry: -entry[3])
    size, pitch, left = 10, 20, 112
    x = Scale(0, 1.03 * max([1.0] + [v for *_, s, ci, _ in entries for v in (s, *(ci or ()))]), left, RIGHT - 28)
    bottom = pitch * len(entries) + 6
    parts = figures.columns(x, figures.ticks(0, x.high, 5), 2, bottom, 9)
    for i, (at, label, kind, speed, ci, n) in enumerate(entries):
        colour, sign, words = GUARANTEES[kind]
        y, said = 4 + i * pitch, f"{at}: {label}, {speed:.2f} times, n={n}, {words}"
        parts.append(figures.text(left - 18, y + 12, figures.short(label, 17), "end", size=size))
        parts.append(figures.text(left - 5, y + 12, sign, "end", colour, 9))
        parts.append(figures.rect(x(0), y + 3, x(speed) - x(0), 11, colour if n >= FEW else GREY, said))
        if ci:
            parts += whisker(x(ci[0]), y + 8.5, x(ci[1]), y + 8.5)
        end = max(x(speed), x(ci[1]) if ci else 0)
        parts.append(figures.text(end + 4, y + 12, f"{speed:.2f}", size=size))
    parts.append(figures.line(x(1), 2, x(1), bottom, INK))
    parts.append(figures.text(RIGHT, bottom + 25, "times faster, 95 % intervals", "end", FAINT, 9))
    return figures.svg(bottom + 30, parts, "Speed-up by method")


def whisker(x1: float, y1: float, x2: float, y2: float) -> list[Markup]:
    across = y1 == y2
    dx, dy = (0, 3) if across else (3, 0)
    ends = [figures.line(x - dx, y - dy, x + dx, y + dy, INK) for x, y in ((x1, y1), (x2, y2))]
    return [figures.line(x1, y1, x2, y2, INK, 1.2), *ends]


def frontier(
    points: Sequence[Point], words: str, across: str, higher_is_better: bool = False, start: float = 0.0
) -> Markup:
    """A quality measure over speed; right and up is better. Methods on the frontier are joined by a line.

    start: the value around which differences are drawn largest.
    """
    best = on_frontier(points, higher_is_better)
    xs = figures.bounds([1.0] + [v for p in points for v in (p.x, *(p.across or ()))])
    top, bottom, left = 26, 236, 40
    x = Scale(*xs, left, RIGHT - 6)
    y = SqrtScale([v for p in points for v in (p.y, *(p.upwards or ()))], top, bottom, higher_is_better, start)
    parts = figures.columns(x, figures.ticks(*xs, 6), top, bottom, 9) + figures.rows(y, y.marks, left, RIGHT - 6, 9)
    for (x1, y1), (x2, y2) in pairwise(sorted((x(p.x), y(p.y)) for p in best)):
        parts += [figures.line(x1, y1, x1, y2, INK, 1.2, "3 3"), figures.line(x1, y2, x2, y2, INK, 1.2, "3 3")]
    taken: list[tuple[float, ...]] = [(x(p.x) - 6, y(p.y) - 6, x(p.x) + 6, y(p.y) + 6) for p in points]
    for p in sorted(points, key=lambda p: p in best):
        colour = GUARANTEES[p.kind][0] if p.n >= FEW else GREY
        if p.across:
            parts.append(figures.line(x(p.across[0]), y(p.y), x(p.across[1]), y(p.y), colour, 0.8))
        if p.upwards:
            parts.append(figures.line(x(p.x), y(p.upwards[0]), x(p.x), y(p.upwards[1]), colour, 0.8))
        said = f"{p.number}: {p.label}, {p.x:.2f} times, {words} {p.y:.4g}, n={p.n}"
        parts.append(mark(x(p.x), y(p.y), p.kind, colour, p in best, said))
    names = [(p.label if p in best else str(p.number), p in best, x(p.x), y(p.y)) for p in points]
    for name, named, at_x, at_y in sorted(names, key=lambda entry: not entry[1]):
        parts += place_label(figures.short(name, 20), at_x, at_y, 10 if named else 8.5, INK if named else FAINT, taken)
    direction = "higher is better" if higher_is_better else "lower is better, drawn upwards"
    parts.append(figures.text(LEFT, 11, f"{words} ({direction})", colour=FAINT, size=10))
    parts.append(figures.text(RIGHT, bottom + 27, across, "end", FAINT, 10))
    return figures.svg(bottom + 33, parts, f"{words} over speed")


def on_frontier(points: Sequence[Point], higher_is_better: bool) -> list[Point]:
    """The points that no other point beats in both directions."""
    sign = 1 if higher_is_better else -1

    def beaten(p: Point) -> bool:
        return any(o.x >= p.x and sign * o.y >= sign * p.y and (o.x, o.y) != (p.x, p.y) for o in points)

    return [p for p in points if not beaten(p)]


class SqrtScale:
    """A scale by square roots of the distance to `start`, so that one outlier doesn't press all others together."""

    def __init__(self, values: Sequence[float], top: float, bottom: float, upwards: bool, start: float = 0.0):
        self.start = start
        low, high = min(values), max(values)
        low = min(start, low) if abs(low - start) < 0.2 * abs(high - start) else low
        roots = figures.bounds([self.root(low), self.root(high)], 0.1)
        self.scale = Scale(*roots, bottom, top) if upwards else Scale(*roots, top, bottom)
        self.marks = [t for t in figures.ticks(low, high, 4) if roots[0] <= self.root(t) <= roots[1]]
        near = figures.ticks(start, start + (high - start) / 6, 3)
        self.marks += [t for t in near if roots[0] <= self.root(t) <= roots[1] and self.apart(t) > 14][:1]

    def root(self, value: float) -> float:
        return math.copysign(math.sqrt(abs(value - self.start)), value - self.start)

    def apart(self, value: float) -> float:
        """Units to the nearest mark."""
        return min([abs(self(value) - self(t)) for t in self.marks], default=math.inf)

    def __call__(self, value: float) -> float:
        return self.scale(self.root(value))


def mark(x: float, y: float, kind: str, colour: str, filled: bool, title: str) -> Markup:
    """A point in the shape of its guarantee."""
    r = 5.5 if filled else 4.0
    style = Markup('fill="{}" stroke="{}" stroke-width="1.5"').format(colour if filled else "#ffffff", colour)
    if kind in ("tokens", "unknown"):
        shape = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="mark" {}>').format(x, y, r, style)
        return shape + Markup("<title>{}</title></circle>").format(title)
    corners = ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)) if kind == "law" else ((0, -1.25), (1.2, 0.9), (-1.2, 0.9))
    place = " ".join(f"{x + r * a:.1f},{y + r * b:.1f}" for a, b in corners)
    return Markup('<polygon points="{}" class="mark" {}><title>{}</title></polygon>').format(place, style, title)


def place_label(
    words: str, x: float, y: float, size: float, colour: str, taken: list[tuple[float, ...]]
) -> list[Markup]:
    """A name beside a point, where it is free of the boxes `taken`, to which its own is added; nothing if nowhere."""
    width, half = LETTER * size * len(words), size / 2
    rows = (0.0, -size, size, -2 * size, 2 * size)
    places = [(x + side * (9 + width / 2), y + row) for row in rows for side in (1, -1)]
    for at_x, at_y in [*places, (x, y - 8 - half), (x, y + 8 + half)]:
        box = (at_x - width / 2, at_y - half, at_x + width / 2, at_y + half)
        inside = LEFT <= box[0] and box[2] <= RIGHT + 4 and 14 <= box[1] and box[3] <= 236
        if inside and not any(overlap(box, other) for other in taken):
            taken.append(box)
            return [figures.text(at_x, at_y + 0.35 * size, words, "middle", colour, size)]
    return []


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
