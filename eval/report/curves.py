"""The report's sections for `bench prompts`, costs of passes and of the whole loop over the length of prompts, and for
`bench rules`, tokens a pass and drift over the entropy of simulated distributions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from visspec.eval.report import figures
from visspec.eval.report.data import Section, number

RATIOS = ("over_stock_pass", "attention_over_stock_query", "loop_over_transformers")
FIELDS = (("tau", "tokens a pass", True), ("drift", "drift a token", False))
BOUND = "exact, at most"


class PromptCurves(Section):
    """Two figures of each head layout."""

    def __init__(self, record: Mapping[str, Any], source: str):
        super().__init__(record, source, "prompts", prompt_row)
        self.tau, self.charts = number(record.get("tau")), list[tuple[str, Markup]]()
        for heads in dict.fromkeys(row["heads"] for row in self.rows):
            own = [row for row in self.rows if row["heads"] == heads]
            for field, words, better in (
                ("over_stock_pass", "a pass over a one-token pass of transformers, lower is better", False),
                ("loop_over_transformers", "the loop, times faster than generate", True),
            ):
                if lines := series(own, field):
                    self.charts.append((f"{heads}: {words}", figures.curves(lines, "tokens of the prompt", better)))


def prompt_row(row: object, where: str) -> dict[str, Any]:
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


class RuleCurves(Section):
    """Two figures of each structure and distance; lines are numbered as `names`."""

    def __init__(self, record: Mapping[str, Any], source: str):
        super().__init__(record, source, "rules", rule_row)
        bounds = [row | {"rule": BOUND, "tau": row["bound"], "drift": None} for row in self.rows]
        rows = self.rows + [row for row in bounds if row["tau"] is not None]
        self.names = list(dict.fromkeys(row["rule"] for row in rows))
        self.charts: list[tuple[str, Markup]] = []
        for structure, distance in dict.fromkeys((row["structure"], row["distance"]) for row in rows):
            for field, words, better in FIELDS:
                lines: dict[str, dict[float, float]] = {}
                for row in rows:
                    if (row["structure"], row["distance"]) == (structure, distance) and row[field] is not None:
                        lines.setdefault(row["rule"], {})[row["entropy"]] = row[field]
                numbered = [(str(1 + self.names.index(rule)), sorted(points.items())) for rule, points in lines.items()]
                title = f"drafts of {structure}, distance {distance:g}: {words}"
                self.charts.append((title, figures.curves(numbered, "nats of the target", better)))


def rule_row(row: object, where: str) -> dict[str, Any]:
    row = row if isinstance(row, dict) else {}
    found = {name: number(row.get(name)) for name in ("entropy", "distance", "tau", "bound", "drift")}
    if not found["entropy"] or found["entropy"] < 0 or found["tau"] is None:
        raise ValueError(f"report: {where}: got no entropy or tau, expected numbers above 0")
    return found | {name: str(row.get(name) or "") for name in ("rule", "structure")}
