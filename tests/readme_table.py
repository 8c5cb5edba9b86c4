"""Writes the table of results in README.md from docs/results.json: `python -P tests/readme_table.py`.

To change a figure, change docs/results.json and the page that explains it (docs/results.md or docs/gpu.md). `commit` is
the one that first stated the figure.
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: from docs/results.json by tests/readme_table.py -->\n", "<!-- end of results -->\n"


def figure_text(figure: dict, n: int) -> str:
    """A ratio with its interval, as "again 1.63 [1.43, 1.83]". Names its own number of prompts if it has one."""
    interval = " [{:.2f}, {:.2f}]".format(*figure["ci95"]) if "ci95" in figure else ""
    count = f" (n = {figure['n']})" if figure.get("n", n) != n else ""
    ratio = f"{figure['value']:.2f}" + (", a slowdown" if figure["value"] < 1 else "")
    return f"{figure['name']} {ratio}{interval}{count}" if "name" in figure else f"**{ratio}**{interval}"


def table(rows: list[dict]) -> str:
    """The table in Markdown, one line for each row of docs/results.json."""
    lines = ["| what | model and machine | n | times faster | command |", "|---|---|---|---|---|"]
    for row in rows:
        ratios = "; ".join(figure_text(figure, row["n"]) for figure in row["figures"])
        commands = "; ".join(f"`{command}`" for command in row["command"])
        where = f"{row['model']}, {row['dtype']}, {row['machine']}"
        lines.append(f"| {row['what']} | {where} | {row['n']} | {ratios} | {commands} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str) -> str:
    """README with the present table between its two markers."""
    rows = json.loads((ROOT / "docs" / "results.json").read_text())
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + table(rows) + END + rest.partition(END)[2]


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(with_table(page.read_text()))
