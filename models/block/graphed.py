"""Passes of a block drafter recorded as CUDA graphs: the network, the LM head and, for greedy chains, the choice of
tokens are one launch.

A recording reads a context padded to few widths, and the block behind it. Masks over all slots of the stores hide what
the padding writes, until the next pass overwrites it. Prompts and other long contexts are read eagerly. If recording
fails, a warning says so once.

Shapes: B rows, C context elements, K block, F features, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.cache import contiguous_copy, to_device
from visspec.models.attention.pass_inputs import SlotLayers
from visspec.models.drafting.base import Chain
from visspec.models.runner.buffer_pool import GraphBufferPool, capacity, one_line
from visspec.models.runner.compiled import close, foreign
from visspec.replay import REPLAYING, Recording, stream
from visspec.types import State

if TYPE_CHECKING:
    from visspec.models.block.drafter import BlockModel

WIDEST = 64  # context elements that a recorded pass reads at most


class GraphedBlocks(GraphBufferPool):
    """Recorded passes of a block drafter, with keys and values in pooled buffers."""

    def __init__(self, drafter: BlockModel):
        super().__init__(type(drafter).__name__)
        self.drafter = drafter
        self.hooked = False

    def open(self) -> None:
        """Prepare for a request; drop the recordings if the drafter has changed."""
        drafter = self.drafter
        parts = drafter.assistant, drafter.embed, drafter.lm_head, drafter.form.sequential
        self.follow([part for part in parts if part is not None])
        self.hooked = any(map(foreign, drafter.assistant.modules()))

    def run(self, state: State, greedy: bool) -> list[Any] | None:
        """Read the queued context and return the block's hidden states (B, K, d) and logits (B, K, V). Returns None if
        the pass must run eagerly.

        Args:
            greedy: Return the greedy chain (B, K) and, if confidence ends chains, its acceptance rates (B, K) or else
                None.
        """
        drafter, memory, pending = self.drafter, state.memory, state.pending
        slots, device = memory.cache.slots, pending.device
        if self.refused or self.recorder(device) is None or not (self.recordings or self.due(state.request)):
            return None
        if not slots.keys or self.hooked or drafter.assistant.training or torch.is_autocast_enabled(device.type):
            return None
        position_B = memory.placed(state.position)
        position_BC, context_BCF, counts = queued = drafter.queued(memory, position_B)
        memory.pending_inputs = [queued]  # until it has been read
        width = capacity(max(context_BCF.shape[1], drafter.traits.levels + 1))
        room = self.bucket(slots.length + width + drafter.block)
        if context_BCF.shape[1] > WIDEST or room is None:
            return None
        with REPLAYING, torch.cuda.device_of(pending):
            try:
                self.move_in(slots, room, stream(device))
                inputs = [pending, position_B, to_device([slots.lengths, counts], device), position_BC, context_BCF]
                kinds = width, greedy, drafter.confidence > 0, context_BCF.dtype
                key = (slots.lease.stores.number, len(slots.lengths), *kinds)
                if key not in self.recordings and not self.due(state.request):
                    return None
                record = partial(self._record, memory.cache, inputs, counts, width, greedy)
                recording = self.replayed(key, inputs, record)
            except Exception as error:
                self.refuse(f"drafts of {self.name} run without CUDA graphs: {one_line(error)}")
                return None
            outputs = [None if x is None else x.clone() for x in recording.output[greedy:]]
        memory.pending_inputs = []
        memory.advance(counts)
        state.calls["draft_pass"] += 1
        return outputs

    def _record(
        self, cache: SlotLayers, values: list[Tensor], counts: list[int], width: int, greedy: bool
    ) -> Recording:
        """Record a pass and replay it once. Raises ValueError if its hidden states differ from those of an eager pass.

        The output is the hidden states, then the logits, or for greedy chains the tokens and their acceptance rates.
        """
        drafter, stores = self.drafter, cache.slots.lease.stores
        pending, position_B, bounds_2B, position_BC, context_BCF = values
        want = drafter.read(cache, pending, position_B, (position_BC, context_BCF, counts))[:, drafter.first :]
        more = width - context_BCF.shape[1]
        padded = F.pad(position_BC, (0, more)), F.pad(context_BCF, (0, 0, 0, more))
        inputs = [contiguous_copy(x) for x in (pending, position_B, bounds_2B, *padded)]
        # its own cache has another length on the host than the request's, which exposes any dependence on that below
        scratch = cache.with_stores(stores.tensors, len(pending), 1 if cache.slots.length != 1 else 2)

        def call() -> tuple[Tensor | None, ...]:
            pending, position_B, bounds_2B, position_BC, context_BCF = inputs
            length_B1, count_B1 = bounds_2B[..., None]
            ahead = torch.arange(width + drafter.block, device=pending.device)
            scratch.slots.open_at(length_B1 + ahead, stores.slots)
            masks = drafter.masks(length_B1, count_B1, width, stores.slots)
            # the buffer has elements of earlier passes behind the row's own, perhaps of other requests
            context_BCF = context_BCF.masked_fill((ahead[:width] >= count_B1)[..., None], 0)
            hidden_BKd = drafter.network(scratch, masks, pending, position_B, position_BC, context_BCF)
            hidden_BKd = hidden_BKd[:, drafter.first :]
            logits_BKV = drafter._laws(hidden_BKd)
            if not greedy:
                return hidden_BKd, logits_BKV
            request: Any = SimpleNamespace(noise=None, pending=pending)
            chain = Chain(request, drafter.confidence)
            drafter.extend(chain, logits_BKV, hidden_BKd)
            rates_BK = torch.stack(chain.rates, dim=1) if chain.rates else None
            return hidden_BKd, torch.stack(chain.tokens, dim=1), rates_BK

        record = self.recorder(pending.device)
        assert record is not None
        recording = Recording(inputs, *record(call))
        recording.replay()
        close(recording.output[0].float(), want.float(), want.dtype)
        return recording
