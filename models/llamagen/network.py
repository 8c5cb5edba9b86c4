"""LlamaGen's autoregressive transformer (arXiv 2406.06525), for drafting and verification with an external cache.

A prefix of condition embeddings (one for a class, 120 for a caption) is followed by the codes of a square image in
raster order. Rotary embeddings are two-dimensional: the first half of a head's channels is rotated by the row of a
code, the second half by its column. Parameters have the names of the published checkpoints.

Shapes: B rows, N new positions, S positions in the cache, P prefix, T image positions, H heads, K key-value heads,
E head size, C = E / 2 channel pairs, d hidden size, F caption features, V codes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from visspec.io.checkpoint import check_choice
from visspec.models.attention.pass_inputs import SlotLayers
from visspec.models.layers import GeluMLP, Network, grid_rotations, rotate

SIZES = {  # name: (layers, heads, hidden size); the first five are class-conditional in the paper
    "B": (12, 12, 768),
    "L": (24, 16, 1024),
    "XL": (36, 20, 1280),
    "XXL": (48, 24, 1536),
    "XXXL": (48, 40, 2560),
    "1B": (22, 32, 2048),
    "3B": (24, 32, 3200),
    "7B": (32, 32, 4096),
}
CONDITIONS = ("class", "caption")
GUIDANCE = {"class": 4.0, "caption": 7.5}  # from the authors' sampling scripts
CAPTION_WIDTH = 2048  # of the T5-XL features that the published models expect
STEP = 256  # the width of the feed-forward layer is a multiple of this


@dataclass(frozen=True)
class LlamaGenConfig:
    """Configuration of the network.

    condition: 'class' (an embedding per class, and one for "no class") or 'caption' (text features through an MLP).

    Args:
        null_class: Whether that extra class exists, which guidance needs; models trained without class dropout lack it.
        grid: Number of rows and of columns of codes. The weights don't contain it; a wrong value gives wrong images.
        prefix_apart: Whether all positions of the prefix are attended to alike, as in the published models.
    """

    layers: int
    heads: int
    hidden_size: int
    grid: int
    condition: str = "class"
    prefix: int = 1
    classes: int = 1000
    null_class: bool = True
    caption_width: int = CAPTION_WIDTH
    codes: int = 16384
    kv_heads: int = 0  # 0: as many as heads
    intermediate: int = 0  # 0: two thirds of four times the hidden size, rounded up to a multiple of STEP
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    prefix_apart: bool = True
    _attn_implementation: str = field(default="sdpa", init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        usual = -(-(8 * self.hidden_size // 3) // STEP) * STEP
        object.__setattr__(self, "intermediate", self.intermediate or usual)
        if self.hidden_size % (4 * self.heads):
            raise ValueError(f"hidden_size: got {self.hidden_size}, expected a multiple of 4 * {self.heads} heads.")
        check_choice("condition", self.condition, CONDITIONS)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads

    @property
    def num_hidden_layers(self) -> int:
        return self.layers

    @property
    def num_attention_heads(self) -> int:
        return self.heads

    @property
    def intermediate_size(self) -> int:
        return self.intermediate

    def get_text_config(self, decoder: bool = True) -> LlamaGenConfig:
        """Return itself, for compatibility with transformers' configurations."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


