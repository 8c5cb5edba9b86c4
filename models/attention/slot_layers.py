"""Our slot-addressed cache with the interface of a transformers `Cache`, which stock models write into unmodified."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.generation import GenerateDecoderOnlyOutput

from visspec.cache import SlotCache
from visspec.models.attention.recurrent import RecurrentStateCheckpoints

CACHE_NAMES = "cache", "past_key_values"  # names of arguments and outputs: from transformers 5.24 on, and before
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(GenerateDecoderOnlyOutput)})


def cache_argument(function: Callable) -> str | None:
    """Return the name of a function's cache argument, by this transformers' name or by another version's, for which a
    custom model may be written. None if it has none, or takes a dictionary (XLM).
    """
    arguments = inspect.signature(function).parameters
    for name in (CACHE, *CACHE_NAMES):
        if name in arguments and "dict" not in str(arguments[name].annotation):
            return name
    return None


class SlotLayer(CacheLayerMixin):
    """One layer's view of a `SlotCache`."""

    is_sliding = False  # sliding windows are applied by the mask: all slots are kept

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


class StateSlotLayer(LinearAttentionLayer, SlotLayer):  # type: ignore[override]
    """A layer with keys and values, and a recurrent state."""

    def __init__(self, slots: SlotCache, index: int, number_of_states: int):
        SlotLayer.__init__(self, slots, index)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args, **kwargs) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)
        self.is_initialized = True


