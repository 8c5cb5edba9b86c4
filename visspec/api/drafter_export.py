"""What follows the training of a drafter: its card, and its form for other engines."""

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

Trained by visspec {visspec} (commit {git}) on {date}, {preset}, with answers of {whose}.

| | |
|---|---|
{rows}

`tau` is tokens committed a pass of the target, the bonus token among them, on {held} held-out items.

```python
{use}
```
"""
USE = """import visspec
from visspec.api import loading

model, processor = loading.load({target!r})  # or any transformers class of it
fast = visspec.accelerate(model, {spec!r})"""


def say(text: str) -> None:
    """Print a sentence beside the progress bar; standard output has the figures."""
    tqdm.write(text, file=sys.stderr)


def finish(
    trainer: Trainer,
    history: list[dict],
    held: int,
    use: str = USE,
    chosen: Mapping[str, Any] | None = None,
) -> None:
    """What follows training, in the first process: the card of a drafter, README.md beside its weights.

    history: validations; held: items that validate; use: code of the card; chosen: the structure and its figures.
    """
    if trainer.workers.rank:
        return
    folder, record, best = trainer.folder, trainer.provenance, trainer.best.get("step")
    figures = {"steps": trainer.plan.steps, **next((found for found in history if found["step"] == best), {})}
    figures |= chosen or {}
    settings = record["settings"]
    about = {"data": f"{Path(record['data']).name}, {settings['data']}", "seed": record["seed"]}
    figures = {"best at step" if name == "step" else name: value for name, value in figures.items()}
    rows = "\n".join(f"| {name} | {value} |" for name, value in (about | figures).items())
    whose = "the data" if settings["answers"] == "own" else "the target"
    preset = f"preset `{record['preset']}`" if record["preset"] else "visspec's own form"
    known = {
        "target": record["target"],
        "use": use.format(target=record["target"], spec=str(folder)),
        "whose": whose,
        "preset": preset,
        "rows": rows,
        "held": held,
    }
    known |= {"visspec": record["visspec"], "git": record["git"] or "unknown", "date": record["date"]}
    (folder / "README.md").write_text(CARD.format(**known), encoding="utf-8")
    say(f"{folder} holds the drafter, and README.md says how to use it (--drafter {folder})")


def export(folder: str | Path, form: str, out: str | Path, target: str | None = None, **hardware: Any) -> str:
    """Write the drafter of a folder for other engines. target: folder or hub id of the model that it was trained for
    (default: the one that its provenance names). Returns the target's name. Raises ValueError for a drafter or a form
    that can't be written, and for a folder `out` that holds a model.
    """
    if (Path(out) / CONFIG).exists():
        raise ValueError(f"out: got {out}, which holds a model, expected a folder of its own")
    known = read_json(Path(folder), PROVENANCE) if (Path(folder) / PROVENANCE).is_file() else {}
    name = target or known.get("target")
    if not isinstance(name, str):
        raise ValueError(f"target: got none, and {folder} names none, expected the model that it was trained for")
    model, _ = loading.load(name, **hardware)
    drafter, _ = registry.drafter(folder, model)
    drafter.export(out, form, name)
    return name
