"""The one-layer network of a feature drafter as in ViSpec (NeurIPS 2025, arXiv 2509.15235).

An element of the draft sequence combines the target's feature after token t with the embedding of token t + 1. One
Llama-like decoder layer predicts the feature after token t + 1, which is decoded by the *target's* LM head. Each
contiguous run of image tokens is compressed by learned queries that cross-attend to the run's input embeddings: all
outputs but the last are separate elements; the last is a global vector, added to the features of later text.

Shapes: B rows, T elements, R image runs, S slots of a run, L latents, H heads, E head size, d hidden size, F features,
V vocabulary. Independent of model classes: token embeddings and LM head are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.io.checkpoint import check_whole, shorten
from visspec.models.drafting.checkpoint import DrafterConfig
from visspec.models.layers import FeatureRMSNorm, rotate, unit
from visspec.types import MAX_NODES


@dataclass(frozen=True)
class HeadConfig(DrafterConfig):
    """Configuration of the network and of its target.

    feature_layers: indices into the target's hidden_states (-1: last, after the final norm); any value but (-1,) adds
    a learned reduction F -> d (EAGLE-3). image_latents: elements per image run; with 0 images are not used, and there
    is no global vector. mrope_section: rotary channels per position row if the target uses M-RoPE, else ().
    """

    target_layers: int
    heads: int
    intermediate: int
    feature_layers: tuple[int, ...] = (-1,)
    image_latents: int = 1
    image_ids: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    mrope_section: tuple[int, ...] = ()
    levels: int = 8
    rope_scaling: ClassVar[dict | None] = None  # the next too as in `EagleConfig`
    partial_rotary_factor: ClassVar[float] = 1.0
    mrope_interleaved: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        check_whole("levels", self.levels, 1, MAX_NODES - 1)
        self.check_layers(-self.target_layers - 1, self.target_layers)
        half = self.hidden // self.heads // 2
        if self.hidden != 2 * half * self.heads:
            raise ValueError(f"heads: got {self.heads}, expected an even share of the hidden size {self.hidden}")
        if self.mrope_section and sum(self.mrope_section) != half:
            raise ValueError(f"mrope_section: got {shorten(self.mrope_section)}, expected numbers that sum to {half}")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def rotated(self) -> int:
        return self.head_size

    @property
    def key_heads(self) -> int:
        return self.heads

    @property
    def reduced(self) -> bool:
        """Whether features pass through a learned reduction."""
        return self.feature_layers != (-1,)

    @property
    def parts(self) -> int:
        """Number of hidden states per token, concatenated, that the target provides."""
        return len(self.feature_layers)


class ImageAdaptor(nn.Module):
    """Learned queries over the input embeddings of one image run: (R, S, d) -> (R, L + 1, d)."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        d, self.heads, count = config.hidden, config.heads, config.image_latents + 1
        self.norm = FeatureRMSNorm(d)
        self.queries = nn.Parameter(torch.randn(count, config.heads, config.head_size))
        self.key = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, image_RSd: Tensor, real_RS: Tensor) -> Tensor:
        x = self.norm(image_RSd)
        key, value = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.key, self.value))
        query = self.queries.transpose(0, 1).expand(x.shape[0], -1, -1, -1).to(key.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=real_RS[:, None, None])
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeatureHead(nn.Module):
    """Trainable weights of the drafter. For drafting they are folded (`layer.FoldedLayer`)."""

    kind: ClassVar[str] = "feature_drafter"  # identifies its checkpoints
    config_class: ClassVar[type[HeadConfig]] = HeadConfig

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config, d, middle = config, config.hidden, config.intermediate
        if config.reduced:
            self.reduce = nn.Linear(config.parts * d, d, bias=False)
        self.embed_norm = FeatureRMSNorm(d)
        self.fc = nn.Linear(2 * d, d)
        if config.image_latents:
            self.adaptor = ImageAdaptor(config)
            self.img_fc = nn.Linear(2 * d, d)
        self.norm_in = FeatureRMSNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.norm_mlp = FeatureRMSNorm(d)
        self.gate_up = nn.Linear(d, 2 * middle, bias=False)
        self.down = nn.Linear(middle, d, bias=False)
        self.norm_out = FeatureRMSNorm(d)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        if self.config.image_latents:  # initially the identity on the feature, without the image (ViSpec)
            d = self.config.hidden
            self.img_fc.weight.copy_(torch.cat([torch.eye(d), torch.zeros(d, d)], dim=1))
            self.img_fc.bias.zero_()
            self.adaptor.queries.mul_(4.0)  # with ViSpec's E**-0.5 every query starts as the mean of the image
        for layer in (self.out, self.down):
            layer.weight.mul_(0.3)

    def reduced(self, feature: Tensor) -> Tensor:
        """Target features (..., F) -> (..., d); each part is normalised first."""
        if not self.config.reduced:
            return feature
        parts = feature.unflatten(-1, (self.config.parts, -1))
        return self.reduce(unit(parts).flatten(-2))

    def join(self, embed: Tensor, feature: Tensor, image: Tensor | None) -> Tensor:
        """Layer input of text elements: fc([norm(embedding); img_fc([feature; global vector])]). All (..., d)."""
        if self.config.image_latents:
            assert image is not None
            feature = self.img_fc(torch.cat([feature, image], dim=-1))
        return self.fc(torch.cat([self.embed_norm(embed), feature], dim=-1))

    def project(self, x_BTd: Tensor, turn_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each (B, T, H, E)."""
        qkv = self.qkv(self.norm_in(x_BTd)).unflatten(-1, (3, self.config.heads, self.config.head_size))
        query, key, value = qkv.unbind(2)
        return rotate(query, turn_BTC), rotate(key, turn_BTC), value

    def keys_values(self, x_BTd: Tensor, turn_BTC: Tensor) -> Tensor:
        """Rotated keys, and values, (B, T, 2H, E), as `project` has them; for inference."""
        d, heads = self.config.hidden, self.config.heads
        kv = F.linear(self.norm_in(x_BTd), self.qkv.weight[d:]).unflatten(-1, (2 * heads, self.config.head_size))
        kv[:, :, :heads] = rotate(kv[:, :, :heads], turn_BTC)
        return kv

    def after_attention(self, x_BTd: Tensor, query: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """The layer behind its queries: `finish` of what they attend to."""
        return self.finish(x_BTd, attend(query))

    def finish(self, x_BTd: Tensor, attended_BTd: Tensor) -> Tensor:
        """The layer after attention, and the norm before the target's LM head."""
        x = x_BTd + self.out(attended_BTd)
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=-1)
        return self.norm_out(x + self.down(F.silu(gate) * up))


