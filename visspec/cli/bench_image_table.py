"""The table printed by `visspec bench image`."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from visspec.cli.bench import Cell, cell, table
from visspec.loop.stats import drift_text

COLUMNS: dict[str, Cell] = {
    "method": "{name}",
    "NFE": "{nfe:.1f}",
    "head calls / token": lambda row: f"{row['head_calls']:.1f}" if row.get("head_calls") else "",
    "fewer by": "{nfe_reduction:.2f}",
    "ms / NFE": "{ms_per_nfe:.1f}",
    "over stock": "{speedup:.2f}",
    "95 %": "{speedup_ci95[0]:.2f}..{speedup_ci95[1]:.2f}",
    "GenEval": "{geneval:.3f}",
    "CLIPScore": "{clipscore:.2f} ({clipscore_se:.2f})",
    "FD": "{fd:.3f}",
    "FD of pairs": "{fd_paired:.2g}",
    "drift / token": lambda row: "" if "stock" in row else drift_text(row["drift_per_token"]),
    "guarantee": "{guarantee}",
}


def view(record: dict[str, Any]) -> Table:
    """Return the table of a record, with the columns for which any row has a value."""
    title = f"{record['n_prompts']} prompts, batch {record['batch_size']}, guidance {record['guidance_scale']}"
    stock, baselines = record["stock"], record.get("baselines", {})
    title += f", stock with its {stock['cache']} cache" if stock else ", speed-up over plain decoding"
    rows: list[dict[str, Any]] = []
    arms = {"stock": stock, "stock, compiled": baselines.get("transformers_compiled")} if stock else {}
    for name, arm in arms.items():
        if arm is not None:
            seconds, nfe = arm["seconds_per_image"], stock["nfe"]
            rows.append({"name": name, "stock": True, "nfe": nfe, "ms_per_nfe": 1e3 * seconds / nfe})
            rows[-1] |= {"speedup": stock["seconds_per_image"] / seconds, "guarantee": "the model's own"}
    rows += record["rows"]
    columns = {head: form for head, form in COLUMNS.items() if any(cell(form, row) for row in rows)}
    floor = max((row.get("fd_paired_floor", 0.0) for row in rows), default=0.0)
    distance = next((row["fd_name"] for row in rows if "fd_name" in row), "FD")  # only Inception's is called FID
    columns = {escape(distance) if head == "FD" else head: form for head, form in columns.items()}
    caption = f"FD of pairs with plain decoding: by chance below {floor:.2g}" if "FD of pairs" in columns else None
    return table(title, rows, columns, caption, left=["guarantee"], whole=columns)
