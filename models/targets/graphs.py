"""Draft passes recorded as CUDA graphs: a whole pass of the stock model, head included, is one launch.

A recording is made for so many cache rows, nodes and slots. All else is in tensors that it reads from buffers: ids,
positions, the rows' lengths, the tree and the padding, of which it makes the slots to write and the mask over all slots
of the stores. It stands for fixed addresses, so the recorder owns the stores and lends them: before its first pass a
request's keys and values move into stores of the next *bucket* of slots, and on to others when they outgrow it; when it
ends they go back, to be lent again with their recordings. Beyond the largest bucket passes run eager.

Not yet run on a GPU: tested with a stand-in that replays the operators of a call. What can't be recorded runs eager,
which a warning says once. Shapes: R cache rows, N nodes, S slots.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec import replay
from visspec.cache import SlotCache, to_device
from visspec.models.targets import rotary
from visspec.models.targets.compiled import close, foreign, form
from visspec.models.targets.masks import Masks
from visspec.models.targets.slot_layers import SlotLayers
from visspec.replay import REPLAYING, Call, Recording, Recordings, stream
from visspec.types import Request, State, Tree

WORTH = 32  # new tokens that a request must ask for to be one that passes are recorded for
FIRST, LARGEST = 256, 1 << 17  # slots of the smallest and the largest bucket
MOST = 64  # recordings; the one that was not used for the longest makes room
IDLE = 8  # stores that no request uses and that are kept
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NUMBERS = itertools.count()
# a pass over buffers: forward(cache, mask, *given) -> logits or hidden states, and what else is needed of it
Forward = Callable[..., Sequence[Tensor | None]]


def buckets(positions: int | None) -> list[int]:
    """Numbers of slots that passes are recorded for: powers of two, up to the first that holds all positions."""
    sizes = [FIRST]
    while sizes[-1] < min(positions or LARGEST, LARGEST):
        sizes.append(2 * sizes[-1])
    return sizes


def capacity(rows: int) -> int:
    """Rows of stores for so many: few sizes, so that rows may join and other batches find their recordings."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


@dataclass(eq=False)
class Stores:
    """Keys and then values of all layers, (C, H, S, E) each, at addresses that recordings hold. kind: C, S and more."""

    kind: tuple
    tensors: list[Tensor]
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def slots(self) -> int:
        return self.kind[1]

    def hold(self, slots: SlotCache, wanted: int, queue: int) -> bool:
        """Whether a request's rows are in these stores, with room for `wanted` slots."""
        here = slots.keys[0].data_ptr() == self.tensors[0].data_ptr()  # it has moved out where it needed more rows
        return here and self.slots >= wanted and self.kind[2] == queue


class Lent:
    """Stores in use. They are back as soon as nothing holds this: the request has ended, or went on to others."""

    def __init__(self, stores: Stores, returned: deque[Stores]):
        self.stores = stores
        # no lock is taken in it, because it runs wherever the last reference ends
        weakref.finalize(self, returned.append, stores).atexit = False