def staggered_attention(query: Tensor, part: int | None = None, *, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of self-fed step k = len(keys) - 1, all (B, T, H, E) -> (B, T, H * E). part: the half of the keys and
    values, by number, if there are twice as many as queries.

    Element t attends to step 0 up to t - k (true features) and to one element of each later step i: t - k + i, the
    chain that drafting would leave in the cache (EAGLE-3's training-time test, arXiv 2503.01840). Cost is linear in k.
    """
    if part is not None:
        keys, values = ([x.chunk(2, dim=2)[part] for x in both] for both in (keys, values))
    size, step = query.shape[1], len(keys) - 1
    scale = query.shape[-1] ** -0.5
    score = torch.einsum("bthe,bshe->bhts", query, keys[0]) * scale
    index = torch.arange(size, device=query.device)
    past = index[None, :] <= index[:, None] - step
    score = score.masked_fill(~past, torch.finfo(score.dtype).min)
    ahead_key, ahead_value = ([_delay(x, step - i) for i, x in enumerate(p) if i] for p in (keys, values))
    own = [(query * k).sum(-1).transpose(1, 2)[..., None] * scale for k in ahead_key]
    weight = torch.cat([score, *own], dim=-1).float().softmax(dim=-1).to(query.dtype)
    mixed = torch.einsum("bhts,bshe->bthe", weight[..., :size], values[0])
    for i, value in enumerate(ahead_value):
        mixed = mixed + weight[..., size + i].transpose(1, 2)[..., None] * value
    return mixed.flatten(2)


def _delay(x_BTHE: Tensor, by: int) -> Tensor:
    """Shift: element t of the result is element t - by of x, or zero for t < by."""
    if by == 0:
        return x_BTHE
    return torch.cat([torch.zeros_like(x_BTHE[:, :by]), x_BTHE[:, :-by]], dim=1)
