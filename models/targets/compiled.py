"""Draft passes through a compiled decoder (`torch.compile`): the same weights, module and cache, less work on the host.

The stock model is not changed. Passes go through a *view* of it: shallow copies of the modules from the model down to
its decoder, which share everything but have a compiled `forward` at the end; hooks on those modules run as they do on
the model. One graph serves passes over one node, one those over more, at any length; several rows have two of their
own (`SlotCache.steady`). They are made by `warm_up`, on the cache of a request, so that no pass of a request compiles.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visspec import tree as trees
from visspec.cache import SlotCache
from visspec.models.targets import rotary
from visspec.types import Draft, State

WORTH = 32  # new tokens that a request must ask for to be one that passes are compiled for
NODES = (5, 7)  # of the pass that stands for all with more than one; the first that is not the number of rows
GRAPHS = 64  # a bound that is never reached, in place of torch's 8
BACKEND = "inductor"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of a pass's output relative to its norm; 5e-2 for others
COMPILING = threading.Lock()  # one warm-up at a time
logger = logging.getLogger(__name__)


class Passes:
    """Chooses between a model and its view with a compiled decoder. A model that can't be compiled runs as it is, which
    a warning says once. `graphs` counts what was compiled, `late` those of them that were after a warm-up.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module):
        self.stock, self.decoder = model, decoder
        self.graphs = self.late = 0
        self.ready: set[bool] = set()  # whether for several cache rows
        self.refused = ""
        self._warming = False
        options: dict[str, Any] = {"backend": self._backend, "dynamic": True}
        known = inspect.signature(torch.compile).parameters
        options |= {k: v for k, v in {"recompile_limit": GRAPHS, "isolate_recompiles": True}.items() if k in known}
        self.view = view(model, decoder, torch.compile(decoder.forward, **options))
        if self.view is None:
            self._refuse("a forward of the instance's own, or a decoder apart from it")

    def open(self, slots: SlotCache) -> None:
        """Before a request's prefill."""
        slots.steady = not self.refused
        if (hooked := _hooked(self.decoder)) and not self.refused:
            self._refuse(f"hooks on {hooked}, which would not be called")
            slots.steady = False

    def choice(self, state: State, cold: Callable[[Any, Draft], Any]) -> Any:
        """What the next pass goes through. cold(model, draft) runs a pass and returns a tensor of its output; it is
        called with dummies where the form of this pass is new and the request a long one.
        """
        several = len(state.cache.slots.lengths) > 1
        if several not in self.ready and not self.refused and state.request.max_new_tokens >= WORTH:
            with COMPILING:
                if several not in self.ready and not self.refused:
                    self._warm_up(several, state, cold)
        return self.view if several in self.ready and state.cache.slots.steady else self.stock

    def _warm_up(self, several: bool, state: State, cold: Callable[[Any, Draft], Any]) -> None:
        """Compile the two graphs for this number of rows, and compare a pass of each with that of the model."""
        start, before = time.perf_counter(), self.graphs
        rows = "several rows" if several else "one row"
        logger.info("%s: compiling passes over %s, once", type(self.stock).__name__, rows)
        self._warming = True
        try:
            for nodes in (1, next(n for n in NODES if n != len(state.rows))):
                draft = dummy(state.pending, nodes)
                want = cold(self.stock, draft).float()
                with no_duck_shapes():
                    got = cold(self.view, draft).float()
                off = float((got - want).norm() / want.norm().clamp(min=1e-12))
                if not off <= TOLERANCE.get(state.cache.slots.keys[0].dtype, 5e-2):
                    raise ValueError(f"its output differs by {off:.1e} of its norm")
        except Exception as error:
            cause = getattr(error, "inner_exception", error)
            said = str(cause).splitlines()[0] if str(cause) else ""
            self._refuse(f"passes that fail when compiled ({type(cause).__name__}: {said})")
            return
        finally:
            self._warming = False
        self.ready.add(several)
        seconds = time.perf_counter() - start
        logger.info("%d graphs compiled for passes over %s in %.1f s", self.graphs - before, rows, seconds)

    def _refuse(self, why: str) -> None:
        self.refused = why
        warnings.warn(refusal(self.stock, why), RuntimeWarning, stacklevel=3)

    def _backend(self, graph: Any, inputs: Any) -> Callable:
        made = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
        self.graphs += 1
        self.late += not self._warming
        return made


def view(model: nn.Module, decoder: nn.Module, forward: Callable) -> Any:
    """A copy of the modules from `model` down to `decoder` whose last one has another `forward`; all else is shared.
    None where a module on the way has a forward of its own instance (as of offloaded weights), or there is no way.
    """
    new = copy.copy(decoder)
    object.__setattr__(new, "forward", forward)
    return replaced(model, decoder, new)


def replaced(model: nn.Module, decoder: nn.Module, new: nn.Module) -> Any:
    """A copy of the modules from `model` down to `decoder`, in whose place is another one. None as for `view`."""
    names = next((name for name, module in model.named_modules() if module is decoder), None)
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


def stepwise(model: nn.Module, decoder: nn.Module) -> Any:
    """A view of a stock model for benchmarks, whose own `generate` runs its passes over one token compiled, as it does
    the prompt in any model. Raises ValueError where there is no `view`.
    """
    steps = torch.compile(decoder.forward, backend=BACKEND)

    def forward(*args: Any, **kwargs: Any) -> Any:
        widths = [part.shape[1] for part in map(kwargs.get, ("input_ids", "inputs_embeds")) if part is not None]
        return (steps if widths == [1] else decoder.forward)(*args, **kwargs)

    found = view(model, decoder, forward)
    if found is None:
        raise ValueError("--compile: got a model that can't be compiled, expected one without forwards of its own")
    return found


def _hooked(decoder: nn.Module) -> str:
    """The first module inside a decoder with a hook that transformers did not put up; empty if there is none."""
    for name, module in decoder.named_modules():
        if module is decoder:
            continue  # called as ever, outside the graph
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                return name
    return ""


def dummy(pending: Tensor, nodes: int) -> Draft:
    """A chain of copies of every row's pending node."""
    proposed = pending[:, None].expand(-1, nodes - 1, *pending.shape[1:])
    return trees.chain_draft(pending, proposed) if nodes > 1 else trees.undrafted(pending)


@contextmanager
def no_duck_shapes() -> Iterator[None]:
    """Lengths that happen to be equal while a graph is made are not taken to be equal for ever."""
    from torch.fx.experimental import _config

    config: Any = _config
    with config.patch(use_duck_shape=False) if hasattr(config, "use_duck_shape") else warnings.catch_warnings():
        yield


def refusal(model: nn.Module, why: str) -> str:
    return f"compile: got {type(model).__name__} with {why}, expected one without; its passes run uncompiled"


def compiled(model: nn.Module, decoder: nn.Module, states: bool = False) -> Passes | None:
    """`Passes` of a model; None, said in a warning, where rotary frequencies depend on the length of a pass or layers
    keep `states`.
    """
    turning = rotary.modules(decoder)
    if turning or states:
        why = "rotary frequencies that depend on the length" if turning else "layers that keep a state"
        warnings.warn(refusal(model, why), RuntimeWarning, stacklevel=3)
        return None
    return Passes(model, decoder)
