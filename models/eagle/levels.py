"""Drafts of a feature drafter, compiled or as CUDA graphs. One call reads a block and returns `GROUP` ids of a chain;
whole trees are one call, as CUDA graphs only.

A level of a small network is two dozen kernels of a few microseconds each, and as much work on the host. The calls of a
draft differ only in sizes: the first reads the queued elements, each other the last id of the call before.
With `torch.compile`, one graph serves blocks of one element and one longer blocks; batches have two of their own.
With CUDA graphs (`models.runner.buffer_pool`), blocks are padded to few lengths, and attention covers a store's slots.

Shapes: B rows, T elements of a block, K = `GROUP` levels, S slots, H heads, E head size, C = E / 2 rotations, P
positions, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec.cache import SlotCache, contiguous_copy, to_device
from visspec.kernels.common import next_power_of_2
from visspec.models.eagle.feature_drafting import FeatureDrafting
from visspec.models.eagle.layer import DraftLayer, FeatureMemory, StoreMemory
from visspec.models.runner.buffer_pool import GraphBufferPool
from visspec.models.runner.compiled import CompiledFunctions, close
from visspec.types import Draft, State, Tree

GROUP = 4  # levels per call; other draft lengths waste up to GROUP - 1 levels
BLOCK = 5  # elements of the block used to warm up the graph of longer blocks
USES = 8  # drafts of a kind of tree before it is recorded: each depth is a kind, and some are rare


class DraftLevels(nn.Module):
    """`GROUP` levels of a drafter's layer as a function of tensors."""

    def __init__(self, layer: DraftLayer):
        super().__init__()
        self.layer = layer

    def forward(
        self,
        token_BT: Tensor,
        feature_BTd: Tensor,
        numbers_BKV: Tensor,
        offsets_3B: Tensor,
        kv_BSHE: Tensor,
        extent: int,
        turns_PC2: Tensor,
        shift_Bd: Tensor,
        scale: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read a block of elements, of which each row has the first `count`, and choose the next K ids.

        offsets: each row's count, and the slot and position of its first element. Keys and values are written to kv, of
        which at most `extent` slots are read. An id is the argmax of logits / scale + numbers. Returns the ids (B, K),
        the feature (B, 1, d) before the last of them, and `offsets` for the call that continues there.
        """
        (rows, width), layer, heads = token_BT.shape, self.layer, self.layer.heads
        attended = partial(attend, kv_BSHE=kv_BSHE, extent=extent, grouped=layer.grouped)
        size = feature_BTd.shape[-1]
        count_B, slot_B, position_B = offsets_3B
        ahead_T, row_B = torch.arange(width, device=token_BT.device), torch.arange(rows, device=token_BT.device)
        turn_BTC2 = turns_PC2[position_B[:, None] + ahead_T]
        x_Nd = layer.join(token_BT, feature_BTd, shift_Bd[:, None])
        qkv = layer.project(x_Nd, rows, width, turn_BTC2)
        kv_BSHE[row_B[:, None], slot_B[:, None] + ahead_T] = qkv[:, :, heads:]
        last_B = count_B - 1
        slot_B, position_B = slot_B + last_B, position_B + last_B
        x_Bd, query_BHE = x_Nd.view(rows, width, -1)[row_B, last_B], qkv[row_B, last_B, :heads]
        feature_Bd = layer.after_attention(x_Bd, query_BHE, partial(attended, at_B=slot_B))
        ids = [self.choose(feature_Bd, numbers_BKV[:, 0], scale)]
        for level in range(1, GROUP):
            slot_B, position_B = slot_B + 1, position_B + 1
            feature_Bd = feature_Bd[..., -size:]  # the last one, if the head predicts several features
            x_Bd = layer.join(ids[-1][:, None], feature_Bd[:, None], shift_Bd[:, None])
            qkv = layer.project(x_Bd, rows, 1, turns_PC2[position_B][:, None])
            kv_BSHE[row_B, slot_B] = qkv[:, 0, heads:]
            feature_Bd = layer.after_attention(x_Bd, qkv[:, 0, :heads], partial(attended, at_B=slot_B))
            ids.append(self.choose(feature_Bd, numbers_BKV[:, level], scale))
        offsets_3B = torch.stack([torch.ones_like(count_B), slot_B + 1, position_B + 1])
        return torch.stack(ids, dim=1), feature_Bd[:, None, -size:], offsets_3B

    def choose(self, feature_Bd: Tensor, numbers_BV: Tensor, scale: Tensor) -> Tensor:
        """Return the ids (B,) chosen after a feature."""
        return (self.layer.logits(feature_Bd).float() / scale + numbers_BV).argmax(dim=-1)


def attend(
    query_BHE: Tensor, part: int | None = None, *, kv_BSHE: Tensor, at_B: Tensor, extent: int, grouped: bool
) -> Tensor:
    """Attend with one query per row to the slots up to its own, (B, H * E).

    Args:
        part: As in `FeatureMemory.attend`.
        grouped: Whether several query heads share keys.
    """
    seen_BS = torch.arange(extent, device=at_B.device) <= at_B[:, None]
    keys, values = kv_BSHE[:, :extent].transpose(1, 2).chunk(2, dim=1)
    if part is not None:
        keys, values = (x.chunk(2, dim=1)[part] for x in (keys, values))
    query_BH1E, mask = query_BHE[:, :, None], seen_BS[:, None, None]
    return F.scaled_dot_product_attention(query_BH1E, keys, values, attn_mask=mask, enable_gqa=grouped).flatten(1)


class DraftCalls:
    """Drafts chains with a drafter's `DraftLevels`, in calls that subclasses compile or record."""

    call: Callable[..., tuple[Tensor, Tensor, Tensor]]
    fits: Callable[[State, int], bool]  # whether the next draft, of so many elements, is compiled or replayed
    name: str

    def __init__(self, drafter: FeatureDrafting):
        super().__init__(type(drafter).__name__)  # type: ignore[call-arg]  # goes to the subclass's other base
        self.drafter, self.layer = drafter, drafter.layer
        self.levels = DraftLevels(self.layer)
        self.vocab, self.head = drafter.config.vocab, drafter.head

    def prepare(self, state: State, depth: int, turns: Callable[[int], Tensor]) -> bool:
        """Make room for a draft, and return whether `draft` can run it.

        Args:
            turns: Returns rotations for so many positions.
        """
        memory: FeatureMemory = state.memory
        count = max(sum(token.shape[1] for token, _, _ in memory.pending_inputs), self.drafter.traits.levels + 1)
        drafted = depth * self.drafter.structure(state).width
        more = max(next_power_of_2(count), BLOCK + 1) + drafted + GROUP  # a draft, or a warm-up, writes at most as many
        memory.reserve(memory.end + more)
        memory.table = turns(max(memory.positions) + more)
        return self.fits(state, more)

    def draft(self, state: State, depth: int) -> Tensor:
        """Read the queued elements and draft ids (B, depth) after the pending ones, after `prepare`."""
        memory: FeatureMemory = state.memory
        token_BT, feature_BTF, counts = memory.pop_pending()
        feature_BTd, length = self.head.reduced(feature_BTF).to(self.layer.dtype), -(-depth // GROUP) * GROUP
        token_BT, feature_BTd = self._block(token_BT, feature_BTd)
        numbers_BTV, scale = self._numbers(state, length)
        offsets_3B = to_device([counts, memory.lengths, memory.positions], token_BT.device)
        fixed = self._shared_arguments(memory, memory.kv, token_BT.shape[1] + length, feature_BTd)
        levels = []
        for start in range(0, length, GROUP):
            inputs = map(contiguous_copy, (token_BT, feature_BTd, numbers_BTV[:, start : start + GROUP]))
            ids_BK, feature_BTd, offsets_3B = self._called(memory, *inputs, offsets_3B, *fixed, scale)
            levels.append(ids_BK)
            token_BT = ids_BK[:, -1:]
        memory.advance(counts)
        return torch.cat(levels, dim=1)[:, :depth]

    def _block(self, token_BT: Tensor, feature_BTd: Tensor) -> tuple[Tensor, Tensor]:
        """Pad the queued elements for a call."""
        return token_BT, feature_BTd

    def _called(self, memory: FeatureMemory, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.call(*inputs)

    def _shared_arguments(self, memory: FeatureMemory, kv_BSHE: Tensor, more: int, like_BTd: Tensor) -> tuple:
        """Return the arguments shared by all calls of a draft that writes `more` elements: the store, its extent,
        rotations and the context bias.
        """
        shift_Bd = memory.image_bias
        if shift_Bd is None:
            shift_Bd = like_BTd.new_zeros(like_BTd.shape[0], like_BTd.shape[2])
        return kv_BSHE, memory.end + more, torch.view_as_real(memory.table), shift_Bd

    def _numbers(self, state: State, levels: int) -> tuple[Tensor, Tensor]:
        """Return what is added to the logits of each level, (B, levels, V), and what the logits are divided by."""
        device, temperature = state.pending.device, state.request.sampling.temperature or 1.0
        scale = to_device([temperature], device)
        if state.noise is None:
            return torch.zeros(len(state.rows), levels, self.vocab, device=device), scale
        return state.noise.window(levels)[:, :, : self.vocab], scale


class CompiledDrafter(DraftCalls, CompiledFunctions):
    """Compiled drafts. If a drafter cannot be compiled, it warns and drafts eagerly."""

    def __init__(self, drafter: FeatureDrafting):
        super().__init__(drafter)
        self.call = self.compile(self.levels.forward)
        if self.layer.is_quantized():
            self.refuse("a quantized LM head")

    def fits(self, state: State, more: int) -> bool:
        several = len(state.rows) > 1
        return maximal(state) and self.serve(several, state, lambda: self._warm_up(several, state))

    def _warm_up(self, several: bool, state: State) -> None:
        """Build both graphs for this number of rows and check their outputs, on a copy of the request's memory."""
        memory, rows = state.memory, len(state.rows)
        feature_BTd = self.head.reduced(memory.pending_inputs[-1][1][:, -1:]).to(self.layer.dtype)
        numbers_BKV, scale = self._numbers(state, GROUP)
        with self.warm_up(several, "drafts"):
            for width in (BLOCK if rows != BLOCK else BLOCK + 1, 1):
                block = state.pending[:, None].expand(-1, width), feature_BTd.expand(-1, width, -1), numbers_BKV
                offsets_3B = to_device([[width] * rows, memory.lengths, memory.positions], numbers_BKV.device)
                fixed = self._shared_arguments(memory, memory.kv.clone(), width + GROUP, feature_BTd)
                inputs = (*map(contiguous_copy, block), offsets_3B, *fixed, scale)
                want, got = (function(*inputs)[1].float() for function in (self.levels, self.call))
                close(got, want, feature_BTd.dtype)


class GraphedDrafter(DraftCalls, GraphBufferPool):
    """Drafts as CUDA graphs, with keys and values in pooled buffers: chains in groups of levels, and whole trees. If
    recording fails, it runs eagerly.
    """

    def __init__(self, drafter: FeatureDrafting):
        super().__init__(drafter)
        self.fixed = not self.layer.is_quantized()
        self.uses: Counter[tuple] = Counter()

    def fits(self, state: State, more: int) -> bool:
        memory: FeatureMemory = state.memory
        tree = self.drafter.structure(state).width > 1 and (state.noise is None or not state.noise.samples)
        lent = self.fixed and (tree or maximal(state)) and self.lend(state, memory.slots, more)
        if memory.kv.data_ptr() != memory.slots.keys[0].data_ptr():
            memory.update()
        return lent

    def _block(self, token_BT: Tensor, feature_BTd: Tensor, least: int = 1) -> tuple[Tensor, Tensor]:
        # padding is written after a row's last element, where later levels overwrite it
        more = next_power_of_2(max(token_BT.shape[1], least)) - token_BT.shape[1]
        return F.pad(token_BT, (0, more)), F.pad(feature_BTd, (0, 0, 0, more))

    def tree(self, state: State, depth: int) -> Draft | None:
        """Like `draft`, for a tree of `depth` levels. Returns None if it is not recorded yet."""
        drafter, memory, sampling = self.drafter, state.memory, state.request.sampling
        structure, table = drafter.structure(state), memory.table
        kind = depth, structure, drafter.paths, sampling.temperature, sampling.top_k, sampling.top_p
        self.uses[kind] += 1
        if self.uses[kind] <= USES:
            return None
        token_BT, feature_BTF, counts = memory.pop_pending()
        feature_BTd = self.head.reduced(feature_BTF).to(self.layer.dtype)
        block = self._block(token_BT, feature_BTd, drafter.traits.levels + 1)
        offsets_3B = to_device([counts, memory.lengths, memory.positions], token_BT.device)
        turns_PC2, shift_Bd = self._shared_arguments(memory, memory.kv, 0, block[1])[2:]
        numbers = [] if state.noise is None else [self._numbers(state, depth)[0]]
        slots = SlotCache(len(counts))
        slots.keys = memory.slots.keys[:]

        def grow(*inputs: Tensor) -> tuple[Any, ...]:
            pending, token_BT, feature_BTd, offsets_3B, shift_Bd, *numbers = inputs
            noise = None
            if numbers:
                noise = SimpleNamespace(perturb=lambda logits_BWV, level: logits_BWV + numbers[0][:, level : level + 1])
            request = SimpleNamespace(sampling=sampling)
            part: Any = SimpleNamespace(pending=pending, noise=noise, structure=structure, request=request)
            inner = StoreMemory(slots, offsets_3B[1:], shift_Bd, table)
            feature_Bd = drafter.read_block(inner, token_BT, feature_BTd, offsets_3B[0])
            builder, feature_BWd = drafter.grow_tree(part, inner, feature_Bd, depth)
            draft = builder.finish(structure.nodes)
            shape = () if drafter.paths else (draft.tree.parent, draft.tree.depth, draft.tree.ancestor)
            # a static tree's builder holds tensors that the recording reads
            return draft.value, feature_BWd, draft.real, builder, *shape

        args = [state.pending, *block, offsets_3B, shift_Bd, *numbers]
        value, _, real, builder, *shape = self._replay(memory, turns_PC2, kind, args, grow)
        memory.advance(counts)
        tree = Tree(shape[0], shape[1], shape[2], depth, chain=False) if shape else builder.tree
        return Draft(value, tree, real=real)

    def _called(self, memory: FeatureMemory, *inputs: Tensor) -> Any:
        token_BT, feature_BTd, numbers_BKV, offsets_3B, kv_BSHE, _, turns_PC2, shift_Bd, scale = inputs
        fixed = kv_BSHE, kv_BSHE.shape[1], turns_PC2
        args = [token_BT, feature_BTd, numbers_BKV, offsets_3B, shift_Bd, scale]
        return self._replay(memory, turns_PC2, (), args, lambda *x: self.levels(*x[:4], *fixed, *x[4:]))

    def _replay(
        self, memory: FeatureMemory, turns_PC2: Tensor, kind: tuple, args: list[Tensor], function: Callable[..., tuple]
    ) -> list[Any]:
        weights = [turns_PC2, *self.layer.embed.parameters(), *self.layer.lm_head.parameters()]
        key = (memory.slots.lease.stores.number, kind, *(x.data_ptr() for x in weights))
        return self.run_recorded(key, args, function, weights)


def maximal(state: State) -> bool:
    """Return whether a request's drafted ids are argmaxes of logits, plus the position's own noise if there is any."""
    sampling = state.request.sampling
    if state.noise is not None and state.noise.samples:
        return False
    return sampling.greedy or not (sampling.top_k > 0 or sampling.top_p < 1.0)
