"""Attention of draft passes without a mask over stored keys: layers are told lengths and the tree instead.

A pass hands a `DraftLayout` to the layers (`draft_attention`), small enough to be made anew at every pass. Chains go
through `torch.nn.attention.varlen`, causal from the last key on; trees through `kernels.tree_attention`. Keys and
values are read from the stores by slot: neither repeated for the heads that share them, nor copied. Nothing else
depends on a pass, so that a recorded one can be replayed.
B rows, H query heads, K key heads, N nodes, S slots, E head size.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PretrainedConfig

from visspec import kernels
from visspec.cache import SlotCache, to_device, visibility
from visspec.kernels.common import triton
from visspec.types import Tree

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

MASK, VARLEN, TREE = "mask", "varlen", "tree"
WORDS = {
    MASK: "a mask over stored keys",
    VARLEN: "torch's varlen_attn for chains, tree_attention for trees, no mask",
    TREE: "tree_attention, no mask",
}
_starts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of `SlotCache.padding`


class DraftLayout(NamedTuple):
    """Where the nodes of a draft are among the stored keys, and what they see of each other."""

    length_B: Tensor  # committed slots of each row
    start_B: Tensor  # first slot of each row that is no padding
    ancestor: Tensor  # (1|B, N, N) bool
    backend: Backend
    # of chains: where each row's queries and keys begin, and how many keys it has, (3, B + 1) int32; and the distance
    # of two rows in a store, in vectors (a layer whose store has another is given a mask)
    tables: Tensor | None = None
    pitch: int = 0


class Backend:
    """How the draft passes of one target tell attention what a node sees; `name` is MASK, VARLEN or TREE. `keys` is K.

    A failure makes it MASK for good, which a warning says: of the pass that fails too, the tokens are the same.
    """

    def __init__(self, name: str = MASK, keys: int = 0, why: str = ""):
        self.name, self.keys, self.why = name, keys, why

    def __str__(self) -> str:
        return WORDS[self.name] + (f" ({self.why})" if self.why else "")

    def refuse(self, why: str) -> None:
        if self.name != MASK:
            self.name, self.why = MASK, why
            warnings.warn(f"attention: got {why}, expected none; draft passes take a mask", RuntimeWarning, 2)

    def __call__(self, slots: SlotCache, tree: Tree, extent: int) -> DraftLayout | None:
        """What the layers of a pass are given in place of a mask, after `slots.open`; None where they need a mask:
        padding inside prompts, and compiled passes.
        """
        if slots.steady or (start_B := self.first_slots(slots)) is None:
            return None
        lengths, device = slots.lengths, tree.ancestor.device
        if self.name == VARLEN and tree.chain and ("seqused_k" in takes(varlen_attn) or len(start_B) == 1):
            pitch = (slots.keys[0].shape[2] if slots.keys else extent) * self.keys
            first = [row * pitch + start for row, start in enumerate(start_B)]
            used = [length + tree.size - start for length, start in zip(lengths, start_B)]
            tables = [n * tree.size for n in range(len(used) + 1)], [*first, first[-1] + used[-1]], [*used, 0]
            told = to_device([*tables, [*lengths, 0], [*start_B, 0]], device, torch.int32)
            return DraftLayout(told[3, :-1], told[4, :-1], tree.ancestor, self, told[:3], pitch)
        told = to_device([lengths, start_B], device, torch.int32)
        return DraftLayout(told[0], told[1], tree.ancestor, self)

    def first_slots(self, slots: SlotCache) -> list[int] | None:
        """Each row's first slot that attention sees; None where it needs a mask."""
        return None if self.name == MASK else starts(slots)


def starts(slots: SlotCache) -> list[int] | None:
    """Each row's first slot that is no padding; None where there is padding behind it. It waits for the device once
    for each set of padded rows.
    """
    padding = slots.padding
    if padding is None:
        return [0] * len(slots.lengths)
    if padding not in _starts:
        real = padding.tolist()
        _starts[padding] = [row.count(False) for row in real] if all(row == sorted(row) for row in real) else None
    return _starts[padding]


def attend(
    stock: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: DraftLayout,
    plain: bool,
    scaling: float | None,
) -> tuple[Tensor, Any]:
    """Attention of (B, H, N, E) queries to (B, K, S, E) keys: (B, N, H, E). plain: it is a softmax over keys and no
    more. stock(mask): transformers' own function, which takes over where it isn't, and where ours fails.
    """
    why = "attention that is more than a softmax over keys"
    if plain:
        try:
            way = by_tree if layout.tables is None else varlen
            return way(query, key, value, layout, scaling), None
        except (MemoryError, torch.OutOfMemoryError):
            raise  # says nothing of the machine
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    layout.backend.refuse(why)
    return stock(visibility_mask(layout, key.shape[2]))


