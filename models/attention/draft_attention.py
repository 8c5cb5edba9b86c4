"""Attention of draft passes, registered with transformers under a name of our own.

A verification pass hands its tree to the attention layers as the keyword `visspec` of the forward pass, and switches
the model's configurations to the name "visspec" meanwhile (`switched`). Without the keyword, and for whatever is more
than a softmax over keys, the function registered here is transformers' own `sdpa`: another thread that runs the same
model computes the same under either name. Models that drop the keyword attend by the 4-D mask that goes with it
(`masks`).

transformers repeats keys and values for every query head when a mask is given. Here the query heads that share a key
head are rows of one matrix, and the mask has a row for each. Shapes: B rows, H query heads, K key heads, N nodes,
S slots, E head size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from visspec.models.attention import ragged

NAME = "visspec"  # in transformers' registries, and the keyword of the forward pass
STOCK = "sdpa"
FIELD = "_attn_implementation_internal"  # its property takes 15 microseconds to set, and sets the parts too
LEAST = 4  # rows of a folded product
# arguments by which attention is more than a softmax over keys; transformers' own function decides what becomes of them
MORE = ("softcap", "s_aux", "position_bias", "cache")
FUNCTIONS, MASKS = AttentionInterface(), AttentionMaskInterface()
_lock = threading.Lock()
_switched: dict[int, tuple[int, str]] = {}  # by id of a configuration: passes that run now, its own implementation


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
    """transformers' `sdpa`, or attention of a draft where `visspec` is given.

    Args:
        visspec: a mask (1|B, 1, G N, S) for the G heads of a group and N nodes, a dictionary of such masks by kind of
            layer, or what replaces a mask (`ragged.DraftLayout`).
    """

    def stock(mask: Tensor | None) -> tuple[Tensor, Any]:
        return FUNCTIONS[STOCK](module, query, key, value, mask, *args, **kwargs)

    more = args or kwargs.get("dropout") or any(kwargs.get(name) is not None for name in MORE)
    scaling = kwargs.get("scaling")
    if isinstance(visspec, ragged.DraftLayout):
        return ragged.attend(stock, query, key, value, visspec, not more, scaling)
    if isinstance(visspec, dict):
        layer: Any = module
        visspec = visspec[layer.config.layer_types[layer.layer_idx]]
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    if visspec is None or more or rows == query.shape[2] or visspec.shape[2] < rows:
        return stock(attention_mask)
    return folded_attention(query, key, value, visspec[:, :, :rows], scaling), None


def draft_mask(*args: object, **kwargs: object) -> Tensor | None:
    """transformers' own mask for `sdpa`; a verification pass brings a 4-D mask and does not ask."""
    return MASKS[STOCK](*args, **kwargs)


def folded_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention of (B, H, N, E) queries to (B, K, S, E) keys, mask (1|B, 1, H / K * N, S): (B, N, H, E).

    Fewer rows than `LEAST` to a key head are padded: a product of so few may sum in another order (`runner.widths`).
    """
    rows, heads, nodes, size = query.shape
    query = query.reshape(rows, key.shape[1], -1, size)
    if (count := query.shape[2]) < LEAST:
        query = F.pad(query, (0, 0, 0, LEAST - count))
        mask = torch.cat([mask, mask[:, :, -1:].expand(-1, -1, LEAST - count, -1)], dim=2)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)[:, :, :count]
    return attended.reshape(rows, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, draft_attention)
AttentionMaskInterface.register(NAME, draft_mask)


def implementation(config: object) -> str | None:
    """A configuration's own attention implementation, also while another thread verifies with its model."""
    name = getattr(config, "_attn_implementation", None)
    return STOCK if name == NAME else name


def groups(decoder: nn.Module, probed: bool) -> int:
    """Query heads per key head, the most of any layer; 1 where the attention of a decoder is known to take no keyword.

    Args:
        probed: whether the decoder will be asked (`probe`). If not, it must be of a class that declares to transformers
            that keywords reach its attention function.
    """
    if not probed and not getattr(decoder, "_supports_attention_backend", False):
        return 1
    found = (getattr(module, "num_key_value_groups", 1) for module in decoder.modules())
    return max((share for share in found if isinstance(share, int)), default=1)


def configurations(decoder: nn.Module) -> list[Any]:
    """The configurations that choose the attention of a decoder's layers."""
    found = {id(config): config for module in decoder.modules() if (config := getattr(module, "config", None))}
    return [
        config
        for config in found.values()
        if FIELD in getattr(config, "__dict__", ()) and implementation(config) == STOCK
    ]


@contextmanager
def switched(configs: Iterable[Any]) -> Iterator[None]:
    """A context in which configurations name our attention. Passes of several threads may overlap."""
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
