"""The report's section for `bench prompts`: costs of passes and of the whole loop behind prompts of any length."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from visspec.eval.report import figures
from visspec.eval.report.data import number, pairs_of, rows_of

RATIOS = ("over_stock_pass", "attention_over_stock_query", "loop_over_transformers")


class Curves:
    """The rows of a bench of prompts, checked, and two figures of each head layout. Raises ValueError for rows of
    another kind.
    """

    def __init__(self, record: Mapping[str, Any], source: str):
        self.source, self.tau, self.new = source, number(record.get("tau")), number(record.get("max_new_tokens"))
        self.rows = [row_of(row, f"{source}: rows[{i}]") for i, row in enumerate(rows_of(record, source, "prompts"))]
        self.provenance = pairs_of(record)
        self.charts: list[tuple[str, Markup]] = []
        for heads in dict.fromkeys(row["heads"] for row in self.rows):
            own = [row for row in self.rows if row["heads"] == heads]
            for field, words, better in (
                ("over_stock_pass", "a pass over a one-token pass of transformers, lower is better", False),
                ("loop_over_transformers", "the loop, times faster than generate", True),
            ):
                if lines := series(own, field):
                    self.charts.append((f"{heads}: {words}", figures.curves(lines, "tokens of the prompt", better)))


def row_of(row: object, where: str) -> dict[str, Any]:
    """A row for the page; a ratio that is no positive number is shown as not measured."""
    row = row if isinstance(row, dict) else {}
    nodes, prompt = number(row.get("nodes")), number(row.get("prompt"))
    if nodes is None or prompt is None or min(nodes, prompt) < 1:
        raise ValueError(f"report: {where}: got no nodes or prompt, expected counts of at least 1")
    found: dict[str, Any] = {"nodes": int(nodes), "prompt": int(prompt), "heads": str(row.get("heads") or "")}
    for name in RATIOS:
        value = number(row.get(name))
        found[name] = value if value is not None and value > 0 else None
    compared = int(number(row.get("compared")) or 0)
    found["same"] = f"{int(number(row.get('identical')) or 0)} of {compared}" if compared else ""
    return found


def series(rows: Sequence[Mapping[str, Any]], field: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """A line for each number of nodes: its label and its points (prompt, ratio), by prompt."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row[field] is not None:
            found.setdefault(row["nodes"], []).append((row["prompt"], row[field]))
    return [(f"{nodes} node{'s' * (nodes > 1)}", sorted(found[nodes])) for nodes in sorted(found)]
