"""What a drafter reads of a request: copies, of which only `memory` can be set.

A drafter must not be able to change the output by modifying its arguments, so it gets a `ReadOnlyState` instead of the
`State`: tensors and generators are copies, lists are immutable, and the target's cache is not included.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visspec.distributions import Categorical
from visspec.types import Noise, Request, State, Structure, Target


def copy_tensors(value: Any) -> Any:
    """Copy the tensors of a value, also in lists, tuples, mappings and dataclasses; other objects are not copied."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return CopyOnRead(lambda: value)
    if type(value) in (list, tuple, set):
        return type(value)(map(copy_tensors, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: copy_tensors(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        )
    return value


class CopyOnRead(Mapping):
    """A mapping whose values are copied on access: unused pixels are not copied, and none are kept that its owner lets
    go.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]]):
        self._read = read

    def __getitem__(self, key: str) -> Any:
        return copy_tensors(self._read()[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class ReadOnlyList(Sequence):
    """An immutable view of a list. Slices and sums are new lists."""

    __slots__ = ("_items",)

    def __init__(self, items: list[Any]):
        self._items = items

    def __getitem__(self, index: int | slice) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, ReadOnlyList) else other)

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(self._items)


class ReadOnlyRows(ReadOnlyList):
    """An immutable view of a list of lists."""

    __slots__ = ()

    def __getitem__(self, index: int | slice) -> Any:
        found = self._items[index]
        return list(map(ReadOnlyList, found)) if isinstance(index, slice) else ReadOnlyList(found)

    def __iter__(self) -> Iterator[ReadOnlyList]:
        return map(ReadOnlyList, self._items)


class ReadOnlyNoise:
    """Read access to the noise of a request, without consuming it."""

    def __init__(self, noise: Noise):
        self._noise = noise
        self._copies: dict[torch.Generator, torch.Generator] = {}

    @property
    def samples(self) -> bool:
        return self._noise.samples

    def window(self, positions: int) -> Tensor:
        """(B, positions, width): the numbers of each row's next positions."""
        return self._noise.window(positions)

    def draft(self, distribution: Categorical, level: int) -> tuple[Tensor, Categorical | None]:
        """As `Noise.draft`."""
        return self._noise.draft(distribution, level)

    def perturb(self, logits_BWV: Tensor, level: int) -> Tensor:
        """As `Noise.perturb`."""
        return self._noise.perturb(logits_BWV, level)

    @property
    def generators(self) -> list[torch.Generator]:
        """Copies of the rows' generators, to derive numbers from (`sampling.child_generator`).

        A rule's own random numbers must be unknown to the drafter, so its generator skips the first number of the copy,
        once per request. Noise indexed by position is not changed.
        """
        for own in self._noise.generators:
            if own not in self._copies:
                self._copies[own] = own.clone_state()
                if self.samples:
                    torch.randint(2**62, (), generator=own, device=own.device)
        return [self._copies[own].clone_state() for own in self._noise.generators]


def lent_request(request: Request) -> Request:
    """A copy of a request for its drafter, made once, without what is only the loop's to call and to draw from. Its
    processors can only be called; pixels are copied when they are read.
    """
    own, named = request.sampling, isinstance(request.inputs, Mapping)
    return replace(
        request,
        inputs=CopyOnRead(lambda: request.inputs) if named else copy_tensors(request.inputs),
        prompt=request.prompt.clone(),
        sampling=replace(own, processors=tuple(map(_callable, own.processors))) if own.processors else own,
        stop=None,
        generators=None,
        on_tokens=None,
        on_logits=None,
        on_round=None,
        media=CopyOnRead(lambda: request.media),
        fixed=copy_tensors(request.fixed),
        known=copy_tensors(request.known),
        each=[],
    )


def _callable(processor: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, scores: processor(ids, scores)


class ReadOnlyState:
    """The `State` of a request for its drafter: copied once a round, when its rows have new pending nodes. Only
    `memory` can be set.
    """

    __slots__ = ("_source", "_state", "_target", "memory", "noise", "pending", "request", "tokens")
    memory: Any
    noise: ReadOnlyNoise | None
    pending: Tensor
    request: Request
    tokens: ReadOnlyRows  # emitted, of every original row
    _source: Tensor
    _state: Callable[[], Any]  # a weak reference, since the state holds what it lends
    _target: Target | None

    def __init__(self, state: State, target: Target | None = None):
        lent: ReadOnlyState | None = state.lent
        if lent is None:
            noise = None if state.noise is None else ReadOnlyNoise(state.noise)
            request = lent_request(state.request)
        else:
            noise, request = lent.noise, lent.request
        copies = {
            "memory": state.memory,
            "noise": noise,
            "pending": state.pending.clone(),
            "request": request,
            "tokens": ReadOnlyRows(state.tokens),
            "_source": state.pending,
            "_state": weakref.ref(state),
            "_target": target,
        }
        for name, value in copies.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "memory":
            raise AttributeError(f"{name}: got a value for it, expected only `memory` to be set")
        object.__setattr__(self, name, value)

    def of(self, state: State) -> bool:
        """Whether it is what the state is now."""
        return self._source is state.pending and self._target is None

    @property
    def position(self) -> Tensor:
        return self._state().position.clone()

    @property
    def rows(self) -> list[int]:
        return list(self._state().rows)

    @property
    def calls(self) -> Counter[str]:
        """Calls of networks beside the target's passes, to which a drafter adds those of its head ("draft_head")."""
        return self._state().trace.calls

    @property
    def doubted(self) -> bool:
        return self._state().doubted

    @property
    def structure(self) -> Structure:
        return self._state().structure

    @property
    def finished(self) -> frozenset[int]:
        return frozenset(self._state().finished)

    @property
    def live(self) -> bool:
        return self._state().live

    @property
    def budget(self) -> int:
        return self._state().budget

    def ids(self, live_row: int) -> Tensor:
        """Prompt and emitted tokens of a live row, (1, length)."""
        return self._state().ids(live_row)

    def partial(self, value: Tensor, level: int, skip: frozenset[int]) -> Tensor:
        """`Target.partial`, in `propose` of a drafter that declares it. It writes behind the rows' ends only."""
        if level < 0:
            raise ValueError(f"level: got {level}, expected 0 for the pending node or more")
        return self._target_for("partial").partial(self._state(), value, level, skip)

    def stored(self, layers: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """`Target.stored`, in `propose` of a drafter that declares it. No copies: not to be written to."""
        return self._target_for("stored").stored(self._state(), layers)

    def _target_for(self, name: str) -> Target:
        if self._target is None:
            raise ValueError(f"{name}: got a call outside of propose or of undeclared traits, expected traits.{name}")
        return self._target
