"""Attention of draft passes: their masks, and the attention function that reads them.

A verification pass hands its tree to the attention layers as the keyword `visspec` of the forward pass, and meanwhile
switches the model's configurations to our function, registered with transformers as "visspec" (`switched`). Without the
keyword, and for anything more than a softmax over keys, that function calls transformers' own `sdpa`, so another thread
that runs the same model computes the same under either name. Models that drop the keyword use the 4-D mask that goes
with it (`Masks`).

transformers repeats keys and values for every query head if a mask is given. Here the query heads that share a key head
are rows of one matrix, and the mask has a row for each. On a GPU with 16-bit weights there is no mask (`Backend`):
layers get lengths and the tree (`DraftLayout`), small enough to be rebuilt for every pass, and `kernels.tree_attention`
reads keys and values from the stores by slot. Nothing else depends on the pass, so a CUDA graph of it can be replayed.

Shapes: B rows of a pass, R cache rows, H query heads, K key heads, G query heads per key head, N nodes, S slots, E head
size, M = G N mask rows: row g N + n belongs to node n.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from visspec import kernels
from visspec.cache import GROW, SlotCache, additive, contiguous_copy, to_device, visibility
from visspec.kernels.common import triton
from visspec.types import Tree

NAME = "visspec"  # our name in transformers' registries, and the keyword of the forward pass
STOCK = "sdpa"
FIELD = "_attn_implementation_internal"  # setting the public property takes 15 microseconds and changes submodels too
LEAST = 4  # minimum rows of a folded product
# arguments that make attention more than a softmax over keys; transformers' own function handles these
MORE = ("softcap", "s_aux", "position_bias", "cache")
STATEFUL = ("linear_attention", "conv")  # layer types without attention; they need no mask, as drafts have no padding
HYBRID = "hybrid"  # layers with attention and a state
MOST_KEPT = 1 << 24  # numbers in all shared masks together
MASK, TREE = "mask", "tree"  # names of a `Backend`
WORDS = {MASK: "a mask over stored keys", TREE: "tree_attention, no mask"}
FUNCTIONS, MASKS = AttentionInterface(), AttentionMaskInterface()
AttentionInputs = dict[str, Any]  # keyword arguments of a forward pass that define what its nodes attend to
_lock = threading.Lock()
_switched: dict[int, tuple[int, str]] = {}  # id of a configuration -> (running passes, original implementation)
_starts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # `SlotCache.padding` -> first slots

# --- the attention function -------------------------------------------------------------------------------------------


def draft_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: object,
    visspec: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Run transformers' `sdpa`, or attention over a draft if `visspec` is given.

    Args:
        visspec: A mask (1|B, 1, G N, S) for the G heads of a group and N nodes, a dictionary of such masks by layer
            type, or a mask replacement (`DraftLayout`).
    """

    def stock(mask: Tensor | None) -> tuple[Tensor, Any]:
        return FUNCTIONS[STOCK](module, query, key, value, mask, *args, **kwargs)

    more = args or kwargs.get("dropout") or any(kwargs.get(name) is not None for name in MORE)
    scaling = kwargs.get("scaling")
    if isinstance(visspec, DraftLayout):
        return attend_by_tree(stock, query, key, value, visspec, not more, scaling)
    if isinstance(visspec, dict):
        layer: Any = module
        visspec = visspec[layer.config.layer_types[layer.layer_idx]]
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    if visspec is None or more or rows == query.shape[2] or visspec.shape[2] < rows:
        return stock(attention_mask)
    return folded_attention(query, key, value, visspec[:, :, :rows], scaling), None


def draft_mask(*args: object, **kwargs: object) -> Tensor | None:
    """Return transformers' own mask for `sdpa`. A verification pass has a 4-D mask and does not call this."""
    return MASKS[STOCK](*args, **kwargs)


