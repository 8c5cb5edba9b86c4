"""One network for all one-layer drafters: EAGLE-1 and 2, EAGLE-3, DREAM, the variants MSD, HiViS, ViSpec, FLASH and
SpecVLM, and our own.

An element of the draft sequence combines the target's features after token t with the embedding of token t + 1; one
Llama layer predicts the feature after token t + 1. `EagleConfig` selects the variant:

* fusion "sum" (EAGLE, arXiv 2401.15077; EAGLE-2): the layer reads fc([embedding; feature]) without an input norm, its
  output is the next feature, and the target's LM head decodes it.
* fusion "split" (EAGLE-3, arXiv 2503.01840): fc reduces the features of several layers; queries, keys and values read
  [norm(embedding); norm(feature)]; the residual is the feature alone; and the network's own norm and head decode it
  over a part of the vocabulary.
* fusion "cross" (DREAM, arXiv 2505.19201): a layer over embeddings alone, then gated cross-attention to the target's
  features up to token t (predicted features stand in for later ones), and an MLP (`FeatureCrossAttention`).
* norms before every matrix (`norm_embedding`, `norm_input`, `norm_output`) give the network that we train by default:
  ViSpec's form, for which drafting has a faster layer (`layer.FoldedLayer`).
* images: how the draft sequence represents image slots, see `eagle.config.IMAGES`.

Weight names are those of the published checkpoints (`layers.0.self_attn.q_proj`, ...). Channels are rotated in
halves, as in Llama. Shapes: B rows, T elements, R image runs, S slots of a run, H heads, K heads of keys, E head
size, d hidden size, F features, V vocabulary, D draft vocabulary, C rotations (E / 2, or fewer), P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from visspec.models.eagle.config import EagleConfig
from visspec.models.eagle.image_compression import FlashQueries, SpecVLMBranches, ViSpecAdaptor


def frequencies(config: EagleConfig, device: torch.device | str) -> tuple[Tensor, float]:
    """Return the angle per position of each rotary channel, float32 (C,), and the attention scaling factor, computed
    by transformers if a scaling is configured.
    """
    scaling, size = config.rope_scaling or {}, config.rotated
    if scaling.get("rope_type", "default") == "default":
        return config.rope_theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size), 1.0
    parameters = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor, **scaling}
    layer = LlamaConfig(head_dim=config.head_size, rope_parameters=parameters)
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](layer, device)


def turns(config: EagleConfig, length: int, device: torch.device | str) -> Tensor:
    """Return exp(i * position * frequency) for positions [0, length), times the scaling factor, complex64 (P, C)."""
    frequency_C, factor = frequencies(config, device)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency_C
    return torch.polar(torch.full_like(angle, factor), angle)


def turns_at(rope_table_PC: Tensor, position: Tensor, section: tuple[int, ...], interleaved: bool) -> Tensor:
    """Return the rotations of elements, (B, T, C). position is (B, T), or (3, B, T) with `section` channels per row,
    in blocks or interleaved (time, height, width, time, ... while a row has channels left, then time; Qwen3-VL).
    """
    if position.dim() == 2:
        return rope_table_PC[position]
    if not section:
        return rope_table_PC[position[0]]
    row_C = torch.tensor([row for row, count in enumerate(section) for _ in range(count)], device=rope_table_PC.device)
    if interleaved:
        channel_C = torch.arange(len(row_C), device=rope_table_PC.device)
        row_C = channel_C % 3
        row_C = torch.where(channel_C < 3 * torch.tensor(section, device=rope_table_PC.device)[row_C], row_C, 0)
    return rope_table_PC[position.permute(1, 2, 0)[..., row_C], torch.arange(len(row_C), device=rope_table_PC.device)]


def apply_rope(x_BTHE: Tensor, turn_BTC: Tensor) -> Tensor:
    """Rotate channel c with channel c + C among the first 2 C, out of place, differentiably, in float32. turn is
    complex, or pairs of real numbers (B, T, C, 2).
    """
    turn = torch.view_as_real(turn_BTC) if turn_BTC.is_complex() else turn_BTC
    cos, sin = turn[..., None, :, :].unbind(-1)
    count = cos.shape[-1]
    real, imaginary, rest = x_BTHE.float().tensor_split((count, 2 * count), dim=-1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin, rest], dim=-1).to(x_BTHE.dtype)


class EagleAttention(nn.Module):
    """Projections of the attention; `EagleHead.project_qkv` applies them."""

    q_norm: nn.Module  # only with qk_norm or qk_layer_norm
    k_norm: nn.Module

    def __init__(self, config: EagleConfig):
        super().__init__()
        d, size = config.hidden, config.head_size
        inputs = 2 * d if config.fusion == "split" else d
        self.q_proj = nn.Linear(inputs, config.heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, config.kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, config.kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * size, d, bias=False)
        for name, count in (("q_norm", config.heads), ("k_norm", config.kv_heads)):
            if config.qk_norm:
                self.add_module(name, LlamaRMSNorm(size, config.eps))
            elif config.qk_layer_norm:
                self.add_module(name, ChameleonLayerNorm((count, size)))


def mlp(config: EagleConfig) -> LlamaMLP:
    """Build a SiLU-gated MLP."""
    sizes = LlamaConfig(hidden_size=config.hidden, intermediate_size=config.intermediate, num_attention_heads=1)
    return LlamaMLP(sizes)


class EagleLayer(nn.Module):
    """Weights of the decoder layer. EAGLE-1's has no input norm."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.self_attn, self.mlp = EagleAttention(config), mlp(config)
        if config.fusion == "split":
            self.input_layernorm = LlamaRMSNorm(config.hidden, config.eps)  # norm of the embedding
            self.hidden_norm = LlamaRMSNorm(config.hidden, config.eps)  # norm of the feature
        if config.norm_input or config.fusion == "cross":
            self.input_layernorm = LlamaRMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden, config.eps)


