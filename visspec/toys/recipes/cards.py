"""What the recipes write beside finished weights: where they are from, and the card."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from transformers import PreTrainedModel

from visspec.io.provenance import provenance

HEAD = """---
license: apache-2.0
pipeline_tag: {task}
library_name: transformers
---

# visspec {name}
"""


def identity(weights: Path) -> dict[str, Any]:
    """Name, size and digest of a weight file."""
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return {"file": weights.name, "bytes": weights.stat().st_size, "sha256": digest}


def origin(model: PreTrainedModel, recipe: str, folder: Path, measured: dict, **more: Any) -> dict[str, Any]:
    """The provenance of a finished folder; `more` are the seeds and steps of the recipe's stages."""
    versions: dict[str, Any] = {"numpy": np.__version__, "pillow": PIL.__version__}
    stored: dict[str, Any] = {"compute_dtype": "bfloat16 autocast over float32 weights", "stored_dtype": "float16"}
    weights = identity(folder / "model.safetensors")
    return provenance(model, recipe=recipe, **versions, **(stored | more), weights=weights, measured=measured)


def layers(sizes: dict[str, int]) -> str:
    """A text model's sizes in words."""
    return "{num_hidden_layers} layers of width {hidden_size}, {num_attention_heads} heads".format(**sizes)


def publish(folder: Path, card: str) -> None:
    """Write the card; the weights, which safetensors writes private, can be read by all: packages copy the mode."""
    (folder / "README.md").write_text(card)
    (folder / "model.safetensors").chmod(0o644)
