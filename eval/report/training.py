"""The page with the curves of a training run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visspec.eval.report import figures, rendering

CURVES = (  # field, its title, and the list of `progress` that contains it
    ("loss", "Loss", "curve"),
    ("agreed", "First drafted token agrees with the target's most probable one", "curve"),
    ("tau_greedy", "tau on held-out prompts, greedy, bonus included", "validations"),
    ("tau_sampled", "tau on held-out prompts, temperature 1, bonus included", "validations"),
)


def write_page(path: str | Path, progress: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write the page of a run: loss, agreement with the target, and tau on held-out prompts, over steps."""
    points = {label: [(e["step"], e[name]) for e in progress[entries] if name in e] for name, label, entries in CURVES}
    curves = [(label, figures.curve(values, label)) for label, values in points.items() if values]
    rendering.write_page(path, "training", {"progress": progress, "provenance": provenance, "curves": curves})
