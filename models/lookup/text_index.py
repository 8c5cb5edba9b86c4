"""N-gram index of texts, to find what followed the tokens at the end of a text."""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (16, 8, 5, 3, 2, 1)  # match lengths with their own rates, in tokens
MATCHES = 4  # number of earlier occurrences to follow
INDEXED = 3  # longest n-gram that is indexed; longer matches are found by comparing tokens
PLACES = 8  # newest occurrences kept per n-gram

Pointer = tuple[int, list[int], int]  # a match: its rate, a text, and where its continuation starts


class TextIndex:
    """Concatenated texts, indexed by their n-grams. A negative id ends a text."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.start = 0  # start of the newest text
        self.places: dict[tuple[int, ...], list[int]] = {}  # positions after each n-gram, the newest last

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the newest text."""
        ids, places = self.ids, self.places
        for token in tokens:
            place = len(ids)
            for n in range(1, min(INDEXED, place - self.start) + 1):
                positions = places.setdefault(tuple(ids[-n:]), [])
                positions.append(place)
                if len(positions) > PLACES:
                    del positions[0]
            ids.append(token)

    def matches(self, text: Sequence[int], first: int) -> list[Pointer]:
        """Return the continuations of the longest matches of a text's end, preferring newer ones.

        Args:
            first: Number of the first rate.
        """
        lengths: dict[int, int] = {}  # place -> length
        for n in range(min(INDEXED, len(text)), 0, -1):
            for place in reversed(self.places.get(tuple(text[-n:]), ())):
                if place not in lengths:
                    lengths[place] = n if n < INDEXED else self._length(text, place)
            if len(lengths) >= MATCHES:
                break
        ranked = sorted(
            (next(i for i, n in enumerate(LENGTHS) if n <= length), -place) for place, length in lengths.items()
        )
        return [(first + i * MATCHES + k, self.ids, -place) for k, (i, place) in enumerate(ranked[:MATCHES])]

    def _length(self, text: Sequence[int], place: int) -> int:
        """Count the tokens before a place that equal the text's end."""
        for n in range(INDEXED, min(LENGTHS[0], len(text), place)):
            if self.ids[place - n - 1] != text[-n - 1]:
                return n
        return min(LENGTHS[0], len(text), place)
