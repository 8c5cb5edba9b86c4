"""Draft passes through a compiled decoder (`torch.compile`): the same weights, module and cache, less work on the host.

The stock model is not changed. Passes go through a *view* of it: shallow copies of the modules from the model down to
its decoder, which share everything but have a compiled `forward` at the end; hooks on those modules run as they do on
the model. One graph serves passes over one node, one those over more, at any length; several rows have two of their
own (`SlotCache.steady`). They are made on the cache of a request, so that no pass of a request compiles. What a graph
takes for granted of the modules is looked at once a request (`form`), not at every pass.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visspec import tree as trees
from visspec.cache import SlotCache
from visspec.models.attention import rotary
from visspec.types import Draft, State

WORTH = 32  # new tokens that a request must ask for to be one that passes are compiled for
NODES = (5, 7)  # of the pass that stands for all with more than one; the first that is not the number of rows
GRAPHS = 64  # a bound that is never reached, in place of torch's 8
ADAPTER = (
    "_active_adapter",
    "_disable_adapters",
    "merged_adapters",
    "scaling",
)  # which one PEFT's layers add, how much
BACKEND = "inductor"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of a pass's output relative to its norm; 5e-2 for others
COMPILING = threading.Lock()  # one warm-up at a time
logger = logging.getLogger(__name__)


class CompiledFunctions:
    """Functions through `torch.compile`, and what became of them. `graphs` counts what was compiled, `late` what of it
    was after a warm-up; `ready` holds False where there are graphs for one cache row, True where for several.
    """

    def __init__(self, name: str):
        self.name = name
        self.graphs = self.late = 0
        self.ready: set[bool] = set()
        self.refused = ""
        self._warming = False

    def compile(self, function: Callable) -> Callable:
        """`function` compiled, for any sizes of what it is given and those that its modules' parameters have."""
        options: dict[str, Any] = {"backend": self._backend, "dynamic": True}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # graphs of this function alone
            kept = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
            options |= {"recompile_limit": GRAPHS, "isolate_recompiles": True, "options": kept}
        return torch.compile(function, **options)

    def serve(self, several: bool, state: State, warm_up: Callable[[], None]) -> bool:
        """Whether there are graphs for this number of rows; where the request is a long one, they are made."""
        if self._due(several, state):
            with COMPILING:
                if self._due(several, state):
                    warm_up()
        return several in self.ready

    def _due(self, several: bool, state: State) -> bool:
        return several not in self.ready and not self.refused and state.request.max_new_tokens >= WORTH

    @contextmanager
    def warming(self, several: bool, what: str) -> Iterator[None]:
        """What is compiled in this context is ready then; an exception in it is said, and nothing more is compiled."""
        start, before = time.perf_counter(), self.graphs
        rows = "several rows" if several else "one row"
        logger.info("%s: compiling %s over %s, once", self.name, what, rows)
        self._warming = True
        try:
            with steadily():
                yield
        except Exception as error:
            cause = getattr(error, "inner_exception", error)
            said = str(cause).splitlines()[0] if str(cause) else ""
            self.refuse(f"{what} that fail when compiled ({type(cause).__name__}: {said})")
            return
        finally:
            self._warming = False
        self.ready.add(several)
        seconds = time.perf_counter() - start
        logger.info("%d graphs compiled for %s over %s in %.1f s", self.graphs - before, what, rows, seconds)

    def refuse(self, why: str) -> None:
        """Nothing is compiled from now on, which is said."""
        self.refused = why
        warnings.warn(refusal(self.name, why), RuntimeWarning, stacklevel=4)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        compiler: Callable = torch._dynamo.lookup_backend(BACKEND)
        if BACKEND == "inductor" and all(x.device.type == "cpu" for x in inputs if isinstance(x, Tensor)):
            # kernels are called from C++ too: calls from Python take a tenth of the time of a small model
            made = compiler(graph, inputs, config_patches={"cpp_wrapper": True})
        else:
            made = compiler(graph, inputs)
        self.graphs += 1
        self.late += not self._warming
        return made


