"""One call of an `ImagePipeline`: what was checked, how it is watched and ended early, what comes out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from visspec.loop.pairing import Pairing
from visspec.loop.stats import COLOURS, Stats
from visspec.models.targets.image_ar import Family, Layout
from visspec.types import Sampling, State, Trace

ORIGINS = tuple(COLOURS)  # plain, drafted, bonus, corrected


@dataclass
class ImageOutput:
    """What a call returns. `images` holds what `output_type` says; the lists run over images. Of a call "np" is one
    array (B, H, W, 3) and "pt" one tensor (B, 3, H, W), as in diffusers; `stream` yields lists.

    maps: (rows, columns) uint8 arrays, indices into ORIGINS; passes: (rows, columns) int32, the target pass that gave
    each token (0 is the prefill).
    """

    images: list[Any] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)  # (rows * columns,) codes
    maps: list[np.ndarray] = field(default_factory=list)
    passes: list[np.ndarray] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)  # one a batch
    traces: list[Trace] = field(default_factory=list, repr=False)  # the same, round by round

    def extend(self, other: ImageOutput) -> None:
        for name in self.__dataclass_fields__:
            getattr(self, name).extend(getattr(other, name))


class Interrupted(Exception):
    """Raised between rounds when a callback asked for the end."""


@dataclass(eq=False)
class Job:
    """A checked call, with all that it needs of the pipeline: of what others do, only `interrupt` reaches it."""

    texts: list[str]
    seeds: list[int]
    sampling: Sampling
    layout: Layout
    family: Family
    pairing: Pairing
    output_type: str
    callback: Callable | None
    interrupt: bool = False
    thread: int = field(default_factory=threading.get_ident)  # that runs it, or ran its newest batch


@dataclass
class Watch:
    """Called after every round: progress, the callback, and the state for whoever ends the batch early."""

    pipeline: Any
    job: Job
    bar: tqdm
    state: State | None = None
    tokens: int = 0

    def __call__(self, state: State) -> None:
        self.state, before = state, self.tokens
        self.tokens = sum(map(len, state.tokens))
        self.bar.update(self.tokens - before)
        if self.job.callback is not None:
            self.job.callback(self.pipeline, len(state.trace.rounds), self.tokens, {"state": state})
        if self.job.interrupt:
            raise Interrupted


class Calls:
    """The calls of a pipeline that are under way, and whom `interrupt` means: in a thread that runs one, its newest;
    in any other, all of them.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def meant(self) -> list[Job]:
        jobs = list(self.jobs)
        return [job for job in jobs if job.thread == threading.get_ident()][-1:] or jobs


def origin_map(origin: list[str], layout: Layout) -> np.ndarray:
    """Where each code came from, (rows, columns) uint8 indices into ORIGINS."""
    kinds = np.array([ORIGINS.index(o) for o in origin], np.uint8)
    return kinds[layout.free.numpy()].reshape(layout.grid)


def pass_numbers(origin: list[str]) -> list[int]:
    """The target pass that gave each token in raster order: a pass ends with a token that was not drafted."""
    passes, now = [], 0
    for kind in origin:
        passes.append(now)
        now += kind != "drafted"
    return passes