class SlotLayers(Cache):
    """The cache passed to a model; the loop works with its `slots`.

    `written` maps a layer of the model to its place in `slots`; layers that share another layer's keys write none.
    `prompt` is the number of slots that the prompt took; `lag` and `moves` are used by `rotary`, and `past` by models
    with recurrent states (`recurrent`).
    """

    prompt = 0
    lag: torch.Tensor | None = None  # (B,) by how many positions the longest prompt was ahead of the row's
    moves = False  # whether rotary frequencies change in this request

    def __init__(self, rows: int, answer: int = 0, lean: bool = False, states: dict[int, Any] | None = None):
        self.slots, self.rows = SlotCache(rows, answer, lean), list(range(rows))
        states = dict(states or {})
        for i, layer in states.items():
            if isinstance(layer, CacheLayerMixin):
                states[i] = StateSlotLayer(self.slots, i, states[i].number_of_states)
        self.past = RecurrentStateCheckpoints(states, rows) if states else None
        self.left: dict[int, list[torch.Tensor]] = {}  # original row -> keys and values (H, S, E) of a row that left
        self.written: dict[int, int] = {}
        super().__init__(layers=[states.get(i) or SlotLayer(self.slots, i) for i in range(max(states, default=-1) + 2)])

    def over(self, stores: list[torch.Tensor], rows: int, length: int) -> SlotLayers:
        """Return a cache of the same layers over other stores (keys, then values), with rows of `length` slots."""
        new, half = SlotLayers(rows), len(stores) // 2
        new.slots.keys, new.slots.values = [s[:rows] for s in stores[:half]], [s[:rows] for s in stores[half:]]
        new.slots.lengths = [length] * rows
        new.adopt(self)
        return new

    def adopt(self, other: SlotLayers) -> None:
        """Take over the layers of another cache of the same model, whose keys and values were put into `slots`."""
        self.written = dict(other.written)
        self.layers = [SlotLayer(self.slots, i) for i in range(len(other.layers))]

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        place = self.written.get(layer_idx)
        if place is None:
            place = self._first(layer_idx, key_states.shape[2])
        return self.slots.write(place, key_states, value_states)

    def _first(self, layer_idx: int, width: int) -> int:
        """Give a layer its place when it is first written. Raises ValueError if it writes another number of slots than
        the layers before it.
        """
        if not self.written and self.slots.length == 0:
            self.slots.open(width, "cpu")  # a prompt may take more slots than it has ids, for images in front of it
        if width != self.slots.nodes:
            raise ValueError(f"model: got {width} keys from its layer {layer_idx}, expected {self.slots.nodes}.")
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self.slots, len(self.layers)))
        self.written[layer_idx] = len(self.written)
        return self.written[layer_idx]

    def check_written(self, model: PreTrainedModel, expected: Collection[int]) -> None:
        """Raise ValueError unless all of these layers of the model have been written."""
        if self.past is not None:
            self.past.check_written(model)
        if missing := [index for index in expected if index not in self.written]:
            raise ValueError(
                f"model: {type(model).__name__} wrote keys and values in {len(self.written)} of {len(expected)} layers"
                f" (not in layer {missing[0]}), expected all of them in the cache it was given."
            )

    def select(self, keep: list[int], stash: bool = False) -> None:
        """Drop all rows but these.

        Args:
            stash: Whether to keep a copy of the contents of dropped rows for `dynamic`.
        """
        if stash:
            for b, row in enumerate(self.rows):
                if b not in keep:
                    length, stores = self.slots.lengths[b], (*self.slots.keys, *self.slots.values)
                    self.left[row] = [store[b, :, :length].clone() for store in stores]
            self.rows = [self.rows[b] for b in keep]
        self.slots.select(keep)
        if self.past is not None:
            self.past.select(keep)
        if self.lag is not None:
            self.lag = self.lag[keep]

    def join(self, other: SlotLayers, take: list[int]) -> None:
        """Add rows of another cache of the same model. Padding of both is dropped."""
        if self.slots.padding is not None:
            self.slots.pack(self.slots.padding.tolist())
        skip = [0] * len(other.slots.lengths)
        if other.slots.padding is not None:
            real = other.slots.padding.tolist()
            if all(row == sorted(row) for row in real):  # left padding: each row's slots are contiguous
                skip = [row.count(False) for row in real]
            else:
                other.slots.pack(real)
        self.slots.join(other.slots, take, skip)
        if self.past is not None and other.past is not None:
            self.past.join(other.past, take)
        if self.lag is not None and other.lag is not None:
            self.lag, self.moves = torch.cat([self.lag, other.lag[take]]), self.moves or other.moves

    def dynamic(self, lengths: list[int]) -> DynamicCache | None:
        """Copy the first lengths[b] slots of every original row, followed by zeros, to transformers' own dynamic cache.

        Nothing is copied if all rows are present and have one length. Returns None for models with recurrent states,
        which may be those of an earlier token.
        """
        if self.past is not None:
            return None
        longest, stores = max(lengths), [*self.slots.keys, *self.slots.values]
        if self.left or min(lengths) < longest:
            copies = [store.new_zeros(len(lengths), store.shape[1], longest, store.shape[3]) for store in stores]
            live = {row: [store[b] for store in stores] for b, row in enumerate(self.rows)}
            for row, length in enumerate(lengths):
                for new, old in zip(copies, self.left.get(row) or live[row]):
                    new[row, :, :length] = old[:, :length]
            stores = copies
        cache = DynamicCache()
        for keys, values in zip(stores[: len(stores) // 2], stores[len(stores) // 2 :]):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[:, :, :longest], values[:, :, :longest]
            cache.layers.append(layer)
        return cache


def cached_layers(config: PretrainedConfig) -> dict[int, int]:
    """Return the layers that have keys and values in transformers' own cache for a configuration, with window or 0."""
    layers = enumerate(DynamicCache(config=config).layers)
    return {i: getattr(layer, "sliding_window", 0) for i, layer in layers if isinstance(layer, CacheLayerMixin)}


def state_modules(decoder: nn.Module, layers: Collection[int]) -> dict[int, nn.Module]:
    """Return the modules of a decoder that read and write the states of these layers, judged by what they call."""
    candidates: Iterator[tuple[Any, nn.Module]] = ((getattr(m, "layer_idx", None), m) for m in decoder.modules())
    return {index: module for index, module in candidates if index in layers and _writes_states(type(module))}


def _writes_states(kind: type[nn.Module]) -> bool:
    functions = (inspect.unwrap(value) for base in kind.__mro__ for value in vars(base).values() if callable(value))
    codes = (getattr(function, "__code__", None) for function in functions)
    return any(code is not None and "update_conv_state" in code.co_names for code in codes)


def restarts(model: GenerationMixin, cached: int, length: int) -> bool:
    """Return whether input preparation drops a cache of `cached` tokens at `length` ids."""
    cache = SlotLayers(1)
    cache.slots.lengths = [cached]
    ids = torch.zeros(1, 1, dtype=torch.long).expand(1, length)
    name = cache_argument(model.prepare_inputs_for_generation) or CACHE
    try:
        arguments = model.prepare_inputs_for_generation(ids, **{name: cache}, next_sequence_length=1)
    except Exception:  # it needs arguments of a generate call
        return False
    return all(arguments.get(name) is not cache for name in CACHE_NAMES)
