"""Decoder layers compiled for passes that are recorded as CUDA graphs (`graphs`).

A recording launches all that the stock modules launch one by one: norms, rotary embeddings, activations and residual
sums, about 25 small kernels per layer. Compiled, they are four or five. All layers of a class share the compiled code,
so compiling takes as long as for one layer, once per shape: layers are called through one function, and each gets its
own part of the cache, without its number (`LayerCache`). The code rounds wherever the stock modules round.

Products of one input by several matrices become one if the matrices lie behind one another in memory (`join_weights`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers.cache_utils import Cache

from visspec.cache import SlotCache
from visspec.models.attention.pass_inputs import CACHE_NAMES, SlotLayers
from visspec.models.runner.compiled import GRAPHS, CompiledFunctions, replace_decoder

JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # modules that read the same input


class LayerCache(Cache):
    """The keys and values of one layer of a `SlotLayers`, as a transformers cache."""

    def __init__(self, slots: SlotCache, place: int):
        super().__init__(layers=[])
        self.slots, self.keys, self.values = slots, slots.keys[place], slots.values[place]

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object):
        return self.slots.write_to(self.keys, self.values, key_states, value_states)


class CompiledLayers(CompiledFunctions):
    """A view of a model whose decoder layers are compiled. The model itself is not changed. A model whose layers can't
    be replaced is refused with a warning.
    """

    # by default fused operations round once, so tokens in 16 bits may differ
    patches: ClassVar[dict[str, bool]] = {"emulate_precision_casts": True}

    def __init__(self, model: nn.Module, decoder: nn.Module):
        super().__init__(type(model).__name__)
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList) or any("forward" in vars(layer) for layer in layers):
            self.refuse("layers that have forwards of their own, or are in no list")
            return
        self.layer, self.count, self.bar = self.compile(call_layer), len(layers), tqdm(disable=True)
        new = copy.copy(decoder)
        new._modules = {**decoder._modules, "layers": nn.ModuleList(map(self._view_of, range(self.count), layers))}
        self.view = replace_decoder(model, decoder, new)
        if self.view is None:
            self.refuse("a forward of the instance's own, or a decoder outside the model")

    def compile(self, function: Callable) -> Callable:
        """Compile a function for each shape of its inputs."""
        options: dict[str, Any] = {"backend": self._backend, "dynamic": False}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            options |= {"recompile_limit": GRAPHS, "isolate_recompiles": True}
        return torch.compile(function, **options)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        merge_products(graph.graph)
        graph.recompile()
        return super()._backend(graph, inputs)

    def _view_of(self, index: int, layer: nn.Module) -> nn.Module:
        def forward(*args: Any, **kwargs: Any) -> Any:
            for name in CACHE_NAMES:
                cache = kwargs.get(name)
                if isinstance(cache, SlotLayers) and index in cache.written:
                    kwargs[name] = LayerCache(cache.slots, cache.written[index])
            output = self.layer(inner, *args, **kwargs)
            self.bar.update()
            return output

        new, inner = copy.copy(layer), with_joined_products(layer)
        object.__setattr__(new, "forward", forward)
        return new

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Context for a pass that compiles, with a bar over the layers."""
        with (
            torch._dynamo.config.patch(recompile_limit=GRAPHS),
            tqdm(total=self.count, desc=f"compiling {self.name}", leave=False, disable=None) as self.bar,
        ):
            yield


def call_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer without its hooks, which run outside the compiled code."""
    return type(layer).forward(layer, *args, **kwargs)


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
