"""`visspec list`: names of drafters, rules, presets and checkpoints."""

from visspec.cli.arguments import NoOptions


def run(arguments: NoOptions) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from visspec import presets
    from visspec.entries import TABLES
    from visspec.io import included
    from visspec.models.image_codes.families import FAMILIES

    view = Table("kind", "name", Column("what it is", overflow="fold"))
    for kind, entries in TABLES.items():
        for name, entry in entries.items():
            view.add_row(kind, name, str(entry))
    table = included.table()
    for name in table.drafters:
        view.add_row("drafter", name, f"{table.models[name].what} {table.models[name].kind}, included")
    tables = presets.CODES, presets.ANY_ORDER, presets.VECTORS, presets.MAPS
    for name, preset in (item for table in tables for item in table.items()):
        parts = "".join(f", {part}={value}" for part, value in preset.parts.items())
        view.add_row("preset", name, f"{preset.source} ({preset}{parts})")
    for name, reference in FAMILIES.items():
        view.add_row("image model", name, "driven by " + reference.partition(":")[2])
    for name, model in table.models.items():
        folder = included.folder(name)
        size = f"{sum(f.stat().st_size for f in folder.glob('*.safetensors')) / 1e6:.1f} MB"
        where = size if included.present(name) else "not in this installation, in the repository only"
        view.add_row("checkpoint", folder.name, f"{model.what}; {where}")
    Console().print(view)
