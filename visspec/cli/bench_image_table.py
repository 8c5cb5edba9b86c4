"""The tables that `visspec bench image` prints, from its record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from visspec.loop.stats import drift_said

HEAD_COLUMN = "head calls / token"  # beside NFE, where there are any
SPEED = ("method", "NFE", "fewer by", "ms / NFE", "over stock", "95 %")
QUALITY = ("method", "GenEval", "FD", "drift / token", "displacement", "guarantee")
HEADS = SPEED + QUALITY[1:]
LEFT = ("method", "guarantee")


def tables(record: dict[str, Any], width: int) -> list[Table]:
    """The rich table of a record, or one of speed and one of quality where it does not fit into `width` columns."""
    whole = table(record)
    if Console(width=10 * width).measure(whole).maximum <= width:
        return [whole]
    return [table(record, SPEED), table(record, QUALITY)]


def table(record: dict[str, Any], heads: Sequence[str] = HEADS) -> Table:
    """A rich table of a record: the field's own columns, those that are named."""
    title = f"{record['n_prompts']} prompts, batch {record['batch_size']}, guidance {record['guidance_scale']}"
    if stock := record["stock"]:
        title += f", stock with its {stock['cache']} cache"
    view = Table(title=title)
    if "NFE" in heads and any(line.get("head_calls") for line in record["rows"]):
        at = heads.index("NFE") + 1
        heads = [*heads[:at], HEAD_COLUMN, *heads[at:]]
    for head in heads:
        title = "over plain" if head == "over stock" and not record["stock"] else head.replace(" / ", " /\n")
        view.add_column(title, justify="left" if head in LEFT else "right", no_wrap=head != "guarantee")
    if "drift / token" in heads:
        rows = ((line["name"], line.get("unmetered")) for line in record["rows"])
        view.caption = "\n".join(f"{name}: drift not measured, {why}" for name, why in rows if why) or None
    for cells in _lines(record):
        view.add_row(*(cells.get(head, "") for head in heads))
    return view


def _lines(record: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The cells of each line of a record, by head; the stock class comes first."""
    if stock := record["stock"]:
        per = 1e3 * stock["seconds_per_image"] / stock["nfe"]
        yield {
            "method": "stock", "NFE": str(stock["nfe"]), "ms / NFE": f"{per:.1f}", "over stock": "1",
            "guarantee": "the model's own",
        }  # fmt: skip
    if compiled := record.get("baselines"):
        over = stock["seconds_per_image"] / compiled["transformers_compiled"]["seconds_per_image"]
        per = 1e3 * compiled["transformers_compiled"]["seconds_per_image"] / stock["nfe"]
        yield {
            "method": "stock, compiled", "NFE": str(stock["nfe"]), "ms / NFE": f"{per:.1f}",
            "over stock": f"{over:.2f}", "guarantee": "the model's own",
        }  # fmt: skip
    for line in record["rows"]:
        far, timed = line["latent_displacement"], {}
        if line.get("speedup") is not None:
            low, high = line["speedup_ci95"]
            timed = {"ms / NFE": f"{line['ms_per_nfe']:.1f}", "over stock": f"{line['speedup']:.2f}",
                     "95 %": f"{low:.2f}..{high:.2f}"}  # fmt: skip
        yield timed | {
            "method": line["name"], "NFE": f"{line['nfe']:.1f}", "fewer by": f"{line['nfe_reduction']:.2f}",
            HEAD_COLUMN: f"{line.get('head_calls', 0.0):.1f}",
            "drift / token": drift_said(line["drift_per_token"]).replace(" ", "\n"),
            "displacement": "not\nmeasured" if far is None else f"{far:.4f}", "guarantee": line["guarantee"],
            "GenEval": f"{line['geneval']:.3f}" if line.get("geneval") is not None else "",
            "FD": f"{line['fd']:.3f}" if line.get("fd") is not None else "",
        }  # fmt: skip
