"""Our slot-addressed cache behind the face of a transformers `Cache`, so that stock models write into it unmodified."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from visspec.cache import SlotCache


class SlotLayer(CacheLayerMixin):
    """One layer's window on a `SlotCache`."""

    is_sliding = False  # sliding windows are a matter of the mask: all slots are kept

    def __init__(self, slots: SlotCache, index: int):
        super().__init__()
        self.slots, self.index = slots, index

    def lazy_initialization(self, key_states, value_states) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return self.slots.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.slots.length

    def get_max_length(self) -> int:
        return -1


class SlotLayers(Cache):
    """What a model is given as `past_key_values`; `slots` is what the loop works with."""

    def __init__(self, rows: int):
        self.slots = SlotCache(rows)
        super().__init__(layers=[SlotLayer(self.slots, 0)])

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self.slots, len(self.layers)))
        return self.slots.write(layer_idx, key_states, value_states)
