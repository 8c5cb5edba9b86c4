"""Attention of draft passes under `sdpa`: the query heads that share a key head are rows of one matrix.

transformers repeats keys and values for every query head when a mask is given. A draft's mask (`masks`) has a row for
every query head of a group and node instead, G heads to a key head times N nodes, which no other caller hands over:
transformers' own `sdpa` can't add such a mask to N queries. So the shape tells a draft's pass, and the entry registered
here answers all other calls with transformers' own function. Nothing of a model, its configuration or its cache
changes.

A mask of `masks` also says how many slots every node sees (`shown`): behind a long prompt nearly all. On a CPU they are
attended to without a mask, the others apart, and the two softmaxes are put together by their normalisers.

Shapes: B rows, H query heads, K key heads, N nodes, M = H / K * N rows of a mask, S slots, E head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from visspec.models.targets.hooks import HOOKING

NAME = "sdpa"
APART = 1 << 18  # scores; fewer are not worth a second call
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # gives the logarithms of the normalisers too
# arguments by which attention is more than a softmax over keys; transformers' own function decides what becomes of them
MORE = ("softcap", "s_aux", "position_bias", "cache")


def register() -> None:
    """Puts our entry in front of transformers' own `sdpa`, once per process: one exchange, never half done."""
    with HOOKING:
        stock = AttentionInterface()[NAME]
        if not hasattr(stock, "stock"):
            AttentionInterface.register(NAME, folding(stock))


def folding(stock: Callable) -> Callable:
    """`stock`, except for masks with more rows than there are queries."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        nodes, share = query.shape[2], query.shape[1] // key.shape[1]
        seen = shown(attention_mask)
        plain = share == 1 and not worth(query, key, value, seen)
        if attention_mask.shape[2] <= nodes and (plain or not seen):
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        more = args or kwargs.get("dropout") or any(kwargs.get(name) is not None for name in MORE)
        if more or plain or attention_mask.shape[2] < share * nodes:
            return stock(module, query, key, value, attention_mask[:, :, :nodes], *args, **kwargs)
        return folded(query, key, value, attention_mask[:, :, : share * nodes], kwargs.get("scaling"), seen), None

    attention.stock = stock  # type: ignore[attr-defined]
    return attention


def folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, seen: int = 0) -> Tensor:
    """Attention of (B, H, N, E) queries to (B, K, S, E) keys, mask (1|B, 1, M, S): (B, N, H, E). `seen`: as `shown`."""
    rows, heads, nodes, size = query.shape
    folds = query.reshape(rows, key.shape[1], -1, size)
    if seen == key.shape[2]:
        attended = F.scaled_dot_product_attention(folds, key, value, scale=scaling)
    elif worth(query, key, value, seen):
        attended = parted(folds, key, value, mask, scaling, seen)
    else:
        attended = F.scaled_dot_product_attention(folds, key, value, attn_mask=mask, scale=scaling)
    return attended.reshape(rows, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous()


def parted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, seen: int) -> Tensor:
    """The same for folded queries (B, K, M, E), the first `seen` slots apart from the others: (B, K, M, E)."""
    near, norm_BKM = flash(query, key[:, :, :seen], value[:, :, :seen], scale=scaling)
    own, own_norm_BKM = flash(query, key[:, :, seen:], value[:, :, seen:], attn_mask=mask[..., seen:], scale=scaling)
    return torch.lerp(near, own, torch.sigmoid(own_norm_BKM - norm_BKM)[..., None])


def worth(query: Tensor, key: Tensor, value: Tensor, seen: int) -> bool:
    """Whether attention to the first `seen` slots is done apart: where that saves more than the calls cost."""
    if query.numel() // query.shape[3] * seen < APART or seen > key.shape[2] or value.shape[-1] != query.shape[3]:
        return False
    return query.device.type == "cpu" and query.dtype == torch.float32


def showing(mask: Tensor, seen: int) -> Tensor:
    """The mask, which says that all its rows see the first `seen` slots; `seen` may be all of them."""
    mask.visspec_seen = seen  # type: ignore[attr-defined]
    return mask


def shown(mask: Tensor) -> int:
    """What `showing` has said of this very mask, or 0. Graphs are made without it."""
    return 0 if torch.compiler.is_compiling() else getattr(mask, "visspec_seen", 0)


def groups(decoder: nn.Module, attention: str) -> int:
    """Query heads per key head, the most of any layer; 1 where a layer does not ask the registry for its attention."""
    if attention != NAME:
        return 1
    most = 1
    for module in decoder.modules():
        share = getattr(module, "num_key_value_groups", None)
        if isinstance(share, int) and share > 1:
            code = inspect.unwrap(type(module).forward).__code__
            if "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
                return 1
            most = max(most, share)
    register()
    return most
