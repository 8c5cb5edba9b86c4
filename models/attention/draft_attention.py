"""The attention function of draft passes, and which decoders use it.

A verification pass hands its tree to the attention layers as the keyword `visspec` of the forward pass, and meanwhile
the model's configurations name our function, registered with transformers as "visspec" (`switch_attention`). Without
the keyword, and for anything more than a softmax over keys, that function calls transformers' own `sdpa`, so another
thread that runs the same model computes the same under either name. Models that drop the keyword use the 4-D mask that
goes with it (`pass_inputs`).

transformers repeats keys and values for every query head if a mask is given. Here the query heads that share a key head
are rows of one matrix, and the mask has a row for each. On a GPU with 16-bit weights there is no mask (`Backend`):
layers get lengths and the tree (`DraftLayout`), small enough to be rebuilt for every pass, and `kernels.tree_attention`
reads keys and values from the stores by slot. Nothing else depends on the pass, so a CUDA graph of it can be replayed.

Shapes: B rows of a pass, H query heads, K key heads, G query heads per key head, N nodes, S slots, E head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from visspec import kernels
from visspec.kernels.common import triton
from visspec.models.attention.pass_inputs import MASK, NAME, TREE, WORDS, Backend, DraftLayout, visibility_mask

STOCK = "sdpa"
FIELD = "_attn_implementation_internal"  # setting the public property takes 15 microseconds and changes submodels too
LEAST = 4  # minimum rows of a folded product
# arguments that make attention more than a softmax over keys; transformers' own function handles these
MORE = ("softcap", "s_aux", "position_bias", "cache")
FUNCTIONS, MASKS = AttentionInterface(), AttentionMaskInterface()
_lock = threading.Lock()
_switched: dict[int, tuple[int, str]] = {}  # id of a configuration -> (running passes, original implementation)


def draft_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: object,
    visspec: Tensor | dict[str, Tensor] | DraftLayout | None = None,
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
def switch_attention(configs: Iterable[Any]) -> Iterator[None]:
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
