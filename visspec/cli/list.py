"""`visspec list`: drafters, rules, presets and everything else with a name, with options and defaults."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visspec.io.options import option

if TYPE_CHECKING:
    from visspec.entries import Entry

WIDTH = 120
PLURALS = ("drafters", "rules", "lengths", "orders", "families", "layouts", "presets", "recipes", "models")


@dataclass(kw_only=True)
class Options:
    kind: str | None = option(f"what to list: {', '.join(PLURALS)}", None, positional=True, nargs="?", choices=PLURALS)
    json: bool = option("print JSON", False)


def run(arguments: Options) -> None:
    from visspec import registry

    kinds = [kind for kind, plural in registry.KINDS.items() if arguments.kind in (None, plural)]
    tables = {kind: registry.table(kind) for kind in kinds}
    if arguments.json:
        rows = [row(kind, name, entry) for kind, table in tables.items() for name, entry in table.items()]
        print(json.dumps(rows, indent=1))
    elif arguments.kind is None:
        for kind, table in tables.items():
            start = f"{registry.KINDS[kind]:12}"
            print(textwrap.fill(", ".join(table), WIDTH, initial_indent=start, subsequent_indent=" " * len(start)))
        print("visspec list KIND describes each name and its options, as in lantern:k=100,delta=0.1")
    else:
        rows = [row(kinds[0], name, entry) for name, entry in tables[kinds[0]].items()]
        widths = [max(len(one[key]) for one in rows) for key in ("name", "needs")]
        for one in rows:
            defaults = {key: table["default"] for key, table in one["options"].items() if table["default"] is not None}
            options = ",".join(f"{key}={str(value).lower()}" for key, value in defaults.items())
            columns = f"{one['name']:{widths[0]}}  {one['needs']:{widths[1]}}  {one['what']}"
            print(f"{columns} ({options})" if options else columns)


def row(kind: str, name: str, entry: Entry) -> dict[str, Any]:
    """Return an entry as JSON. `options` are those of `name:option=value`, by name."""
    from visspec.entries import options_of
    from visspec.io import included

    options = {}
    if kind in ("drafter", "rule", "length", "order") and entry.target is not None:
        arguments = options_of(entry.load())
        options = {key: {"type": annotation, "default": default} for key, (annotation, default) in arguments.items()}
    more: dict[str, Any] = {"trained": True} if entry.checkpoint else {}
    if kind == "preset":
        more = {"arguments": {needs: one._asdict() for needs, one in entry.target.items()}}
    elif kind == "model":
        more = {"present": included.present(name)}
    return {"kind": kind, "name": name, "what": entry.what, "needs": entry.needs, "options": options} | more
