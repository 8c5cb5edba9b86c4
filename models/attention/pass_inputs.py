"""Inputs of one pass of a stock model: a cache over our slots, what a draft's nodes attend to, and hooks.

`SlotLayers` is our slot-addressed cache with the interface of a transformers `Cache`, which models write into
unmodified. `Masks` builds the attention arguments of a pass over a draft: a mask, or where `draft_attention` needs
none, lengths and the tree (`DraftLayout`), small enough to be rebuilt for every pass. `ModuleHooks` are registered on
a shared model for one pass and ignore calls from other threads.

Shapes: B rows of a pass, R cache rows, H heads, G query heads per key head, N nodes, S slots, E head size, M = G N mask
rows: row g N + n belongs to node n.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.generation import GenerateDecoderOnlyOutput

from visspec.cache import GROW, SlotCache, additive, contiguous_copy, to_device, visibility
from visspec.types import Tree

if TYPE_CHECKING:
    from visspec.models.attention.recurrent import RecurrentStateCheckpoints

CACHE_NAMES = "cache", "past_key_values"  # names of arguments and outputs: from transformers 5.24 on, and before
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(GenerateDecoderOnlyOutput)})
NAME = "visspec"  # our name in transformers' registries, and the keyword of the forward pass
HYBRID = "hybrid"  # layers with attention and a state
STATEFUL = ("linear_attention", "conv")  # layer types without attention; they need no mask, as drafts have no padding
MOST_KEPT = 1 << 24  # numbers in all shared masks together
MASK, TREE = "mask", "tree"  # names of a `Backend`
WORDS = {MASK: "a mask over stored keys", TREE: "tree_attention, no mask"}
AttentionInputs = dict[str, Any]  # keyword arguments of a forward pass that define what its nodes attend to
_starts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # `SlotCache.padding` -> first slots
# PyTorch numbers hooks without a lock, so two registered at once can get the same id. While a model is probed
# (`probe`), hooks that other threads register must be neither removed nor kept for good.
HOOKING = threading.RLock()


class SlotLayer(CacheLayerMixin):
    """One layer's view of a `SlotCache`."""

    is_sliding = False  # sliding windows are applied by the mask: all slots are kept

    def __init__(self, slots: SlotCache, index: int):
        super().__init__()
        self.slots, self.index = slots, index

    def lazy_initialization(self, key_states, value_states) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
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
    lag: Tensor | None = None  # (B,) by how many positions the longest prompt was ahead of the row's
    moves = False  # whether rotary frequencies change in this request

    def __init__(self, rows: int, answer: int = 0, lean: bool = False, past: RecurrentStateCheckpoints | None = None):
        self.slots, self.rows, self.past = SlotCache(rows, answer, lean), list(range(rows)), past
        states = {} if past is None else past.layers
        for i, layer in states.items():
            if isinstance(layer, CacheLayerMixin):
                states[i] = StateSlotLayer(self.slots, i, states[i].number_of_states)
        self.left: dict[int, list[Tensor]] = {}  # original row -> keys and values (H, S, E) of a row that left
        self.written: dict[int, int] = {}
        super().__init__(layers=[states.get(i) or SlotLayer(self.slots, i) for i in range(max(states, default=-1) + 2)])

    def with_stores(self, stores: list[Tensor], rows: int, length: int) -> SlotLayers:
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
        skip = starts(other.slots)
        if skip is None:  # a row's slots are not contiguous
            assert other.slots.padding is not None
            other.slots.pack(other.slots.padding.tolist())
            skip = [0] * len(other.slots.lengths)
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


def cache_argument(function: Callable) -> str | None:
    """Return the name of a function's cache argument; None if it has none, or takes a dictionary (XLM).

    Custom models may use the name of another transformers version.
    """
    arguments = inspect.signature(function).parameters
    for name in (CACHE, *CACHE_NAMES):
        if name in arguments and "dict" not in str(arguments[name].annotation):
            return name
    return None


def cached_layers(config: PretrainedConfig) -> dict[int, int]:
    """Return the layers that have keys and values in transformers' own cache for a configuration, with window or 0."""
    layers = enumerate(DynamicCache(config=config).layers)
    return {i: getattr(layer, "sliding_window", 0) for i, layer in layers if isinstance(layer, CacheLayerMixin)}


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


