"""How a target's passes over drafts run: eager, compiled (`compiled_passes`), or recorded as CUDA graphs (`graphs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from visspec.cache import SlotCache
from visspec.models.runner.compiled import CompiledPasses
from visspec.models.runner.graphs import Forward, GraphedForward
from visspec.types import Draft, Request, State, Target, Tree


class RunningTarget(Target):
    """Base class of targets with one way to run a pass. A subclass sets `passes` and `recorder`, where it has them."""

    passes: CompiledPasses | None = None
    recorder: GraphedForward | None = None

    def lean(self, request: Request) -> bool:
        """Whether the prompt's keys and values will move into stores of a recording."""
        return self.recorder is not None and self.recorder.due(request)

    def open(self, slots: SlotCache) -> None:
        """To be called before a request's prefill."""
        if self.passes is not None:
            self.passes.open(slots)
        if self.recorder is not None:
            self.recorder.open()

    def runs(self, stock: nn.Module, state: State, cold: Callable[[Any, Draft], Tensor]) -> Any:
        """What an unrecorded pass goes through: `stock`, or its compiled view. cold: as of `CompiledPasses.choice`."""
        return stock if self.passes is None else self.passes.choice(state, cold)

    def replayed(
        self,
        state: State,
        given: Callable[[], tuple[Tree, Sequence[Tensor]]],
        forward: Forward,
        eager: Callable[[], Tensor],
    ) -> list[Tensor | None] | None:
        """What `forward` gives in a recording, for a tree and the inputs of `given`; None where the pass is
        to run as `eager`.
        """
        return None if self.recorder is None else self.recorder.run(state, *given(), forward, eager)

    def finish(self, state: State) -> None:
        if self.recorder is not None:
            self.recorder.finish(state.cache.slots, state.request.keep_cache)
