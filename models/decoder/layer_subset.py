"""View of a stock model without some of its decoder layers, for self-speculation. All weights are shared.

The modules from the model down to its list of layers are copied shallowly, and a skipped layer is replaced by one that
returns its input. The model itself is not changed. Layers keep their index, by which they find their keys and values
in the cache.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from visspec.models.attention.hooks import HOOKING
from visspec.models.decoder.probe import restore_after
from visspec.models.runner.compiled import replace_decoder


class LayerSubset:
    """Views of a model by the set of skipped layers, built on first use."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module):
        self.model = model
        self.decoder = decoder
        self._views: dict[frozenset[int], nn.Module] = {}
        self._tuples: bool | None = None

    def __call__(self, skip: frozenset[int]) -> Any:
        """Return the view. Raises ValueError for layers that do not exist, or a model without a list of layers."""
        view = self._views.get(skip)
        if view is None:
            view = self._views[skip] = self._build(skip)
        return view

    def check(self) -> None:
        """Raise ValueError if the model cannot skip layers: run only the last layer on one id."""
        name, layers = type(self.model).__name__, self._layers()[1]
        if next(self.model.parameters()).device.type == "meta":
            return
        view = self(frozenset(range(len(layers) - 1)))
        try:
            self._run(view)
        except (MemoryError, torch.OutOfMemoryError):
            raise  # unrelated to the model's structure
        except Exception as error:  # for example because the layer reads the keys of an earlier one
            raise ValueError(f"drafter: the last layer of {name} can't run alone ({type(error).__name__}).") from error

    def _build(self, skip: frozenset[int]) -> Any:
        name, layers = self._layers()
        if self._tuples is None:
            self._tuples = self._gives_tuples(layers[0])
        new = copy.copy(self.decoder)
        kept = [_SkippedLayer(layer, self._tuples) if n in skip else layer for n, layer in enumerate(layers)]
        new._modules = {**self.decoder._modules, name: nn.ModuleList(kept)}
        view = replace_decoder(self.model, self.decoder, new)
        if view is None:
            raise ValueError(f"drafter: got {type(self.model).__name__}, expected a model whose layers can be skipped.")
        return view

    def _layers(self) -> tuple[str, nn.ModuleList]:
        count = self.model.config.get_text_config().num_hidden_layers
        for name, module in self.decoder.named_children():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return name, module
        raise ValueError(f"drafter: got {type(self.model).__name__}, expected a decoder with a list of {count} layers.")

    def _gives_tuples(self, layer: nn.Module) -> bool:
        """Return whether layers return tuples, observed in a pass over one id."""
        seen: list[bool] = []
        with HOOKING:
            hook = layer.register_forward_hook(lambda module, args, output: seen.append(isinstance(output, tuple)))
            try:
                self._run(self.model)
            finally:
                hook.remove()
        return seen[0]

    def _run(self, model: nn.Module) -> None:
        with HOOKING, restore_after(self.model):
            ids = torch.zeros(1, 1, dtype=torch.long, device=next(self.model.parameters()).device)
            model(input_ids=ids, use_cache=False)


class _SkippedLayer(nn.Module):
    """Stands in for a layer and returns the hidden states unchanged. Attributes are those of the layer."""

    def __init__(self, layer: nn.Module, tuples: bool):
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not registered as a submodule
        self.tuples = tuples

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        return (hidden_states,) if self.tuples else hidden_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)