class Recorded(Recordings):
    """Passes of a model, or of the decoder of an image model, in recordings. `graphs` counts those that were made,
    `refused` says why none are made any more.
    """

    late = 0  # none is made but for its own pass

    def __init__(self, model: nn.Module, decoder: nn.Module, masks: Masks, positions: int | None):
        super().__init__(MOST)
        self.model, self.decoder, self.masks = model, decoder, masks
        self.name, self.buckets = type(model).__name__, buckets(positions)
        self.graphs, self.refused = 0, ""
        self.idle: list[Stores] = []
        self.returned: deque[Stores] = deque()
        self.form: tuple = ()

    def open(self) -> None:
        """Before a request's prefill: start anew where the model is not the one that was recorded."""
        if self.refused:
            return
        if hooked := self._hooked():
            with REPLAYING:
                self.refuse(f"got {self.name} with hooks on {hooked}, expected one without: they would not be called")
            return
        parts = [self.decoder, *filter(None, [self._head()])]
        weights = (w.data_ptr() for part in parts for w in itertools.chain(part.parameters(), part.buffers()))
        now = (*map(form, parts), *weights)
        if now != self.form:
            with REPLAYING:
                self.form = now
                self.forget()

    def due(self, request: Request) -> bool:
        """Whether passes are recorded for a request."""
        return not self.refused and request.max_new_tokens >= WORTH

    def run(
        self, state: State, tree: Tree, given: Sequence[Tensor], forward: Forward, eager: Callable[[], Tensor]
    ) -> list[Tensor | None] | None:
        """What `forward` gives for `given`, (R, N, ...) each, behind the request's slots. None: the pass is to run
        eager, as `eager` does, which a new recording is compared with.
        """
        slots: SlotCache = state.cache.slots
        wanted = next((size for size in self.buckets if size >= slots.length + tree.size), None)
        record = self.recorder(given[0].device)
        if self.refused or record is None or wanted is None or not (self.recordings or self.due(state.request)):
            return None
        if self.decoder.training or torch.is_autocast_enabled(given[0].device.type):
            return None
        with REPLAYING, torch.cuda.device_of(given[0]):
            try:
                stores = self._settled(slots, wanted, stream(given[0].device))
                told = self._told(slots, stores, tree, given)
                key = (stores.number, tree.size, *((tuple(x.shape), x.dtype) for x in told))
                held = self.recordings.pop(key, None)
                if held is not None:
                    held.fill(told)
                    held.replay()
                elif self.due(state.request):
                    held = self._made(record, state.cache, stores, tree.size, told, len(given), forward, eager)
                else:
                    return None
            except Exception as error:
                self.refuse(f"passes of {self.name} are not recorded, it runs eager: {_said(error)}")
                return None
            self.recordings[key] = held  # the newest are the last
            slots.mask = None  # it is of an earlier pass
            return [None if x is None else x.clone() for x in held.output]

    def finish(self, slots: SlotCache, keep: bool) -> None:
        """A request has ended: its stores go back. keep: what it holds is copied, because it is used further."""
        if slots.lent is not None:
            end = slots.length
            slots.keys, slots.values = (
                [store[:, :, :end].clone() for store in stores] if keep else [] for stores in (slots.keys, slots.values)
            )
            slots.lent = None

    def refuse(self, why: str) -> None:
        """Nothing is recorded from now on, which is said. All that was taken is freed."""
        self.refused = why
        self.forget()
        warnings.warn(f"graphs: {why}", RuntimeWarning, stacklevel=4)

    def forget(self) -> None:
        super().forget()
        self.idle, self.returned = [], deque()  # stores in use end with their requests

    def _settled(self, slots: SlotCache, wanted: int, queue: int) -> Stores:
        """The stores that a request is in, with room for `wanted` slots. It moves if it is in none."""
        if slots.lent is not None and slots.lent.stores.hold(slots, wanted, queue):
            return slots.lent.stores
        old, rows, end = [*slots.keys, *slots.values], len(slots.lengths), slots.length
        layers = tuple((store.shape[1], store.shape[3], store.dtype, store.device) for store in old)
        stores = self._free((capacity(rows), wanted, queue, layers))
        for new, store in zip(stores.tensors, old):
            new[:rows, :, :end] = store[:, :, :end]
            new[:rows, :, end:] = 0  # masked slots are multiplied by 0, and others may have left NaN
            new[rows:] = 0
        views = [new[:rows] for new in stores.tensors]
        slots.keys, slots.values = views[: len(slots.keys)], views[len(slots.keys) :]
        slots.spare, slots.lean = capacity(rows) - rows, False
        slots.lent = Lent(stores, self.returned)
        return stores

    def _free(self, kind: tuple) -> Stores:
        """Stores that no request uses."""
        while self.returned:
            self.idle.append(self.returned.popleft())
        for stores in reversed(self.idle):
            if stores.kind == kind:
                self.idle.remove(stores)
                return stores
        self._drop(len(self.idle) - IDLE)
        try:
            return _allocated(kind)
        except torch.OutOfMemoryError:
            self._drop(len(self.idle))
        return _allocated(kind)

    def _drop(self, count: int) -> None:
        """Free the idle stores that were not used for the longest, and their recordings."""
        gone = {stores.number for stores in self.idle[: max(count, 0)]}
        self.idle = [stores for stores in self.idle if stores.number not in gone]
        self.recordings = {key: held for key, held in self.recordings.items() if key[0] not in gone}

    def _told(self, slots: SlotCache, stores: Stores, tree: Tree, given: Sequence[Tensor]) -> list[Tensor]:
        """All that a recording reads: what is given, lengths (R,), depths (R, N), ancestors (R, N, N), and where there
        is padding, which slots are none (R, S).
        """
        rows, device = len(slots.lengths), given[0].device
        depth, ancestor = tree.depth.expand(rows, -1), tree.ancestor.expand(rows, -1, -1)
        told = [*given, to_device(slots.lengths, device), depth, ancestor]
        if slots.padding is not None:
            told.append(F.pad(slots.padding, (0, stores.slots - slots.padding.shape[1]), value=True))
        return told

    def _made(
        self, record: Callable[[Call], tuple], cache: SlotLayers, stores: Stores, nodes: int, told: list[Tensor],
        count: int, forward: Forward, eager: Callable[[], Tensor],
    ) -> Recording:  # fmt: skip
        """A recording, replayed once. Raises ValueError if it gives anything else than an eager pass."""
        want = eager().float()
        while len(self.recordings) >= self.most:
            del self.recordings[next(iter(self.recordings))]
        inputs = [x.clone(memory_format=torch.contiguous_format) for x in told]
        rows, ahead = len(cache.slots.lengths), torch.arange(nodes, device=want.device)
        # a cache of its own, whose length on the host is not the request's: what depends on that differs below
        scratch = cache.over(stores.tensors, rows, 1 if cache.slots.length != 1 else 2)

        def call() -> Sequence[Tensor | None]:
            given, (length, depth, ancestor, *padding) = inputs[:count], inputs[count:]
            scratch.slots.open_at(length[:, None] + ahead, stores.slots)
            real = padding[0] if padding else None
            return forward(scratch, self.masks.whole(ancestor, depth, length, real, stores.slots), *given)

        held = Recording(inputs, *record(call))
        held.replay()
        close(held.output[0].float(), want, scratch.slots.keys[0].dtype)
        self.graphs += 1
        return held

    def _head(self) -> Any:
        return getattr(self.model, "get_output_embeddings", lambda: None)()

    def _hooked(self) -> str:
        """The first module that a pass goes through with a hook that is not ours; empty if there is none."""
        named = dict(self.model.named_modules())
        names = {id(module): name for name, module in named.items()}
        inner, head = names.get(id(self.decoder), ""), names.get(id(self._head()))
        for name, module in named.items():
            within = not (name and inner) or f"{name}.".startswith(f"{inner}.") or f"{inner}.".startswith(f"{name}.")
            if (within or name == head) and any(not _ours(hook) for hook in foreign(module)):
                return name or self.name
        return ""


