"""The tables that `visspec bench image` prints, from its record."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from visspec.cli import bench as harness
from visspec.cli.bench import Cell, cell
from visspec.loop.stats import drift_text

CELLS: dict[str, Cell] = {
    "method": "{name}", "NFE": "{nfe:.1f}", "head calls / token": "{head_calls:.1f}", "fewer by": "{nfe_reduction:.2f}",
    "ms / NFE": "{ms_per_nfe:.1f}", "over stock": "{speedup:.2f}",
    "95 %": "{speedup_ci95[0]:.2f}..{speedup_ci95[1]:.2f}", "GenEval": "{geneval:.3f}",
    "FD": lambda row: "\n".join(filter(None, (cell(fd, row) for fd in FD))),
    "drift / token": lambda row: "" if "stock" in row else drift_text(row["drift_per_token"]).replace(" ", "\n"),
    "displacement": lambda row: "" if "stock" in row else cell(FAR, row) or "not\nmeasured",
    "guarantee": "{guarantee}",
}  # fmt: skip
FD: tuple[Cell, ...] = ("{fd:.3f}", "({fd_paired:.2g})")  # that of pairs below it
FAR = "{latent_displacement:.4f}"
HEAD_CALLS = "head calls / token"  # where there are any
SPEED = ("method", "NFE", HEAD_CALLS, "fewer by", "ms / NFE", "over stock", "95 %")


def tables(record: dict[str, Any], width: int) -> list[Table]:
    """The rich table of a record, or one of speed and one of quality where it does not fit into `width` columns."""
    whole = table(record)
    if Console(width=10 * width).measure(whole).maximum <= width:
        return [whole]
    return [table(record, SPEED), table(record, ("method", *(head for head in CELLS if head not in SPEED)))]


def table(record: dict[str, Any], heads: Iterable[str] = tuple(CELLS)) -> Table:
    """A rich table of a record: the field's own columns, those that are named."""
    title = f"{record['n_prompts']} prompts, batch {record['batch_size']}, guidance {record['guidance_scale']}"
    if stock := record["stock"]:
        title += f", stock with its {stock['cache']} cache"
    heads = [h for h in heads if h != HEAD_CALLS or any(line.get("head_calls") for line in record["rows"])]
    title_of = {head: head.replace(" / ", " /\n") for head in heads}
    if not stock:
        title_of["over stock"] = "over plain"
    columns, rows = {title_of[head]: CELLS[head] for head in heads}, [*stock_rows(record), *record["rows"]]
    caption = None
    if "FD" in heads and any("fd_paired" in line for line in record["rows"]):
        floor = max(line.get("fd_paired_floor", 0.0) for line in record["rows"])
        caption = f"(FD over pairs with plain decoding, by chance below {floor:.2g})"
    whole = [title_of[head] for head in heads if head != "guarantee"]
    return harness.table(title, rows, columns, caption, left=["guarantee"], whole=whole)


def stock_rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of the stock class, as it is and compiled."""
    stock, compiled = record["stock"], record.get("baselines")
    arms = {"stock": stock} | ({"stock, compiled": compiled["transformers_compiled"]} if compiled else {})
    for name, arm in arms.items() if stock else ():
        seconds, nfe = arm["seconds_per_image"], stock["nfe"]
        row = {"name": name, "stock": True, "nfe": nfe, "ms_per_nfe": 1e3 * seconds / nfe}
        yield row | {"speedup": stock["seconds_per_image"] / seconds, "guarantee": "the model's own"}
