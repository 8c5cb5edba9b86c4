"""Pages rendered from templates, in which every value is escaped."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from visspec.eval.report.data import number
from visspec.io.files import atomic_write
from visspec.loop.stats import COLOURS, MEANING


@cache
def environment() -> Environment:
    """Return the templates with the origins of tokens: (name, colour, meaning) of each."""
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.globals["origins"] = [(name, COLOURS[name], MEANING[name]) for name in COLOURS]
    templates.globals["colours"] = COLOURS
    templates.filters |= {"num": number_text, "indented": lambda value: json.dumps(value, indent=1)}
    return templates


def number_text(value: object, digits: int = 2) -> str:
    """Format a number; a dash for null, NaN and missing ones."""
    parsed = number(value)
    return "–" if parsed is None else f"{parsed:.{digits}f}"


def write_page(path: str | Path, template: str, values: dict[str, Any]) -> None:
    page = environment().get_template(f"{template}.html.j2").render(values)
    with atomic_write(path) as draft:
        draft.write_text(page, encoding="utf-8", errors="backslashreplace")
