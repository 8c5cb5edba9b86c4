"""`visspec list`: names of everything that is registered, by kind, or of one kind with options and their defaults."""

import textwrap
from dataclasses import dataclass

from visspec.io.options import option

WIDTH = 120
PLURALS = ("drafters", "rules", "lengths", "orders", "families", "layouts", "presets", "recipes", "models")


@dataclass(kw_only=True)
class Options:
    kind: str | None = option(f"what to list: {', '.join(PLURALS)}", None, positional=True, nargs="?", choices=PLURALS)


def run(arguments: Options) -> None:
    from visspec import registry
    from visspec.entries import options_of

    if arguments.kind is None:
        for kind, plural in registry.KINDS.items():
            start, names = f"{plural:12}", ", ".join(registry.table(kind))
            print(textwrap.fill(names, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)))
        print("visspec list KIND describes each name and its options, as in lantern:k=100,delta=0.1")
        return
    kind = next(kind for kind, plural in registry.KINDS.items() if plural == arguments.kind)
    entries = registry.table(kind)
    needs = max(len(entry.needs) for entry in entries.values())
    for name, entry in entries.items():
        has_options = kind in ("drafter", "rule", "length", "order") and entry.target is not None
        options = options_of(entry.load()) if has_options else {}
        defaults = [f"{key}={str(value).lower()}" for key, (_, value) in options.items() if value is not None]
        line = f"{name:{max(map(len, entries))}}  {entry.needs:{needs}}  {entry.what}"
        print(f"{line} ({','.join(defaults)})" if defaults else line)
