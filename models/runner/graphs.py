"""Draft passes recorded as CUDA graphs: a whole pass of the stock model, including the LM head, is one launch.

A recording is made for a number of cache rows, nodes and slots, and also runs drafts with fewer nodes, whose extra
results are dropped. Everything else is read from input buffers: ids, positions, the rows' lengths, the tree and the
padding. From these it computes the slots to write and the arguments of attention: a `DraftLayout`, or a mask over all
slots of the stores. The stores are pooled (`buffer_pool`): before its first pass a request's keys and
values move into some. Passes beyond the largest bucket run eagerly. If recording fails, a warning says so once. With
`compile`, the decoder's layers are compiled for their sizes before they are recorded.
Shapes: R cache rows, N nodes, S slots.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from visspec import replay
from visspec.cache import SlotCache, to_device
from visspec.models.attention import rotary
from visspec.models.attention.draft_attention import STOCK, implementation
from visspec.models.attention.pass_inputs import DraftLayout, Masks, SlotLayers
from visspec.models.runner.buffer_pool import GraphBufferPool, KVBuffers
from visspec.models.runner.compiled import CompiledPasses, close, foreign
from visspec.replay import REPLAYING, Recording, capacity
from visspec.types import State, Tree

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# a pass over buffers: forward(model, cache, attention, *given) -> logits or hidden states, and other outputs
Forward = Callable[..., Sequence[Tensor | None]]


class GraphedForward(GraphBufferPool):
    """Recorded passes of a model, or of an image model's decoder."""

    what = "passes"

    def __init__(
        self, model: nn.Module, decoder: nn.Module, masks: Masks, positions: int | None, compile: bool = False
    ):
        super().__init__(type(model).__name__, positions)
        self.model, self.decoder, self.masks, self.compile = model, decoder, masks, compile
        self.layers: CompiledPasses | None = None

    @property
    def compiled(self) -> bool:
        """Return whether compiled layers are recorded."""
        return self.layers is not None and not self.layers.refused

    def open(self) -> None:
        """Prepare for a request before its prefill; drop the recordings if the model has changed."""
        if self.refused:
            return
        if hooked := self._hooked_module():
            with REPLAYING:
                self.refuse(f"got {self.name} with hooks on {hooked}, expected one without: they would not be called")
            return
        self.follow([self.decoder, *filter(None, [self._head()])], self._renew)

    def run(
        self, state: State, tree: Tree, inputs: Sequence[Tensor], forward: Forward, eager: Callable[[], Tensor]
    ) -> list[Tensor | None] | None:
        """Run `forward` in a recording, after the request's slots, and return its outputs, (R, N, ...) each. Returns
        None if the pass must run eagerly. A new recording is compared with the result of `eager`.
        """
        slots: SlotCache = state.cache.slots
        nodes = capacity(tree.size)
        if self.decoder.training or not self.lend(state, slots, nodes):
            return None
        with REPLAYING, torch.cuda.device_of(inputs[0]):
            try:
                stores = slots.lease.stores
                start_R = self.masks.backend.first_slots(slots)
                attn_metadata = [*inputs, *self._attn_metadata(slots, stores, tree, start_R)]
                unmasked, kinds = start_R is not None, [(x.shape[2:], x.dtype) for x in inputs]
                key = (stores.number, len(slots.lengths), nodes, len(attn_metadata), unmasked, *kinds)
                if key not in self.recordings and not self.due(state.request):
                    return None
                arguments = state.cache, stores, nodes, attn_metadata, len(inputs), unmasked, forward, eager
                recording = self.replayed(key, attn_metadata, partial(self._record, *arguments))
            except Exception as error:
                self.fail(error)
                return None
            return [None if x is None else x[:, : tree.size].clone() for x in recording.output]

    def _attn_metadata(
        self, slots: SlotCache, stores: KVBuffers, tree: Tree, start_R: list[int] | None
    ) -> Iterator[Tensor]:
        """Yield the other inputs of a recording: depths (R, N), ancestors (R, N, N) and lengths (R,); then the rows'
        first slots (R,) int32 if attention takes them, else a mask of real slots (R, S) bool if there is padding.
        """
        rows, device = len(slots.lengths), tree.depth.device
        yield from (tree.depth.expand(rows, -1), tree.ancestor.expand(rows, -1, -1), to_device(slots.lengths, device))
        if start_R is not None:
            yield to_device(start_R, device, torch.int32)
        elif slots.padding is not None:
            yield F.pad(slots.padding, (0, stores.slots - slots.padding.shape[1]), value=True)

    def _record(
        self,
        cache: SlotLayers,
        stores: KVBuffers,
        nodes: int,
        attn_metadata: list[Tensor],
        count: int,
        unmasked: bool,
        forward: Forward,
        eager: Callable[[], Tensor],
    ) -> Recording:
        """Record a pass and replay it once. Raises ValueError if its result differs from an eager pass."""
        want = eager().float()
        *by_node, ancestor = attn_metadata[: count + 2]
        more = nodes - ancestor.shape[1]
        inputs = [F.pad(x, (*[0, 0] * (x.dim() - 2), 0, more)) for x in by_node]
        inputs += [F.pad(ancestor, (0, more, 0, more)), *attn_metadata[count + 2 :]]
        inputs = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
        rows = len(cache.slots.lengths)
        # its own cache has another length on the host than the request's, which exposes any dependence on that below
        scratch = cache.with_stores(stores.tensors, rows, 1 if cache.slots.length != 1 else 2)

        def call(model: nn.Module) -> Sequence[Tensor | None]:
            node_inputs, (depth, ancestor, length, *last) = inputs[:count], inputs[count:]
            # tensors made outside the call, other than inputs and stores, would be freed after recording
            scratch.slots.open_at(length[:, None] + torch.arange(nodes, device=length.device), stores.slots)
            if unmasked:
                attention = self.masks.unmasked(DraftLayout(length, last[0], ancestor, self.masks.backend))
            else:
                attention = self.masks.whole(ancestor, depth, length, last[0] if last else None, stores.slots)
            return forward(model, scratch, attention, *node_inputs)

        def check(output: Sequence[Tensor | None]) -> None:
            assert output[0] is not None
            close(output[0][:, : want.shape[1]].float(), want, scratch.slots.keys[0].dtype)

        def recorded(model: nn.Module) -> Recording:
            recording = self.recording(inputs, partial(call, model))
            check(recording.output)
            return recording

        if self.layers is not None and self.compiled:
            view: Any = self.layers.view
            with self.layers.warm_up(rows > 1, "passes"):  # warns if it fails
                with self.layers.progress():
                    check(call(view))
                return recorded(view)
        return recorded(self.model)

    def _renew(self) -> None:
        self.layers = CompiledPasses(self.model, self.decoder, recorded=True) if self.compile else None

    def _head(self) -> Any:
        return getattr(self.model, "get_output_embeddings", lambda: None)()

    def _hooked_module(self) -> str:
        """Return the name of the first module in a pass with a hook that is not ours, or ""."""
        named = dict(self.model.named_modules())
        names = {id(module): name for name, module in named.items()}
        inner, head = names.get(id(self.decoder), ""), names.get(id(self._head()))
        for name, module in named.items():
            nested = not (name and inner) or f"{name}.".startswith(f"{inner}.") or f"{inner}.".startswith(f"{name}.")
            if (nested or name == head) and any(not _ours(hook) for hook in foreign(module)):
                return name or self.name
        return ""


