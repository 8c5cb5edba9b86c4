"""Captions and questions about rendered shapes: generated from a scene, parsed into facts, scored against the scene.

Every sentence has three phrasings with unequal weights, so that greedy decoding has one answer and sampling at
temperature 1 has entropy. All text is a sequence of lower-case words and punctuation separated by spaces.
"""

import re
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from visspec.toys.world.palette import CLASSES, COLOURS, GROUNDS, SIZES
from visspec.toys.world.scene import GRID, Shape, ShapeScene

WEIGHTS = (0.6, 0.25, 0.15)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACES = (
    "in the top left corner",
    "at the top edge",
    "in the top right corner",
    "on the left side",
    "in the very centre",
    "on the right side",
    "in the bottom left corner",
    "at the bottom edge",
    "in the bottom right corner",
)
CENTRE = 4
REQUESTS = (
    "describe the picture in detail .",
    "what can be seen in this picture ?",
    "write a long caption for this image .",
    "please tell me everything you see .",
)

Phrasings = tuple[str, str, str]
Fact = tuple[Hashable, str]  # ("count", "four"), ("ground", "cloudy"), ("middle", "empty"), ((cell, "colour"), "red")

# {d} stands for "a large red star", {p} for a place, {n} for a number, {g} for a ground.
_OPENING: Phrasings = (
    "this picture shows {n} shapes in all .",
    "there are {n} coloured shapes in the picture .",
    "one can count {n} shapes here .",
)
_GROUND: Phrasings = (
    "the ground behind them is a {g} grey .",
    "a {g} grey covers all of the background .",
    "everything lies on {g} grey paper .",
)
_FIRST: Phrasings = ("{p} there is {d} .", "the first one is {d} {p} .", "we begin {p} with {d} .")
# Indexed by the number of shapes already named, minus one: to the right of the previous shape, or in a lower row.
_SAME_ROW: tuple[Phrasings, ...] = (
    ("to the right of it , {p} , we see {d} .", "next to it {p} stands {d} .", "its neighbour {p} is {d} ."),
    ("further along {p} comes {d} .", "then {d} follows {p} .", "on the same level {p} sits {d} ."),
    ("beside that one , {p} , {d} was drawn .", "still in this row {p} is {d} .", "moving right , {d} appears {p} ."),
    ("the same row also holds {d} {p} .", "{d} keeps it company {p} .", "a step to the right brings {d} {p} ."),
    ("at last {p} one finds {d} .", "the row ends with {d} {p} .", "finally , {d} rests {p} ."),
)
_LOWER_ROW: tuple[Phrasings, ...] = (
    ("lower down , {p} , lies {d} .", "below it {p} sits {d} .", "under that row {d} appears {p} ."),
    ("further down {p} we find {d} .", "the next row opens with {d} {p} .", "a little lower {d} rests {p} ."),
    ("beneath these , {p} , {d} can be seen .", "going down there is {d} {p} .", "the row below shows {d} {p} ."),
    ("down {p} another figure appears , {d} .", "lower still {d} stands {p} .", "then {p} the next row has {d} ."),
    ("the last one , {p} , is {d} .", "last of all {d} lies {p} .", "the lowest row has {d} {p} ."),
)
_MIDDLE_EMPTY: Phrasings = (
    "the middle of the picture stays empty .",
    "nothing at all is placed in the middle .",
    "only the middle is left free .",
)
_CLOSING: Phrasings = (
    "nothing else is to be seen .",
    "that is everything in the picture .",
    "there are no other figures .",
)


def pick(rng: np.random.Generator | None, phrasings: Phrasings) -> str:
    """A phrasing sampled by weight, or the most probable one without a generator."""
    return phrasings[0] if rng is None else phrasings[int(np.searchsorted(np.cumsum(WEIGHTS)[:-1], rng.random()))]


def _description(shape: Shape) -> str:
    return f"a {shape.size} {shape.colour} {shape.kind}"


def caption(scene: ShapeScene, rng: np.random.Generator | None = None) -> str:
    """A caption of about 60 to 110 words and marks; without a generator the most probable one."""
    out = [pick(rng, _OPENING).format(n=NUMBERS[len(scene.shapes)]), pick(rng, _GROUND).format(g=scene.ground)]
    for i, shape in enumerate(scene.shapes):
        if i == 0:
            phrasings = _FIRST
        else:
            same = shape.cell // GRID == scene.shapes[i - 1].cell // GRID
            phrasings = (_SAME_ROW if same else _LOWER_ROW)[min(i, len(_SAME_ROW)) - 1]
        out.append(pick(rng, phrasings).format(d=_description(shape), p=PLACES[shape.cell]))
    out.append(pick(rng, _CLOSING if scene.at(CENTRE) else _MIDDLE_EMPTY))
    return " ".join(out)


