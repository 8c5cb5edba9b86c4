"""Building blocks of networks: a root-mean-square norm, rotary embeddings of adjacent channels, and helpers.

Shapes: B rows, T elements, H heads, E head size, P positions, C = E / 2 channels of a rotation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import logging

from visspec.io.checkpoint import first_line

TINY = 1e-6
MOST_LAYERS = 1 << 14  # maximum number of layers of a target
ROPE_SCALINGS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
OPTIONAL_FACTORS = {"yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}}


def depth(model: PreTrainedModel) -> int:
    """Number of layers that have a hidden state; LongCat's configuration counts halves of its layers."""
    layers = getattr(model.get_decoder(), "layers", None)
    return model.config.get_text_config().num_hidden_layers if layers is None else len(layers)


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which transformers logs errors only."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_exactly(kind: Any, argument: str, where: object, **options: object) -> Any:
    """Load a transformers model and require exactly its tensors. ValueErrors start with the argument's name."""
    try:
        with quiet():  # its reports on tensors become one error below
            model, info = kind.from_pretrained(str(where), use_safetensors=True, output_loading_info=True, **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # raised by whichever library checks the wrong entry
        raise ValueError(f"{argument}: {where} could not be loaded, {first_line(error)}.") from None
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(keys):
            name = sorted(map(str, info[keys]))[0]
            raise ValueError(
                f"{argument}: {where} has {keys.replace('_', ' ')} ({name}), expected the model's tensors."
            )
    return model


def same_table(a: Tensor, b: Tensor, atol: float) -> bool:
    return a.shape == b.shape and torch.allclose(a.to(b), b, atol=atol)


def unit(x: Tensor) -> Tensor:
    """Divide x by its root mean square along the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).clamp(min=TINY)
    return x * (math.sqrt(x.shape[-1]) / norm).to(x.dtype)


def over_vocabulary(logits: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """Expand logits (..., D) of some target ids (D,) to all ids (..., V), -inf elsewhere. ids None: all, unchanged."""
    if ids is None:
        return logits
    return logits.new_full((*logits.shape[:-1], vocab), float("-inf")).index_copy_(-1, ids, logits)


class Network(nn.Module):
    """Base class of networks whose parameters share one device and one dtype."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class GeluMLP(nn.Module):
    """Two linear layers with a GELU between them, with timm's names."""

    def __init__(self, width: int, hidden: int, out: int, bias: bool = True, approximate: str = "none"):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, out, bias=bias)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


def rotations(length: int, size: int, theta: float, device: torch.device | str) -> Tensor:
    """Return exp(i * position * frequency) for positions [0, length), complex64 (length, size / 2)."""
    frequency = theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    return torch.polar(torch.ones_like(angle), angle)


def grid_rotations(place: Tensor, size: int, theta: float) -> Tensor:
    """Return rotations (..., E / 2), complex64, of a head's pairs at places (..., 2), the first half by row and the
    second by column, computed in float32 whatever the model's dtype.
    """
    frequency = theta ** -(torch.arange(0, size, 4, device=place.device, dtype=torch.float32) / size)
    angle = (place[..., None] * frequency).flatten(-2)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x_BTHE: Tensor, turn_BTC: Tensor) -> Tensor:
    """Rotate pairs of adjacent channels, out of place, differentiably, in float32."""
    pairs = torch.view_as_complex(x_BTHE.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn_BTC[..., None, :]).flatten(-2).to(x_BTHE.dtype)