def _ours(hook: Callable) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("visspec.")


def unfit(model: PreTrainedModel, decoder: nn.Module, attention: str, states: bool = False) -> tuple[str, str] | None:
    """Return why passes of a model cannot be recorded, as (what it is, what is expected), or None if they can."""
    name, weights = type(model).__name__, [*model.parameters()]
    devices = {weight.device for weight in weights}
    if len(devices) != 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return f"{name} with weights that are moved or on several devices", "all of them on one"
    if (device := devices.pop()).type not in replay.DEVICES:
        return f"a model on {device.type}", "one on a CUDA device"
    if attention != STOCK:
        return f"{name} with attention of {attention!r}", "'sdpa'"
    if (dtype := next((w.dtype for w in weights if w.is_floating_point()), torch.float32)) not in DTYPES:
        return f"{name} of {dtype}", f"one of {', '.join(map(str, DTYPES))}"
    if states:
        return f"{name} with layers that keep a state", "one without"
    if rotary.modules(decoder):
        return f"{name} with rotary frequencies that depend on the length", "one without"
    return None


def graphed_forward(
    asked: bool | None,
    compile: bool,
    model: PreTrainedModel,
    decoder: nn.Module,
    masks: Masks,
    text: object,
    states: bool = False,
) -> GraphedForward | None:
    """Return `GraphedForward` passes of a model whose text configuration is `text`. Returns None if they cannot be
    recorded, and warns if they were requested.
    """
    why = unfit(model, decoder, implementation(text) or STOCK, states)
    if why is None:
        return GraphedForward(model, decoder, masks, getattr(text, "max_position_embeddings", None), compile)
    if asked:
        warnings.warn(f"graphs: got {why[0]}, expected {why[1]}; it runs eager", RuntimeWarning, stacklevel=4)
    return None
