"""Passes of a block drafter recorded as CUDA graphs: the network, the LM head and, for greedy chains, the choice of
tokens are one launch.

A recording reads a context padded to few widths, and the block behind it. Masks over all slots of the stores hide what
the padding writes, until the next pass overwrites it. Prompts and other long contexts are read eagerly. If recording
fails, a warning says so once.

Shapes: B rows, C context elements, K block, F features, V vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.cache import to_device
from visspec.models.drafting.base import Chain
from visspec.models.runner.buffer_pool import GraphBufferPool
from visspec.models.runner.compiled import foreign
from visspec.replay import capacity
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
            greedy: Return the greedy chain (B, K), hidden states, and if confidence ends chains, its acceptance rates
                (B, K).
        """
        drafter, memory, pending = self.drafter, state.memory, state.pending
        slots, position_B = memory.cache.slots, memory.placed(state.position)
        position_BC, context_BCF, counts = queued = drafter.queued(memory, position_B)
        width = capacity(max(context_BCF.shape[1], drafter.traits.levels + 1))
        fits = slots.keys and context_BCF.shape[1] <= WIDEST and not (self.hooked or drafter.assistant.training)
        if not (fits and self.lend(state, slots, width + drafter.block)):
            memory.pending_inputs = [queued]
            return None
        stores, more = slots.lease.stores, width - context_BCF.shape[1]

        def read(*inputs: Tensor) -> tuple[Any, ...]:
            # its own cache has another length on the host than the request's, which exposes any dependence on that
            scratch = memory.cache.with_stores(stores.tensors, len(counts), 1 if slots.length != 1 else 2)
            pending, position_B, bounds_2B, position_BC, context_BCF = inputs
            length_B1, count_B1 = bounds_2B[..., None]
            scratch.slots.open_at(length_B1 + torch.arange(width + drafter.block, device=pending.device), stores.slots)
            masks = drafter.masks(length_B1, count_B1, width, stores.slots)
            hidden_BKd = drafter.network(scratch, masks, pending, position_B, position_BC, context_BCF)
            hidden_BKd = hidden_BKd[:, drafter.first :]
            logits_BKV = drafter._laws(hidden_BKd)
            if not greedy:
                return hidden_BKd, logits_BKV
            request: Any = SimpleNamespace(noise=None, pending=pending)
            chain = Chain(request, drafter.confidence)
            drafter.extend(chain, logits_BKV, hidden_BKd)
            return torch.stack(chain.tokens, dim=1), hidden_BKd, *(torch.stack(x, dim=1) for x in [chain.rates] if x)

        padded = F.pad(position_BC, (0, more)), F.pad(context_BCF, (0, 0, 0, more))
        args = [pending, position_B, to_device([slots.lengths, counts], pending.device), *padded]
        outputs = self.run_recorded((stores.number, greedy, drafter.confidence > 0), args, read)
        memory.advance(counts)
        state.calls["draft_pass"] += 1
        return outputs
