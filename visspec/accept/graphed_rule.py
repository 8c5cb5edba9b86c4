"""A rule whose verification is captured as a CUDA graph, once per shape: one launch instead of about thirty.

    pipe(prompt, acceptance=GraphedRule(registry.rule("lantern:k=100,delta=0.1")))

A rule does not synchronise between logits and verdict, and its shapes repeat. The graph reads draft, distributions and
noise from static buffers. Its verdict is copied, because a round keeps parts of it. On a CPU, and for more than `most`
shapes, the rule runs without a graph. If a capture fails, the rule warns once and runs without a graph.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from visspec.distributions import Categorical, categorical
from visspec.replay import REPLAYING, Call, Recording, Recordings, fill, stream
from visspec.sampling import BufferedNoise
from visspec.tree import branch, limit_children
from visspec.types import Acceptance, Draft, Scores, Tree, Verdict


class GraphedRule(Recordings, Acceptance):
    """Runs `rule` as CUDA graphs, one for each of the first `most` shapes. Tests replace `cuda_graph` by `record`."""

    def __init__(self, rule: Acceptance, most: int = 16, record: Callable[[Call], tuple] | None = None):
        super().__init__(most, record)
        self.rule, self.traits = rule, rule.traits

    def bind(self, capabilities) -> None:
        """Bind the rule and discard graphs for another target."""
        self.forget()
        self.rule = copy.copy(self.rule)  # the caller may bind it to another target
        self.rule.bind(capabilities)

    @property
    def inner(self) -> Acceptance:
        return self.rule.inner

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> BufferedNoise:
        return self.rule.make_noise(generators, width)

    def __call__(self, draft: Draft, scores: Scores, noise: BufferedNoise | None) -> Verdict:
        logits = categorical(scores.distribution).logits
        record = self.recorder(logits.device)
        if record is None:
            return self.rule(draft, scores, noise)
        tree = draft.tree
        inputs = [draft.value, tree.parent, tree.depth, tree.ancestor, logits]
        p = None if draft.q is None else categorical(draft.q).p
        more = draft.real, p, None if noise is None else noise.window(tree.levels + 1)
        inputs += [x for x in more if x is not None]
        shapes = tuple((tuple(x.shape), x.dtype, x.device) for x in inputs)
        has = tuple(x is not None for x in more)
        kind = None if noise is None else type(noise)
        queue = stream(logits.device)
        key = (
            shapes,
            tree.levels,
            tree.chain,
            branch(tree),
            has,
            kind,
            queue,
        )  # all host values that a graph depends on
        with REPLAYING:
            recording = self._recording(record, inputs, key)
            if recording is not None:
                fill(recording.inputs, inputs)
                recording.replay()
                parts: Iterator[Any] = (None if x is None else x.clone() for x in vars(recording.output).values())
                return Verdict(*parts)
        return self.rule(draft, scores, noise)

    def _recording(self, record: Callable[[Call], tuple], inputs: list[Tensor], key: tuple) -> Recording | None:
        """Return the graph for these shapes, captured if needed; None if the limit is reached or the capture failed."""
        if key not in self.recordings and len(self.recordings) < self.most:
            try:
                self.recordings[key] = self._record(record, inputs, key)
            except RuntimeError as error:
                warnings.warn(
                    f"acceptance: not captured, the rule runs without a graph: {error}", RuntimeWarning, stacklevel=3
                )
                self.most = 0
        return self.recordings.get(key)

    def _record(self, record: Callable[[Call], tuple], values: list[Tensor], key: tuple) -> Recording:
        _, levels, chain, most, has, kind, _ = key
        inputs = [x.clone() for x in values]
        value, parent, depth, ancestor, logits, *rest = inputs
        real, p, numbers = (rest.pop(0) if there else None for there in has)
        q = None if p is None else Categorical(p=p)
        draft = Draft(value, limit_children(Tree(parent, depth, ancestor, levels, chain), most), q, real)
        noise = None if numbers is None else kind.of(numbers)
        with torch.cuda.device_of(logits):
            verdict, replay = record(lambda: self.rule(draft, Scores(Categorical(logits)), noise))
        return Recording(inputs, verdict, replay)
