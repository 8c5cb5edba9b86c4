"""The report's section for `bench rules`: tokens a pass and drift over the entropy of simulated distributions."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from visspec.eval.report import figures
from visspec.eval.report.data import number, pairs_of, rows_of

FIELDS = (("tau", "tokens a pass", True), ("drift", "drift a token", False))
BOUND = "exact, at most"


class RuleCurves:
    """Two figures of each structure and distance; lines are numbered as `names`. Raises ValueError for rows of another
    kind.
    """

    def __init__(self, record: Mapping[str, Any], source: str):
        self.source, self.provenance = source, pairs_of(record)
        rows = [row_of(row, f"{source}: rows[{i}]") for i, row in enumerate(rows_of(record, source, "rules"))]
        rows += [row | {"rule": BOUND, "tau": row["bound"], "drift": None} for row in rows if row["bound"] is not None]
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


def row_of(row: object, where: str) -> dict[str, Any]:
    """A row for the page."""
    row = row if isinstance(row, dict) else {}
    found = {name: number(row.get(name)) for name in ("entropy", "distance", "tau", "bound", "drift")}
    if not found["entropy"] or found["entropy"] < 0 or found["tau"] is None:
        raise ValueError(f"report: {where}: got no entropy or tau, expected numbers above 0")
    return found | {name: str(row.get(name) or "") for name in ("rule", "structure")}