def folded_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attend from (B, H, N, E) queries to (B, K, S, E) keys with mask (1|B, 1, H / K * N, S): (B, N, H, E).

    Fewer than `LEAST` rows per key head are padded: smaller products may sum in a different order (`runner.widths`).
    """
    rows, heads, nodes, size = query.shape
    query = query.reshape(rows, key.shape[1], -1, size)
    if (count := query.shape[2]) < LEAST:
        query = F.pad(query, (0, 0, 0, LEAST - count))
        mask = torch.cat([mask, mask[:, :, -1:].expand(-1, -1, LEAST - count, -1)], dim=2)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)[:, :, :count]
    return attended.reshape(rows, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous()


def attend_by_tree(
    stock: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: DraftLayout,
    plain: bool,
    scaling: float | None,
) -> tuple[Tensor, Any]:
    """Attend from (B, H, N, E) queries to (B, K, S, E) keys: (B, N, H, E).

    Args:
        plain: Whether attention is only a softmax over keys.
        stock: transformers' own function of a mask, used otherwise, and if ours fails.
    """
    why = "attention that is more than a softmax over keys"
    if plain:
        try:
            return by_tree(query, key, value, layout, scaling), None
        except (MemoryError, torch.OutOfMemoryError):
            raise  # unrelated to support for the kernel
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    layout.backend.refuse(why)
    return stock(visibility_mask(layout, key.shape[2]))


def by_tree(query: Tensor, key: Tensor, value: Tensor, layout: DraftLayout, scaling: float | None) -> Tensor:
    """Attend over any tree with our own kernel."""
    arguments = layout.length_B, None, layout.ancestor, layout.start_B
    attended = kernels.tree_attention(query, key, value, *arguments, scaling)
    return attended.transpose(1, 2).contiguous()


def visibility_mask(layout: DraftLayout, extent: int) -> Tensor:
    """Return the mask equivalent to a layout, (B, 1, N, S) bool."""
    slot = torch.arange(extent, device=layout.ancestor.device)
    seen_BNS = visibility(layout.ancestor, layout.length_B, None, extent)
    return (seen_BNS & (slot >= layout.start_B[:, None])[:, None])[:, None]


AttentionInterface.register(NAME, draft_attention)
AttentionMaskInterface.register(NAME, draft_mask)


def implementation(config: object) -> str | None:
    """Return a configuration's original attention implementation, even while a pass has switched it."""
    name = getattr(config, "_attn_implementation", None)
    return STOCK if name == NAME else name


def groups(decoder: nn.Module, probed: bool) -> int:
    """Return the number of query heads per key head, the maximum over layers; 1 if attention ignores our keyword.

    Args:
        probed: Whether `probe` will test that the keyword arrives. If not, the decoder's class must declare to
            transformers that keywords reach its attention function.
    """
    if not probed and not getattr(decoder, "_supports_attention_backend", False):
        return 1
    shares = (getattr(module, "num_key_value_groups", 1) for module in decoder.modules())
    return max((share for share in shares if isinstance(share, int)), default=1)


def configurations(decoder: nn.Module) -> list[Any]:
    """Return the configurations that select the attention of a decoder's layers."""
    unique = {id(config): config for module in decoder.modules() if (config := getattr(module, "config", None))}
    return [
        config
        for config in unique.values()
        if FIELD in getattr(config, "__dict__", ()) and implementation(config) == STOCK
    ]


@contextmanager
def switched(configs: Iterable[Any]) -> Iterator[None]:
    """Context in which configurations select our attention. Passes of several threads may overlap."""
    with _lock:
        for config in configs:
            running, own = _switched.get(id(config), (0, vars(config)[FIELD]))
            _switched[id(config)] = running + 1, own
            vars(config)[FIELD] = NAME
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                running, own = _switched.pop(id(config))
                if running > 1:
                    _switched[id(config)] = running - 1, own
                else:
                    vars(config)[FIELD] = own


# --- what it is given -------------------------------------------------------------------------------------------------


class DraftLayout(NamedTuple):
    """Positions of a draft's nodes among the stored keys, and which nodes see each other."""

    length_B: Tensor  # committed slots of each row
    start_B: Tensor  # first slot of each row that is not padding
    ancestor: Tensor  # (1|B, N, N) bool
    backend: Backend


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


