"""What the recipes write beside finished weights: where they are from, and the card.

A card is a template of `visspec/toys/cards`, filled with the figures of the provenance.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

import numpy as np
import PIL
import torch
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

from visspec.io.files import write_json
from visspec.io.provenance import provenance
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.recipe import BFLOAT16

FOLDER = Path(__file__).parents[1] / "cards"
Model = TypeVar("Model", bound=PreTrainedModel)
PROVENANCE, README = "provenance.json", "README.md"
TITLES = {"single_object": "one object", "two_object": "two objects", "color_attr": "colour and object"}  # of tasks


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "m": lambda seconds: round(seconds / 60),  # minutes
    "j": lambda values: ", ".join(map(str, values)),
    "b": lambda values: " | ".join(map(str, values)),  # cells of a table
    "n": len,
    "c": lambda columns: "---|" * len(columns),  # what stands under so many headings
    "p": lambda model: millions(model),
    "l": lambda sizes: LAYERS.format(**sizes),
    "w": lambda sweep: ", ".join(f"{r['guidance']} {r['images']:.3f}" for r in sweep),
}
COMPUTED = {True: "bfloat16 autocast over float32 weights", False: "float32"}
LAYERS = "{num_hidden_layers} layers of width {hidden_size}, {num_attention_heads} heads"  # of a text model


class _Template(Formatter):
    """Fields may end in one of CONVERSIONS: `{seconds!m}`."""

    def convert_field(self, value, conversion):
        return CONVERSIONS[conversion](value) if conversion in CONVERSIONS else super().convert_field(value, conversion)


def fill(template: str, record: Mapping[str, Any], model: nn.Module, constants: Mapping[str, Any], **figures) -> str:
    """A card's text: its fields are those of the provenance, of the model, of the recipe's module, and figures."""
    text = (FOLDER / f"{template}.md").read_text(encoding="utf-8")
    own = {"record": record, "measured": record["measured"], "model": model}
    return _Template().vformat(text, (), {**constants, **own, **figures})


def table(rows: Iterable[Iterable[str]]) -> str:
    """Lines of a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def score_row(name: str, found: Mapping[str, Any], tasks: Iterable[str] = ()) -> list[str]:
    """Cells of a table of `painter_score.geneval`: GenEval, share of prompts, and tasks."""
    shares = [f"{found['tasks'].get(tag, float('nan')):.2f}" for tag in tasks]
    return [name, f"**{found['geneval']:.3f}**", f"{found['images']:.3f}", *shares]


def best_guidance(sweep: Iterable[Mapping[str, Any]]) -> float:
    """The guidance with the largest share of right pictures."""
    return max(sweep, key=lambda record: record["images"])["guidance"]


def millions(*parts: nn.Module) -> float:
    """Parameters of networks."""
    return sum(p.numel() for part in parts for p in part.parameters()) / 1e6


def cores(count: int | None) -> str:
    """Cores in words."""
    return "one CPU core" if count == 1 else "two CPU cores"


def half_precision_copy(model: Model, processor: ProcessorMixin, folder: Path, attention: str | None = None) -> Model:
    """A model as its folder gives it, where it is written in half precision; with transformers' `attention`."""
    save(model, processor, folder, torch.float16)
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def identity(weights: Path) -> dict[str, Any]:
    """Name, size and digest of a weight file."""
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return {"file": weights.name, "bytes": weights.stat().st_size, "sha256": digest}


def read_stage(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint of a stage, and its steps, seconds and last loss."""
    saved = torch.load(file, weights_only=True)
    return saved, {"steps": saved["step"], "seconds": round(saved["seconds"]), "loss": saved["loss"]}


def read_stages(folder: Path, files: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both of several stages, by the names of their parts in the provenance."""
    read = {part: read_stage(folder / file) for part, file in files.items()}
    return {part: saved for part, (saved, _) in read.items()}, {part: stage for part, (_, stage) in read.items()}


def origin(model: nn.Module, recipe: str, folder: Path, measured: dict, **more: Any) -> dict[str, Any]:
    """The provenance of a finished folder, which is written; `more` are seeds and steps of the recipe's stages."""
    versions: dict[str, Any] = {"numpy": np.__version__, "pillow": PIL.__version__}
    stored: dict[str, Any] = {"compute_dtype": COMPUTED[BFLOAT16], "stored_dtype": "float16"}
    weights = identity(folder / "model.safetensors")
    record = provenance(model, recipe=recipe, **versions, **(stored | more), weights=weights, measured=measured)
    write_json(folder / PROVENANCE, record)
    return record


def publish(folder: Path, card: str) -> None:
    """Write the card; the weights, which safetensors writes private, can be read by all: packages copy the mode."""
    (folder / README).write_text(card, encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)


def describe(
    options: argparse.Namespace, name: str, model: nn.Module, measured: dict, about: dict, constants: dict, **figures
) -> None:
    """Write the provenance and the card of `options.out / name`; `about` is of the provenance, beside pairs and rows a
    step, `constants` those of the recipe's module, `figures` what else the card says.
    """
    folder, about = options.out / name, {"rows": options.rows * options.workers, "pairs": options.pairs} | about
    record = origin(model, f"visspec.toys {constants['PAINTER'].name}", folder, measured, **about)
    seen = about["draw"]["steps"] * about["rows"]
    publish(folder, fill(name, record, model, constants, options=options, seen=seen, **figures))


def describe_drafter(
    options: argparse.Namespace,
    name: str,
    drafter: PreTrainedModel,
    load: Callable[[Path], nn.Module],
    about: dict,
    constants: dict,
) -> None:
    """Write a drafter that was taught in a painter's recipe, in half precision, and describe it."""
    save(drafter, None, options.out / name, torch.float16)
    measured = {"distance": about["drafter"]["loss"]}
    describe(options, name, load(options.out / name), measured, about, constants)


def say(folder: Path, **figures) -> None:
    """The last line of a recipe."""
    print(json.dumps({"folder": str(folder), **figures}), flush=True)
