"""Decoder layers compiled for passes that are recorded as CUDA graphs (`graphs`).

A recording launches all that the stock modules launch one by one: norms, rotary embeddings, activations and residual
sums, about 25 small kernels per layer. Compiled, they are four or five. All layers of a class share the compiled code,
so compiling takes as long as for one layer, once per shape: layers are called through one function, and each gets its
own part of the cache, without its number (`LayerCache`). The code rounds wherever the stock modules round.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers.cache_utils import Cache

from visspec.cache import SlotCache
from visspec.models.attention.pass_inputs import CACHE_NAMES, SlotLayers
from visspec.models.runner.compiled import GRAPHS, CompiledFunctions, replace_decoder


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

    patches = {"emulate_precision_casts": True}  # otherwise fused operations round once, and 16-bit tokens may differ

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

    def _view_of(self, index: int, layer: nn.Module) -> nn.Module:
        def forward(*args: Any, **kwargs: Any) -> Any:
            for name in CACHE_NAMES:
                cache = kwargs.get(name)
                if isinstance(cache, SlotLayers) and index in cache.written:
                    kwargs[name] = LayerCache(cache.slots, cache.written[index])
            output = self.layer(layer, *args, **kwargs)
            self.bar.update()
            return output

        new = copy.copy(layer)
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