class FeatureCrossAttention(nn.Module):
    """DREAM's attention from the draft stream to features: queries and keys are RMS-normed but not rotated, and gates
    start at zero. The last block is only an MLP here; attention over the stream of all elements is left out.
    """

    def __init__(self, config: EagleConfig):
        super().__init__()
        d, size = config.hidden, config.head_size
        self.norm, self.mlp_norm, self.last_norm = (LlamaRMSNorm(d, config.eps) for _ in range(3))
        self.q_norm, self.k_norm = LlamaRMSNorm(size, config.eps), LlamaRMSNorm(size, config.eps)
        self.q_proj = nn.Linear(d, config.heads * size, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.heads * size, d, bias=False)
        self.mlp, self.last = mlp(config), mlp(config)
        self.gate, self.mlp_gate = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the state after cross-attention and its MLP, and the state after the last MLP, both (..., d)."""
        query = self.q_norm(self.q_proj(self.norm(x)).unflatten(-1, (-1, self.q_norm.weight.shape[0])))
        x = x + torch.tanh(self.gate) * self.o_proj(attend(query))
        middle = x + torch.tanh(self.mlp_gate) * self.mlp(self.mlp_norm(x))
        return middle, middle + self.last(self.last_norm(middle))


class SemiAutoregressiveHead(nn.Module):
    """FLASH's semi-autoregressive head: predicts the features of K tokens from one, (..., d) -> (..., K, d)."""

    def __init__(self, hidden: int, block: int):
        super().__init__()
        self.block = block
        self.down, self.up = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, block * hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., None, :] + self.up(F.silu(self.down(x))).unflatten(-1, (self.block, -1))


