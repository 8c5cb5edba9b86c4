"""The network of a distilled drafter, from the noise of many places to their codes.

It is a causal decoder over prompt and codes that gives the target's distributions *after* guidance from one stream. A
code may be a guess, or missing: the argmax of a place's distribution and its Gumbel numbers is the next guess
(`models.distilled.drafter`).

Element t of an image holds code t and predicts code t + 1; elements of a prompt have negative numbers. Known elements
are kept as keys and values, the memory. Embeddings of codes and words are the target's.

Shapes: B rows, T elements, S elements of the memory, C channels of a rotation, d hidden size, V codes, H heads, E head
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.io.checkpoint import check_whole
from visspec.models.drafting.checkpoint import DrafterConfig
from visspec.models.layers import MOST_LAYERS, rotate, rotations
from visspec.types import MAX_NODES

BEFORE = 64  # rotary positions before the first code; the start of longer prompts shares the first of them
EPS = 1e-12  # of norms
KNOWN, GUESSED, BLANK = range(3)  # kinds of an element: a code of the target or a word, a guess, nothing


@dataclass(frozen=True)
class DistilledConfig(DrafterConfig):
    """Configuration of the network and of its target, whose images have `rows` rows of `columns` positions, including
    row ends. `vocab` counts codes and grammar ids.

    Args:
        guidance, temperature: Those of the distributions used in training.
    """

    target_layers: int
    codes: int
    rows: int
    columns: int
    layers: int
    heads: int
    intermediate: int
    guidance: float = 1.0
    temperature: float = 1.0
    rope_theta: float = 10000.0
    levels: int = 24

    def __post_init__(self):
        super().__post_init__()
        check_whole("layers", self.layers, 1, MOST_LAYERS)
        check_whole("levels", self.levels, 1, MAX_NODES - 1)
        if self.hidden % (2 * self.heads):
            raise ValueError(f"heads: got {self.heads}, expected an even share of the hidden size {self.hidden}.")

    @property
    def positions(self) -> int:
        return self.rows * self.columns


class DistilledLayer(nn.Module):
    """A decoder layer whose attention also sees a memory."""

    def __init__(self, config: DistilledConfig):
        super().__init__()
        d, self.heads = config.hidden, config.heads
        self.norm_in, self.norm_mlp = nn.RMSNorm(d, eps=EPS), nn.RMSNorm(d, eps=EPS)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.gate_up = nn.Linear(d, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, d, bias=False)

    def forward(self, x_BTd: Tensor, turn_BTC: Tensor, memory: Tensor, mask_BTS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, and its elements' rotated keys and values, (2, B, H, T, E), for the memory. mask:
        true where an element sees an element of the memory or, after those, one of its own pass, (B, T, S + T).
        """
        query, key, value = self.qkv(self.norm_in(x_BTd)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        own = torch.stack([rotate(key, turn_BTC), value]).transpose(2, 3)
        keys, values = torch.cat([memory, own], dim=3)
        query = rotate(query, turn_BTC).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask_BTS[:, None])
        x_BTd = x_BTd + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mlp(x_BTd)).chunk(2, dim=-1)
        return x_BTd + self.down(F.silu(gate) * up), own

    def copy(self, layer: Any) -> bool:
        """Copy the weights of a decoder layer (named as Llama's) if it has this structure. Returns whether it has."""
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        parts: list[Any] = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
        parts += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
        if not all(type(part) is nn.Linear and part.bias is None for part in parts) or hasattr(attention, "q_norm"):
            return False
        query, key, value, out, gate, up, down = (part.weight for part in parts)
        if not query.shape == out.shape == self.out.weight.shape or down.shape != self.down.weight.shape:
            return False
        repeat, heads = len(query) // len(key), (self.heads, -1)
        key, value = (part.unflatten(0, (-1, len(query) // self.heads)) for part in (key, value))
        key, value = (part.repeat_interleave(repeat, dim=0).flatten(0, 1) for part in (key, value))  # grouped heads
        # rotated channel pairs are half a head apart in transformers, and adjacent here
        query, key = (
            part.unflatten(0, heads).unflatten(1, (2, -1)).transpose(1, 2).flatten(0, 2) for part in (query, key)
        )
        pairs: list[tuple[Any, Tensor]] = [(self.qkv, torch.cat([query, key, value])), (self.out, out)]
        pairs += [(self.gate_up, torch.cat([gate, up])), (self.down, down)]
        pairs += [(self.norm_in, layer.input_layernorm.weight), (self.norm_mlp, layer.post_attention_layernorm.weight)]
        for part, weight in pairs:
            part.weight.copy_(weight)
        return True


class DistilledHead(nn.Module):
    """Trainable weights of a distilled drafter."""

    kind: ClassVar[str] = "distilled_drafter"  # identifies its checkpoints
    config_class: ClassVar[type[DistilledConfig]] = DistilledConfig

    def __init__(self, config: DistilledConfig):
        super().__init__()
        self.config, d = config, config.hidden
        self.kinds = nn.Parameter(torch.zeros(3, d))
        self.row, self.column = nn.Embedding(config.rows, d), nn.Embedding(config.columns, d)
        self.layers = nn.ModuleList(DistilledLayer(config) for _ in range(config.layers))
        self.norm_out, self.inner, self.codes = nn.RMSNorm(d, eps=EPS), nn.Linear(d, d), nn.Linear(d, config.codes)
        for table in (self.row, self.column):
            nn.init.zeros_(table.weight)

    def empty(self, rows: int) -> Tensor:
        config, like = self.config, self.kinds
        return like.new_zeros(config.layers, 2, rows, config.heads, 0, config.hidden // config.heads)

    @torch.no_grad()
    def start_from(self, decoder: Any, mlp_head: tuple[nn.Linear, nn.Linear] | None) -> None:
        """Copy the first layers of a target's decoder, its last layer and its head, if their shapes match."""
        own: Any = self.layers
        others = getattr(decoder, "layers", None)
        if others is None or decoder.config.num_attention_heads != self.config.heads:
            return
        if not all(layer.copy(other) for layer, other in zip(own, [*others[: len(own) - 1], others[-1]])):
            return
        self.norm_out.weight.copy_(decoder.norm.weight)
        pairs = zip((self.inner, self.codes), mlp_head or ())
        if mlp_head is not None and all(part.weight.shape == other.weight.shape for part, other in pairs):
            self.inner.load_state_dict(mlp_head[0].state_dict())
            state = mlp_head[1].state_dict()
            self.codes.load_state_dict({name: p / self.config.temperature for name, p in state.items()})

    def forward(
        self, embed: Tensor, kind: Tensor, element: Tensor, memory: Tensor, mask_BTS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return states (B, T, d) for `logits`, and keys and values (layers, 2, B, H, T, E) for the memory.

        embed (B, T, d): of each element's code or word, ignored where it is BLANK; kind, element (B, T): elements of a
        prompt are negative; memory (layers, 2, B, H, S, E); mask: see `DistilledLayer`.
        """
        x = embed * (kind != BLANK)[..., None] + self.kinds[kind] + self._query(element)
        turn, stored = self._turns(element), []
        for layer, own in zip(self.layers, memory):
            x, fresh = layer(x, turn, own, mask_BTS)
            stored.append(fresh)
        return x, torch.stack(stored)

    def logits(self, x_BTd: Tensor) -> Tensor:
        """Return logits (B, T, V) of the codes that elements predict, at temperature 1, after guidance."""
        return self.codes(F.gelu(self.inner(self.norm_out(x_BTd)))) * self.config.temperature

    def _turns(self, element: Tensor) -> Tensor:
        size = self.config.hidden // self.config.heads
        table = rotations(BEFORE + self.config.positions, size, self.config.rope_theta, element.device)
        return table[(element + BEFORE).clamp(0, len(table) - 1)]

    def _query(self, element: Tensor) -> Tensor:
        """Return the embedding of the predicted place, zero for elements of a prompt: (B, T) -> (B, T, d)."""
        place = (element + 1).clamp(0, self.config.positions - 1)
        embedded = self.row(place // self.config.columns) + self.column(place % self.config.columns)
        return embedded * (element >= 0)[..., None]
