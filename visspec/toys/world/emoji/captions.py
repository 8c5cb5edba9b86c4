"""Captions of about 25 to 100 words and marks, and questions, about scenes of the emoji world.

Names have one to four words and are read by the longest match. One sentence says how the first and the last picture
stand to each other.
"""

import re
from collections.abc import Hashable
from functools import cache
from types import MappingProxyType

import numpy as np

from visspec.toys.world.captions import NUMBERS, Fact, Phrasings, WorldCaptions, pick, place_in
from visspec.toys.world.emoji.atlas import names
from visspec.toys.world.emoji.scene import COUNTS, GROUNDS, SIZES, TINTS
from visspec.toys.world.scene import GRID, PlacedThing, Scene
from visspec.toys.world.suite import RELATIONS

INVERSE = {"right of": "left of", "below": "above"}


def relation(a: PlacedThing, b: PlacedThing) -> str:
    """What a caption says of two pictures in raster order: `left of` in one row of the layout, else `above`."""
    return "left of" if a.cell // GRID == b.cell // GRID else "above"


@cache
def _patterns() -> tuple[re.Pattern, re.Pattern]:
    """A name, the longest first; and a relation between two names in either order of the sentence."""
    name = "|".join(sorted(map(re.escape, names()), key=len, reverse=True))
    how = "|".join(RELATIONS)
    between = rf"the ({name}) is ({how}) the ({name})|({how}) the ({name}) is the ({name})"
    return re.compile(rf"\b(?:{name})\b"), re.compile(between)


def _relation_fact(match: re.Match) -> Fact:
    a, how, b = match.group(1, 2, 3) if match[1] else match.group(6, 4, 5)
    if how in INVERSE:
        a, how, b = b, INVERSE[how], a
    return "relation", f"{a} {how} {b}"


class EmojiCaptions(WorldCaptions):
    """The language of the emoji world."""

    things, named = "pictures", "name"
    details = (("is the {n} large or small ?", "size"),)
    attributes = MappingProxyType({"size": "size", "name": "name"})
    settings = ("ground", "tint")
    opening = ("this scene shows {n} .", "there is a scene of {n} here .", "one can count {n} in all .")
    ground = (
        "behind lies a {g} ground .",
        "the whole background is a {g} one .",
        "everything was put on a {g} backdrop .",
    )
    same_row = (
        ("to the right of it , {p} , we see {d} .", "next to it {p} stands {d} .", "on the same level {p} comes {d} ."),
    )
    lower_row = (("lower down , {p} , lies {d} .", "below it {p} sits {d} .", "further down we find {d} {p} ."),)
    # {a} and {b}: two names
    beside: Phrasings = (
        "the {a} is left of the {b} .",
        "the {b} is right of the {a} .",
        "left of the {b} is the {a} .",
    )
    above: Phrasings = ("the {a} is above the {b} .", "the {b} is below the {a} .", "above the {b} is the {a} .")
    closing: Phrasings = ("nothing else is to be seen .", "that is everything .", "there are no other things .")
    words = (*NUMBERS[1:6], *GROUNDS, *TINTS, *SIZES)
    more = "how many what is the ground like ? or where a nothing picture pictures one . ,"

    @property
    def tables(self) -> tuple[tuple[str, ...], ...]:  # type: ignore[override]  # names are read from a file
        return self.beside, self.above, self.closing, names()

    @property
    def read_words(self) -> frozenset[str]:  # type: ignore[override]
        places = {"top", "bottom", "left", "right", "centre"}
        return frozenset({*" ".join(names()).split(), *self.words, *places} - {"and", "of"})

    def count(self, n: int) -> str:
        return f"{NUMBERS[n]} picture" + "s" * (n != 1)

    def phrase(self, thing) -> str:
        return f"a {thing.size} {thing.name}"

    def ending(self, scene: Scene, rng: np.random.Generator | None) -> list[str]:
        out = []
        if len(scene.things) > 1:
            first, last = scene.things[0], scene.things[-1]
            phrasings = self.beside if relation(first, last) == "left of" else self.above
            out.append(pick(rng, phrasings).format(a=first.name, b=last.name))
        return [*out, pick(rng, self.closing)]

    def of_whole(self, scene: Scene) -> dict[Hashable, str]:
        if len(scene.things) < 2:
            return {}
        first, last = scene.things[0], scene.things[-1]
        return {"relation": f"{first.name} {relation(first, last)} {last.name}"}

    def read(self, tokens: list[str]) -> list[Fact]:
        text = " ".join(tokens)
        name, between = _patterns()
        if match := between.fullmatch(text):
            return [_relation_fact(match)]
        if count := re.search(rf"\b({'|'.join(NUMBERS[COUNTS[0] : COUNTS[-1] + 1])}) pictures?\b", text):
            return [("count", count[1])]
        ground = re.search(rf"\b({'|'.join(GROUNDS)}) ({'|'.join(TINTS)}) (?:ground|one|backdrop)\b", text)
        if ground:
            return [("ground", ground[1]), ("tint", ground[2])]
        sized = re.search(rf"\ba ({'|'.join(SIZES)}) (.+)", text)
        if not sized:
            return []
        cell, known = place_in(text), name.match(sized[2])
        out: list[Fact] = [((cell, "place"), "taken"), ((cell, "size"), sized[1])]
        return [*out, ((cell, "name"), known[0] if known else sized[2])]
