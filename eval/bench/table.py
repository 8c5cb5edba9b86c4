"""A bench's table: a column is its head and a format of a row's fields."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table

Cell = str | Callable[[Mapping[str, Any]], str]  # "{tau:.2f}", or a function of the row


def cell(form: Cell, row: Mapping[str, Any]) -> str:
    """A cell of a row; empty where a field of the format is absent or None."""
    if callable(form):
        return form(row)
    try:
        return form.format(**row)
    except (KeyError, TypeError):
        return ""


def table(
    title: str,
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, Cell],
    caption: str | None = None,
    left: Iterable[str] = (),
    whole: Iterable[str] | None = None,
) -> Table:
    """A rich table for the terminal. The first column and those of `left` are aligned to the left; those of `whole`,
    by default the same, are not wrapped.
    """
    view = Table(title=title, caption=caption)
    left = {next(iter(columns)), *left}
    whole = left if whole is None else set(whole)
    for head in columns:
        view.add_column(head, justify="left" if head in left else "right", no_wrap=head in whole)
    for row in rows:
        view.add_row(*(cell(form, row) for form in columns.values()))
    return view
