"""Attention of draft passes under `sdpa`: the query heads that share a key head are rows of one matrix.

transformers repeats keys and values for every query head when a mask is given. A draft's mask (`masks`) has a row for
every query head of a group and node instead, G heads to a key head times N nodes, which no other caller hands over:
transformers' own `sdpa` can't add such a mask to N queries. So the shape tells a draft's pass, and the entry registered
here answers all other calls with transformers' own function. Nothing of a model, its configuration or its cache
changes. Shapes: B rows, H query heads, K key heads, N nodes, S slots, E head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from visspec.models.attention import ragged
from visspec.models.attention.hooks import HOOKING

NAME = "sdpa"
LEAST = 4  # rows
# arguments by which attention is more than a softmax over keys; transformers' own function decides what becomes of them
MORE = ("softcap", "s_aux", "position_bias", "cache")


def register() -> None:
    """Puts our entry in front of transformers' own `sdpa`, once per process: one exchange, never half done."""
    with HOOKING:
        stock = AttentionInterface()[NAME]
        if not hasattr(stock, "stock"):
            AttentionInterface.register(NAME, folding(stock))


def folding(stock: Callable) -> Callable:
    """`stock`, except for masks with more rows than there are queries and for what `ragged` gives in their place."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        if ragged.is_tree_metadata(attention_mask, query):

            def masked(mask: Tensor) -> tuple[Tensor, Any]:
                return stock(module, query, key, value, mask, *args, **kwargs)

            return ragged.attend(
                masked, query, key, value, attention_mask, not _more(args, kwargs), kwargs.get("scaling")
            )
        nodes, share = query.shape[2], query.shape[1] // key.shape[1]
        if attention_mask.shape[2] <= nodes:
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        if _more(args, kwargs) or share == 1 or attention_mask.shape[2] < share * nodes:
            return stock(module, query, key, value, attention_mask[:, :, :nodes], *args, **kwargs)
        return folded_attention(query, key, value, attention_mask[:, :, : share * nodes], kwargs.get("scaling")), None

    attention.stock = stock  # type: ignore[attr-defined]
    return attention


def _more(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for more than a softmax over keys."""
    return bool(args or kwargs.get("dropout") or any(kwargs.get(name) is not None for name in MORE))


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
    if most > 1:
        register()
    return most
