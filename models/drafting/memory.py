"""State of a feature drafter for a request: draft keys and values by slot, and features not yet processed.

Row b has slots [0, lengths[b]) for elements with the target's features; drafted elements are written after them and
overwritten in the next round. Row lengths may differ and are stored on the host, so nothing synchronises.

Shapes: B rows, T elements, S slots, H heads, E head size, C = E / 2 rotations, W frontier width, M drafted tree nodes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from visspec.cache import first_room, gather_rows, more_room, move_rows, to_device, widen_store
from visspec.models.runner.buffer_pool import BufferLease
from visspec.types import MAX_NODES, Draft, Outcome, Scores, Verdict


class PendingInputs:
    """Base class of what drafters on the target's features keep of a request: elements that are not processed yet, in
    blocks of (tokens (B, T) or vectors, features (B, T, F), counts), counts[b] in row b, padded on the right.
    """

    limit = MAX_NODES  # levels of the next draft, see `structure`

    def __init__(self) -> None:
        self.pending_inputs: list[tuple[Tensor, Tensor, list[int]]] = []

    def pop_pending(self) -> tuple[Tensor, Tensor, list[int]]:
        """Remove and return all stored elements as one block, each row packed to the left."""
        blocks, self.pending_inputs = self.pending_inputs, []
        if len(blocks) == 1:
            return blocks[0]
        token, feature = (
            torch.cat([block[0] for block in blocks], dim=1),
            torch.cat([block[1] for block in blocks], dim=1),
        )
        widths = [block[0].shape[1] for block in blocks]
        parts = [block[2] for block in blocks]
        totals = [sum(c[b] for c in parts) for b in range(token.shape[0])]
        if all(min(c) == width for c, width in zip(parts, widths)):
            return token, feature, totals
        starts = [sum(widths[:i]) for i in range(len(widths))]
        kept = [[s + j for s, c in zip(starts, parts) for j in range(c[b])] for b in range(token.shape[0])]
        longest = max(totals)
        index = to_device([k + [0] * (longest - len(k)) for k in kept], token.device)
        rows = torch.arange(token.shape[0], device=token.device)[:, None]
        return token[rows, index], feature[rows, index], totals

    def select_pending(self, keep: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.pending_inputs = [(t[keep], f[keep], [c[b] for b in keep]) for t, f, c in self.pending_inputs]

    def join_pending(self, other: PendingInputs, take: list[int]) -> None:
        """Add rows of another request."""
        self.pending_inputs, other.pending_inputs = [self.pop_pending()], [other.pop_pending()]
        (token, feature, counts), (new_token, new_feature, new_counts) = self.pending_inputs[0], other.pending_inputs[0]
        width = max(token.shape[1], new_token.shape[1])
        tokens = torch.cat([_pad(t, width) for t in (token, new_token[take])])
        features = torch.cat([_pad(f, width) for f in (feature, new_feature[take])])
        self.pending_inputs = [(tokens, features, counts + [new_counts[b] for b in take])]


class FeatureMemory(PendingInputs):
    """State of one request.

    heads: of keys, and as many of values. first: the position, by row, of the first element after the prompt's read.
    answer: elements that will follow, for which there is room from the start as in `cache.SlotCache`.
    """

    def __init__(self, heads: int, first: list[int], answer: int = 0):
        super().__init__()
        self.heads, self.answer = heads, answer
        self.positions = first  # position of each row's next element
        self.lengths: list[int] = [0] * len(first)
        self.image_bias: Tensor | None = None  # (B, d) term of the last global vector in a layer input
        self.kv = torch.empty(0)
        self.spare = 0  # rows allocated behind those of `kv`: of rows that have left
        self.lease: BufferLease | None = None  # what keeps a store that was lent from others
        self.table = torch.empty(0)  # rotations by position, as far as this draft goes

    def write_prompt(self, kv_BTHE: Tensor, lengths: list[int], start: int = 0) -> None:
        """Store the prompt's keys and values, packed to the left, (B, T, 2H, E); those of its elements from `start` on.
        lengths: of whole prompts.
        """
        end = start + kv_BTHE.shape[1]
        if start == 0:
            room = first_room(max(end, *lengths), self.answer)
            self.kv = kv_BTHE.new_zeros(kv_BTHE.shape[0], room, *kv_BTHE.shape[2:])
            self._view()
            self.lengths = list(lengths)
            self._measure()
        self.kv[:, start:end] = kv_BTHE

    def move_storage(self, kv_BSHE: Tensor, spare: int) -> None:
        """Go on in another store, which holds what this one does, with `spare` rows behind."""
        self.kv, self.spare = kv_BSHE, spare
        self._view()

    def _view(self) -> None:
        self._keys = self.kv[:, :, : self.heads].transpose(1, 2)
        self._values = self.kv[:, :, self.heads :].transpose(1, 2)

    def _measure(self) -> None:
        """Update data derived from the rows' lengths and positions."""
        device = self.kv.device
        self.even = min(self.lengths) == max(self.lengths) and min(self.positions) == max(self.positions)
        self.end = max(self.lengths)
        if not self.even:
            self._length_B = to_device(self.lengths, device)
            self._position_B = to_device(self.positions, device)
            self._row_B = torch.arange(len(self.lengths), device=device)

    def reserve(self, slots: int) -> None:
        """Make room for this many slots."""
        if self.kv.shape[1] < slots:
            room = more_room(slots, self.kv.shape[1])
            grown = self.kv.new_zeros(self.kv.shape[0], room, *self.kv.shape[2:])
            grown[:, : self.kv.shape[1]] = self.kv
            self.kv, self.spare = grown, 0
            self._view()

    def add(self, token_BT: Tensor, feature_BTF: Tensor, counts: list[int]) -> None:
        """Store elements to be processed later: counts[b] in row b, padded on the right."""
        self.pending_inputs.append((token_BT, feature_BTF, counts))

    def rope(self, rope_table_PC: Tensor, width: int) -> Tensor:
        """Rotations of the next `width` elements, (1|B, T, C)."""
        if self.even:
            return rope_table_PC[None, self.positions[0] : self.positions[0] + width]
        return rope_table_PC[self._position_B[:, None] + torch.arange(width, device=rope_table_PC.device)]

    def rope_at(self, rope_table_PC: Tensor, level: int) -> Tensor:
        """Rotations of the element `level` below the last one read, (1|B, C)."""
        if self.even:
            at = self.positions[0] + level
            return rope_table_PC[at : at + 1]
        return rope_table_PC[self._position_B + level]

    def context_bias(self, width: int) -> Tensor | None:
        """Context term of the layer inputs of the next `width` elements, (1|B, 1|T, d)."""
        return None if self.image_bias is None else self.image_bias[:, None]

    def context_bias_at(self, level: int) -> Tensor | None:
        """The same for elements `level` below the last one read, (1|B, 1, d)."""
        return self.context_bias(1)

    def write(self, kv_BTHE: Tensor, offset: int = 0) -> None:
        """Write a block `offset` slots after the processed elements. Padding is written to unused slots."""
        width = kv_BTHE.shape[1]
        if self.even:
            self.kv[:, self.end + offset : self.end + offset + width] = kv_BTHE
        else:
            slot = self._length_B[:, None] + torch.arange(offset, offset + width, device=kv_BTHE.device)
            self.kv[self._row_B[:, None], slot] = kv_BTHE

    def advance(self, counts: list[int]) -> None:
        """Mark the first counts[b] elements of the block just written as processed."""
        self.lengths = [n + c for n, c in zip(self.lengths, counts)]
        self.positions = [p + c for p, c in zip(self.positions, counts)]
        self._measure()

    def attend(self, query_BHE: Tensor, part: int | None = None, drafted: int = 0) -> Tensor:
        """Attention of one query per row over processed elements and `drafted` further ones, (B, H * E). part: the half
        of the keys and values, by number, if queries have two kinds of them.
        """
        extent = self.end + drafted
        mask = None
        if not self.even:
            slot = torch.arange(extent, device=query_BHE.device)
            mask = (slot < (self._length_B + drafted)[:, None])[:, None, None]
        keys, values = self._stored_part(part, extent)
        grouped = query_BHE.shape[1] > keys.shape[1]
        mixed = F.scaled_dot_product_attention(query_BHE[:, :, None], keys, values, attn_mask=mask, enable_gqa=grouped)
        return mixed.reshape(query_BHE.shape[0], -1)

    def _stored_part(self, part: int | None, extent: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[:, :, :extent], self._values[:, :, :extent]
        return (keys, values) if part is None else (keys.chunk(2, dim=1)[part], values.chunk(2, dim=1)[part])

    def attend_tree(self, query_NHE: Tensor, part: int | None = None, *, seen_BWM: Tensor) -> Tensor:
        """Attention of a frontier's queries, N = B * W, over processed elements and their ancestors in the tree,
        (N, H * E). part: as of `attend`.
        """
        rows, width, nodes = seen_BWM.shape
        extent = self.end + nodes
        if self.even:
            mask = torch.cat([seen_BWM.new_ones(rows, width, self.end), seen_BWM], dim=2)
        else:
            behind = torch.arange(extent, device=seen_BWM.device) - self._length_B[:, None]
            inside = (behind >= 0) & (behind < nodes)
            index = behind.clamp(0, nodes - 1)[:, None].expand(rows, width, extent)
            mask = (behind < 0)[:, None] | (seen_BWM.gather(2, index) & inside[:, None])
        keys, values = self._stored_part(part, extent)
        grouped, query_BWHE = query_NHE.shape[1] > keys.shape[1], query_NHE.unflatten(0, (rows, width))
        mixed = F.scaled_dot_product_attention(
            query_BWHE.transpose(1, 2), keys, values, attn_mask=mask[:, None], enable_gqa=grouped
        )
        return mixed.transpose(1, 2).reshape(rows * width, -1)

    def select(self, keep: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.kv = move_rows(self.kv, keep, self.kv[:, : self.end])
        self.spare += len(self.lengths) - len(keep)
        self._view()
        self.lengths, self.positions = ([x[b] for b in keep] for x in (self.lengths, self.positions))
        self.image_bias = None if self.image_bias is None else self.image_bias[keep]
        self.select_pending(keep)
        self._measure()

    def join(self, other: FeatureMemory, take: list[int]) -> None:
        """Add rows of another request's memory, in the room that is spare."""
        rows, wanted = len(self.lengths), len(self.lengths) + len(take)
        longest = max(other.lengths[b] for b in take)
        if self.spare >= len(take) and self.kv.shape[1] >= longest:
            self.kv, self.spare = widen_store(self.kv, wanted), self.spare - len(take)
        else:
            room = max(self.kv.shape[1], other.kv.shape[1])
            grown = self.kv.new_zeros(wanted, room, *self.kv.shape[2:])
            grown[:rows, : self.end] = self.kv[:, : self.end]
            self.kv, self.spare = grown, 0
        self.kv[rows:, :longest] = other.kv[:, :longest][take]
        self._view()
        if self.image_bias is not None or other.image_bias is not None:
            self.image_bias = torch.cat([self._image_bias_like(other), other._image_bias_like(self)[take]])
        self.lengths = self.lengths + [other.lengths[b] for b in take]
        self.positions = self.positions + [other.positions[b] for b in take]
        self.join_pending(other, take)
        self._measure()

    def _image_bias_like(self, other: FeatureMemory) -> Tensor:
        """The rows' shift, or zeros if none of them has an image."""
        if self.image_bias is not None:
            return self.image_bias
        assert other.image_bias is not None
        return other.image_bias.new_zeros(len(self.lengths), other.image_bias.shape[1])


def prompt_first(token_BT: Tensor, feature_BTF: Tensor, real_BT: Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
    """A prompt's block with padding, where `real_BT` is false, moved behind it; None: there is none."""
    if real_BT is None:
        return token_BT, feature_BTF, [token_BT.shape[1]] * len(token_BT)
    order = (~real_BT).long().argsort(dim=1, stable=True)
    return token_BT.gather(1, order), gather_rows(feature_BTF, order), real_BT.sum(dim=1).tolist()


def accepted_nodes(scores: Scores, verdict: Verdict, outcome: Outcome) -> tuple[Tensor, Tensor, list[int]]:
    """Of a round's accepted nodes: indices (B, D), the target's features (B, D, F), and how many of D are a row's."""
    assert scores.features is not None
    counts = [len(path) for path in outcome.path]
    path_BD = verdict.path[:, : max(counts)].clamp(min=0)
    return path_BD, gather_rows(scores.features, path_BD), counts


def next_tokens(draft: Draft, path_BD: Tensor, verdict: Verdict) -> Tensor:
    """The token after each node of a round's accepted paths, (B, D)."""
    shifted_BD = torch.cat([path_BD[:, 1:], path_BD[:, -1:]], dim=1)
    return draft.value.gather(1, shifted_BD).scatter(1, verdict.length[:, None] - 1, verdict.next[:, None])


def _pad(x: Tensor, width: int) -> Tensor:
    """(B, T, ...) with zeros behind, up to `width` elements."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.shape[1]))
