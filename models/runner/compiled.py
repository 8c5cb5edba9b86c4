"""Draft passes through a compiled decoder (`torch.compile`): same weights, module and cache, less work on the host.

The stock model is not changed. Passes go through a *view* of it (`views`); hooks on the decoder, and on modules above
it, still run. One graph serves passes over one node and one longer ones, at any length; batches have two of their own
(`SlotCache.steady`). Graphs are built on a request's cache before its first pass, so that no pass compiles. What
a graph assumes of the modules is checked once per request (`form`), not in every pass. The code rounds wherever the
stock modules round.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from visspec import tree as trees
from visspec.cache import SlotCache
from visspec.models.attention import rotary
from visspec.models.runner.views import layers_of, layers_view, merge_products, run_layer, view
from visspec.types import Draft, State

WORTH = 32  # minimum new tokens of a request for which passes are compiled
NODES = (5, 7)  # warm-up sizes of longer passes; the first that differs from the number of rows is used
GRAPHS = 64  # recompile limit, never reached, instead of torch's 8
ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # state of PEFT's layers
BACKEND = "inductor"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # error of a pass relative to its norm; 5e-2 for other dtypes
COMPILING = threading.Lock()  # one warm-up at a time
logger = logging.getLogger(__name__)


class CompiledFunctions:
    """Functions compiled with `torch.compile`, and their state.

    `graphs` counts compiled graphs, and `late` those that were not compiled in a warm-up. `ready` contains False if
    there are graphs for one cache row, and True if there are graphs for several.
    """

    def __init__(self, name: str):
        self.name = name
        self.graphs = self.late = 0
        self.ready: set[bool] = set()
        self.refused = ""
        self._warming = False

    def compile(self, function: Callable, dynamic: bool = True) -> Callable:
        """Compile a function for any input sizes except those of its modules' parameters.

        Args:
            dynamic: False compiles it for each size, and guards what it assumes of modules.
        """
        options: dict[str, Any] = {"backend": self._backend, "dynamic": dynamic}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # count graphs of this function only
            guards = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
            options |= {"recompile_limit": GRAPHS, "isolate_recompiles": True}
            options |= {"options": guards} if dynamic else {}
        return torch.compile(function, **options)

    def serve(self, several: bool, state: State, warm_up: Callable[[], None]) -> bool:
        """Return whether there are graphs for this number of rows. A long request builds them."""
        if self._due(several, state):
            with COMPILING:
                if self._due(several, state):
                    warm_up()
        return several in self.ready

    def _due(self, several: bool, state: State) -> bool:
        return several not in self.ready and not self.refused and state.request.max_new_tokens >= WORTH

    @contextmanager
    def warm_up(self, several: bool, what: str) -> Iterator[None]:
        """Context for a warm-up, after which graphs are ready. An exception inside disables compilation and warns."""
        start, count = time.perf_counter(), self.graphs
        rows = "several rows" if several else "one row"
        logger.info("%s: compiling %s over %s, once", self.name, what, rows)
        self._warming = True
        try:
            with steadily():
                yield
        except Exception as error:
            cause = getattr(error, "inner_exception", error)
            message = str(cause).splitlines()[0] if str(cause) else ""
            self.refuse(f"{what} that fail when compiled ({type(cause).__name__}: {message})")
            return
        finally:
            self._warming = False
        self.ready.add(several)
        seconds = time.perf_counter() - start
        logger.info("%d graphs compiled for %s over %s in %.1f s", self.graphs - count, what, rows, seconds)

    def refuse(self, why: str) -> None:
        """Disable compilation and warn."""
        self.refused = why
        warnings.warn(refusal(self.name, why), RuntimeWarning, stacklevel=4)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        compiler: Callable = torch._dynamo.lookup_backend(BACKEND)
        if BACKEND == "inductor":
            # by default fused operations round once, so tokens in 16 bits may differ
            patches = {"emulate_precision_casts": True}
            # call kernels from C++ as well: calls from Python take a tenth of the time of a small model
            patches["cpp_wrapper"] = all(x.device.type == "cpu" for x in inputs if isinstance(x, Tensor))
            compiled = compiler(graph, inputs, config_patches=patches)
        else:
            compiled = compiler(graph, inputs)
        self.graphs += 1
        self.late += not self._warming
        return compiled


class CompiledPasses(CompiledFunctions):
    """Chooses between a model and its view with a compiled decoder. If the model cannot be compiled, it runs uncompiled
    and warns once.

    Args:
        recorded: Compile the decoder's layers instead, for one size at a time. They compile in a fraction of the time.
            Calling them costs more, but recordings do not call them.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module, recorded: bool = False):
        super().__init__(type(model).__name__)
        self.stock, self.decoder, self.recorded, self.bar = model, decoder, recorded, tqdm(disable=True)
        self.view: nn.Module | None = None
        self.form: tuple = ()
        self._look()

    def open(self, slots: SlotCache) -> None:
        """Prepare for a request; call it before the prefill."""
        self._look()
        slots.steady = not self.refused

    def _look(self) -> None:
        """Start over if the decoder's modules, or the LM head, are not those that the graphs were built from."""
        head = getattr(self.stock, "get_output_embeddings", lambda: None)()
        if self.refused or (now := (id(head), *form(self.decoder))) == self.form:
            return
        self.form, self.ready = now, set()
        if hooked := _hooked_module(self.decoder):
            self.refuse(f"hooks on {hooked}, which would not be called")
            return
        if self.recorded:
            run = self.compile(run_layer, dynamic=False)
            self.view = layers_view(self.stock, self.decoder, run, lambda: self.bar.update())
        else:
            self.view = view(self.stock, self.decoder, self.compile(self.decoder.forward))
        if self.view is None:
            self.refuse("a forward of the instance's own, or a decoder outside the model")

    def choice(self, state: State, cold: Callable[[Any, Draft], Any]) -> Any:
        """Return what the next pass goes through. cold(model, draft) runs a pass and returns a tensor of its output; it
        is called with dummies if there are no graphs for this pass yet and the request is long.
        """
        several = len(state.cache.slots.lengths) > 1
        ready = self.serve(several, state, lambda: self._warm_up(several, state, cold))
        return self.view if ready and state.cache.slots.steady else self.stock

    def _warm_up(self, several: bool, state: State, cold: Callable[[Any, Draft], Any]) -> None:
        """Compile both graphs for this number of rows, and compare a pass of each with the model's own."""
        with self.warm_up(several, "passes"):
            for nodes in (1, next(n for n in NODES if n != len(state.rows))):
                draft = dummy(state.pending, nodes)
                want, got = (cold(model, draft).float() for model in (self.stock, self.view))
                close(got, want, state.cache.slots.keys[0].dtype)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Context for a pass that compiles layers, with a progress bar over them."""
        total = len(layers_of(self.decoder) or ())
        with tqdm(total=total, desc=f"compiling {self.name}", leave=False, disable=None) as self.bar:
            yield

    def _backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        merge_products(graph.graph)
        graph.recompile()
        return super()._backend(graph, inputs)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if a compiled or recorded result differs from the expected one by more than rounding."""
    off = float((got - want).norm() / want.norm().clamp(min=1e-12))
    if not off <= TOLERANCE.get(dtype, 5e-2):
        raise ValueError(f"its output differs by {off:.1e} of its norm")