class DraftLayout(NamedTuple):
    """Positions of a draft's nodes among the stored keys, and which nodes see each other."""

    length_B: Tensor  # committed slots of each row
    start_B: Tensor  # first slot of each row that is not padding
    ancestor: Tensor  # (1|B, N, N) bool
    backend: Backend


def visibility_mask(layout: DraftLayout, extent: int) -> Tensor:
    """Return the mask equivalent to a layout, (B, 1, N, S) bool."""
    slot = torch.arange(extent, device=layout.ancestor.device)
    seen_BNS = visibility(layout.ancestor, layout.length_B, None, extent)
    return (seen_BNS & (slot >= layout.start_B[:, None])[:, None])[:, None]


class Backend:
    """How the draft passes of one target tell attention what a node sees; `name` is MASK or TREE.

    The first failure switches to MASK for good and warns. The failing pass uses it, too, so tokens are the same.
    """

    def __init__(self, name: str = MASK, why: str = ""):
        self.name, self.why = name, why

    def __str__(self) -> str:
        return WORDS[self.name] + (f" ({self.why})" if self.why else "")

    def refuse(self, why: str) -> None:
        if self.name != MASK:
            self.name, self.why = MASK, why
            warnings.warn(f"attention: draft passes use a mask because of {why}", RuntimeWarning, 2)

    def __call__(self, slots: SlotCache, tree: Tree) -> DraftLayout | None:
        """Return the layout that replaces a mask, after `slots.open`; None if a mask is needed: for padding inside
        prompts, and in compiled passes.
        """
        if slots.steady or (start_B := self.first_slots(slots)) is None:
            return None
        bounds = to_device([slots.lengths, start_B], tree.ancestor.device, torch.int32)
        return DraftLayout(bounds[0], bounds[1], tree.ancestor, self)

    def first_slots(self, slots: SlotCache) -> list[int] | None:
        """Return each row's first visible slot; None if a mask is needed."""
        return None if self.name == MASK else starts(slots)


def starts(slots: SlotCache) -> list[int] | None:
    """Return each row's first slot that is not padding; None if there is padding after it. It synchronizes with the
    device once per set of padded rows.
    """
    padding = slots.padding
    if padding is None:
        return [0] * len(slots.lengths)
    if padding not in _starts:
        real = padding.tolist()
        _starts[padding] = [row.count(False) for row in real] if all(row == sorted(row) for row in real) else None
    return _starts[padding]


