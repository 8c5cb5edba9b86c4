"""The one layer of a feature drafter as drafting uses it (eager, compiled or as a CUDA graph), and its KV memory.

`DraftLayer` runs an `EagleHead` unchanged; `FoldedLayer` folds the norms into the matrices that follow them, which
requires a norm before every matrix. One level of drafting consists of `join` (the layer's input), `project` (queries,
keys, values), attention by the owner of keys and values, `after_attention` (the rest of the layer) and `logits`.

Row b of a `FeatureMemory` has slots [0, lengths[b]) for elements with the target's features; drafted elements are
written after them and overwritten in the next round. Row lengths may differ and are stored on the host, so nothing
synchronizes.

Shapes: B rows, T elements, N = B * T, S slots, H heads, K heads of keys, E head size, C rotations, W frontier width,
M drafted tree nodes, d hidden size, F features, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.cache import SlotCache, first_room, to_device, visibility
from visspec.models.drafting.base import PendingInputs
from visspec.models.eagle.head import EagleHead
from visspec.models.layers import TINY, over_vocabulary, rotate, unit

FOLD_LIMIT = 1 << 26  # largest folded embedding table, in numbers; beyond it embeddings are looked up and multiplied


class FeatureMemory(PendingInputs):
    """Keys, values and queued elements of one request.

    Args:
        first: Position of each row's first element after the prompt.
        answer: Number of elements to expect; room for them is allocated at once, as in `cache.SlotCache`.
    """

    def __init__(self, first: list[int], answer: int = 0):
        super().__init__()
        self.positions = first  # position of each row's next element
        self.slots = SlotCache(len(first), answer)  # with one store, (B, 2K, S, E): keys, then values
        self.image_bias: Tensor | None = None  # (B, d) term of the last global vector in a layer input
        self.table = torch.empty(0)  # rotations by position, for the current draft

    @property
    def lengths(self) -> list[int]:
        return self.slots.lengths

    def write_prompt(self, kv_BTHE: Tensor, lengths: list[int], start: int = 0) -> None:
        """Store the prompt's keys and values (B, T, 2K, E), packed to the left, from element `start` on.

        Args:
            lengths: Lengths of the whole prompts.
        """
        rows, width, heads, size = kv_BTHE.shape
        if start == 0:
            room = first_room(max(width, *lengths), self.slots.answer)
            self.slots.keys, self.slots.lengths = [kv_BTHE.new_zeros(rows, heads, room, size)], list(lengths)
            self.update()
        self.kv[:, start : start + width] = kv_BTHE

    def update(self) -> None:
        """Update data derived from the store, and from the rows' lengths and positions."""
        self.kv = self.slots.keys[0].transpose(1, 2)
        self._keys, self._values = self.slots.keys[0].chunk(2, dim=1)
        self._measure()

    def _measure(self) -> None:
        """Update data derived from the rows' lengths and positions."""
        device = self.kv.device
        self.even = self.slots.uniform and min(self.positions) == max(self.positions)
        self.end = self.slots.length
        if not self.even:
            self._length_B = to_device(self.lengths, device)
            self._position_B = to_device(self.positions, device)
            self._row_B = torch.arange(len(self.lengths), device=device)

    def reserve(self, slots: int) -> None:
        if self.kv.shape[1] < slots:
            self.slots.open(slots - self.end, self.kv.device)
            self.update()

    def add(self, token_BT: Tensor, feature_BTF: Tensor, counts: list[int]) -> None:
        """Queue elements for later processing: counts[b] in row b, padded on the right."""
        self.pending_inputs.append((token_BT, feature_BTF, counts))

    def rope(self, rope_table_PC: Tensor, width: int, offset: int = 0) -> Tensor:
        """Return rotations of `width` elements, `offset` after the last processed one, (1|B, T, C)."""
        if self.even:
            first = self.positions[0] + offset
            return rope_table_PC[None, first : first + width]
        ahead = torch.arange(offset, offset + width, device=rope_table_PC.device)
        return rope_table_PC[self._position_B[:, None] + ahead]

    def context_bias(self, width: int, offset: int = 0) -> Tensor | None:
        """Return what the image context adds to the layer inputs of these elements, (1|B, 1|T, d)."""
        return None if self.image_bias is None else self.image_bias[:, None]

    def each(self, x: Tensor) -> Tensor:
        """Repeat a per-request tensor (B, ...) for every row of the memory."""
        return x

    def write(self, kv_BTHE: Tensor, offset: int = 0) -> None:
        """Write a block `offset` slots after the processed elements. Padding is written to unused slots."""
        width = kv_BTHE.shape[1]
        if self.even:
            self.kv[:, self.end + offset : self.end + offset + width] = kv_BTHE
        else:
            slot = self._length_B[:, None] + torch.arange(offset, offset + width, device=kv_BTHE.device)
            self.kv[self._row_B[:, None], slot] = kv_BTHE

    def advance(self, counts: list[int] | Tensor) -> None:
        """Mark the first counts[b] elements of the block just written as processed."""
        self.slots.lengths = [n + c for n, c in zip(self.lengths, counts)]
        self.positions = [p + c for p, c in zip(self.positions, counts)]
        self._measure()

    def extent(self, drafted: int) -> int:
        """Return the number of slots that attention covers, with `drafted` elements behind the processed ones."""
        return self.end + drafted

    def attend(
        self, query_NHE: Tensor, part: int | None = None, drafted: int = 0, seen_BWM: Tensor | None = None
    ) -> Tensor:
        """Attend with one query per row to the processed elements and `drafted` further ones, (N, H * E).

        Args:
            part: Which half of the keys and values to use, if there are twice as many as queries.
            seen_BWM: For W queries per row, N = B * W, of a tree's frontier: their ancestors among the drafted nodes.
        """
        rows, extent, mask = len(self.slots.lengths), self.extent(drafted), None
        if seen_BWM is not None and self.even:
            mask = torch.cat([seen_BWM.new_ones(rows, seen_BWM.shape[1], self.end), seen_BWM], dim=2)[:, None]
        elif seen_BWM is not None:
            mask = visibility(seen_BWM, self._length_B, None, extent)[:, None]
        elif not self.even:
            slot = torch.arange(extent, device=query_NHE.device)
            mask = (slot < (self._length_B + drafted)[:, None])[:, None, None]
        keys, values = self._keys[:, :, :extent], self._values[:, :, :extent]
        if part is not None:
            keys, values = keys.chunk(2, dim=1)[part], values.chunk(2, dim=1)[part]
        query_BHWE = query_NHE.unflatten(0, (rows, -1)).transpose(1, 2)
        grouped = query_BHWE.shape[1] > keys.shape[1]
        attended_BHWE = F.scaled_dot_product_attention(query_BHWE, keys, values, attn_mask=mask, enable_gqa=grouped)
        return attended_BHWE.transpose(1, 2).flatten(2).flatten(0, 1)

    def select(self, keep: list[int]) -> None:
        self.slots.select(keep)
        self.positions = [self.positions[b] for b in keep]
        self.image_bias = None if self.image_bias is None else self.image_bias[keep]
        self.select_pending(keep)
        self.update()

    def join(self, other: FeatureMemory, take: list[int]) -> None:
        """Add rows of another request's memory, in spare rows if there are enough."""
        if self.image_bias is not None or other.image_bias is not None:
            self.image_bias = torch.cat([self._image_bias_like(other), other._image_bias_like(self)[take]])
        self.slots.join(other.slots, take, [0] * len(other.lengths))
        self.positions = self.positions + [other.positions[b] for b in take]
        self.join_pending(other, take)
        self.update()

    def _image_bias_like(self, other: FeatureMemory) -> Tensor:
        """Return the rows' bias, or zeros if none of them has an image."""
        if self.image_bias is not None:
            return self.image_bias
        assert other.image_bias is not None
        return other.image_bias.new_zeros(len(self.lengths), other.image_bias.shape[1])