def questions(scene: ShapeScene) -> list[tuple[str, str]]:
    """Every (question, exact answer) about a scene; attributes only for classes that occur once."""
    out = [
        ("how many shapes are there ?", f"{NUMBERS[len(scene.shapes)]} ."),
        ("what is the ground like ?", f"{scene.ground} ."),
    ]
    for cell, place in enumerate(PLACES):
        shape = scene.at(cell)
        out.append((f"what is {place} ?", f"{_description(shape)} ." if shape else "nothing ."))
    kinds = [shape.kind for shape in scene.shapes]
    for shape in scene.shapes:
        if kinds.count(shape.kind) == 1:
            out.append((f"what colour is the {shape.kind} ?", f"{shape.colour} ."))
            out.append((f"is the {shape.kind} large or small ?", f"{shape.size} ."))
            out.append((f"where is the {shape.kind} ?", f"{PLACES[shape.cell]} ."))
    return out


def facts(scene: ShapeScene) -> dict[Hashable, str]:
    """All facts of a complete caption: count, ground, an empty middle, and four facts per shape."""
    out: dict[Hashable, str] = {"count": NUMBERS[len(scene.shapes)], "ground": scene.ground}
    if not scene.at(CENTRE):
        out["middle"] = "empty"
    for shape in scene.shapes:
        cell = shape.cell
        out |= {(cell, "place"): "taken", (cell, "size"): shape.size}
        out |= {(cell, "colour"): shape.colour, (cell, "class"): shape.kind}
    return out


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks of any spelling of a text ("A star." or "a star .")."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _sentence_facts(tokens: list[str]) -> list[Fact]:
    """Facts stated by one sentence, its words without the final mark."""
    text = " ".join(tokens)
    kind = next((w for w in tokens if w in CLASSES), None)
    if kind is not None:
        cell = next((i for i, place in enumerate(PLACES) if place in text), None)
        out: list[Fact] = [((cell, "place"), "taken"), ((cell, "class"), kind)]
        out += [((cell, "colour"), w) for w in tokens if w in COLOURS]
        out += [((cell, "size"), w) for w in tokens if w in SIZES]
        return out
    if "shapes" in tokens:
        return [("count", w) for w in tokens if w in NUMBERS[3:]]
    if "grey" in tokens:
        return [("ground", w) for w in tokens if w in GROUNDS]
    return [("middle", "empty")] if "middle" in tokens else []


def stated(text: str, read: Callable[[list[str]], list[Fact]]) -> list[Fact]:
    """Facts of a text's sentences, in order, with repetitions; `read` gives those of one sentence's words."""
    out: list[Fact] = []
    sentence: list[str] = []
    for word in [*words(text), "."]:
        if word == ".":
            out += read(sentence)
            sentence = []
        else:
            sentence.append(word)
    return out


def right(found: list[Fact], true: Mapping[Hashable, str]) -> tuple[int, int]:
    """(facts right, facts stated); a fact stated twice is right once at most."""
    return sum(true.get(key) == value for key, value in set(found)), len(found)


def parse(text: str) -> list[Fact]:
    """Facts stated in a caption, in order, with repetitions; a shape at an unknown place has cell None."""
    return stated(text, _sentence_facts)


def score(text: str, scene: ShapeScene) -> tuple[int, int]:
    """(facts right, facts stated); a fact stated twice is right once at most."""
    return right(parse(text), facts(scene))


def missing(text: str, scene: ShapeScene) -> int:
    """Number of facts of the scene that the caption doesn't state."""
    return len(facts(scene).keys() - dict(parse(text)).keys())


def fact_words() -> frozenset[str]:
    """Words that must be read from the picture."""
    places = {"top", "bottom", "left", "right", "centre", "middle"}
    return frozenset({*CLASSES, *COLOURS, *SIZES, *GROUNDS, *NUMBERS} | places)


def vocabulary() -> list[str]:
    """Every word and mark that captions, questions, answers and requests can use, sorted."""
    tables = (_OPENING, _GROUND, _FIRST, *_SAME_ROW, *_LOWER_ROW, _MIDDLE_EMPTY, _CLOSING, REQUESTS, PLACES)
    text = " ".join(re.sub(r"\{.\}", "", phrase) for table in tables for phrase in table)
    text += " how many what is the ground like ? colour or small where a nothing"
    return sorted({*text.split(), *NUMBERS, *GROUNDS, *CLASSES, *COLOURS, *SIZES})
