"""A stand-in for CUDA graphs that needs no GPU: the operators of a call, run again on the same tensors.

As in a graph, numbers that the host read or counted are what they were when the call was recorded, and tensors are
those of that call, views and in-place writes included. Outputs of all recordings share their memory: a replay spoils
those of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visspec import replay


def storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def tensors(tree: Any) -> list[Tensor]:
    tree = vars(tree) if dataclasses.is_dataclass(tree) else tree
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Tape(TorchDispatchMode):
    """Records what is called in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple] = []
        self.made: set[int] = set()  # storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        given = {storage(x) for x in tensors((args, kwargs))}
        new = [x for x in tensors(output) if storage(x) not in given]
        self.made |= {storage(x) for x in new}
        if new or function._schema.is_mutable:  # anything else is a view
            self.steps.append((function, args, kwargs or {}, output, new))
        return output

    def replay(self) -> None:
        for function, args, kwargs, output, new in self.steps:
            again = function(*args, **kwargs)
            for old, value in zip(tensors(output), tensors(again)):
                if any(old is x for x in new):
                    old.copy_(value)


class Standin:
    """In place of `replay.cuda_graph`. `fails`: raised when a call is recorded for the n-th time, counted from 0."""

    def __init__(self, fails: dict[int, Exception] | None = None):
        self.outputs: list[list[Tensor]] = []
        self.count = self.replays = 0
        self.fails = fails or {}

    def __call__(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.count += 1
        call()
        replay.check_waits(call)
        if error := self.fails.get(self.count - 1):
            raise error
        with Tape() as tape:
            output = call()
        mine = [x for x in tensors(output) if storage(x) in tape.made]
        self.outputs.append(mine)

        def again() -> None:
            self.replays += 1
            for others in self.outputs:
                for x in others:
                    if others is not mine:
                        x.fill_(float("nan") if x.is_floating_point() else 0)
            tape.replay()

        return output, again


def recording(monkeypatch: pytest.MonkeyPatch, fails: dict[int, Exception] | None = None) -> Standin:
    """Everything is recorded as on a CUDA device, with the stand-in that is returned."""
    made = Standin(fails)
    monkeypatch.setattr(replay, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(replay.Recordings, "_graph", lambda self, call: made(call))
    return made
