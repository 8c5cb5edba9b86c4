"""Captions and questions about scenes of the emoji world: generated from a scene, parsed into facts, scored against it.

As with the shapes, every sentence has three phrasings with unequal weights, and text is lower-case words and marks
separated by spaces. Names have one to four words and are read by the longest match.
"""

import re
from collections.abc import Hashable
from functools import cache

import numpy as np

from visspec.toys.world.captions import NUMBERS, PLACES, REQUESTS, Fact, Phrasings, pick, right, stated
from visspec.toys.world.emoji.atlas import names
from visspec.toys.world.emoji.scene import COUNTS, GROUNDS, SIZES, TINTS, EmojiScene, PlacedEmoji
from visspec.toys.world.scene import GRID

__all__ = ["REQUESTS", "caption", "facts", "missing", "parse", "questions", "score", "vocabulary"]

# {n} stands for "four pictures" or "one picture", {g} for "a grainy blue", {d} for "a large owl", {p} for a place,
# {a} and {b} for two names.
_OPENING: Phrasings = ("this scene shows {n} .", "there is a scene of {n} here .", "one can count {n} in all .")
_GROUND: Phrasings = (
    "behind lies {g} ground .",
    "the whole background is {g} one .",
    "everything was put on {g} backdrop .",
)
_FIRST: Phrasings = ("{p} there is {d} .", "the first one is {d} {p} .", "we begin {p} with {d} .")
_SAME_ROW: Phrasings = (
    "to the right of it , {p} , we see {d} .",
    "next to it {p} stands {d} .",
    "on the same level {p} comes {d} .",
)
_LOWER_ROW: Phrasings = (
    "lower down , {p} , lies {d} .",
    "below it {p} sits {d} .",
    "further down we find {d} {p} .",
)
_BESIDE: Phrasings = ("the {a} is left of the {b} .", "the {b} is right of the {a} .", "left of the {b} is the {a} .")
_ABOVE: Phrasings = ("the {a} is above the {b} .", "the {b} is below the {a} .", "above the {b} is the {a} .")
_CLOSING: Phrasings = ("nothing else is to be seen .", "that is everything .", "there are no other things .")
_RELATIONS = ("left of", "right of", "above", "below")
_INVERSE = {"right of": "left of", "below": "above"}


def _count(n: int) -> str:
    return f"{NUMBERS[n]} picture" + "s" * (n != 1)


def relation(a: PlacedEmoji, b: PlacedEmoji) -> str:
    """What a caption says of two pictures in raster order: `left of` in one row of the layout, else `above`."""
    return "left of" if a.cell // GRID == b.cell // GRID else "above"


def caption(scene: EmojiScene, rng: np.random.Generator | None = None) -> str:
    """A caption of about 25 to 100 words and marks; without a generator the most probable one."""
    pictures = scene.pictures
    out = [pick(rng, _OPENING).format(n=_count(len(pictures)))]
    out.append(pick(rng, _GROUND).format(g=f"a {scene.ground} {scene.tint}"))
    for i, picture in enumerate(pictures):
        same = i and picture.cell // GRID == pictures[i - 1].cell // GRID
        phrasings = _SAME_ROW if same else _LOWER_ROW if i else _FIRST
        out.append(pick(rng, phrasings).format(d=f"a {picture.size} {picture.name}", p=PLACES[picture.cell]))
    if len(pictures) > 1:
        first, last = pictures[0], pictures[-1]
        phrasings = _BESIDE if relation(first, last) == "left of" else _ABOVE
        out.append(pick(rng, phrasings).format(a=first.name, b=last.name))
    return " ".join([*out, pick(rng, _CLOSING)])


def questions(scene: EmojiScene) -> list[tuple[str, str]]:
    """Every (question, exact answer) about a scene."""
    out = [
        ("how many pictures are there ?", f"{NUMBERS[len(scene.pictures)]} ."),
        ("what is the ground like ?", f"{scene.ground} {scene.tint} ."),
    ]
    for cell, place in enumerate(PLACES):
        picture = scene.at(cell)
        out.append((f"what is {place} ?", f"a {picture.size} {picture.name} ." if picture else "nothing ."))
    for picture in scene.pictures:
        out.append((f"is the {picture.name} large or small ?", f"{picture.size} ."))
        out.append((f"where is the {picture.name} ?", f"{PLACES[picture.cell]} ."))
    return out


def facts(scene: EmojiScene) -> dict[Hashable, str]:
    """All facts of a complete caption: count, ground, tint, three facts a picture, and one relation."""
    out: dict[Hashable, str] = {"count": NUMBERS[len(scene.pictures)], "ground": scene.ground, "tint": scene.tint}
    for picture in scene.pictures:
        out |= {(picture.cell, "place"): "taken", (picture.cell, "size"): picture.size}
        out[picture.cell, "name"] = picture.name
    if len(scene.pictures) > 1:
        out["relation"] = " ".join(
            (scene.pictures[0].name, relation(scene.pictures[0], scene.pictures[-1]), scene.pictures[-1].name)
        )
    return out


@cache
def _patterns() -> tuple[re.Pattern, re.Pattern]:
    """A name, the longest first; and a relation between two names in either order of the sentence."""
    name = "|".join(sorted(map(re.escape, names()), key=len, reverse=True))
    how = "|".join(_RELATIONS)
    between = rf"the ({name}) is ({how}) the ({name})|({how}) the ({name}) is the ({name})"
    return re.compile(rf"\b(?:{name})\b"), re.compile(between)


def _relation_fact(match: re.Match) -> Fact:
    a, how, b = match.group(1, 2, 3) if match[1] else match.group(6, 4, 5)
    if how in _INVERSE:
        a, how, b = b, _INVERSE[how], a
    return "relation", f"{a} {how} {b}"


def _sentence_facts(tokens: list[str]) -> list[Fact]:
    """Facts stated by one sentence, its words without the final mark."""
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
    cell = next((i for i, place in enumerate(PLACES) if place in text), None)
    out: list[Fact] = [((cell, "place"), "taken"), ((cell, "size"), sized[1])]
    said = name.match(sized[2])
    return [*out, ((cell, "name"), said[0] if said else sized[2])]


def parse(text: str) -> list[Fact]:
    """Facts stated in a caption, in order, with repetitions; a picture at an unknown place has cell None."""
    return stated(text, _sentence_facts)


def score(text: str, scene: EmojiScene) -> tuple[int, int]:
    """(facts right, facts stated); a fact stated twice is right once at most."""
    return right(parse(text), facts(scene))


def missing(text: str, scene: EmojiScene) -> int:
    """Number of facts of the scene that the caption doesn't state."""
    return len(facts(scene).keys() - dict(parse(text)).keys())


@cache
def fact_words() -> frozenset[str]:
    """Words that must be read from the picture: names, sizes, grounds, tints, numbers and places."""
    places = {"top", "bottom", "left", "right", "centre"}
    return frozenset({*" ".join(names()).split(), *SIZES, *GROUNDS, *TINTS, *NUMBERS[1:6], *places} - {"and", "of"})


def vocabulary() -> list[str]:
    """Every word and mark that captions, questions, answers and requests can use, sorted."""
    tables = (_OPENING, _GROUND, _FIRST, _SAME_ROW, _LOWER_ROW, _BESIDE, _ABOVE, _CLOSING, REQUESTS, PLACES, names())
    text = " ".join(re.sub(r"\{.\}", "", phrase) for table in tables for phrase in table)
    text += " how many what is the ground like ? or where a nothing picture pictures one . ,"
    return sorted({*text.split(), *NUMBERS[1:6], *GROUNDS, *TINTS, *SIZES})
