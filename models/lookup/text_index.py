"""Texts indexed by their n-grams, to find what followed the tokens at the end of a text."""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (16, 8, 5, 3, 2, 1)  # of matches that rates tell apart, in tokens
MATCHES = 4  # earlier occurrences that are followed
INDEXED = 3  # tokens of the longest n-grams that are indexed; longer matches are found by comparing
PLACES = 8  # newest occurrences of an n-gram that are kept

Pointer = tuple[int, list[int], int]  # a match: its rate, a text, and the place in it of what the match proposes


class TextIndex:
    """Texts one behind the other, indexed by their n-grams. A negative id ends a text."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.start = 0  # of the newest text
        self.places: dict[tuple[int, ...], list[int]] = {}  # of what followed an n-gram, the newest last

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the newest text."""
        ids, places = self.ids, self.places
        for token in tokens:
            here = len(ids)
            for n in range(1, min(INDEXED, here - self.start) + 1):
                found = places.setdefault(tuple(ids[-n:]), [])
                found.append(here)
                if len(found) > PLACES:
                    del found[0]
            ids.append(token)

    def matches(self, text: Sequence[int], first: int, shortest: int = 1) -> list[Pointer]:
        """The continuations of the longest matches of a text's end, and of these of the newest.

        Args:
            first: Number of the first rate.
            shortest: Tokens of the shortest matches.
        """
        found: dict[int, int] = {}  # length by place
        for n in range(min(INDEXED, len(text)), shortest - 1, -1):
            for place in reversed(self.places.get(tuple(text[-n:]), ())):
                if place not in found:
                    found[place] = n if n < INDEXED else self._length(text, place)
            if len(found) >= MATCHES:
                break
        ranked = sorted(
            (next(i for i, n in enumerate(LENGTHS) if n <= length), -place) for place, length in found.items()
        )
        return [(first + i * MATCHES + k, self.ids, -place) for k, (i, place) in enumerate(ranked[:MATCHES])]

    def _length(self, text: Sequence[int], place: int) -> int:
        """Tokens before a place that equal the text's end."""
        for n in range(INDEXED, min(LENGTHS[0], len(text), place)):
            if self.ids[place - n - 1] != text[-n - 1]:
                return n
        return min(LENGTHS[0], len(text), place)
