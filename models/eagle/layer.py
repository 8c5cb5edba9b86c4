"""The one layer of a feature drafter, as drafting calls it: eager, compiled or recorded as a CUDA graph.

`FoldedLayer` has the weights of our own network (`feature_head.FeatureHead`) with norms folded into the following
matrices; `PublishedLayer` runs a published one (`head.EagleHead`) as it is. A level of drafting is `join` (the layer's
input), `project` (queries, keys, values), attention by whoever holds keys and values, `after_attention` (the rest of
the layer) and `logits`.

Shapes: B rows, T elements, N = B * T, H heads, K heads of keys, E head size, C rotations, d hidden size, F features,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.models.drafting.memory import FeatureMemory
from visspec.models.eagle.config import EagleConfig
from visspec.models.eagle.feature_head import FeatureHead
from visspec.models.eagle.head import EagleHead
from visspec.models.layers import TINY, over_vocabulary, rotate, unit

FOLD_LIMIT = 1 << 26  # numbers in the folded embedding table; above it embeddings are looked up and multiplied


class DraftLayer(nn.Module):
    """Base class. embed, lm_head: modules that ids and features go through, the target's or the drafter's own."""

    embed: nn.Embedding
    lm_head: nn.Module

    def __init__(self, heads: int, dtype: torch.dtype, grouped: bool = False):
        super().__init__()
        self.heads, self.dtype = heads, dtype  # of queries; of drafting
        self.grouped = grouped  # whether several heads of queries share keys

    def shift(self, global_Bd: Tensor) -> Tensor:
        """What the last global vectors of images add to the layer inputs of drafts."""
        raise NotImplementedError

    def join(self, token: Tensor, feature: Tensor, context_bias: Tensor | None) -> Tensor:
        """Layer inputs (N, ...) of ids (...), features (..., d) before them and what the context adds (..., d)."""
        raise NotImplementedError

    def project(self, x_N: Tensor, rows: int, width: int, turn_BTC: Tensor) -> Tensor:
        """Rotated queries, rotated keys, and values of a block of elements, (B, T, H + 2K, E). turn: rotations, complex
        or as pairs of real numbers (B, T, C, 2).
        """
        raise NotImplementedError

    def after_attention(self, x_N: Tensor, query_NHE: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """The layer behind its queries: the predicted feature (N, d). attend: of queries to keys and values."""
        raise NotImplementedError

    def read(
        self,
        memory: FeatureMemory,
        token_BT: Tensor,
        feature_BTd: Tensor,
        bias: Tensor | None,
        turn_BTC: Tensor,
        offset: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values of elements, `offset` slots behind the processed ones: layer inputs (N, ...), and
        queries (B, T, H, E).
        """
        x_N = self.join(token_BT, feature_BTd, bias)
        qkv = self.project(x_N, *token_BT.shape, turn_BTC)
        memory.write(qkv[:, :, self.heads :], offset)
        return x_N, qkv[:, :, : self.heads]

    def step(
        self,
        memory: FeatureMemory,
        token_B: Tensor,
        feature_Bd: Tensor,
        bias_B1d: Tensor | None,
        turn_B1C: Tensor,
        level: int,
    ) -> Tensor:
        """One element per row, stored after the `level` drafted ones: the predicted feature (B, d)."""
        x_B, query_B1HE = self.read(memory, token_B[:, None], feature_Bd[:, None], bias_B1d, turn_B1C, level)
        return self.after_attention(x_B, query_B1HE[:, 0], partial(memory.attend, drafted=level + 1))

    def logits(self, feature: Tensor) -> Tensor:
        """(..., d) -> (..., V)."""
        return head_logits(self.lm_head, feature, self.dtype)

    def packed(self) -> bool:
        """Whether the head has weights that only itself can read, as quantisation leaves it."""
        weights = [*self.lm_head.parameters()]
        return not weights or not all(weight.is_floating_point() for weight in weights)