class CompiledPasses(CompiledFunctions):
    """Chooses between a model and its view with a compiled decoder. A model that can't be compiled runs as it is, which
    a warning says once.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module):
        super().__init__(type(model).__name__)
        self.stock, self.decoder = model, decoder
        self.view: nn.Module | None = None
        self.form: tuple = ()
        self._look()

    def open(self, slots: SlotCache) -> None:
        """Before a request's prefill."""
        self._look()
        slots.steady = not self.refused

    def _look(self) -> None:
        """Start anew where the decoder's modules, or the head behind them, are not those that graphs were made of."""
        head = getattr(self.stock, "get_output_embeddings", lambda: None)()
        if self.refused or (now := (id(head), *form(self.decoder))) == self.form:
            return
        self.form, self.ready = now, set()
        if hooked := _hooked_module(self.decoder):
            self.refuse(f"hooks on {hooked}, which would not be called")
            return
        self.view = view(self.stock, self.decoder, self.compile(self.decoder.forward))
        if self.view is None:
            self.refuse("a forward of the instance's own, or a decoder apart from it")

    def choice(self, state: State, cold: Callable[[Any, Draft], Any]) -> Any:
        """What the next pass goes through. cold(model, draft) runs a pass and returns a tensor of its output; it is
        called with dummies where the form of this pass is new and the request a long one.
        """
        several = len(state.cache.slots.lengths) > 1
        ready = self.serve(several, state, lambda: self._warm_up(several, state, cold))
        return self.view if ready and state.cache.slots.steady else self.stock

    def _warm_up(self, several: bool, state: State, cold: Callable[[Any, Draft], Any]) -> None:
        """Compile the two graphs for this number of rows, and compare a pass of each with that of the model."""
        with self.warming(several, "passes"):
            for nodes in (1, next(n for n in NODES if n != len(state.rows))):
                draft = dummy(state.pending, nodes)
                want, got = (cold(model, draft).float() for model in (self.stock, self.view))
                close(got, want, state.cache.slots.keys[0].dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError unless what was compiled gives what it should."""
    off = float((got - want).norm() / want.norm().clamp(min=1e-12))
    if not off <= TOLERANCE.get(dtype, 5e-2):
        raise ValueError(f"its output differs by {off:.1e} of its norm")


def view(model: nn.Module, decoder: nn.Module, forward: Callable) -> Any:
    """A copy of the modules from `model` down to `decoder` whose last one has another `forward`; all else is shared.
    None where a module on the way has a forward of its own instance (as of offloaded weights), or there is no way.
    """
    new = copy.copy(decoder)
    object.__setattr__(new, "forward", forward)
    return replace_decoder(model, decoder, new)


def replace_decoder(model: nn.Module, decoder: nn.Module, new: nn.Module) -> Any:
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

    def forward(*args: object, **kwargs: Any) -> Any:
        widths = [part.shape[1] for part in map(kwargs.get, ("input_ids", "inputs_embeds")) if part is not None]
        return (steps if widths == [1] else decoder.forward)(*args, **kwargs)

    found = view(model, decoder, forward)
    if found is None:
        raise ValueError("--compile: got a model that can't be compiled, expected one without forwards of its own")
    return found


def form(decoder: nn.Module) -> tuple:
    """What graphs of a decoder take for granted: its modules, their mode, hooks and adapters, and the kind of their
    weights.
    """
    found: list[Any] = []
    for module in decoder.modules():
        found += (id(module), module.training, module is not decoder and bool(foreign(module)))
        found += (repr(vars(module)[name]) for name in ADAPTER if name in vars(module))
        for weight in (*module._parameters.values(), *module._buffers.values()):
            if weight is not None:
                found += (weight.dtype, weight.device, weight.shape)
    return tuple(found)


def foreign(module: nn.Module) -> list:
    """A module's hooks that transformers did not put up."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return []
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in hooks if not (getattr(hook, "__module__", None) or "").startswith("transformers.")]


def _hooked_module(decoder: nn.Module) -> str:
    """The first module inside a decoder with a foreign hook; empty if there is none. Those of the decoder itself are
    called as ever, outside the graph.
    """
    return next((name for name, module in decoder.named_modules() if module is not decoder and foreign(module)), "")


def dummy(pending: Tensor, nodes: int) -> Draft:
    """A chain of copies of every row's pending node."""
    proposed = pending[:, None].expand(-1, nodes - 1, *pending.shape[1:])
    return trees.chain_draft(pending, proposed) if nodes > 1 else trees.empty_draft(pending)


@contextmanager
def steadily() -> Iterator[None]:
    """Lengths that happen to be equal while a graph is made are not taken to be equal for ever, and numbers that are
    not whole are constants, which saves tracing twice.
    """
    from torch.fx.experimental import _config

    wanted: tuple = (_config, "use_duck_shape", False), (torch._dynamo.config, "specialize_float", True)
    with ExitStack() as stack:
        for config, name, value in wanted:
            if hasattr(config, name):
                stack.enter_context(config.patch({name: value}))  # type: ignore[attr-defined]
        yield


def refusal(name: str, why: str) -> str:
    return f"compile: got {name} with {why}, expected one without; it runs uncompiled"


def compiled_passes(model: nn.Module, decoder: nn.Module, why: str = "") -> CompiledPasses | None:
    """`CompiledPasses` of a model; None, said in a warning, where rotary frequencies depend on the length of a pass, or
    for the reason that is given.
    """
    if why := "rotary frequencies that depend on the length" if rotary.modules(decoder) else why:
        warnings.warn(refusal(type(model).__name__, why), RuntimeWarning, stacklevel=3)
        return None
    return CompiledPasses(model, decoder)