class Masks:
    """Builds the mask of a pass; masks shared by all rows come from a buffer. `window` 0 means full attention in every
    layer; `mixed` models take a dictionary with a mask per layer type. `groups` is G, or 1 for models that attend with
    the mask alone. `backend` can replace the mask (`Backend`).
    """

    def __init__(
        self, dtype: torch.dtype, window: int = 0, mixed: bool = False, groups: int = 1, backend: Backend | None = None
    ):
        self.dtype, self.window, self.mixed, self.groups = dtype, window, mixed, groups
        self.backend = backend or Backend()
        self._bias: dict[int, tuple[Tree, Tensor]] = {}

    def __call__(self, slots: SlotCache, tree: Tree, extent: int) -> AttentionInputs:
        """Return the arguments of a pass over a draft. A tree per row has R rows; no mask means plain causal."""
        if self.window:
            return self.whole(tree.ancestor, tree.depth, slots.lengths, slots.padding, extent)
        single = (
            tree.size == 1 and slots.uniform and slots.padding is None and not slots.steady and slots.extents is None
        )
        if single and (self.groups == 1 or self.backend.name != MASK):
            return {"attention_mask": None}
        if (layout := self.backend(slots, tree)) is not None:
            return self.unmasked(layout)
        if slots.apart or slots.padding is not None or tree.parent.shape[0] > 1 or slots.extents is not None:
            mask = self._ragged_mask(slots, tree, extent)
        else:
            mask = self._shared_mask(tree, slots.length)
        return self.inputs(layout_mask(mask, slots.steady))

    def whole(
        self, ancestor: Tensor, depth: Tensor, lengths: list[int] | Tensor, padding: Tensor | None, extent: int
    ) -> AttentionInputs:
        """Like a call, without cached masks; lengths (R,) may be a tensor, which is then not read on the host."""
        seen_RNS = visibility(ancestor, lengths, padding, extent)
        full = layout_mask(self.additive(seen_RNS, self.groups), False)
        if not self.window:
            return self.inputs(full)
        sliding = layout_mask(self.additive(seen_RNS & nearby(depth, lengths, extent, self.window), self.groups), False)
        if not self.mixed:
            return self.inputs(sliding)
        kinds = self.inputs(full), self.inputs(sliding)
        return {
            name: {"full_attention": inputs, "sliding_attention": kinds[1][name], **dict.fromkeys(STATEFUL)}
            for name, inputs in kinds[0].items()
        }

    def inputs(self, mask: Tensor) -> AttentionInputs:
        """Return the arguments for a mask of M rows: the part for N nodes, and all of it for our attention."""
        if self.groups == 1:
            return {"attention_mask": mask}
        return {"attention_mask": mask[:, :, : mask.shape[2] // self.groups], NAME: mask}

    def unmasked(self, layout: DraftLayout) -> AttentionInputs:
        """Return the arguments without a mask. The empty mask makes attention that ignores the layout fail."""
        nodes = layout.ancestor.shape[2]
        empty = torch.empty(1, 1, nodes, 0, dtype=self.dtype, device=layout.ancestor.device)
        return {"attention_mask": empty, NAME: layout}

    def additive(self, seen_RNS: Tensor, groups: int = 1) -> Tensor:
        """Return 0 where a node attends and the dtype's minimum elsewhere: (R, 1, M, S)."""
        bias = additive(seen_RNS, self.dtype)[:, None]
        return bias if groups == 1 else bias.repeat(1, 1, groups, 1)

    def _shared_mask(self, tree: Tree, length: int) -> Tensor:
        """Return the mask if all rows are equal: a view into a buffer of [zeros | tree], not built every round."""
        entry = self._bias.get(id(tree))
        if entry is not None and entry[0] is tree and entry[1].shape[-1] - tree.size >= length:
            buffer = entry[1]
        else:
            own = self.additive(tree.ancestor, self.groups)
            buffer = torch.cat([own.new_zeros(*own.shape[:3], length + length // 4 + GROW), own], dim=-1)
            masks = list(self._bias.values())  # copied, as other threads may add to it
            if sum(other.numel() for _, other in masks) + buffer.numel() > MOST_KEPT:
                self._bias.clear()
            self._bias[id(tree)] = (tree, buffer)
        return buffer[..., buffer.shape[-1] - tree.size - length :]

    def _ragged_mask(self, slots: SlotCache, tree: Tree, extent: int) -> Tensor:
        """Return the mask if rows differ. It is kept with the request and updated after each row's prefix only."""
        mask = slots.mask
        if not isinstance(mask, IncrementalMask) or not mask.fits(slots, tree, self.groups, extent):
            room = extent + extent // 4 + GROW
            seen_RNS = visibility(tree.ancestor, slots.lengths, slots.padding, room)
            slots.mask = IncrementalMask(self.additive(seen_RNS, self.groups), slots.lengths, tree.size)
        else:
            mask.move(slots.lengths, self.additive(tree.ancestor))
        return slots.mask.bias[:, :, : self.groups * tree.size, :extent]


class IncrementalMask:
    """A mask for rows of different lengths that is updated through the rounds of a request: bias (R, 1, M, S).

    All M rows of a cache row share its prefix, so a pass with fewer nodes uses the first ones.
    """

    def __init__(self, bias: Tensor, lengths: list[int], nodes: int):
        self.bias, self.lengths, self.nodes = bias, lengths, nodes

    def fits(self, slots: SlotCache, tree: Tree, groups: int, extent: int) -> bool:
        """Return whether the next pass can be written over the last one's slots."""
        rows, _, most, room = self.bias.shape
        growth = [new - old for new, old in zip(slots.lengths, self.lengths)]
        return (
            rows == len(slots.lengths)
            and most >= groups * tree.size
            and room >= max(max(self.lengths) + self.nodes + tree.size + 1, extent)
            and 0 <= min(growth)
            and max(growth) <= self.nodes
        )

    def move(self, lengths: list[int], own: Tensor) -> None:
        """Update the mask after rows have committed nodes; `own` (1|R, 1, N, N) is the next pass's tree."""
        device, (rows, _, most, _), size = self.bias.device, self.bias.shape, own.shape[-1]
        lowest = torch.finfo(own.dtype).min
        start_RX = to_device([[old, self.nodes + old - new] for new, old in zip(lengths, self.lengths)], device)
        ahead = torch.arange(self.nodes + size, device=device)
        padded = torch.nn.functional.pad(own[:, 0], (self.nodes, 0))
        padded = torch.nn.functional.pad(padded, (0, self.nodes), value=lowest).expand(rows, -1, -1)
        values_RNW = padded.gather(2, (start_RX[:, 1:] + ahead)[:, None].expand(-1, size, -1))
        values_RMW = values_RNW.repeat(1, -(-most // size), 1)[:, :most]
        self.bias[:, 0].scatter_(2, (start_RX[:, :1] + ahead)[:, None].expand(-1, most, -1), values_RMW)
        self.lengths, self.nodes = lengths, size


def layout_mask(bias: Tensor, steady: bool) -> Tensor:
    """Lay out a mask for attention.

    Args:
        steady: Whether to copy it, so that strides depend on the shape alone, which lets one graph serve all masks.
    """
    if not bias.is_cuda:
        return contiguous_copy(bias) if steady else bias
    aligned = bias.is_contiguous() and bias.storage_offset() % 8 == bias.shape[-1] % 8 == 0
    return bias if aligned and not steady else align_mask(bias, spare=steady)


def align_mask(bias: Tensor, spare: bool = False) -> Tensor:
    """Copy the mask to aligned rows, because SDPA selects wide loads by strides only.

    Args:
        spare: Whether to make the allocated rows longer than the visible part in any case.
    """
    length = bias.shape[-1]
    width = (length // 8 + 1) * 8 if spare else -(-length // 8) * 8
    new = bias.new_empty(*bias.shape[:-1], width)[..., :length]
    return new.copy_(bias)


def nearby(depth: Tensor, lengths: list[int] | Tensor, extent: int, window: int) -> Tensor:
    """Return sliding windows, (R, N, extent) bool: a node attends to the last `window` tokens on its path."""
    length_R = to_device(lengths, depth.device)
    rows, size = len(lengths), depth.shape[-1]
    depth_RN = depth.expand(rows, size)
    slot = torch.arange(extent, device=depth.device).expand(rows, extent)
    node = slot - length_R[:, None]
    is_node = (node >= 0) & (node < size)
    index_RS = torch.where(is_node, length_R[:, None] + depth_RN.gather(1, node.clamp(0, size - 1)), slot)
    return (length_R[:, None] + depth_RN)[..., None] - index_RS[:, None] < window


class ModuleHooks:
    """Context with hooks, registered in `_put_up`. While one is removed, another thread's pass may still call it,
    without keyword arguments.
    """

    def __init__(self) -> None:
        self.caller = threading.get_ident()

    def __enter__(self):
        with HOOKING:
            self.hooks = self._put_up()
        return self

    def __exit__(self, *error) -> None:
        with HOOKING:
            for hook in self.hooks:
                hook.remove()

    @property
    def is_caller(self) -> bool:
        """Return whether the current call comes from the thread that opened the context."""
        return threading.get_ident() == self.caller

    def _put_up(self) -> list[RemovableHandle]:
        raise NotImplementedError


class DecoderRecorder(ModuleHooks):
    """Context that records inputs and outputs of a text decoder: merged embeddings, positions, the last hidden state
    after the final norm and, if the `last` layer is given, before it. Calls from other threads are not recorded.
    """

    def __init__(self, decoder, last=None):
        super().__init__()
        self.decoder, self.last, self.seen = decoder, last, {}

    def __enter__(self) -> dict[str, Any]:
        return super().__enter__().seen

    def _put_up(self):
        return [
            self.decoder.register_forward_pre_hook(self._before_call, with_kwargs=True),
            self.decoder.register_forward_hook(self._after_call),
            *([] if self.last is None else [self.last.register_forward_hook(self._after_last_layer)]),
        ]

    def _before_call(self, module, args, kwargs=None) -> None:
        if self.is_caller:
            self.seen.update({k: kwargs.get(k) for k in ("inputs_embeds", "position_ids")})

    def _after_call(self, module, args, output) -> None:
        if self.is_caller:
            self.seen["last_hidden_state"] = getattr(output, "last_hidden_state", None)

    def _after_last_layer(self, module, args, output) -> None:
        if self.is_caller:
            self.seen["before_norm"] = output[0] if isinstance(output, tuple) else output
