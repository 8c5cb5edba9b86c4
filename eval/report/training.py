"""The page of a training run: its curves."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from visspec.eval.report import figures, rendering

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


CURVES = (  # field, its words, and the list of `progress` that has it
    ("loss", "Loss", "curve"),
    ("agreed", "First drafted token agrees with the target's most probable one", "curve"),
    ("tau_greedy", "tau on held-out prompts, greedy, bonus included", "validations"),
    ("tau_sampled", "tau on held-out prompts, temperature 1, bonus included", "validations"),
)


def write_page(path: str | Path, progress: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write the page of a run: loss, agreement with the target, and tau on held-out prompts, over steps."""
    points = {label: [(e["step"], e[name]) for e in progress[entries] if name in e] for name, label, entries in CURVES}
    curves = [(label, curve(found, label)) for label, found in points.items() if found]
    rendering.write_page(path, "training", {"progress": progress, "provenance": provenance, "curves": curves})