class EagleHead(nn.Module):
    """Weights of a drafter. If it has its own LM head, row i of that head predicts target id `d2t[i] + i`."""

    kind: ClassVar[str] = "eagle_head"  # identifies its checkpoints
    config_class: ClassVar[type[EagleConfig]] = EagleConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config, d, wide = config, config.hidden, config.target_hidden
        self.layers = nn.ModuleList([EagleLayer(config)])
        if config.fusion == "split":
            self.fc = nn.Linear(config.parts * wide, d, bias=config.fc_bias)
            self.norm = LlamaRMSNorm(d, config.eps)
            if config.norm_before_fc:
                self.input_norm = LlamaRMSNorm(config.parts * wide, config.eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(wide, config.eps) for _ in config.feature_layers)
        elif config.fusion == "cross":
            self.cross, self.norm = FeatureCrossAttention(config), LlamaRMSNorm(d, config.eps)
        else:
            self.fc = nn.Linear(2 * d, d, bias=config.fc_bias)
            if config.norm_output:
                self.norm = LlamaRMSNorm(d, config.eps)
            if config.norm_embedding:
                self.embed_norm = LlamaRMSNorm(d, config.eps)
                with torch.no_grad():  # small output projections at first train better
                    for weight in (self.layer.self_attn.o_proj.weight, self.layer.mlp.down_proj.weight):
                        weight.mul_(0.3)
        if config.draft_vocab:
            self.lm_head = nn.Linear(d, config.draft_vocab, bias=False)
            if config.draft_vocab < config.vocab:
                self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.long))
                self.register_buffer("t2d", torch.arange(config.vocab) < config.draft_vocab)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab, d)
        if config.block > 1:
            self.ahead = SemiAutoregressiveHead(d, config.block)
        self._add_compressor()

    @torch.no_grad()
    def _add_compressor(self) -> None:
        config, d = self.config, self.config.hidden
        if config.images in ("queries", "gated"):
            self.compressor = (FlashQueries if config.images == "queries" else SpecVLMBranches)(config)
        if config.images == "latents":
            self.imadpt = ViSpecAdaptor(config, config.image_latents + 1)
            self.img_fc = nn.Linear(2 * d, d, bias=config.fc_bias)
            self.img_fc.weight.copy_(torch.eye(d, 2 * d))  # the global vector contributes nothing at first
            if config.fc_bias:
                self.img_fc.bias.zero_()

    @property
    def layer(self) -> EagleLayer:
        return self.layers[0]  # type: ignore[return-value]

    @property
    def ids(self) -> Tensor | None:
        """Target ids (D,) of the head's own logits; None if they cover the target's whole vocabulary."""
        if not 0 < self.config.draft_vocab < self.config.vocab:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def keep(self, ids: Tensor) -> None:
        """Predict only these ids (D,), in ascending order."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def reduced(self, feature: Tensor) -> Tensor:
        """Reduce target features (..., F) to (..., d)."""
        if self.config.images == "blind":
            return feature.new_zeros(*feature.shape[:-1], self.config.hidden)
        if self.config.fusion != "split":
            return feature[..., -self.config.hidden :]
        feature = feature.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            feature = self.input_norm(feature)
        if self.config.fc_norm:
            parts = feature.chunk(self.config.parts, dim=-1)
            feature = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(feature)

    def join(self, embed: Tensor, feature: Tensor, image: Tensor | None) -> Tensor:
        """Return the layer input (..., d), fc([embedding; img_fc([feature; global vector])]), or both (..., 2d)."""
        if self.config.fusion != "sum":
            return torch.cat([embed, feature[..., -self.config.hidden :]], dim=-1)
        if self.config.images == "latents":
            assert image is not None
            feature = self.img_fc(torch.cat([feature, image], dim=-1))
        embed = self.embed_norm(embed) if self.config.norm_embedding else embed
        return self.fc(torch.cat([embed, feature], dim=-1))

    def shift(self, image_Bd: Tensor) -> Tensor:
        """Return what a global vector adds to a layer input that was joined without one."""
        d = self.config.hidden
        return image_Bd @ self.img_fc.weight[:, d:].T @ self.fc.weight[:, d:].T

    def attention_inputs(self, x: Tensor) -> Tensor:
        """Return the input of the query, key and value projections."""
        if self.config.fusion == "sum":
            return self.layer.input_layernorm(x) if self.config.norm_input else x
        embed, feature = x.chunk(2, dim=-1)
        if self.config.fusion == "cross":
            return self.layer.input_layernorm(embed)
        return torch.cat([self.layer.input_layernorm(embed), self.layer.hidden_norm(feature)], dim=-1)

    def project_qkv(self, x_BTX: Tensor, turn_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries (B, T, H, E), rotated keys and values (B, T, K, E), then cross-attention's, if any."""
        attention, size, inputs = self.layer.self_attn, self.config.head_size, self.attention_inputs(x_BTX)
        query, key, value = (
            f(inputs).unflatten(-1, (-1, size)) for f in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.config.qk_norm or self.config.qk_layer_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = apply_rope(query, turn_BTC), apply_rope(key, turn_BTC)
        if self.config.fusion == "cross":
            cross, feature = self.cross, x_BTX[..., self.config.hidden :]
            more = (f(feature).unflatten(-1, (-1, size)) for f in (cross.k_proj, cross.v_proj))
            key, value = (torch.cat(pair, dim=2) for pair in zip((key, value), more))
            key = torch.cat([key[:, :, : self.config.kv_heads], cross.k_norm(key[:, :, self.config.kv_heads :])], dim=2)
        return query, key, value

    def project(self, x_BTX: Tensor, turn_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Like `project_qkv`, with a key and a value for every head, each (B, T, H, E); for training."""
        query, key, value = self.project_qkv(x_BTX, turn_BTC)
        group = self.config.heads // self.config.kv_heads
        return query, key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)

    def after_attention(self, x: Tensor, query: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Run the layer from its queries on: return the next feature (..., d), or those of `feature_layers` (..., F).

        Args:
            attend: Function that attends from queries to the stored keys and values. Its second argument selects one
                half of them.
        """
        if self.config.fusion != "cross":
            return self.finish(x, attend(query))
        x = self.finish(x, attend(query, 0))
        middle, last = self.cross(x, lambda crossing: attend(crossing, 1))
        return torch.cat([middle, self.norm(last)], dim=-1) if self.config.parts == 2 else self.norm(last)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the layer after attention and return the next feature (..., d)."""
        layer = self.layer
        if self.config.fusion == "cross":
            x = x[..., : self.config.hidden]
        if self.config.fusion == "split":
            x = x.chunk(2, dim=-1)[1]
            x = layer.hidden_norm(x) if self.config.norm_before_residual else x
        x = x + layer.self_attn.o_proj(attended)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x) if self.config.norm_output else x

    def spread(self, feature: Tensor) -> Tensor:
        """Expand the first token's feature to the features (..., K, d) of all tokens that one pass predicts."""
        return feature[..., None, :] if self.config.block == 1 else self.ahead(feature)

    def decodable(self, feature: Tensor) -> Tensor:
        """Convert a feature to the LM head's input."""
        if self.config.fusion == "cross":
            return feature[..., -self.config.hidden :]
        return self.norm(feature) if self.config.fusion == "split" and not self.config.norm_output else feature
