"""Orders of an image's places for any-order targets.

A node of the loop is a rank in the order. Every order has its own joint distribution, unless the model is consistent
between orders, and decoding is exact for the chosen order. Distant places depend little on each other, so codes drafted
for them are accepted more often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import index
from typing import Any

import torch

from visspec.loop.draft_length import DraftLengthPolicy
from visspec.loop.orders import Raster
from visspec.types import Acceptance, Drafter, Request, State, Target


@lru_cache(maxsize=64)
def spread(rows: int, columns: int) -> tuple[int, ...]:
    """Return the order that draws each code as far as possible from earlier ones; ties in raster order."""
    place = torch.arange(rows * columns)
    at = torch.stack([place // columns, place % columns], dim=1)
    distance, order = torch.full((len(place),), rows**2 + columns**2 + 1), [0]
    for _ in range(len(place) - 1):
        distance = torch.minimum(distance, (at - at[order[-1]]).square().sum(dim=1))
        order.append(int(distance.argmax()))
    return tuple(order)


@lru_cache(maxsize=64)
def halton(rows: int, columns: int) -> tuple[int, ...]:
    """Return the places in the order of the Halton sequence with bases 2 (rows) and 3 (columns) (Besnier et al.,
    "Halton scheduler for masked generative image transformer", ICLR 2025).
    """
    places: dict[int, None] = {}
    number = 1
    while len(places) < rows * columns:
        places[int(radical_inverse(number, 2) * rows) * columns + int(radical_inverse(number, 3) * columns)] = None
        number += 1
    return tuple(places)


def radical_inverse(number: int, base: int) -> float:
    """Mirror the digits of a number at the point: 6 = 110 in base 2 becomes 0.011 = 3 / 8."""
    value, share = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        value += digit * share
        share /= base
    return value


class VisitOrder(Raster):
    """Base class of orders for any-order targets. A request must have a grid."""

    visits = True

    def places(self, rows: int, columns: int) -> Sequence[int]:
        """Return the place of each code in drawing order, a permutation of 0 .. rows * columns - 1."""
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
    """The order `spread`."""

    name, places = "spread", staticmethod(spread)


class HaltonOrder(VisitOrder):
    """The order `halton`."""

    name, places = "halton", staticmethod(halton)


class ListedOrder(VisitOrder):
    """An order given as a list of places. Raises ValueError if it is not a permutation of the places."""

    name = "given"

    def __init__(self, order: Iterable[Any]):
        self.order = tuple(index(place) for place in order)
        count = len(self.order)
        if sorted(self.order) != list(range(count)):
            raise ValueError(f"order: got {count} places, expected each of 0..{count - 1} once.")

    def places(self, rows: int, columns: int) -> Sequence[int]:
        if len(self.order) != rows * columns:
            raise ValueError(f"order: got {len(self.order)} places, expected the {rows} * {columns} of the image.")
        return self.order
