"""A rule whose verification is captured once per shape as a CUDA graph: one launch instead of about thirty.

    pipe(prompt, acceptance=Captured(zoo.acceptance("lantern:k=100,delta=0.1")))

A rule doesn't synchronise between logits and verdict, and its shapes repeat. The graph reads draft, laws and noise from
static buffers and writes the verdict to others, which are copied, because a round keeps parts of it. On a CPU, for more
than `most` shapes, and if a verdict depends on earlier rounds (`RuleTraits.remembers`), the rule runs without capture.

Not yet run on a GPU: the buffers are tested with a stand-in for `cuda_graph`. If a capture fails, a warning is issued
once and the rule runs without capture.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visspec.laws import Categorical, categorical
from visspec.tree import bounded, branch
from visspec.types import Acceptance, Draft, Scores, Tree, Verdict

Call = Callable[[], Verdict]
REPLAYING = threading.Lock()  # buffers are filled, replayed and copied out by one thread at a time


def cuda_graph(call: Call, pool: Any = None, aside: Any = None) -> tuple[Verdict, Callable[[], None]]:
    """Capture a call. Graphs may share a memory pool, because only the verdict is needed after a replay and it is
    copied before the next one. Recordings of one pool are made on one stream, `aside`, of the current device. Returns
    the verdict, which every replay overwrites, and the replay. Raises as `check_waits` does.
    """
    aside, now = aside or torch.cuda.Stream(), torch.cuda.current_stream()
    aside.wait_stream(now)
    with torch.cuda.stream(aside):
        call()  # compiles kernels, opens libraries
        check_waits(call)
    now.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(now),
        torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"),
    ):
        verdict = call()
    return verdict, graph.replay


def check_waits(call: Call) -> None:
    """Raises RuntimeError if a call synchronises. Checked before the capture, because a failed capture can leave the
    allocator of older versions of torch unusable.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass
class Recording:
    """Buffers that a recorded verification reads, its verdict's, and the replay."""

    inputs: list[Tensor]
    verdict: Verdict
    replay: Callable[[], None]


class Captured(Acceptance):
    """`rule` in recordings, one for each of the first `most` shapes. `record` stands in for `cuda_graph` in tests."""

    def __init__(self, rule: Acceptance, most: int = 16, record: Callable[[Call], tuple] | None = None):
        if most < 1:
            raise ValueError(f"most: got {most}, expected at least 1")
        self.rule, self.most, self.record = rule, most, record
        self.traits = rule.traits
        self.recordings: dict[tuple, Recording] = {}
        self.shared: dict[Any, tuple] = {}  # a pool of memory and a stream, of all recordings for one stream

    def bind(self, capabilities) -> None:
        """Binds the rule; graphs for another target are discarded."""
        self.recordings, self.shared = {}, {}  # a pool ends with the last recording in it
        self.rule = copy.copy(self.rule)  # the caller may bind it to another target
        self.rule.bind(capabilities)

    @property
    def inner(self) -> Acceptance:
        return self.rule.inner

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> Any:
        return self.rule.make_noise(generators, width)

    def __call__(self, draft: Draft, scores: Scores, noise: Any) -> Verdict:
        logits = categorical(scores.law).logits
        record = self.record or (self._graph if logits.is_cuda else None)
        if record is None or self.traits.remembers:
            return self.rule(draft, scores, noise)
        tree = draft.tree
        given = [draft.value, tree.parent, tree.depth, tree.ancestor, logits]
        p = None if draft.q is None else categorical(draft.q).p
        more = draft.real, p, None if noise is None else noise.window(tree.levels + 1)
        given += [x for x in more if x is not None]
        shapes = tuple((tuple(x.shape), x.dtype, x.device) for x in given)
        has = tuple(x is not None for x in more)
        kind = None if noise is None else type(noise)
        # work on different streams is not ordered, so each stream has its own graphs
        queue = _stream(logits.device) if logits.is_cuda else 0
        key = (shapes, tree.levels, tree.chain, branch(tree), has, kind, queue)  # all the host tells it
        with REPLAYING:
            held = self._held(record, given, key)
            if held is not None:
                for buffer, value in zip(held.inputs, given):
                    buffer.copy_(value)
                held.replay()
                parts: Iterator[Any] = (None if x is None else x.clone() for x in vars(held.verdict).values())
                return Verdict(*parts)
        return self.rule(draft, scores, noise)

    def _held(self, record: Callable[[Call], tuple], given: list[Tensor], key: tuple) -> Recording | None:
        """The graph for these shapes, captured if needed; None if the limit is reached or the capture failed."""
        if key not in self.recordings and len(self.recordings) < self.most:
            try:
                self.recordings[key] = self._recorded(record, given, key)
            except RuntimeError as error:
                warnings.warn(
                    f"acceptance: not captured, the rule runs without a graph: {error}", RuntimeWarning, stacklevel=3
                )
                self.most = 0
        return self.recordings.get(key)

    def _graph(self, call: Call) -> tuple[Verdict, Callable[[], None]]:
        here = torch.cuda.current_device(), _stream()
        if here not in self.shared:
            self.shared[here] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return cuda_graph(call, *self.shared[here])

    def _recorded(self, record: Callable[[Call], tuple], given: list[Tensor], key: tuple) -> Recording:
        _, levels, chain, most, has, kind, _ = key
        inputs = [x.clone() for x in given]
        value, parent, depth, ancestor, logits, *rest = inputs
        real, p, numbers = (rest.pop(0) if there else None for there in has)
        q = None if p is None else Categorical(p=p)
        draft = Draft(value, bounded(Tree(parent, depth, ancestor, levels, chain), most), q, real)
        noise = None if numbers is None else kind.of(numbers)
        with torch.cuda.device_of(logits):
            verdict, replay = record(lambda: self.rule(draft, Scores(Categorical(logits)), noise))
        return Recording(inputs, verdict, replay)


def _stream(device: torch.device | None = None) -> int:
    """The stream that work for a device, or the current one, is queued on; 0 before there is any."""
    return torch.cuda.current_stream(device).cuda_stream if torch.cuda.is_initialized() else 0
