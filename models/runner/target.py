"""How a target's draft passes run: eagerly, compiled (`compiled_passes`), or recorded as CUDA graphs (`graphs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from visspec.cache import SlotCache
from visspec.models.runner.compiled import CompiledPasses
from visspec.models.runner.graphs import Forward, GraphedForward
from visspec.types import Draft, Request, State, Target, Tree


class RunningTarget(Target):
    """Base class of targets with a common way to run a pass. Subclasses may set `passes` and `recorder`."""

    passes: CompiledPasses | None = None
    recorder: GraphedForward | None = None

    def lean(self, request: Request) -> bool:
        """Return whether the prompt's keys and values will move into buffers of a recording."""
        return self.recorder is not None and self.recorder.due(request)

    def open(self, slots: SlotCache) -> None:
        """Prepare for a request; call it before the prefill."""
        if self.passes is not None:
            self.passes.open(slots)
        if self.recorder is not None:
            self.recorder.open()

    def runs(self, stock: nn.Module, state: State, cold: Callable[[Any, Draft], Tensor]) -> Any:
        """Return what an unrecorded pass goes through: `stock`, or its compiled view. cold: see `CompiledPasses`."""
        return stock if self.passes is None else self.passes.choice(state, cold)

    def replayed(
        self,
        state: State,
        given: Callable[[], tuple[Tree, Sequence[Tensor]]],
        forward: Forward,
        eager: Callable[[], Tensor],
    ) -> list[Tensor | None] | None:
        """Return the outputs of `forward` in a recording, for the tree and inputs from `given`, or None if the pass
        must run as `eager`.
        """
        return None if self.recorder is None else self.recorder.run(state, *given(), forward, eager)

    def finish(self, state: State) -> None:
        if self.recorder is not None:
            self.recorder.finish(state.cache.slots, state.request.keep_cache)
