"""Attention of draft passes without a mask over stored keys: layers get lengths and the tree instead.

A pass hands a `DraftLayout` to the layers (`draft_attention`), small enough to be rebuilt for every pass.
`kernels.tree_attention` reads keys and values from the stores by slot, without repeating them for heads that share them
and without copies. Nothing else depends on the pass, so a CUDA graph of it can be replayed.
Shapes: B rows, H query heads, K key heads, N nodes, S slots, E head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PretrainedConfig

from visspec import kernels
from visspec.cache import SlotCache, to_device, visibility
from visspec.kernels.common import triton
from visspec.types import Tree

MASK, TREE = "mask", "tree"
WORDS = {MASK: "a mask over stored keys", TREE: "tree_attention, no mask"}
_starts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # `SlotCache.padding` -> first slots


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


def attend(
    stock: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: DraftLayout,
    plain: bool,
    scaling: float | None,
) -> tuple[Tensor, Any]:
    """Attend from (B, H, N, E) queries to (B, K, S, E) keys: (B, N, H, E). plain: attention is only a softmax over
    keys. stock(mask): transformers' own function, used otherwise, and if ours fails.
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


def of_device(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return the backend for a device and weights of a dtype, and why it is the mask, if so."""
    if device.type != "cuda":
        return MASK, "no CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return MASK, f"weights in {str(dtype).removeprefix('torch.')}, not in 16 bits"
    if triton is None:
        return MASK, "no Triton"
    return TREE, ""


def choose(
    decoder: nn.Module,
    text: PretrainedConfig,
    attention: str | None,
    dtype: torch.dtype,
    device: torch.device,
    wanted: str | None = None,
) -> Backend:
    """Choose the backend of a decoder: `wanted`, or else the device's, provided that all layers attend to all keys with
    a registered attention function. text: its configuration, attention: the function's name.
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
        return Backend(MASK, why="the model's own attention")
    return Backend(name)