def _ours(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("visspec.")


def _allocated(kind: tuple) -> Stores:
    rows, slots, _, layers = kind
    made = [torch.empty(rows, heads, slots, size, dtype=dtype, device=dev) for heads, size, dtype, dev in layers]
    return Stores(kind, made)


def _said(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def unfit(model: Any, decoder: nn.Module, attention: str, states: bool = False) -> tuple[str, str] | None:
    """Why passes of a model can't be recorded: what it is, and what is expected. None: they can."""
    name, weights = type(model).__name__, [*model.parameters()]
    devices = {weight.device for weight in weights}
    if len(devices) != 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return f"{name} with weights that are moved or on several devices", "all of them on one"
    if (device := devices.pop()).type not in replay.DEVICES:
        return f"a model on {device.type}", "one on a CUDA device"
    if attention != "sdpa":
        return f"{name} with attention of {attention!r}", "'sdpa'"
    if (dtype := next((w.dtype for w in weights if w.is_floating_point()), torch.float32)) not in DTYPES:
        return f"{name} of {dtype}", f"one of {', '.join(map(str, DTYPES))}"
    if states:
        return f"{name} with layers that keep a state", "one without"
    if rotary.modules(decoder):
        return f"{name} with rotary frequencies that depend on the length", "one without"
    return None


def recorded(
    asked: bool | None, model: Any, decoder: nn.Module, masks: Masks, text: Any, states: bool = False
) -> Recorded | None:
    """`Recorded` passes of a model whose configuration of text is `text`; None where they can't be, which a warning
    says if it was asked for.
    """
    why = unfit(model, decoder, getattr(text, "_attn_implementation", None) or "sdpa", states)
    if why is None:
        return Recorded(model, decoder, masks, getattr(text, "max_position_embeddings", None))
    if asked:
        warnings.warn(f"graphs: got {why[0]}, expected {why[1]}; it runs eager", RuntimeWarning, stacklevel=4)
    return None