def head_logits(lm_head: nn.Module, feature: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits of a linear head, without the hooks on it; one with packed weights, or an adapter, computes them itself,
    from `dtype`.
    """
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or hasattr(lm_head, "base_layer"):
        return lm_head(feature.to(dtype))
    return F.linear(feature.to(weight.dtype), weight, lm_head.bias)  # type: ignore[arg-type]


class FoldedLayer(DraftLayer):
    """A `FeatureHead` for drafting: norms folded into the following matrices, matrices transposed, one embedding table.

    A level is x = table[token] + shift + feature @ feature_in, then the layer on x / |x|: no embedding, bias or scale.
    """

    table: Tensor | None  # (V, d) embedding half of fc for every token, bias included; None for large vocabularies

    @torch.no_grad()
    def __init__(
        self,
        head: FeatureHead,
        embed: nn.Embedding,
        lm_head: nn.Module,
        dtype: torch.dtype,
    ):
        """Fold a network, in float32."""
        super().__init__(head.config.heads, dtype)
        self.embed, self.lm_head = embed, lm_head
        d, root = head.config.hidden, math.sqrt(head.config.hidden)
        weight = head.fc.weight.float()
        for_embed, for_feature = weight[:, :d] * head.embed_norm.weight.float(), weight[:, d:]
        bias, self.image_in = head.fc.bias.float(), None
        if head.config.image_latents:
            mix = head.img_fc.weight.float()
            bias = bias + for_feature @ head.img_fc.bias.float()
            for_feature, image_in = for_feature @ mix[:, :d], (for_feature @ mix[:, d:]).T
            self.image_in = self._stored(image_in)  # (d, d) applied to a global vector
        self.embed_in, self.bias = self._stored(for_embed.T), self._stored(bias)
        self.feature_in = self._stored(for_feature.T)  # (d, d) applied to a (reduced) feature
        self.qkv = self._stored((head.qkv.weight * head.norm_in.weight * root).T)
        self.out = self._stored(head.out.weight.T)
        self.gate_up = self._stored((head.gate_up.weight * head.norm_mlp.weight * root).T)
        self.down = self._stored(head.down.weight.T)
        self.norm_out = self._stored(head.norm_out.weight * root)
        self.table = None
        if embed.weight.numel() <= FOLD_LIMIT:
            rows_Vd = embed(torch.arange(embed.weight.shape[0], device=embed.weight.device))
            self.table = self._stored(unit(rows_Vd.float()) @ for_embed.T + bias)

    def _stored(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.dtype).contiguous()

    def shift(self, global_Bd: Tensor) -> Tensor:
        assert self.image_in is not None
        return global_Bd.to(self.dtype) @ self.image_in

    def join(self, token: Tensor, feature: Tensor, context_bias: Tensor | None) -> Tensor:
        if self.table is not None:
            base = self.table[token]
        else:
            embed = unit(self.embed(token.flatten())).to(self.dtype)
            base = torch.addmm(self.bias, embed, self.embed_in).view(feature.shape)
        if context_bias is not None:
            base = base + context_bias
        return torch.addmm(base.flatten(0, -2), feature.flatten(0, -2), self.feature_in)

    def project(self, x_N: Tensor, rows: int, width: int, turn_BTC: Tensor) -> Tensor:
        qkv = torch.mm(direction(x_N), self.qkv).view(rows, width, 3 * self.heads, -1)
        rotated = qkv[:, :, : 2 * self.heads]
        if not turn_BTC.is_complex():
            return torch.cat([rotate_real(rotated, turn_BTC), qkv[:, :, 2 * self.heads :]], dim=2)
        if qkv.dtype == torch.float32:  # in place, which saves two calls
            torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(turn_BTC[:, :, None])
        else:
            rotated.copy_(rotate(rotated, turn_BTC))
        return qkv

    def after_attention(self, x_N: Tensor, query_NHE: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x_N = torch.addmm(x_N, attend(query_NHE), self.out)
        gate, up = torch.mm(direction(x_N), self.gate_up).chunk(2, dim=-1)
        x_N = torch.addmm(x_N, F.silu(gate).mul_(up), self.down)
        return direction(x_N).mul_(self.norm_out)


class PublishedLayer(DraftLayer):
    """An `EagleHead` for drafting, in the target's dtype. Ids outside of the head's vocabulary have logits of -inf."""

    head: EagleHead

    def __init__(self, head: EagleHead, embed: nn.Embedding, lm_head: nn.Module):
        config: EagleConfig = head.config
        super().__init__(config.heads, next(head.parameters()).dtype, config.kv_heads < config.heads)
        self.head, self.vocab = head, config.vocab
        self.latents = config.images == "latents"
        self.embed = head.embed_tokens if config.own_embedding else embed
        self.lm_head = head.lm_head if config.draft_vocab else lm_head
        self.own_head, self.ids = config.draft_vocab > 0, head.ids

    def shift(self, global_Bd: Tensor) -> Tensor:
        return self.head.shift(global_Bd)

    def join(self, token: Tensor, feature: Tensor, context_bias: Tensor | None) -> Tensor:
        embed = stored_rows(self.embed, token).to(feature.dtype)
        x = self.head.join(embed, feature, torch.zeros_like(feature) if self.latents else None)
        return (x + context_bias if self.latents and context_bias is not None else x).flatten(0, -2)

    def project(self, x_N: Tensor, rows: int, width: int, turn_BTC: Tensor) -> Tensor:
        return torch.cat(self.head.project_qkv(x_N.view(rows, width, -1), turn_BTC), dim=2)

    def after_attention(self, x_N: Tensor, query_NHE: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return self.head.after_attention(x_N, query_NHE, attend)

    def logits(self, feature: Tensor) -> Tensor:
        read = self.head.decodable(feature)
        return over_vocabulary(self.lm_head(read), self.ids, self.vocab) if self.own_head else super().logits(read)


def stored_rows(embed: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows of a table as they are stored, as the published code reads them; ids beyond it are image placeholders, whose
    rows are not used.
    """
    return F.embedding(ids.clamp(max=embed.weight.shape[0] - 1), embed.weight)


def direction(x: Tensor) -> Tensor:
    """x divided by its length, as folded weights expect."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=TINY)


def rotate_real(x_BTHE: Tensor, turn_BTC2: Tensor) -> Tensor:
    """As `layers.rotate`, with rotations as pairs of real numbers, which `torch.compile` fuses."""
    pair, turn = x_BTHE.float().unflatten(-1, (-1, 2)), turn_BTC2[:, :, None]
    real = pair[..., 0] * turn[..., 0] - pair[..., 1] * turn[..., 1]
    imaginary = pair[..., 0] * turn[..., 1] + pair[..., 1] * turn[..., 0]
    return torch.stack([real, imaginary], dim=-1).flatten(-2).to(x_BTHE.dtype)
