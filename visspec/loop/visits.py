"""Orders of an image's places for any-order targets, which the loop decodes as any sequence: a node is a rank.

Every order is another joint distribution, unless the model is consistent between orders, and decoding is exact for the
order at hand. Places that are far apart depend little on each other, so codes drafted for them are accepted more often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import index
from typing import Any

import torch

from visspec.loop.orders import Raster
from visspec.types import Acceptance, Drafter, DraftLengthPolicy, Request, State, Target


class VisitOrder(Raster):
    """Base class. A request must have a grid."""

    visits = True

    def places(self, rows: int, columns: int) -> Sequence[int]:
        """The place of each code in the order in which they are drawn, a permutation of 0 .. rows * columns - 1."""
        raise NotImplementedError

    def decode(
        self,
        target: Target,
        drafter: Drafter | None,
        rule: Acceptance,
        request: Request,
        length_policy: DraftLengthPolicy,
    ) -> State:
        assert request.grid is not None
        request.order = tuple(self.places(*request.grid))
        return super().decode(target, drafter, rule, request, length_policy)


class SpreadOrder(VisitOrder):
    """Every place is as far from all earlier ones as can be, by Euclidean distance; the first is the first of the
    image, and of several places the first in raster order is taken.
    """

    name = "spread"

    def places(self, rows: int, columns: int) -> Sequence[int]:
        return spread(rows, columns)


class HaltonOrder(VisitOrder):
    """Points of the Halton sequence in bases 2 (rows) and 3 (columns), each place when it is first met; the order of
    Besnier et al., "Halton scheduler for masked generative image transformer" (ICLR 2025).
    """

    name = "halton"

    def places(self, rows: int, columns: int) -> Sequence[int]:
        return halton(rows, columns)


class ListedOrder(VisitOrder):
    """An order as it is given. Raises ValueError, also before any pass, for what is no permutation of the places."""

    name = "given"

    def __init__(self, order: Iterable[Any]):
        self.order = tuple(index(place) for place in order)
        count = len(self.order)
        if sorted(self.order) != list(range(count)):
            raise ValueError(f"order: got {count} places, expected each of 0..{count - 1} once")

    def places(self, rows: int, columns: int) -> Sequence[int]:
        if len(self.order) != rows * columns:
            raise ValueError(f"order: got {len(self.order)} places, expected the {rows} * {columns} of the image")
        return self.order


@lru_cache(maxsize=64)
def spread(rows: int, columns: int) -> tuple[int, ...]:
    """Farthest-first: see `SpreadOrder`."""
    place = torch.arange(rows * columns)
    at = torch.stack([place // columns, place % columns], dim=1)
    near, found = torch.full((len(place),), rows**2 + columns**2 + 1), [0]
    for _ in range(len(place) - 1):
        near = torch.minimum(near, (at - at[found[-1]]).square().sum(dim=1))
        found.append(int(near.argmax()))
    return tuple(found)


@lru_cache(maxsize=64)
def halton(rows: int, columns: int) -> tuple[int, ...]:
    """See `HaltonOrder`."""
    found: dict[int, None] = {}
    number = 1
    while len(found) < rows * columns:
        found[int(radical_inverse(number, 2) * rows) * columns + int(radical_inverse(number, 3) * columns)] = None
        number += 1
    return tuple(found)


def radical_inverse(number: int, base: int) -> float:
    """The digits of a number mirrored at the point: 6 = 110 in base 2 gives 0.011 = 3 / 8."""
    value, share = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        value += digit * share
        share /= base
    return value
