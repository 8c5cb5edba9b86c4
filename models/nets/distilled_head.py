"""The network of a distilled drafter: from a place's noise to its code, many places at a time.

It reads guesses of the codes between those that are known and each place, and gives the target's law after guidance;
the argmax of that law and the place's Gumbel numbers is the next guess (`models.drafters.distilled`). Places that have
no guess yet hold one learned vector. Guesses see those before them, and of what is known the target's own hidden
states, which are keys and values of every layer but are not processed further.

Element t of a picture holds code t and is asked for code t + 1. Those of a prompt are counted back from it.
Shapes: B rows, T elements, S elements of the memory, C channels of a rotation, d hidden size of the target, w width, V
codes, H heads, E head size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.checkpoint import check_positive, check_whole, shown
from visspec.models.nets.feature_head import MOST_LAYERS, RMSNorm, rotate, rotations, unit
from visspec.types import MAX_NODES

BEFORE = 64  # positions of rotations before the first code; longer prompts share the first of them
DEVIATION = 0.02  # of initial weights
KNOWN, GUESSED, BLANK = range(3)  # kinds of an element: a code of the target, a guess, none


@dataclass(frozen=True)
class DistilledConfig:
    """Configuration of the network and of its target, whose pictures have `rows` rows of `columns` positions, row ends
    included. `vocab` includes codes and grammar ids. guidance, temperature: of the laws that it was taught.
    """

    family: str
    vocab: int
    hidden: int
    target_layers: int
    codes: int
    rows: int
    columns: int
    width: int = 256
    layers: int = 3
    heads: int = 4
    intermediate: int = 512
    guidance: float = 1.0
    temperature: float = 1.0
    rope_theta: float = 10000.0
    levels: int = 24

    def __post_init__(self):
        if not isinstance(self.family, str):
            raise ValueError(f"family: got {shown(self.family)}, expected a name")
        for name in ("vocab", "hidden", "rows", "columns", "width", "heads", "intermediate"):
            check_whole(name, getattr(self, name))
        for name, high in (
            ("codes", self.vocab), ("target_layers", MOST_LAYERS), ("layers", MOST_LAYERS), ("levels", MAX_NODES - 1)
        ):  # fmt: skip
            check_whole(name, getattr(self, name), 1, high)
        for name in ("guidance", "temperature", "rope_theta"):
            check_positive(name, getattr(self, name))
        if self.width % (2 * self.heads):
            raise ValueError(f"heads: got {self.heads}, expected an even share of the width {self.width}")

    @property
    def positions(self) -> int:
        return self.rows * self.columns

    def to_dict(self) -> dict:
        return asdict(self)


class Layer(nn.Module):
    """A decoder layer whose attention also sees a memory."""

    def __init__(self, config: DistilledConfig):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm_in, self.norm_mlp = RMSNorm(width), RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, width, bias=False)

    def stored(self, x_BSw: Tensor, turn_BSC: Tensor) -> Tensor:
        """Rotated keys, and values, of normalised elements: (2, B, H, S, E)."""
        key, value = self.key_value(x_BSw).unflatten(-1, (2, self.heads, -1)).unbind(2)
        return torch.stack([rotate(key, turn_BSC), value]).transpose(2, 3)

    def forward(self, x_BTw: Tensor, turn_BTC: Tensor, memory: Tensor, mask_BTS: Tensor) -> Tensor:
        """memory (2, B, H, S, E) as `stored` gives it; mask: additive, or true where an element sees one of the memory
        or, behind it, of its own: (B, T, S + T).
        """
        x = self.norm_in(x_BTw)
        query = rotate(self.query(x).unflatten(-1, (self.heads, -1)), turn_BTC).transpose(1, 2)
        key, value = torch.cat([memory, self.stored(x, turn_BTC)], dim=3)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_BTS[:, None])
        x_BTw = x_BTw + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mlp(x_BTw)).chunk(2, dim=-1)
        return x_BTw + self.down(F.silu(gate) * up)


class DistilledHead(nn.Module):
    """Trainable weights of a distilled drafter. Embeddings of codes and words are the target's."""

    kind: ClassVar[str] = "distilled_drafter"  # identifies its checkpoints
    config_class: ClassVar[type[DistilledConfig]] = DistilledConfig

    def __init__(self, config: DistilledConfig):
        super().__init__()
        self.config, width = config, config.width
        self.embed_in = nn.Linear(config.hidden, width, bias=False)
        self.state_in = nn.Linear(config.hidden, width, bias=False)
        self.kinds = nn.Parameter(torch.empty(3, width))
        self.row, self.column = nn.Embedding(config.rows, width), nn.Embedding(config.columns, width)
        self.norm_memory, self.norm_out = RMSNorm(width), RMSNorm(width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.codes = nn.Linear(width, config.codes)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for table in (self.kinds, self.row.weight, self.column.weight):
            table.normal_(std=0.3)
        for layer in self.layers:
            for last in (layer.out, layer.down):
                last.weight.mul_(0.3)
        self.codes.weight.normal_(std=DEVIATION)
        self.codes.bias.zero_()

    def turns(self, element: Tensor) -> Tensor:
        """Rotations of elements (B, T), those of a prompt below 0: (B, T, C)."""
        size = self.config.width // self.config.heads
        table = rotations(BEFORE + self.config.positions, size, self.config.rope_theta, element.device)
        return table[(element + BEFORE).clamp(0, len(table) - 1)]

    def asked(self, element: Tensor) -> Tensor:
        """What says which place elements are asked for, zero for those of a prompt: (B, T) -> (B, T, w)."""
        place = (element + 1).clamp(0, self.config.positions - 1)
        found = self.row(place // self.config.columns) + self.column(place % self.config.columns)
        return found * (element >= 0)[..., None]

    def remembered(self, embed: Tensor, state: Tensor, element: Tensor) -> Tensor:
        """Elements that the target has read, as the memory of all layers: embeddings and states (B, S, d), elements
        (B, S) -> (layers, 2, B, H, S, E).
        """
        x = self.norm_memory(self.embed_in(unit(embed)) + self.state_in(unit(state)) + self.asked(element))
        turn = self.turns(element)
        return torch.stack([layer.stored(x, turn) for layer in self.layers])  # type: ignore[operator]

    def forward(self, embed: Tensor, kind: Tensor, element: Tensor, memory: Tensor, mask_BTS: Tensor) -> Tensor:
        """Logits (B, T, V) of the codes that elements are asked for, at temperature 1, guidance applied.

        embed (B, T, d): of each element's code, any where there is none; kind (B, T): KNOWN, GUESSED or BLANK; memory
        as `remembered`; mask as in `Layer`.
        """
        held = self.embed_in(unit(embed)) * (kind != BLANK)[..., None]
        x, turn = held + self.kinds[kind] + self.asked(element), self.turns(element)
        for layer, own in zip(self.layers, memory):
            x = layer(x, turn, own, mask_BTS)
        return self.codes(self.norm_out(x)) * self.config.temperature
