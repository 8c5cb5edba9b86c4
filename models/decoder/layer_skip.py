"""Self-speculation: the target drafts with some of its layers skipped, or exits early. It needs no training and no
extra weights (Zhang et al., "Draft & verify", arXiv 2309.08168; the choice at run time follows "SWIFT", arXiv
2410.06916).

The layers that run share the target's cache, final norm and head (`LayerSubset`). Layers are chosen by acceptance and
by the share of layers that run, not by the clock, so that the same requests lead to the same choices.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from visspec.models.attention.pass_inputs import HOOKING
from visspec.models.decoder.probe import restore_after
from visspec.models.drafting.base import Chain
from visspec.models.runner.views import replace_module
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

FORGET = 0.98
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 2.0  # optimistic enough that every choice is tried
LEVELS = 4


@dataclass
class SkipPlan:
    """A set of skipped layers, and the acceptance of drafts made without them."""

    skip: frozenset[int]
    cost: float  # share of layers that run
    kept: float = 0.0
    tried: float = 0.0

    @property
    def rate(self) -> float:
        return (self.kept + PRIOR_RATE * PRIOR_WEIGHT) / (self.tried + PRIOR_WEIGHT)

    @property
    def worth(self) -> float:
        """Expected tokens per full pass's cost, at the best depth."""
        rate = self.rate
        return max(sum(rate**n for n in range(d + 1)) / (1.0 + self.cost * d) for d in range(1, LEVELS + 1))

    def learn(self, lengths: list[int], levels: int) -> None:
        """Record that paths of these lengths (including the root) were accepted of chains of `levels`."""
        rows = len(lengths)
        self.kept = FORGET * self.kept + sum(n - 1 for n in lengths) / rows
        self.tried = FORGET * self.tried + sum(min(n, levels) for n in lengths) / rows


class LayerSkip(Drafter):
    """Drafts chains with some of the target's own layers.

    If both arguments are 0, one of a few sets of layers is chosen, with the best acceptance for its cost so far,
    over all requests. Under rules that use their own uniform numbers (`rejection`), the choice changes the tokens of a
    seed, but not the distribution; fix it there if seeds must reproduce.

    Args:
        every: Run the first, the last and every n-th layer between them.
        exit: Run only the first n layers.
    """

    traits = DrafterTraits(levels=LEVELS, joins=True, partial=True)

    def __init__(self, every: int = 0, exit: int = 0):
        if every < 0 or exit < 0 or (every and exit):
            raise ValueError(f"every: got {every} with exit {exit}, expected one of them, a count of at least 1.")
        self.every, self.exit = every, exit
        self.choices: list[SkipPlan] = []
        self._lock = threading.Lock()

    def attach(self, target: PreTrainedModel) -> None:
        if not isinstance(target, nn.Module):
            raise ValueError(f"drafter: got {type(target).__name__}, expected a text model with layers to skip.")
        depth = target.config.get_text_config().num_hidden_layers
        if self.exit >= depth > 0 or self.every == 1:
            raise ValueError(f"exit: got {self.exit} with every {self.every}, expected fewer than {depth} layers.")
        fixed = [spaced_layers(depth, self.every)] if self.every else [frozenset(range(self.exit, depth))]
        skips = fixed if self.every or self.exit else candidates(depth)
        self.choices = [SkipPlan(skip, 1.0 - len(skip) / depth) for skip in skips]
        if not self.choices:
            raise ValueError(
                f"drafter: got a model of {depth} layers, expected at least 2 so that some can be skipped."
            )

    def start(self, state: State, scores: Scores) -> None:
        state.memory = None

    def propose(self, state: State, depth: int) -> Draft:
        with self._lock:
            state.memory = best = max(self.choices, key=lambda choice: choice.worth)
        target = state.target
        assert target is not None
        chain, token = Chain(state), state.pending
        for level in range(depth):
            token = chain.add(target.partial(state, token, level, best.skip))
        state.calls["draft_pass"] += depth
        return chain.finish()

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        if draft.levels and state.memory is not None:
            with self._lock:
                state.memory.learn([len(path) for path in outcome.path], draft.levels)

    def join(self, state: State, other: State, take: list[int]) -> None:
        """Do nothing: rows have no memory besides the target's keys and values."""


def spaced_layers(depth: int, every: int) -> frozenset[int]:
    """Return all layers except the first, the last and every n-th."""
    return frozenset(n for n in range(1, depth - 1) if n % every)


def candidates(depth: int) -> list[frozenset[int]]:
    """Return early exits after a quarter, half and three quarters, and sets that run every 2nd, 3rd or 4th layer."""
    exits = [frozenset(range(max(math.ceil(depth * share), 1), depth)) for share in (0.25, 0.5, 0.75)]
    thin = [spaced_layers(depth, every) for every in (2, 3, 4)]
    return [skip for skip in dict.fromkeys(exits + thin) if skip]


class LayerSubset:
    """Views of a stock model without some of its decoder layers, by the set of skipped layers, built on first use.

    All weights are shared, and the model itself is not changed: the modules from the model down to its list of layers
    are copied shallowly, and a skipped layer is replaced by one that returns its input. Layers keep their index, by
    which they find their keys and values in the cache.
    """

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
        name, layers = type(self.model).__name__, self._layers()
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
        layers = self._layers()
        if self._tuples is None:
            self._tuples = self._gives_tuples(layers[0])
        replaced = [_SkippedLayer(layer, self._tuples) if n in skip else layer for n, layer in enumerate(layers)]
        view = replace_module(self.model, layers, nn.ModuleList(replaced))
        if view is None:
            raise ValueError(f"drafter: got {type(self.model).__name__}, expected a model whose layers can be skipped.")
        return view

    def _layers(self) -> nn.ModuleList:
        count = self.model.config.get_text_config().num_hidden_layers
        for module in self.decoder.children():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise ValueError(f"drafter: got {type(self.model).__name__}, expected a decoder with a list of {count} layers.")

    def _gives_tuples(self, layer: nn.Module) -> bool:
        """Return whether layers return tuples, observed in a pass over one id."""
        is_tuple: list[bool] = []
        with HOOKING:
            hook = layer.register_forward_hook(lambda module, args, output: is_tuple.append(isinstance(output, tuple)))
            try:
                self._run(self.model)
            finally:
                hook.remove()
        return is_tuple[0]

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
