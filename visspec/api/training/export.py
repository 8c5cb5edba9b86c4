"""The last steps of training a drafter: its card, and its export for other engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from visspec import registry
from visspec.api import loading
from visspec.io.checkpoint import CONFIG, read_json
from visspec.models.drafting.checkpoint import PROVENANCE
from visspec.train.loop import Trainer

CARD = """---
library_name: visspec
tags:
- speculative-decoding
---

# A drafter for {target}

Trained with visspec {visspec} (commit {git}) on {date}, {preset}, on answers of {whose}.

| | |
|---|---|
{rows}

`tau` is the number of tokens per target pass, bonus token included, on {held} held-out items.

```python
{use}
```
"""
USE = """import visspec
from visspec.api import loading

model, processor = loading.load({target!r})  # or any transformers class of it
fast = visspec.accelerate(model, {spec!r})"""


def say(text: str) -> None:
    """Print a sentence to stderr, next to the progress bar. Standard output has the figures."""
    tqdm.write(text, file=sys.stderr)


def finish(
    trainer: Trainer, history: list[dict], held: int, use: str = USE, chosen: Mapping[str, Any] | None = None
) -> None:
    """Write the drafter's card, README.md, next to its weights. Runs in the first process.

    `history` are the validations, `held` is the number of held-out items, `use` the code of the card, and `chosen` the
    structure of drafts with its figures.
    """
    if trainer.workers.rank:
        return
    folder, record, best = trainer.folder, trainer.provenance, trainer.best.get("step")
    figures = {"steps": trainer.plan.steps, **next((entry for entry in history if entry["step"] == best), {})}
    figures |= chosen or {}
    settings = record["settings"]
    about = {"data": f"{Path(record['data']).name}, {settings['data']}", "seed": record["seed"]}
    figures = {"best at step" if name == "step" else name: value for name, value in figures.items()}
    rows = "\n".join(f"| {name} | {value} |" for name, value in (about | figures).items())
    whose = "the data" if settings["answers"] == "own" else "the target"
    preset = f"preset `{record['preset']}`" if record["preset"] else "visspec's own form"
    fields = record | {"use": use.format(target=record["target"], spec=str(folder)), "git": record["git"] or "unknown"}
    card = CARD.format(**fields | {"whose": whose, "preset": preset, "rows": rows, "held": held})
    (folder / "README.md").write_text(card, encoding="utf-8")
    say(f"The drafter is in {folder}. Its README.md explains how to use it (--drafter {folder}).")


def export(folder: str | Path, form: str, out: str | Path, target: str | None = None, **hardware: Any) -> str:
    """Write the drafter of a folder for other engines.

    Args:
        folder: The drafter.
        form: The form to write.
        out: The new folder.
        target: Folder or hub id of its target. The default is in the drafter's provenance.
        hardware: `device`, `dtype` and `trust_remote_code`.

    Returns:
        The target's name.

    Raises:
        ValueError: If the drafter or the form can't be written, or `out` holds a model.
    """
    if (Path(out) / CONFIG).exists():
        raise ValueError(f"out: {out} already holds a model. Choose another folder.")
    record = read_json(Path(folder), PROVENANCE) if (Path(folder) / PROVENANCE).is_file() else {}
    name = target or record.get("target")
    if not isinstance(name, str):
        raise ValueError(f"target: got none, and {folder} does not name one. Pass the model that it was trained for.")
    model, _ = loading.load(name, **hardware)
    drafter, _ = registry.drafter(folder, model)
    drafter.export(out, form, model.config.name_or_path or name)  # other engines do not know included names
    return name