class StoreMemory(FeatureMemory):
    """A request's memory in a call that is recorded: lengths and positions (2, B) are read from a tensor, and attention
    covers all slots of the store.
    """

    def __init__(self, slots: SlotCache, bounds_2B: Tensor, image_bias: Tensor, table: Tensor):
        self.slots, self.image_bias, self.table, self.even = slots, image_bias, table, False
        self._length_B, self._position_B = bounds_2B
        self._row_B = torch.arange(bounds_2B.shape[1], device=bounds_2B.device)
        self.update()

    def _measure(self) -> None:
        """Nothing is known on the host."""

    def advance(self, counts: Any) -> None:
        self._length_B, self._position_B = (x + counts for x in (self._length_B, self._position_B))

    def extent(self, drafted: int) -> int:
        return self.kv.shape[1]


class DraftLayer(nn.Module):
    """An `EagleHead` for drafting, in the target's dtype. Ids outside the head's vocabulary have logits of -inf.

    Args:
        embed, lm_head: Modules for ids and features, either the target's or the drafter's own.
    """

    def __init__(self, head: EagleHead, embed: nn.Embedding, lm_head: nn.Module, dtype: torch.dtype):
        super().__init__()
        config = head.config
        self.head, self.dtype, self.vocab, self.heads = head, dtype, config.vocab, config.heads
        self.grouped = config.kv_heads < config.heads  # several query heads share keys
        self.latents = config.images == "latents"
        self.embed, self.lm_head = embed, head.lm_head if config.draft_vocab else lm_head
        self.own_head, self.ids = config.draft_vocab > 0, head.ids

    def join(self, token: Tensor, feature: Tensor, context_bias: Tensor | None) -> Tensor:
        """Return layer inputs (N, ...) from ids (...), the features before them (..., d) and the context bias."""
        embed = stored_rows(self.embed, token).to(feature.dtype)
        x = self.head.join(embed, feature, torch.zeros_like(feature) if self.latents else None)
        return (x + context_bias if self.latents and context_bias is not None else x).flatten(0, -2)

    def project(self, x_N: Tensor, rows: int, width: int, turn_BTC: Tensor) -> Tensor:
        """Return rotated queries, rotated keys, and values of a block of elements, (B, T, H + 2K, E). turn: rotations,
        complex or as pairs of real numbers (B, T, C, 2).
        """
        return torch.cat(self.head.project_qkv(x_N.view(rows, width, x_N.shape[-1]), turn_BTC), dim=2)

    def after_attention(self, x_N: Tensor, query_NHE: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Run the rest of the layer and return the predicted feature (N, d).

        Args:
            attend: Function that attends with given queries.
        """
        return self.head.after_attention(x_N, query_NHE, attend)

    def read(
        self,
        memory: FeatureMemory,
        token_BT: Tensor,
        feature_BTd: Tensor,
        bias: Tensor | None,
        turn_BTC: Tensor,
        offset: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values of elements, `offset` slots after the processed ones. Return the layer inputs (N, ...)
        and queries (B, T, H, E).
        """
        x_N = self.join(token_BT, feature_BTd, bias)
        rows, width = token_BT.shape
        qkv = self.project(x_N, rows, width, turn_BTC)
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
        """Read one element per row, stored after `level` drafted ones, and return the predicted feature (B, d)."""
        x_B, query_B1HE = self.read(memory, token_B[:, None], feature_Bd[:, None], bias_B1d, turn_B1C, level)
        return self.after_attention(x_B, query_B1HE[:, 0], partial(memory.attend, drafted=level + 1))

    def logits(self, feature: Tensor) -> Tensor:
        """Return logits (..., V) of features (..., d)."""
        inputs = self.head.decodable(feature)
        if self.own_head:
            return over_vocabulary(self.lm_head(inputs), self.ids, self.vocab)
        return head_logits(self.lm_head, inputs, self.dtype)

    def is_quantized(self) -> bool:
        """Return whether the head has quantized weights, which only the head itself can read."""
        weights = [*self.lm_head.parameters()]
        return not weights or not all(weight.is_floating_point() for weight in weights)


def head_logits(lm_head: nn.Module, feature: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the logits of a linear head without running its hooks. A head with quantized weights or an adapter is
    called as a module, with inputs in `dtype`.
    """
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or hasattr(lm_head, "base_layer"):
        return lm_head(feature.to(dtype))
    return F.linear(feature.to(weight.dtype), weight, lm_head.bias)  # type: ignore[arg-type]


class FoldedLayer(DraftLayer):
    """Like `DraftLayer`, with norms folded into the next matrices, matrices transposed, one embedding table, and the
    two channels of each rotation next to each other (requires `config.foldable`).

    A level is x = table[token] + bias + feature @ feature_in, then the layer on x / |x|: no embedding, bias or scale.
    """

    table: Tensor | None  # (V, d) embedding half of fc per token, with bias; None for large vocabularies

    @torch.no_grad()
    def __init__(self, head: EagleHead, embed: nn.Embedding, lm_head: nn.Module, dtype: torch.dtype):
        """Fold the network's weights, in float32."""
        super().__init__(head, embed, lm_head, dtype)
        if self.own_head:
            self.lm_head = deepcopy(self.lm_head).to(dtype)
        d, layer, size = head.config.hidden, head.layer, head.config.head_size
        root, attention, mlp = math.sqrt(d), layer.self_attn, layer.mlp
        weight, bias = head.fc.weight.float(), head.fc.bias.float()
        for_embed, for_feature = weight[:, :d] * head.embed_norm.weight.float(), weight[:, d:]
        if self.latents:
            bias = bias + for_feature @ head.img_fc.bias.float()
            for_feature = for_feature @ head.img_fc.weight[:, :d].float()
        self.embed_in, self.bias = self._weight_copy(for_embed.T), self._weight_copy(bias)
        self.feature_in = self._weight_copy(for_feature.T)  # (d, d), applied to a (reduced) feature
        halves = torch.cat([attention.q_proj.weight, attention.k_proj.weight]).unflatten(0, (-1, 2, size // 2))
        qkv = torch.cat([halves.transpose(1, 2).flatten(0, 2), attention.v_proj.weight])
        self.qkv = self._weight_copy((qkv * layer.input_layernorm.weight * root).T)
        self.out = self._weight_copy(attention.o_proj.weight.T)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.gate_up = self._weight_copy((gate_up * layer.post_attention_layernorm.weight * root).T)
        self.down = self._weight_copy(mlp.down_proj.weight.T)
        self.norm_out = self._weight_copy(head.norm.weight * root)
        self.table = None
        if embed.weight.numel() <= FOLD_LIMIT:
            rows_Vd = embed(torch.arange(embed.weight.shape[0], device=embed.weight.device))
            self.table = self._weight_copy(unit(rows_Vd.float()) @ for_embed.T + bias)

    def _weight_copy(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.dtype).contiguous()

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
        qkv = torch.mm(direction(x_N), self.qkv).view(rows, width, 3 * self.heads, self.head.config.head_size)
        rotated = qkv[:, :, : 2 * self.heads]
        if not turn_BTC.is_complex():
            return torch.cat([rotate_real(rotated, turn_BTC), qkv[:, :, 2 * self.heads :]], dim=2)
        if qkv.dtype == torch.float32:  # in place, which saves two kernels
            torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(turn_BTC[:, :, None])
        else:
            rotated.copy_(rotate(rotated, turn_BTC))
        return qkv

    def after_attention(self, x_N: Tensor, query_NHE: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x_N = torch.addmm(x_N, attend(query_NHE), self.out)
        gate, up = torch.mm(direction(x_N), self.gate_up).chunk(2, dim=-1)
        x_N = torch.addmm(x_N, F.silu(gate).mul_(up), self.down)
        return direction(x_N).mul_(self.norm_out)


def stored_rows(embed: nn.Embedding, ids: Tensor) -> Tensor:
    """Look up rows of a table directly, without module hooks or scaling, as the published code does. Ids beyond the
    table are image placeholders, whose rows are not used.
    """
    return F.embedding(ids.clamp(max=embed.weight.shape[0] - 1), embed.weight)


def direction(x: Tensor) -> Tensor:
    """Divide x by its length, as folded weights expect."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=TINY)


def rotate_real(x_BTHE: Tensor, turn_BTC2: Tensor) -> Tensor:
    """Like `layers.rotate`, with rotations as pairs of real numbers, which `torch.compile` can fuse."""
    pair, turn = x_BTHE.float().unflatten(-1, (-1, 2)), turn_BTC2[:, :, None]
    real = pair[..., 0] * turn[..., 0] - pair[..., 1] * turn[..., 1]
    imaginary = pair[..., 0] * turn[..., 1] + pair[..., 1] * turn[..., 0]
    return torch.stack([real, imaginary], dim=-1).flatten(-2).to(x_BTHE.dtype)
