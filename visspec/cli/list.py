"""`visspec list`: names of drafters, rules, presets and checkpoints."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from visspec.api import presets, zoo
    from visspec.models.image_codes.families import FAMILIES

    view = Table("kind", "name", Column("what it is", overflow="fold"))
    for kind, entries in (("drafter", zoo.DRAFTERS), ("acceptance", zoo.ACCEPTANCE), ("order", zoo.ORDERS)):
        for name, (_, what) in entries.items():
            view.add_row(kind, name, what)
    for name, (kind, *_, what) in zoo.SHIPPED.items():
        view.add_row("drafter", name, f"{what} {kind}, shipped with the package")
    tables = presets.CODES, presets.ANY_ORDER, presets.VECTORS, presets.MAPS
    for name, preset in (item for table in tables for item in table.items()):
        parts = "".join(f", {part}={value}" for part, value in preset.parts.items())
        view.add_row("preset", name, f"{preset.source} ({preset}{parts})")
    for name, reference in FAMILIES.items():
        view.add_row("image model", name, "driven by " + reference.partition(":")[2])
    for folder in sorted(p for p in zoo.CHECKPOINTS.iterdir() if (p / "config.json").is_file()):
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e6
        view.add_row("checkpoint", folder.name, f"{size:.1f} MB, shipped with the package")
    Console().print(view)
