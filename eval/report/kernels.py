"""The report's section for `bench kernels`, and the list of other benches."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from visspec.eval.report import figures
from visspec.eval.report.data import Section, interval, number, positive

FIELDS = (  # field of a record -> label
    ("copy_bandwidth_gb_s", "copy bandwidth, GB/s"),
    ("ms_to_read_14_gb_at_copy_bandwidth", "time to read 14 GB at the measured copy bandwidth, ms"),
    ("host_syncs_per_round", "host waits in a relaxed verification"),
    ("dispatched_ops_per_verification", "dispatched operations in a relaxed verification"),
)
NUMBERS = {  # name on the page -> field of a row
    "time": "time_us",
    "host": "host_us",
    "share": "share_of_copy_bandwidth",
    "reading": "share_of_reading_14_gb",
}
MOST = 60  # maximum number of fields shown for an unknown bench


class Table(Section):
    """The rows of a kernel bench, and the bars of their ratios."""

    def __init__(self, record: Mapping[str, Any], source: str):
        super().__init__(record, source, "kernels", row_of)
        self.facts = [(words, value) for key, words in FIELDS if (value := number(record.get(key))) is not None]
        self.on_cpu = any(row["device"] == "cpu" and row["time"] is not None for row in self.rows)
        measured = [row for row in self.rows if row["ratio"]]
        self.bars = bars(measured) if measured else None


def row_of(row: object, where: str) -> dict[str, Any]:
    """A row for the page; a value that is not a number is shown as not measured."""
    if not isinstance(row, dict) or not isinstance(row.get("kernel"), str):
        got = type(row.get("kernel") if isinstance(row, dict) else row).__name__
        raise ValueError(f"report: {where}: kernel: got {got}, expected a name")
    ratio, against = number(row.get("ratio_to_eager")), str(row.get("eager") or "eager torch")
    found: dict[str, Any] = {"kernel": row["kernel"], "against": against, "n": int(number(row.get("repeats")) or 0)}
    found |= {name: str(row.get(name) or "") for name in ("shape", "dtype", "device", "timed", "failure")}
    found |= {name: number(row.get(field)) for name, field in NUMBERS.items()}
    found["quartiles"], found["ci"] = interval(row.get("time_us_quartiles")), positive(interval(row.get("ratio_ci95")))
    return found | {"ratio": ratio if ratio and ratio > 0 else None}


def bars(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Ratios to eager torch on a log axis: to the right of 1 faster (blue), to the left a slowdown (orange)."""
    ends = [1.0] + [v for row in rows for v in (row["ratio"], *(row["ci"] or ()))]
    low, high = figures.bounds(ends, log=True)
    x, pitch = figures.Scale(low, high, figures.LEFT + 4, figures.RIGHT - 40, log=True), 34
    bottom = pitch * len(rows) + 2
    marks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= t <= high]
    parts = figures.columns(x, marks, 14, bottom, dash="2 3")
    for i, row in enumerate(rows):
        y, ratio, few = i * pitch, row["ratio"], row["n"] < figures.FEW
        colour = figures.GREY if few else figures.BLUE if ratio >= 1 else figures.ORANGE
        words = figures.short(f"{row['kernel']}, against {row['against']} (n={row['n']})", 56)
        left, right = sorted((x(1), x(ratio)))
        parts.append(figures.text(figures.LEFT, y + 12, words))
        parts.append(figures.rect(left, y + 17, right - left, 10, colour, f"{words}: {ratio:.2f}"))
        if row["ci"]:
            parts.append(figures.line(x(row["ci"][0]), y + 22, x(row["ci"][1]), y + 22, figures.INK, 2))
        edge = max(right, x(row["ci"][1])) if row["ci"] else right
        parts.append(figures.text(edge + 4, y + 26, f"{ratio:.2f}"))
    parts.append(figures.line(x(1), 14, x(1), bottom, figures.INK))
    words = "times faster than eager, log scale; left of 1 is a slowdown"
    parts.append(figures.text(figures.WIDTH / 2, bottom + 28, words, "middle", figures.FAINT))
    return figures.svg(bottom + 34, parts, "Ratio of eager torch to each kernel")


def scalar_fields(record: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A bench without figures: its scalar fields, and the sizes of the others."""
    rows = [(str(key), plain(value)) for key, value in record.items() if key not in ("bench", "provenance")]
    where = record.get("provenance")
    rows += [(str(key), plain(value)) for key, value in where.items()] if isinstance(where, dict) else []
    return {"bench": record["bench"], "source": source, "rows": rows[:MOST], "left_out": max(len(rows) - MOST, 0)}


def plain(value: object) -> str:
    if isinstance(value, (list, dict)):
        return f"{len(value)} entries"
    return f"{value:.6g}" if isinstance(value, float) else figures.short(str(value), 200)
