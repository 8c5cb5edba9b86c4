"""Views of a stock model: shallow copies of modules that share all weights, with some modules replaced.

`layers_view` replaces the layers of a decoder by calls of compiled code. What the stock modules launch one by one
(norms, rotary embeddings, activations, residual sums) is fused. Layers are arguments of one compiled function, and each
gets its own part of the cache, without its number (`LayerCache`), so layers that differ in their weights only share
code. Whatever else a layer computes from its number is guarded, and compiled for each layer.

Products of one input by several matrices become one if the matrices lie behind one another in memory (`join_weights`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from visspec.cache import SlotCache
from visspec.models.attention.pass_inputs import CACHE_NAMES, SlotLayers

JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # modules that read the same input


class LayerCache(Cache):
    """The keys and values of one layer of a `SlotLayers`, as a transformers cache."""

    def __init__(self, slots: SlotCache, place: int):
        super().__init__(layers=[])
        self.slots, self.keys, self.values = slots, slots.keys[place], slots.values[place]

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object):
        return self.slots.write_to(self.keys, self.values, key_states, value_states)


def layers_of(decoder: nn.Module) -> nn.ModuleList | None:
    """Return the list of a decoder's layers, the first list of modules."""
    return next((module for module in decoder.modules() if isinstance(module, nn.ModuleList)), None)


def layers_view(model: nn.Module, decoder: nn.Module, run: Callable, called: Callable[[], None]) -> Any:
    """Return a view of a model whose decoder layers are compiled, or None if they can't be replaced.

    Args:
        run: `run_layer`, compiled.
        called: Is called after each layer.
    """
    layers = layers_of(decoder)
    if layers is None or any("forward" in vars(layer) for layer in layers):
        return None

    def view_of(index: int, layer: nn.Module) -> nn.Module:
        new, inner = copy.copy(layer), with_joined_products(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            for name in CACHE_NAMES:
                cache = kwargs.get(name)
                if isinstance(cache, SlotLayers) and index in cache.written:
                    kwargs[name] = LayerCache(cache.slots, cache.written[index])
            output = run(inner, *args, **kwargs)
            called()
            return output

        object.__setattr__(new, "forward", forward)
        return new

    return replace_module(model, layers, nn.ModuleList(map(view_of, range(len(layers)), layers)))


def run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer without its hooks, which run outside the compiled code."""
    return type(layer).forward(layer, *args, **kwargs)


def view(model: nn.Module, decoder: nn.Module, forward: Callable) -> Any:
    """Copy the modules from `model` down to `decoder` and replace the last one's `forward`; all else is shared. Returns
    None if a module on the way has its instance's own forward (as with offloaded weights), or if there is no way.
    """
    new = copy.copy(decoder)
    object.__setattr__(new, "forward", forward)
    return replace_module(model, decoder, new)


def replace_module(model: nn.Module, part: nn.Module, new: nn.Module) -> Any:
    """Copy the modules from `model` down to `part` and put `new` in its place. Returns None as `view` does."""
    names = next((name for name, module in model.named_modules() if module is part), None)
    if names is None:
        return None
    path = [model]
    for name in names.split(".") if names else []:
        path.append(getattr(path[-1], name))
    if any("forward" in vars(module) for module in path):
        return None
    for parent, child in zip(path[-2::-1], path[::-1]):
        upper = copy.copy(parent)
        upper._modules = {name: new if module is child else module for name, module in parent._modules.items()}
        new = upper
    return new


class JoinedProduct(nn.Module):
    """One of several linear modules whose weights are one tensor. Each returns its own part of the whole product, which
    compiled code computes once (`merge_products`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int, size: int):
        super().__init__()
        self.weight, self.bias, self.start, self.size = weight, bias, start, size

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).narrow(-1, self.start, self.size)


def joined_groups(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield the linear children of a module that read the same input, and whose products may become one."""
    for names in JOINED:
        group = [child for name in names if type(child := module._modules.get(name)) is nn.Linear]
        kinds = {(x.in_features, x.bias is None, x.weight.dtype, x.weight.device) for x in group}
        if len(group) == len(names) and len(kinds) == 1:
            yield group


def merge_products(graph: torch.fx.Graph) -> None:
    """Compute equal products once, which Inductor does not."""
    first: dict[tuple, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.target is F.linear and node is not (same := first.setdefault(node.args, node)):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


@torch.no_grad()
def join_weights(decoder: nn.Module) -> None:
    """Move the weights of `joined_groups` behind one another in memory. Modules, parameters and values stay the same,
    and no second copy is kept.
    """
    for module in decoder.modules():
        for group in joined_groups(module):
            for name in ("weight", "bias"):
                parts = [getattr(linear, name) for linear in group]
                if parts[0] is not None:
                    whole = torch.cat(parts)
                    for part, data in zip(parts, whole.split([len(part) for part in parts])):
                        part.data = data


def whole_of(parts: list[Tensor]) -> Tensor | None:
    """Return tensors that lie behind one another in memory as one, or None if they don't."""
    first, end = parts[0].detach(), parts[0].storage_offset()
    for part in parts:
        if not part.is_contiguous() or part.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        if part.storage_offset() != end:
            return None
        end += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def with_joined_products(layer: nn.Module) -> nn.Module:
    """Return a shallow copy of a layer with `JoinedProduct` where weights allow it, or the layer itself if nowhere."""
    new = {name: with_joined_products(child) for name, child in layer.named_children()}
    for group in joined_groups(layer):
        weight = whole_of([linear.weight for linear in group])
        bias = None if group[0].bias is None else whole_of([linear.bias for linear in group])
        if weight is None or (bias is None) != (group[0].bias is None):
            continue
        start = 0
        for linear in group:
            name = next(name for name, child in layer.named_children() if child is linear)
            new[name] = JoinedProduct(weight, bias, start, linear.out_features)
            start += linear.out_features
    if all(child is layer._modules[name] for name, child in new.items()):
        return layer
    changed = copy.copy(layer)
    changed._modules = {**layer._modules, **new}
    return changed