def of_device(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return the backend for a device and weights of a dtype, and why it is the mask, if so."""
    if device.type != "cuda":
        return MASK, "no CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return MASK, f"weights in {str(dtype).removeprefix('torch.')}, not in 16 bits"
    if triton is None:
        return MASK, "no Triton"
    return TREE, ""


def choose_backend(
    decoder: nn.Module,
    text: PretrainedConfig,
    attention: str | None,
    dtype: torch.dtype,
    device: torch.device,
    wanted: str | None = None,
) -> Backend:
    """Choose the backend of a decoder: `wanted`, or else the device's, provided that all layers attend to all keys with
    a registered attention function.

    Args:
        text: Its configuration.
        attention: The function's name.
    """
    name, why = of_device(device, dtype) if wanted is None else (wanted, "")
    if name not in WORDS:
        raise ValueError(f"attention: got {name!r}, expected one of {', '.join(WORDS)}.")
    if name == MASK:
        return Backend(MASK, why=why)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if attention != "sdpa":
        return Backend(MASK, why=f"attention {attention}, not sdpa")
    if kinds or (getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)):
        return Backend(MASK, why="layers that do not attend to all keys")
    if not getattr(decoder, "_supports_attention_backend", False):
        return Backend(MASK, why="the model's own attention")
    return Backend(name)


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
        return self.inputs(laid(mask, slots.steady))

    def whole(
        self, ancestor: Tensor, depth: Tensor, lengths: list[int] | Tensor, padding: Tensor | None, extent: int
    ) -> AttentionInputs:
        """Like a call, without cached masks; lengths (R,) may be a tensor, which is then not read on the host."""
        seen_RNS = visibility(ancestor, lengths, padding, extent)
        full = laid(self.additive(seen_RNS, self.groups), False)
        if not self.window:
            return self.inputs(full)
        sliding = laid(self.additive(seen_RNS & nearby(depth, lengths, extent, self.window), self.groups), False)
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
        known = self._bias.get(id(tree))
        if known is not None and known[0] is tree and known[1].shape[-1] - tree.size >= length:
            buffer = known[1]
        else:
            own = self.additive(tree.ancestor, self.groups)
            buffer = torch.cat([own.new_zeros(*own.shape[:3], length + length // 4 + GROW), own], dim=-1)
            kept = list(self._bias.values())  # copied, as other threads may add to it
            if sum(other.numel() for _, other in kept) + buffer.numel() > MOST_KEPT:
                self._bias.clear()
            self._bias[id(tree)] = (tree, buffer)
        return buffer[..., buffer.shape[-1] - tree.size - length :]

    def _ragged_mask(self, slots: SlotCache, tree: Tree, extent: int) -> Tensor:
        """Return the mask if rows differ. It is kept with the request and updated after each row's prefix only."""
        kept = slots.mask
        if not isinstance(kept, IncrementalMask) or not kept.fits(slots, tree, self.groups, extent):
            room = extent + extent // 4 + GROW
            seen_RNS = visibility(tree.ancestor, slots.lengths, slots.padding, room)
            slots.mask = IncrementalMask(self.additive(seen_RNS, self.groups), slots.lengths, tree.size)
        else:
            kept.move(slots.lengths, self.additive(tree.ancestor))
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


def laid(bias: Tensor, steady: bool) -> Tensor:
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
    seen = bias.shape[-1]
    width = (seen // 8 + 1) * 8 if spare else -(-seen // 8) * 8
    new = bias.new_empty(*bias.shape[:-1], width)[..., :seen]
    return new.copy_(bias)


def nearby(depth: Tensor, lengths: list[int] | Tensor, extent: int, window: int) -> Tensor:
    """Return sliding windows, (R, N, extent) bool: a node attends to the last `window` tokens on its path."""
    length_R = to_device(lengths, depth.device)
    rows, size = len(lengths), depth.shape[-1]
    depth_RN = depth.expand(rows, size)
    slot = torch.arange(extent, device=depth.device).expand(rows, extent)
    node = slot - length_R[:, None]
    inside = (node >= 0) & (node < size)
    index_RS = torch.where(inside, length_R[:, None] + depth_RN.gather(1, node.clamp(0, size - 1)), slot)
    return (length_R[:, None] + depth_RN)[..., None] - index_RS[:, None] < window