def turns(
    prefix: int, grid: int, head_size: int, theta: float, device: torch.device | str = "cpu", apart: bool = True
) -> Tensor:
    """Return the rotary table, complex64 (P + 2 T, C): exp(i * row * frequency), then exp(i * column * frequency).

    As in the published models, queries and keys of the prefix are multiplied by zero instead of left unrotated, so that
    a code attends to all prefix positions equally, unless `apart` is false. The table is longer than the image, for
    drafts that extend beyond its end.
    """
    place = torch.arange(2 * grid * grid, device=device)
    codes = grid_rotations(torch.stack([place // grid, place % grid], dim=-1), head_size, theta)
    return torch.cat([codes.new_full((prefix, head_size // 2), 0.0 if apart else 1.0), codes])


class LlamaGenAttention(nn.Module):
    def __init__(self, config: LlamaGenConfig, layer: int):
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, config.heads, config.kv_heads
        self.wqkv = nn.Linear(config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BNd: Tensor, turn_BNC: Tensor, mask: Tensor | None, cache: SlotLayers | None) -> Tensor:
        """Attend.

        Args:
            mask: (1|B, 1, N, S), additive or bool (true: attends); None: causal.
        """
        split = [self.heads, self.kv_heads, self.kv_heads]
        heads = self.wqkv(x_BNd).unflatten(-1, (sum(split), -1))
        query, key, value = heads.split(split, dim=-2)
        query, key, value = (x.transpose(1, 2) for x in (rotate(query, turn_BNC), rotate(key, turn_BNC), value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        new, length = query.shape[2], key.shape[2]
        if mask is None and 1 < new < length:  # SDPA would align a causal mask with the first key
            mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype),
            is_causal=mask is None and new > 1,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.wo(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate, bias=False)
        self.w2 = nn.Linear(config.intermediate, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaGenLayer(nn.Module):
    def __init__(self, config: LlamaGenConfig, layer: int):
        super().__init__()
        self.attention_norm = LlamaRMSNorm(config.hidden_size, config.norm_eps)
        self.attention = LlamaGenAttention(config, layer)
        self.ffn_norm = LlamaRMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, turn_BNC: Tensor, mask: Tensor | None, cache: SlotLayers | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn_BNC, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class ClassCondition(nn.Module):
    """Embeds class numbers (B,) as (B, 1, d). With a null class, the last entry of the table is "no class"."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.embedding_table = nn.Embedding(config.classes + config.null_class, config.hidden_size)

    def forward(self, classes_B: Tensor) -> Tensor:
        return self.embedding_table(classes_B)[:, None]

    def absent(self, classes_B: Tensor) -> Tensor:
        return torch.full_like(classes_B, self.embedding_table.num_embeddings - 1)


class CaptionCondition(nn.Module):
    """Embeds text features (B, P, F) as (B, P, d). `uncond_embedding`: learned features for "no caption"."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.cap_proj = GeluMLP(config.caption_width, config.hidden_size, config.hidden_size, False, "tanh")
        self.uncond_embedding = nn.Parameter(
            torch.randn(config.prefix, config.caption_width) * config.caption_width**-0.5
        )

    def forward(self, features_BPF: Tensor) -> Tensor:
        return self.cap_proj(features_BPF)

    def absent(self, features_BPF: Tensor) -> Tensor:
        return self.uncond_embedding.to(features_BPF.dtype).expand_as(features_BPF)


class LlamaGen(Network):
    """The transformer. Position ids count from the first prefix position: the code of index t has position P + t.

    The hidden state of the last prefix position, or of a code, predicts the next code.
    """

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.config = config
        caption = config.condition == "caption"
        self.cls_embedding = CaptionCondition(config) if caption else ClassCondition(config)
        self.tok_embeddings = nn.Embedding(config.codes, config.hidden_size)
        self.layers = nn.ModuleList(LlamaGenLayer(config, i) for i in range(config.layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.norm_eps)
        self.output = nn.Linear(config.hidden_size, config.codes, bias=False)
        self._turns: Tensor | None = None  # not a buffer: a change of dtype must not round it

    @property
    def guided(self) -> bool:
        """Return whether the model has an unconditional embedding, which guidance needs."""
        return self.config.condition != "class" or self.config.null_class

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed codes (..., N) as (..., N, d)."""
        return self.tok_embeddings(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits of the next code (..., V) from hidden states (..., d)."""
        return self.output(hidden)

    def prefix(self, condition: Tensor, guidance: bool = False) -> Tensor:
        """Return the prefix, (B, P, d), or with guidance (2 B, P, d), the unconditional rows last.

        Args:
            condition: Class numbers (B,) int64, or text features (B, P, F), padded on the left and zero there
                (`left_padded`).
        """
        if self.config.condition != "class":
            condition = condition.to(self.dtype)
        if guidance and not self.guided:
            raise ValueError("guidance_scale: expected 1, because the model has no null class.")
        if guidance:
            condition = torch.cat([condition, self.cls_embedding.absent(condition)])
        return self.cls_embedding(condition)

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool = True,
        return_dict: bool = True,
        past_key_values: Cache | None = None,
    ) -> BaseModelOutputWithPast:
        """Return hidden states after the final norm, (B, N, d).

        Args:
            position_ids: (1|B, N), default 0..N - 1.
            attention_mask: (1|B, 1, N, S), additive or bool, None for causal.
            cache, past_key_values: Anything with `update(key, value, layer) -> (keys, values)`, all (B, K, ., E).
            use_cache, return_dict: For compatibility with transformers decoders; they are ignored.
        """
        cache = past_key_values if cache is None else cache
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        turn_BNC = self.rope_table(inputs_embeds.device)[position_ids]
        x = inputs_embeds
        for layer in self.layers:
            x = layer(x, turn_BNC, attention_mask, cache)
        return BaseModelOutputWithPast(self.norm(x), cache)

    def rope_table(self, device: torch.device) -> Tensor:
        """Return rotations by position, complex64 (P + 2 T, C)."""
        if self._turns is None or self._turns.device != device:
            config = self.config
            with torch.inference_mode(False):  # training may use the cached table, too
                self._turns = turns(
                    config.prefix, config.grid, config.head_size, config.rope_theta, device, config.prefix_apart
                )
        return self._turns


def left_padded(features_BPF: Tensor, real_BP: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding of text features from right to left and zero it. Returns them with their mask (B, P) bool."""
    real = real_BP.bool()
    order = real.long().argsort(dim=-1, stable=True)  # padding first, each part in its original order
    moved = features_BPF.gather(1, order[..., None].expand_as(features_BPF))
    mask = real.gather(1, order)
    return moved * mask[..., None], mask


class RandAR(LlamaGen):
    """RandAR (Pang et al., arXiv 2412.01827): LlamaGen over codes in any order, each queried by its place.

    The condition is followed by pairs of a query and a code, which have the same position id, P + place. The query of a
    place is one learned vector, rotated as a key at that place would be, and its output gives the distribution of the
    code at the place. Everything attends to what comes before it, so one causal pass over all pairs gives the
    distribution of every code given the earlier ones in the order (`forward`), and a query appended to any prefix gives
    the distribution of its place given that prefix.
    """

    def __init__(self, config: LlamaGenConfig):
        super().__init__(config)
        self.pos_instruct_embeddings = nn.Parameter(torch.randn(1, config.hidden_size) * 0.02)

    def query(self, places: Tensor) -> Tensor:
        """Return inputs (B, N, d) that query places (B, N), each below twice their number."""
        turn_BNC = self.rope_table(places.device)[self.config.prefix + places]
        query_HE = self.pos_instruct_embeddings.view(self.config.heads, -1)
        return rotate(query_HE.expand(*places.shape, -1, -1), turn_BNC).flatten(2)