def stepwise(model: nn.Module, decoder: nn.Module) -> Any:
    """Return a view of a stock model for benchmarks whose own `generate` compiles passes over one token; the prefill
    stays eager. Raises ValueError if the model has no `view`.
    """
    steps = torch.compile(decoder.forward, backend=BACKEND)

    def forward(*args: object, **kwargs: Any) -> Any:
        widths = [part.shape[1] for part in map(kwargs.get, ("input_ids", "inputs_embeds")) if part is not None]
        return (steps if widths == [1] else decoder.forward)(*args, **kwargs)

    compiled = view(model, decoder, forward)
    if compiled is None:
        raise ValueError("--compile: got a model that can't be compiled, expected one without forwards of its own.")
    return compiled


def form(decoder: nn.Module) -> tuple:
    """Return what a decoder's graphs assume: its modules, their mode, hooks and adapters, and their weights' dtypes,
    devices and shapes.
    """
    facts: list[Any] = []
    for module in decoder.modules():
        facts += (id(module), module.training, module is not decoder and bool(foreign(module)))
        facts += (repr(vars(module)[name]) for name in ADAPTER if name in vars(module))
        for weight in (*module._parameters.values(), *module._buffers.values()):
            if weight is not None:
                facts += (weight.dtype, weight.device, weight.shape)
    return tuple(facts)


def foreign(module: nn.Module) -> list:
    """Return a module's hooks that transformers did not install."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return []
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in hooks if not (getattr(hook, "__module__", None) or "").startswith("transformers.")]


def _hooked_module(decoder: nn.Module) -> str:
    """Return the name of the first module inside a decoder with a foreign hook, or "". Hooks on the decoder itself run
    outside the graph.
    """
    return next((name for name, module in decoder.named_modules() if module is not decoder and foreign(module)), "")


def dummy(pending: Tensor, nodes: int) -> Draft:
    """Return a chain of copies of every row's pending node."""
    proposed = pending[:, None].expand(-1, nodes - 1, *pending.shape[1:])
    return trees.chain_draft(pending, proposed) if nodes > 1 else trees.empty_draft(pending)


@contextmanager
def steadily() -> Iterator[None]:
    """Context for tracing in which equal lengths are not assumed to stay equal, and floats are constants, which avoids
    tracing twice. Failures are raised, although importing outlines makes torch hide them in the whole process.
    """
    from torch.fx.experimental import _config

    shapes = _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    limits = {"specialize_float": True, "suppress_errors": False, "recompile_limit": GRAPHS}
    with shapes, torch._dynamo.config.patch(limits):
        yield


def refusal(name: str, why: str) -> str:
    return f"compile: got {name} with {why}, expected one without; it runs uncompiled"


def compiled_passes(model: nn.Module, decoder: nn.Module, why: str = "") -> CompiledPasses | None:
    """Return `CompiledPasses` of a model, or warn and return None if rotary frequencies depend on the length of a pass,
    or if a reason `why` is given.
    """
    if why := "rotary frequencies that depend on the length" if rotary.modules(decoder) else why:
        warnings.warn(refusal(type(model).__name__, why), RuntimeWarning, stacklevel=3)
        return None
    return CompiledPasses(model, decoder)