def varlen(query: Tensor, key: Tensor, value: Tensor, layout: DraftLayout, scaling: float | None) -> Tensor:
    """A chain a row through `varlen_attn`. The stores are one sequence of vectors, in which a row's heads are apart by
    the stride of heads: a key's number is its row's first one and its slot.
    """
    rows, heads, nodes, size = query.shape
    assert layout.tables is not None
    check(query, key, value, layout.pitch)
    took, tables = takes(varlen_attn), layout.tables
    if "scale" not in took and scaling not in (None, size**-0.5):
        raise ValueError(f"scaling: got {scaling:g}, expected one over the root of {size}")
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in took else {"is_causal": True}
    wanted = {"enable_gqa": heads != key.shape[1], "seqused_k": tables[2, :rows], "scale": scaling}
    options = causal | {name: value for name, value in wanted.items() if name in took}
    flat_q = query.transpose(1, 2).reshape(rows * nodes, heads, size)
    out = varlen_attn(
        flat_q, overlapping_rows(key), overlapping_rows(value), tables[0], tables[1], nodes, key.shape[2], **options
    )
    return cast(Tensor, out).view(rows, nodes, heads, size)


def check(query: Tensor, key: Tensor, value: Tensor, pitch: int) -> None:
    """Raises ValueError for keys and values that are no view of a store."""
    size = query.shape[3]
    for name, states in (("key", key), ("value", value)):
        strides, shape = states.stride(), tuple(states.shape)
        dense = shape == tuple(key.shape) and shape[3] == size and strides[2:] == (size, 1) and strides[1] % size == 0
        if not dense or (shape[0] > 1 and strides[0] != pitch * size):
            raise ValueError(f"{name}: got strides {strides} of {shape}, expected those of a store")


def overlapping_rows(states: Tensor) -> Tensor:
    """(T, K, E): the memory of a store as overlapping rows; T reaches to the end of the last row's first head."""
    rows, heads, extent, size = states.shape
    last = (rows - 1) * states.stride(0) // size if rows > 1 else 0
    return states.as_strided((last + extent, heads, size), (size, states.stride(1), 1))


def by_tree(query: Tensor, key: Tensor, value: Tensor, layout: DraftLayout, scaling: float | None) -> Tensor:
    """Any tree by our own kernel."""
    told = layout.length_B, None, layout.ancestor, layout.start_B
    attended = kernels.tree_attention(query, key, value, *told, scaling)
    return attended.transpose(1, 2).contiguous()


def visibility_mask(layout: DraftLayout, extent: int) -> Tensor:
    """The mask that says the same: (B, 1, N, S) bool."""
    slot = torch.arange(extent, device=layout.ancestor.device)
    seen_BNS = visibility(layout.ancestor, layout.length_B, None, extent)
    return (seen_BNS & (slot >= layout.start_B[:, None])[:, None])[:, None]


@lru_cache(maxsize=8)
def takes(function: Callable | None) -> frozenset[str]:
    """Names of a function's arguments."""
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)


def of_device(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """(the backend of a device for weights of a dtype, why it is the mask)."""
    if device.type != "cuda":
        return MASK, "no CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return MASK, f"weights in {str(dtype).removeprefix('torch.')}, not in 16 bits"
    if triton is None:
        return MASK, "no Triton"
    return (VARLEN if "seqused_k" in takes(varlen_attn) else TREE), ""


def choose(
    decoder: nn.Module,
    text: PretrainedConfig,
    attention: str | None,
    dtype: torch.dtype,
    device: torch.device,
    wanted: str | None = None,
) -> Backend:
    """The backend of a decoder: that of the device, or `wanted`, where all its layers attend to all keys by a function
    of the registry. text: its configuration, attention: the name of the function.
    """
    name, why = of_device(device, dtype) if wanted is None else (wanted, "")
    if name not in WORDS:
        raise ValueError(f"attention: got {name!r}, expected one of {', '.join(WORDS)}")
    if name == MASK:
        return Backend(MASK, why=why)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if attention != "sdpa":
        return Backend(MASK, why=f"attention {attention}, not sdpa")
    if kinds or (getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)):
        return Backend(MASK, why="layers that do not attend to all keys")
    if not getattr(decoder, "_supports_attention_backend", False):
        return Backend(MASK, why="attention of the model's own")
    heads = text.num_attention_heads  # of one size in all layers: those that have several have windows
    keys = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if name == VARLEN and (size % 8 or size > 256):  # which FlashAttention does not take
        name = TREE
    return Backend(name, keys)
