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
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from visspec import replay


def storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def tensors(tree: Any) -> list[Tensor]:
    tree = vars(tree) if dataclasses.is_dataclass(tree) else tree
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Tape(TorchDispatchMode):
    """Records the calls in its context without owning outside memory: a replay fails where that memory was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple] = []
        self.made: set[int] = set()  # storages
        self.outer: dict[int, list[Tensor]] = {}  # by storage

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kept = tree_map_only(Tensor, self._alias, (args, kwargs or {}))
        output = function(*args, **(kwargs or {}))
        given = {storage(x) for x in tensors((args, kwargs))}
        new = [(n, x) for n, x in enumerate(tensors(output)) if storage(x) not in given]
        self.made |= {storage(x) for _, x in new}
        if new or function._schema.is_mutable:  # anything else is a view
            self.steps.append((function, *kept, new))
        return output

    def _alias(self, x: Tensor) -> Tensor:
        if storage(x) in self.made:
            return x
        alias = x.detach()
        self.outer.setdefault(storage(x), []).append(alias)
        return alias

    def replay(self) -> None:
        for where, aliases in self.outer.items():
            uses = torch._C._storage_Use_Count(where) - 1  # that of the number itself
            assert uses > len(aliases), f"a recording reads memory of {tuple(aliases[0].shape)} that was freed"
        for function, args, kwargs, new in self.steps:
            again = tensors(function(*args, **kwargs))
            for n, old in new:
                old.copy_(again[n])


class Waits(TorchDispatchMode):
    """Counts operators, views included, and names those whose result the host must wait for."""

    NAMES = "_local_scalar_dense nonzero equal masked_select unique is_nonzero _assert_async".split()

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.found = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        self.calls += 1
        if name in self.NAMES or any(i is not None and i.dtype == torch.bool for i in indices):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


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
