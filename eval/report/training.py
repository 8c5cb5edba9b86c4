"""The page of a training run: its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from visspec.eval.report import figures
from visspec.io.files import replacing

HEIGHT = 120  # of a curve


def curve(points: Sequence[tuple[float, float]], label: str) -> Markup:
    """A line through (step, value) points, with round numbers at its left and its last value."""
    steps, values = [x for x, _ in points], [y for _, y in points]
    marks = figures.ticks(min(values), max(values), 4)
    low, high = min([*marks, *values]), max([*marks, *values])
    first, last = min(steps), max(steps)
    left, right = figures.LEFT + 34, figures.RIGHT - 40

    x = figures.Scale(first, max(last, first + 1e-9), left, right)
    y = figures.Scale(low, max(high, low + 1e-9), 16 + HEIGHT, 16)
    parts = figures.rows(y, marks, left, right)
    placed = [(x(step), y(value)) for step, value in points]
    parts += [figures.line(*a, *b, figures.BLUE, 1.5) for a, b in pairwise(placed)]
    across, down = placed[-1]
    parts += [figures.dot(across, down, 2.5, figures.BLUE), figures.text(across + 5, down + 4, f"{values[-1]:.3g}")]
    parts += [figures.text(left, HEIGHT + 32, f"step {first:g}"), figures.text(right, HEIGHT + 32, f"{last:g}", "end")]
    return figures.svg(HEIGHT + 40, parts, label)


def write_page(path: str | Path, progress: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write the page of a run: loss, agreement with the target, and tau on held-out prompts, over steps."""
    drawn = []
    for name, label, entries in (
        ("loss", "Loss", progress["curve"]),
        ("agreed", "First drafted token agrees with the target's most probable one", progress["curve"]),
        ("tau_greedy", "tau on held-out prompts, greedy, bonus included", progress["validations"]),
        ("tau_sampled", "tau on held-out prompts, temperature 1, bonus included", progress["validations"]),
    ):
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        if points:
            drawn.append(Markup("<h2>{}</h2>{}").format(label, curve(points, label)))
    said = json.dumps({"plan": progress["plan"], "provenance": provenance}, indent=1)
    page = Markup(
        "<!doctype html><meta charset=utf-8><title>Training</title><style>body{{font-family:sans-serif;max-width:44em;"
        "margin:2em auto}} .halo{{paint-order:stroke;stroke:#fff;stroke-width:3px}}</style><h1>Training</h1>"
        "<p>{} steps, {:.0f} s, {} processes.</p>{}<h2>Plan and provenance</h2><pre>{}</pre>\n"
    ).format(progress["step"], progress["seconds"], progress["workers"], Markup("").join(drawn), said)
    with replacing(path) as draft:
        draft.write_text(page, encoding="utf-8", errors="backslashreplace")
