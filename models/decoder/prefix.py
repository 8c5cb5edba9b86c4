"""Prefix cache: reuse the keys and values of a shared prompt prefix.

After its prefill a prompt is kept whole, with what drafters read of it (`Scores.features`, embeddings, positions), so
that they start as after a fresh prefill. A later prompt with the same media reuses the slots whose ids agree, which
must include all image slots, and reads the rest as one chain, each row from its own length. The first time that a kind
of row is continued, it is also prefilled from scratch and compared.

Shapes: B rows, L prompt, N tokens to read, H heads, S slots, E head size, K kinds of ids, P rows of positions.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Categorical
from visspec.loop.decode import TokenBuffer
from visspec.models.decoder import probe
from visspec.models.runner.compiled import ADAPTER
from visspec.sampling import process
from visspec.types import MAX_NODES, Request, Scores, State, Tree

if TYPE_CHECKING:
    from visspec.models.decoder.target import HFDecoder

LOGGER = logging.getLogger(__name__)
ROOM = 1 << 29  # bytes, by default


class PromptKey(NamedTuple):
    """Identity of a prompt.

    Args:
        media: Digest of everything that is not ids.
        least: Slots that must be shared, up to the last one of an image, a video or audio.
    """

    media: bytes
    ids: np.ndarray  # (K, L)
    least: int
    names: frozenset[str]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def shared(self, other: PromptKey) -> int:
        """Return how many slots of this prompt the other can supply; 0 if reading the rest costs as much as all."""
        if self.media != other.media or len(self.ids) != len(other.ids):
            return 0
        most = min(self.length - 1, other.length)  # the last token is always processed
        differs = (self.ids[:, :most] != other.ids[:, :most]).any(axis=0)
        agreeing = int(differs.argmax()) if differs.any() else most
        unread = self.length - agreeing
        return agreeing if agreeing >= max(self.least, unread) and unread <= MAX_NODES else 0

    def cut(self, shared: int) -> PromptKey:
        """Return the part of this prompt to read first if others share `shared` slots of it; all of it if none does."""
        least = max(shared, self.least + 1, -(-self.length // 2), self.length - MAX_NODES)
        return self._replace(ids=self.ids[:, :least]) if shared else self


class Prefix(NamedTuple):
    """A processed prompt.

    Args:
        parts: Positions (L, P); features (L, F) and embeddings (L, d), if drafters read them.
    """

    key: PromptKey
    stores: list[Tensor]  # keys of all layers, then values: (H, L, E)
    parts: dict[str, Tensor]
    bytes: int


Start = tuple[Prefix, int]  # a kept prompt, and how many of its slots are reused


@dataclass(eq=False)
class PrefixPlan:
    """How to prefill the rows of a request.

    Args:
        keys: One per row.
        known: The kept prompt each row starts from, if any.
        rows, first: The rows to read before the others, and a request of the parts that others share.
        batch: Builds a request of rows by number for a fresh prefill. Without `known`, the request is prefilled
            normally and kept.
    """

    cache: PrefixCache
    keys: list[PromptKey]
    known: list[Start | None] = field(default_factory=list)
    rows: Collection[int] = ()
    batch: Callable[[Sequence[int]], Request] | None = None
    first: Request | None = None
    made: list[Prefix] = field(default_factory=list)


class PrefixCache:
    """Kept prompts of one model, at most `room` bytes; the least recently used are evicted first.

    hits: rows that started from a kept prompt or from another row of their batch; misses: all others. The cache is
    cleared when weights or adapters change; call `clear` after a change through `.data`, which PyTorch does not track.
    """

    def __init__(self, room: int | None = None):
        room = ROOM if room is None else room
        if not isinstance(room, int) or isinstance(room, bool) or room < 0:
            raise ValueError(f"prefix_cache: got {room!r}, expected a number of bytes, or 0 for none.")
        self.room, self.bytes, self.hits, self.misses = room, 0, 0, 0
        self.refused = ""  # why prompts of this model are not reused
        self._target: HFDecoder | None = None
        self._weights: tuple = ()
        self._kept: list[Prefix] = []  # the most recently used last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        with self._lock:
            self._kept, self.bytes = [], 0

    def open(self, target: HFDecoder) -> PrefixCache | None:
        """Prepare the cache for requests of a target; prompts of another target or of other weights are dropped.
        Returns None if nothing can be kept.
        """
        if not self.room:
            return None
        if self._weights != (weights := weights_version(target.model)):
            self.clear()
            self._weights = weights
        if self._target is not target:
            self.clear()
            self._target, self.refused = target, ""
            if target.states or target.rotary or target.restarts:
                self.refused = "recurrent states, or rotary frequencies that depend on the prompt's length"
            elif target.widths is not None:
                self.refused = "batch_invariant=True, which prefills a prompt in one pass"
        return None if self.refused else self

    def find(self, keys: Sequence[PromptKey]) -> tuple[list[Start | None], dict[int, PromptKey]]:
        """Return, per row, the kept prompt that shares the most slots; and, by row, what to read first: rows that share
        nothing with a kept prompt or with an earlier such row.
        """
        with self._lock:
            starts = [_longest(key, self._kept) for key in keys]
            hits = {id(start[0]) for start in starts if start is not None}
            self._kept.sort(key=lambda p: id(p) in hits)
        shared: dict[int, int] = {}
        for b, key in enumerate(keys):
            if starts[b] is None:
                row = next((f for f in shared if key.shared(keys[f])), b)
                shared[row] = max(shared.get(row, 0), key.shared(keys[row]) if row != b else 0)
        return starts, {b: keys[b].cut(n) for b, n in shared.items()}

    def put(
        self, keys: Sequence[PromptKey], rows: Sequence[int], state: State, scores: Scores, old: Sequence[Prefix] = ()
    ) -> list[Prefix]:
        """Keep the prompts of these rows after their prefill, replacing `old` ones."""
        slots, width = state.cache.slots, state.request.prompt.shape[1]
        if slots.length != width:
            self.refuse(f"{slots.length} slots of a prompt of {width} ids")
            return []
        positions = scores.aux["positions"]
        positions = positions.expand(*positions.shape[:-2], len(state.rows), width)
        positions_BLP = positions[..., None] if positions.dim() == 2 else positions.permute(1, 2, 0)
        sources = {"positions": positions_BLP, "features": scores.features, "embeddings": scores.aux.get("embeddings")}
        prefixes = []
        for key, b in zip(keys, rows):
            end, first = slots.lengths[b], width - key.length
            stores = [s[b, :, end - key.length : end].clone() for s in (*slots.keys, *slots.values)]
            parts = {name: x[b, first:].clone() for name, x in sources.items() if x is not None}
            prefixes.append(Prefix(key, stores, parts, sum(x.nbytes for x in (*stores, *parts.values()))))
        with self._lock:
            self._kept = [p for p in self._kept if all(p is not replaced for replaced in old)]
            self._kept += [p for p in prefixes if p.bytes <= self.room]
            while (found_bytes := sum(p.bytes for p in self._kept)) > self.room:
                del self._kept[0]
            self.bytes = found_bytes
        return prefixes

    def refuse(self, why: str) -> None:
        """Stop reusing prompts."""
        self.refused = why
        self.clear()
        LOGGER.info("prefix cache: disabled because of %s", why)

    def prefill(self, target: HFDecoder, request: Request, plan: PrefixPlan) -> tuple[State, Scores]:
        """Run `HFDecoder.prefill` for rows that start from kept prompts, or from other rows of their batch."""
        assert plan.batch is not None
        result = self._start(target, request, plan)
        return result or target.prefill(replace(request, inputs=plan.batch(range(len(plan.keys))).inputs))

    def _start(self, target: HFDecoder, request: Request, plan: PrefixPlan) -> tuple[State, Scores] | None:
        """Prefill from kept prompts; None if the model does not support it."""
        assert plan.batch is not None
        prefixes: list[Prefix] = []
        if plan.first is not None:
            of_first = plan.first.prefix
            target.prefill(plan.first)
            prefixes = of_first.made
        all_starts = [start or _longest(key, prefixes) for start, key in zip(plan.known, plan.keys)]
        starts = [start for start in all_starts if start is not None]
        if len(starts) < len(all_starts):
            return None
        same = [np.array_equal(key.ids, p.key.ids) for key, (p, _) in zip(plan.keys, starts)]
        row = same.index(False) if False in same else 0
        kind = plan.keys[0].names, same[row]
        try:
            state, scores = resume(target, request, plan.keys, starts)
            if kind not in target.continues:
                fresh, expected = target.prefill(replace(plan.batch([row]), keep_raw=True))
                alike = probe.alike(target, scores.aux["raw"][row : row + 1], expected.aux["raw"])
                target.continues[kind] = alike and bool(fresh.position == state.position[row])
        except Exception as error:
            if kind in target.continues or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
            target.continues[kind] = False
        if not target.continues[kind]:
            self.refuse("a prefix changes the model's distributions compared with a fresh prefill")
            return None
        request.reused = [0 if b in plan.rows else n for b, (_, n) in enumerate(starts)]
        self.hits += len(starts) - len(plan.rows)
        users = Counter(id(p) for p, _ in starts)
        chats = [b for b, (p, n) in enumerate(starts) if n == p.key.length and users[id(p)] == 1]  # a chat continues
        self.put([plan.keys[b] for b in chats], chats, state, scores, [starts[b][0] for b in chats])
        return state, scores


def weights_version(model: nn.Module) -> tuple:
    """Return a value that changes with the weights of a model and with the active adapters."""
    tensors = [*model.parameters(), *model.buffers()]
    version = [(id(x), x.data_ptr(), None if x.is_inference() else x._version) for x in tensors]
    adapters = [repr(vars(part)[name]) for part in model.modules() for name in ADAPTER if name in vars(part)]
    return version, adapters


def _longest(key: PromptKey, prompts: Sequence[Prefix]) -> Start | None:
    """Return the prompt that shares the most slots, the last of them in case of a tie."""
    shared, n = max(((key.shared(p.key), n) for n, p in enumerate(prompts)), default=(0, 0))
    return (prompts[n], shared) if shared else None


def resume(
    target: HFDecoder, request: Request, keys: Sequence[PromptKey], starts: Sequence[Start]
) -> tuple[State, Scores]:
    """Return state and scores as after a prefill, including raw logits: copy the kept slots and read the rest in one
    pass.
    """
    rows, device, prompt = list(range(len(starts))), request.prompt.device, request.prompt
    counts = [key.length - n for key, (_, n) in zip(keys, starts)]
    size, width = max(counts), prompt.shape[1]
    cache = target.cache(len(rows), request.max_new_tokens, lean=True)
    slots = cache.slots
    target.open(slots)
    slots.fill([(p.stores, n) for p, n in starts], size)
    extent, tree = slots.open(size, device), _chain(size, device)
    column_BN = to_device([[width - c + min(n, c - 1) for n in range(size)] for c in counts], device)
    first_BP = torch.stack([next_position(p.parts["positions"][n - 1]) for p, n in starts])
    positions_BNP = first_BP[:, None] + tree.depth[0, :, None]
    attention = target.masks.whole(tree.ancestor, tree.depth, slots.lengths, None, extent)
    ends, heads = sorted({c - 1 for c in counts}), "logits_to_keep" in signature(target.model.forward).parameters
    more = {"logits_to_keep": to_device(ends, device)} if heads else {}  # run the head only where a row ends
    ids_BN = prompt.gather(1, column_BN)
    output, record = target.forward(
        target.model, cache, attention, ids_BN, positions_BNP[..., -1], recorded=True, **more
    )
    at = [ends.index(c - 1) if heads else c - 1 for c in counts]
    raw_B1V = output.logits[to_device(rows, device), to_device(at, device)][:, None]
    cache.prompt = width
    slots.commit([list(range(c)) for c in counts])
    parts = {
        "positions": positions_BNP,
        "features": target.features(output, record),
        "embeddings": record["inputs_embeds"],
    }
    aux: dict[str, Any] = {name: _concatenate(starts, name, parts[name], counts, width) for name in starts[0][0].parts}
    positions_BLP, features = aux["positions"], aux.pop("features", None)
    aux["positions"] = positions_BLP[..., 0] if positions_BLP.shape[2] == 1 else positions_BLP.permute(2, 0, 1)
    padding = [width - key.length for key in keys]
    aux["attention"] = (
        torch.arange(width, device=device) >= to_device(padding, device)[:, None] if any(padding) else None
    )
    state = State(request, prompt[:, -1], positions_BLP[:, -1, -1], cache, rows, TokenBuffer(request, len(rows)))
    logits = process(raw_B1V, trees.empty_draft(state.pending), state)
    return state, Scores(Categorical(logits), features, aux | {"raw": raw_B1V})


def _concatenate(starts: Sequence[Start], name: str, read_BNX: Tensor, counts: list[int], width: int) -> Tensor:
    """Concatenate the kept part of each row's prompt and the part read after it, right-aligned: (B, L, X)."""
    joined_BLX = read_BNX.new_zeros(len(starts), width, read_BNX.shape[2])
    for row_LX, new_NX, count, (prefix, n) in zip(joined_BLX, read_BNX, counts, starts):
        row_LX[width - count - n : width - count] = prefix.parts[name][:n]
        row_LX[width - count :] = new_NX[:count]
    return joined_BLX


def next_position(position_P: Tensor) -> Tensor:
    """Return the position of the next token: after an image, M-RoPE continues from the largest of its three rows."""
    return torch.cat([position_P[:-3], position_P[-3:].amax().expand(min(len(position_P), 3))]) + 1


def _chain(size: int, device: torch.device) -> Tree:
    """Return a chain like `tree.chain`, without caching one for every size."""
    n = torch.arange(size, device=device)
    return Tree(n[None] - 1, n[None], (n[:, None] >= n)[None], size - 1, True)
