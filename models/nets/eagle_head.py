"""The published one-layer drafters as one network: EAGLE-1 and 2, EAGLE-3, and what MSD, HiViS and ViSpec make of them.

An element of the draft sequence has the target's features after token t and the embedding of token t + 1; one Llama
layer predicts the feature after token t + 1. What differs is data (`EagleConfig`):

* fusion "sum" (EAGLE, arXiv 2401.15077; EAGLE-2): the layer reads fc([embedding; feature]) without an input norm, its
  output is the next feature, and the target's LM head decodes it.
* fusion "split" (EAGLE-3, arXiv 2503.01840): fc reduces features of several layers, queries, keys and values read
  [norm(embedding); norm(feature)], the residual is the feature alone, and a norm and a head of the network's own over
  a part of the vocabulary decode it.
* images: what the slots of an image are in the draft sequence, see `IMAGES`.

Names of weights are those of the published checkpoints (`layers.0.self_attn.q_proj`, ...). Channels are rotated in
halves, as Llama's are. Shapes: B rows, T elements, R image runs, S slots of a run, H heads, K heads of keys, E head
size, d hidden size, F features, V vocabulary, D draft vocabulary, C = E / 2 rotations, P positions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.checkpoint import LARGEST, check_positive, check_whole, check_wholes, shown
from visspec.models.nets.feature_head import MOST_LAYERS
from visspec.types import MAX_NODES

IMAGES = {  # slots of an image in the draft sequence
    "slots": "as text: the target's feature and the next input embedding (EAGLE)",
    "placeholders": "as text, with the embedding of the placeholder id (EAGLE-3 as SpecForge and speculators train it)",
    "embeddings": "their input embeddings alone, which are layer inputs as they are (MSD, arXiv 2505.14260)",
    "latents": "a few learned latents, and a global vector for later text (ViSpec, arXiv 2509.15235)",
    "none": "no elements (HiViS, arXiv 2509.23928)",
    "blind": "no elements, and no features of the target in place of which zeros stand: a control",
}
SCALED: dict[str, set[str]] = {"default": set(), "linear": {"factor"}, "llama3": {
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
}}  # fmt: skip
FLAGS = (
    "fc_bias", "qkv_bias", "qk_norm", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "own_embedding", "mrope_interleaved",
)  # fmt: skip


@dataclass(frozen=True)
class EagleConfig:
    """Configuration of the network and of its target.

    feature_layers: indices into the target's hidden_states (-1: last, after the final norm). draft_vocab: ids that the
    network's own head predicts; 0: the target's head decodes. head_rank: of that head, as the product of two matrices
    (SlimSpec); 0: one matrix. rope_scaling: "default", "linear" or "llama3" with its
    factors by name. mrope_section: rotary channels per position row if the drafter's positions are M-RoPE's, else ().
    positions: "target", or "index", the number of the slot in the prompt, as ViSpec and MSD count.
    """

    family: str
    vocab: int
    hidden: int
    target_hidden: int
    target_layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    fusion: str = "sum"
    feature_layers: tuple[int, ...] = (-1,)
    draft_vocab: int = 0
    head_rank: int = 0
    images: str = "slots"
    image_latents: int = 0
    image_ids: tuple[int, ...] = ()
    positions: str = "target"
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    fc_bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    levels: int = 8

    def __post_init__(self):
        if not isinstance(self.family, str):
            raise ValueError(f"family: got {shown(self.family)}, expected a name")
        for name in ("vocab", "hidden", "target_hidden", "heads", "kv_heads", "intermediate"):
            check_whole(name, getattr(self, name))
        check_whole("head_size", self.head_size, 2, LARGEST)
        check_whole("target_layers", self.target_layers, 1, MOST_LAYERS)
        check_whole("draft_vocab", self.draft_vocab, 0, self.vocab)
        check_whole("head_rank", self.head_rank, 0, self.hidden)
        check_whole("image_latents", self.image_latents, 0)
        check_whole("levels", self.levels, 1, MAX_NODES - 1)
        for name in ("eps", "rope_theta"):
            check_positive(name, getattr(self, name))
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {shown(getattr(self, name))}, expected true or false")
        for name, known in (
            ("fusion", ("sum", "split")), ("images", tuple(IMAGES)), ("positions", ("target", "index"))
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {shown(getattr(self, name))}, expected one of {', '.join(known)}")
        depth = self.target_layers
        for name, low, high in (
            ("feature_layers", -depth - 1, depth), ("image_ids", 0, LARGEST), ("mrope_section", 0, self.head_size)
        ):  # fmt: skip
            object.__setattr__(self, name, check_wholes(name, getattr(self, name), low, high))
        self._check_forms()

    def _check_forms(self) -> None:
        """Raises ValueError for entries that do not go together."""
        if not self.feature_layers:
            raise ValueError("feature_layers: got (), expected at least one layer")
        if self.head_size % 2:
            raise ValueError(f"head_size: got {self.head_size}, expected an even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, expected a divisor of the {self.heads} heads")
        if self.mrope_section and sum(self.mrope_section) != self.head_size // 2:
            expected = f"numbers that sum to {self.head_size // 2}"
            raise ValueError(f"mrope_section: got {shown(self.mrope_section)}, expected {expected}")
        if (self.images == "latents") != (self.image_latents > 0):
            raise ValueError(
                f"image_latents: got {self.image_latents} with images {self.images!r}, expected a count above 0 with"
                " latents and 0 without"
            )
        if self.images == "embeddings" and self.fusion == "split":
            raise ValueError("images: got 'embeddings' with fusion 'split', expected fusion 'sum'")
        if self.images == "latents" and (self.fusion == "split" or self.heads * self.head_size != self.hidden):
            raise ValueError("images: got 'latents', expected fusion 'sum' and heads that share the hidden size")
        if self.fusion == "sum" and (self.hidden != self.target_hidden or self.feature_layers != (-1,)):
            raise ValueError(
                f"fusion: got 'sum' with hidden size {self.hidden} and layers {list(self.feature_layers)}, expected the"
                f" target's {self.target_hidden} and its last layer"
            )
        if self.hidden != self.target_hidden and not (self.own_embedding and self.draft_vocab):
            raise ValueError(
                f"hidden: got {self.hidden} and a target of {self.target_hidden}, expected an embedding and a head of"
                " the drafter's own"
            )
        if self.hidden != self.target_hidden and self.images in ("slots", "embeddings", "latents"):
            raise ValueError(
                f"images: got {self.images!r} with hidden size {self.hidden}, expected the target's"
                f" {self.target_hidden}, whose embeddings it reads"
            )
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
        if self.fusion == "sum" and (named := [name for name in flags if getattr(self, name)]):
            raise ValueError(f"{named[0]}: got true with fusion 'sum', expected fusion 'split'")
        if self.head_rank and not self.draft_vocab:
            raise ValueError(
                f"head_rank: got {self.head_rank} with draft_vocab 0, expected a head of the drafter's own"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc, fc_norm: got both, expected one of them")
        self._check_rope()

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
        if kind not in SCALED or set(scaling) != SCALED[kind] | {"rope_type"}:
            raise ValueError(
                f"rope_scaling: got {shown(scaling)}, expected the rope_type {', '.join(SCALED)} with its factors"
            )
        for name in SCALED[kind]:
            check_positive(name, scaling[name])

    @property
    def reduced(self) -> bool:
        """Whether features are not read as they are."""
        return self.fusion == "split" or self.images == "blind"

    @property
    def parts(self) -> int:
        """Number of hidden states per token, concatenated, that the target provides."""
        return len(self.feature_layers)

    def to_dict(self) -> dict:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale, computed in float32 as Llama's."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def frequencies(config: EagleConfig, device: torch.device | str) -> Tensor:
    """Angle per position of each rotary channel, float32 (C,). "llama3" lengthens the wave of those that turn less than
    `low_freq_factor` times in the original length by `factor`, keeps those of more than `high_freq_factor`, and blends
    in between (Llama 3.1).
    """
    size = config.head_size
    plain_C = config.rope_theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    scaling = config.rope_scaling or {}
    if "low_freq_factor" not in scaling:
        return plain_C / scaling.get("factor", 1.0)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_C = scaling["original_max_position_embeddings"] * plain_C / (2 * torch.pi)
    share_C = ((turns_C - low) / (high - low)).clamp(0.0, 1.0)
    return plain_C * (share_C + (1.0 - share_C) / scaling["factor"])


def turns(config: EagleConfig, length: int, device: torch.device | str) -> Tensor:
    """exp(i * position * frequency) for positions [0, length), complex64 (P, C)."""
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies(config, device)
    return torch.polar(torch.ones_like(angle), angle)


def turns_at(table_PC: Tensor, position: Tensor, section: tuple[int, ...], interleaved: bool) -> Tensor:
    """Rotations of elements, (B, T, C): position is (B, T), or (3, B, T) with `section` channels per row, in blocks or
    interleaved (time, height, width, time, ... as long as a row has channels left, then time; Qwen3-VL).
    """
    if position.dim() == 2:
        return table_PC[position]
    if not section:
        return table_PC[position[0]]
    row_C = torch.tensor([row for row, count in enumerate(section) for _ in range(count)], device=table_PC.device)
    if interleaved:
        channel_C = torch.arange(len(row_C), device=table_PC.device)
        row_C = channel_C % 3
        row_C = torch.where(channel_C < 3 * torch.tensor(section, device=table_PC.device)[row_C], row_C, 0)
    return table_PC[position.permute(1, 2, 0)[..., row_C], torch.arange(len(row_C), device=table_PC.device)]


def turned(x_BTHE: Tensor, turn_BTC: Tensor) -> Tensor:
    """Rotate channel c with channel c + E / 2. Out of place, differentiable, in float32."""
    real, imaginary = x_BTHE.float().chunk(2, dim=-1)
    turn = turn_BTC[..., None, :]
    cos, sin = turn.real, turn.imag
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1).to(x_BTHE.dtype)


class Attention(nn.Module):
    """Projections of the layer; `project` and `keys_values` of the head apply them."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        d, size = config.hidden, config.head_size
        read = 2 * d if config.fusion == "split" else d
        self.q_proj = nn.Linear(read, config.heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(read, config.kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(read, config.kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * size, d, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(size, config.eps), RMSNorm(size, config.eps)


class MLP(nn.Module):
    """SiLU-gated, as Llama's."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Weights of the decoder layer; EAGLE-1's first layer has no input norm."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        if config.fusion == "split":
            self.input_layernorm = RMSNorm(config.hidden, config.eps)  # of the embedding
            self.hidden_norm = RMSNorm(config.hidden, config.eps)  # of the feature
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)


class ImageAdaptor(nn.Module):
    """ViSpec's learned queries over the input embeddings of an image run: (R, S, d) -> (R, L + 1, d)."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        d, self.heads, size = config.hidden, config.heads, config.head_size
        self.q = nn.Parameter(torch.randn(config.image_latents + 1, config.heads, size) * size**-0.5)
        self.k_proj = nn.Linear(d, d, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, d, bias=config.qkv_bias)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, image_RSd: Tensor, real_RS: Tensor) -> Tensor:
        key, value = (f(image_RSd).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        query = self.q.transpose(0, 1).expand(len(image_RSd), -1, -1, -1).to(key.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=real_RS[:, None, None])
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class LowRank(nn.Module):
    """A head over a vocabulary as the product of two matrices: (..., d) -> (..., D)."""

    def __init__(self, hidden: int, rank: int, vocab: int):
        super().__init__()
        self.down, self.up = nn.Linear(hidden, rank, bias=False), nn.Linear(rank, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))

    @torch.no_grad()
    def approximate(self, weight_Dd: Tensor) -> None:
        """Become the closest such head, by squares: projections on the leading eigenvectors of its Gram matrix."""
        wide = weight_Dd.double()
        basis_dr = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -self.down.out_features :]
        self.down.weight.copy_(basis_dr.T)
        self.up.weight.copy_(wide @ basis_dr)


class EagleHead(nn.Module):
    """Weights of a published drafter. The ids of its own head are `d2t` + their index."""

    kind: ClassVar[str] = "eagle_head"  # identifies its checkpoints
    config_class: ClassVar[type[EagleConfig]] = EagleConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config, d, wide = config, config.hidden, config.target_hidden
        self.layers = nn.ModuleList([Layer(config)])
        if config.fusion == "split":
            self.fc = nn.Linear(config.parts * wide, d, bias=config.fc_bias)
            self.norm = RMSNorm(d, config.eps)
            if config.norm_before_fc:
                self.input_norm = RMSNorm(config.parts * wide, config.eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(RMSNorm(wide, config.eps) for _ in config.feature_layers)
        else:
            self.fc = nn.Linear(2 * d, d, bias=config.fc_bias)
        if config.draft_vocab:
            count, rank = config.draft_vocab, config.head_rank
            self.lm_head = LowRank(d, rank, count) if rank else nn.Linear(d, count, bias=False)
            if config.draft_vocab < config.vocab:
                self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))
                self.register_buffer("t2d", torch.arange(config.vocab) < config.draft_vocab)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab, d)
        if config.image_latents:
            self.imadpt = ImageAdaptor(config)
            self.img_fc = nn.Linear(2 * d, d, bias=config.fc_bias)
            with torch.no_grad():  # the global vector has no part yet
                self.img_fc.weight.copy_(torch.eye(d, 2 * d))
                if config.fc_bias:
                    self.img_fc.bias.zero_()

    @property
    def layer(self) -> Layer:
        return self.layers[0]  # type: ignore[return-value]

    @property
    def ids(self) -> Tensor | None:
        """Target ids (D,) of the head's own logits; None if they are the target's vocabulary."""
        if not 0 < self.config.draft_vocab < self.config.vocab:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def keep(self, ids: Tensor) -> None:
        """Predict these ids (D,), in ascending order."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def adaptor(self) -> ImageAdaptor:
        """The network that compresses images, as `feature_layout.compress` calls it."""
        return self.imadpt

    def reduced(self, feature: Tensor) -> Tensor:
        """Target features (..., F) -> (..., d)."""
        if self.config.images == "blind":
            return feature.new_zeros(*feature.shape[:-1], self.config.hidden)
        if self.config.fusion == "sum":
            return feature
        if self.config.norm_before_fc:
            feature = self.input_norm(feature)
        if self.config.fc_norm:
            parts = feature.chunk(self.config.parts, dim=-1)
            feature = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(feature)

    def join(self, embed: Tensor, feature: Tensor, image: Tensor | None) -> Tensor:
        """Layer input: fc([embedding; img_fc([feature; global vector])]), or both side by side. All (..., d)."""
        if self.config.fusion == "split":
            return torch.cat([embed, feature], dim=-1)
        if self.config.image_latents:
            assert image is not None
            feature = self.img_fc(torch.cat([feature, image], dim=-1))
        return self.fc(torch.cat([embed, feature], dim=-1))

    def shift(self, image_Bd: Tensor) -> Tensor:
        """What a global vector adds to a layer input that was joined without one."""
        d = self.config.hidden
        return image_Bd @ self.img_fc.weight[:, d:].T @ self.fc.weight[:, d:].T

    def normed(self, x: Tensor) -> Tensor:
        """What queries, keys and values read."""
        if self.config.fusion == "sum":
            return x
        embed, feature = x.chunk(2, dim=-1)
        return torch.cat([self.layer.input_layernorm(embed), self.layer.hidden_norm(feature)], dim=-1)

    def parted(self, x_BTX: Tensor, turn_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, T, H, E), rotated keys and values (B, T, K, E)."""
        attention, size, read = self.layer.self_attn, self.config.head_size, self.normed(x_BTX)
        query, key, value = (
            f(read).unflatten(-1, (-1, size)) for f in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.config.qk_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        return turned(query, turn_BTC), turned(key, turn_BTC), value

    def project(self, x_BTX: Tensor, turn_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same with a key and a value for every head, each (B, T, H, E); for training."""
        query, key, value = self.parted(x_BTX, turn_BTC)
        group = self.config.heads // self.config.kv_heads
        return query, key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)

    def keys_values(self, x_BTX: Tensor, turn_BTC: Tensor) -> Tensor:
        """Rotated keys, and values, (B, T, 2K, E)."""
        return torch.cat(self.parted(x_BTX, turn_BTC)[1:], dim=2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer after attention: the next feature (..., d)."""
        layer = self.layer
        if self.config.fusion == "split":
            x = x.chunk(2, dim=-1)[1]
            x = layer.hidden_norm(x) if self.config.norm_before_residual else x
        x = x + layer.self_attn.o_proj(attended)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x) if self.config.norm_output else x

    def decodable(self, feature: Tensor) -> Tensor:
        """A feature as LM heads read it."""
        return self.norm(feature) if self.config.fusion == "split" and not self.config.norm_output else feature
