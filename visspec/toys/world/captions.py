"""Captions and questions about scenes: generated from a scene, parsed into facts, scored against the scene.

Every sentence has three phrasings with unequal weights, so that greedy decoding has one answer and sampling at
temperature 1 has entropy. All text is a sequence of lower-case words and punctuation separated by spaces.
`WorldCaptions` is what both worlds share, `SHAPES` those of rendered shapes.
"""

import re
from collections.abc import Hashable, Mapping
from types import MappingProxyType

import numpy as np

from visspec.toys.world.palette import CLASSES, COLOURS, GROUNDS, SIZES
from visspec.toys.world.scene import GRID, Scene

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

FIRST: Phrasings = ("{p} there is {d} .", "the first one is {d} {p} .", "we begin {p} with {d} .")


def pick(rng: np.random.Generator | None, phrasings: Phrasings) -> str:
    """A phrasing sampled by weight, or the most probable one without a generator."""
    return phrasings[0] if rng is None else phrasings[int(np.searchsorted(np.cumsum(WEIGHTS)[:-1], rng.random()))]


class WorldCaptions:
    """The language of one world: a subclass has its phrasings, and how things, grounds and sentences are worded."""

    requests = REQUESTS
    things: str  # several of them, as a question calls them
    named: str  # the attribute of a thing that is its name
    details: tuple[tuple[str, str], ...]  # questions about the thing {n}, and the attribute that answers each
    attributes: Mapping[str, str]  # facts of a thing, and their attributes
    settings: tuple[str, ...]  # facts of the whole scene, and their attributes
    opening: Phrasings  # {n}: their number
    ground: Phrasings  # {g}: the ground
    # {d}: a thing, {p}: its place; indexed by the number of things already named, minus one, at most the last
    same_row: tuple[Phrasings, ...]  # to the right of the previous thing
    lower_row: tuple[Phrasings, ...]
    tables: tuple[tuple[str, ...], ...]  # all other sentences
    words: tuple[str, ...]  # that captions and answers put into their sentences
    more: str  # words of questions, and others that phrasings do not show
    read_words: frozenset[str]  # those that must be read from the picture

    def count(self, n: int) -> str:
        """How many there are, in an opening sentence."""
        return NUMBERS[n]

    def of_ground(self, scene: Scene) -> str:
        """What a question about the ground is answered."""
        return " ".join(getattr(scene, name) for name in self.settings)

    def phrase(self, thing) -> str:
        """A thing with its attributes."""
        raise NotImplementedError

    def ending(self, scene: Scene, rng: np.random.Generator | None) -> list[str]:
        """Last sentences of a caption."""
        raise NotImplementedError

    def of_whole(self, scene: Scene) -> dict[Hashable, str]:
        """What the last sentences state."""
        raise NotImplementedError

    def read(self, tokens: list[str]) -> list[Fact]:
        """Facts stated by one sentence, its words without the final mark."""
        raise NotImplementedError

    def caption(self, scene: Scene, rng: np.random.Generator | None = None) -> str:
        """A caption; without a generator the most probable one."""
        things = scene.things
        out = [pick(rng, self.opening).format(n=self.count(len(things)))]
        out.append(pick(rng, self.ground).format(g=self.of_ground(scene)))
        for i, thing in enumerate(things):
            phrasings = FIRST
            if i:
                rows = self.same_row if thing.cell // GRID == things[i - 1].cell // GRID else self.lower_row
                phrasings = rows[min(i, len(rows)) - 1]
            out.append(pick(rng, phrasings).format(d=self.phrase(thing), p=PLACES[thing.cell]))
        return " ".join(out + self.ending(scene, rng))

    def questions(self, scene: Scene) -> list[tuple[str, str]]:
        """Every (question, exact answer) about a scene; attributes only of names that occur once."""
        out = [
            (f"how many {self.things} are there ?", f"{NUMBERS[len(scene.things)]} ."),
            ("what is the ground like ?", f"{self.of_ground(scene)} ."),
        ]
        for cell, place in enumerate(PLACES):
            thing = scene.at(cell)
            out.append((f"what is {place} ?", f"{self.phrase(thing)} ." if thing else "nothing ."))
        names = [getattr(thing, self.named) for thing in scene.things]
        for thing, name in zip(scene.things, names):
            if names.count(name) == 1:
                out += [(text.format(n=name), f"{getattr(thing, attribute)} .") for text, attribute in self.details]
                out.append((f"where is the {name} ?", f"{PLACES[thing.cell]} ."))
        return out

    def facts(self, scene: Scene) -> dict[Hashable, str]:
        """All facts of a complete caption: of the scene, and of every thing its place and attributes."""
        out: dict[Hashable, str] = {"count": NUMBERS[len(scene.things)]}
        out |= {name: getattr(scene, name) for name in self.settings}
        for thing in scene.things:
            out[thing.cell, "place"] = "taken"
            out |= {(thing.cell, fact): getattr(thing, attribute) for fact, attribute in self.attributes.items()}
        return out | self.of_whole(scene)

    def parse(self, text: str) -> list[Fact]:
        """Facts stated in a caption, in order, with repetitions; a thing at an unknown place has cell None."""
        out: list[Fact] = []
        sentence: list[str] = []
        for word in [*words(text), "."]:
            if word == ".":
                out += self.read(sentence)
                sentence = []
            else:
                sentence.append(word)
        return out

    def score(self, text: str, scene: Scene) -> tuple[int, int]:
        """(facts right, facts stated); a fact stated twice is right once at most."""
        found, true = self.parse(text), self.facts(scene)
        return sum(true.get(key) == value for key, value in set(found)), len(found)

    def missing(self, text: str, scene: Scene) -> int:
        """Number of facts of the scene that the caption doesn't state."""
        return len(self.facts(scene).keys() - dict(self.parse(text)).keys())

    def vocabulary(self) -> list[str]:
        """Every word and mark that captions, questions, answers and requests can use, sorted."""
        tables = (self.opening, self.ground, FIRST, *self.same_row, *self.lower_row, *self.tables, REQUESTS, PLACES)
        text = " ".join(re.sub(r"\{.\}", "", phrase) for table in tables for phrase in table)
        return sorted({*f"{text} {self.more}".split(), *self.words})


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks of any spelling of a text ("A star." or "a star .")."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def place_in(text: str) -> int | None:
    """The cell whose place a sentence names."""
    return next((i for i, place in enumerate(PLACES) if place in text), None)


class ShapeCaptions(WorldCaptions):
    """Captions of about 60 to 110 words and marks, and questions, about rendered shapes."""

    things, named = "shapes", "kind"
    details = (("what colour is the {n} ?", "colour"), ("is the {n} large or small ?", "size"))
    attributes = MappingProxyType({"size": "size", "colour": "colour", "class": "kind"})
    settings = ("ground",)
    opening = (
        "this picture shows {n} shapes in all .",
        "there are {n} coloured shapes in the picture .",
        "one can count {n} shapes here .",
    )
    ground = (
        "the ground behind them is a {g} grey .",
        "a {g} grey covers all of the background .",
        "everything lies on {g} grey paper .",
    )
    same_row = (
        ("to the right of it , {p} , we see {d} .", "next to it {p} stands {d} .", "its neighbour {p} is {d} ."),
        ("further along {p} comes {d} .", "then {d} follows {p} .", "on the same level {p} sits {d} ."),
        (
            "beside that one , {p} , {d} was drawn .",
            "still in this row {p} is {d} .",
            "moving right , {d} appears {p} .",
        ),
        ("the same row also holds {d} {p} .", "{d} keeps it company {p} .", "a step to the right brings {d} {p} ."),
        ("at last {p} one finds {d} .", "the row ends with {d} {p} .", "finally , {d} rests {p} ."),
    )
    lower_row = (
        ("lower down , {p} , lies {d} .", "below it {p} sits {d} .", "under that row {d} appears {p} ."),
        ("further down {p} we find {d} .", "the next row opens with {d} {p} .", "a little lower {d} rests {p} ."),
        ("beneath these , {p} , {d} can be seen .", "going down there is {d} {p} .", "the row below shows {d} {p} ."),
        ("down {p} another figure appears , {d} .", "lower still {d} stands {p} .", "then {p} the next row has {d} ."),
        ("the last one , {p} , is {d} .", "last of all {d} lies {p} .", "the lowest row has {d} {p} ."),
    )
    empty_middle: Phrasings = (
        "the middle of the picture stays empty .",
        "nothing at all is placed in the middle .",
        "only the middle is left free .",
    )
    closing: Phrasings = (
        "nothing else is to be seen .",
        "that is everything in the picture .",
        "there are no other figures .",
    )
    tables = (empty_middle, closing)
    words = (*NUMBERS, *GROUNDS, *CLASSES, *COLOURS, *SIZES)
    more = "how many what is the ground like ? colour or small where a nothing"
    read_words = frozenset({*CLASSES, *COLOURS, *SIZES, *GROUNDS, *NUMBERS})
    read_words |= {"top", "bottom", "left", "right", "centre", "middle"}

    def phrase(self, thing) -> str:
        return f"a {thing.size} {thing.colour} {thing.kind}"

    def ending(self, scene: Scene, rng: np.random.Generator | None) -> list[str]:
        return [pick(rng, self.closing if scene.at(CENTRE) else self.empty_middle)]

    def of_whole(self, scene: Scene) -> dict[Hashable, str]:
        return {} if scene.at(CENTRE) else {"middle": "empty"}

    def read(self, tokens: list[str]) -> list[Fact]:
        kind = next((w for w in tokens if w in CLASSES), None)
        if kind is not None:
            cell = place_in(" ".join(tokens))
            out: list[Fact] = [((cell, "place"), "taken"), ((cell, "class"), kind)]
            out += [((cell, "colour"), w) for w in tokens if w in COLOURS]
            return out + [((cell, "size"), w) for w in tokens if w in SIZES]
        if "shapes" in tokens:
            return [("count", w) for w in tokens if w in NUMBERS[3:]]
        if "grey" in tokens:
            return [("ground", w) for w in tokens if w in GROUNDS]
        return [("middle", "empty")] if "middle" in tokens else []


SHAPES = ShapeCaptions()
caption, questions, facts, parse = SHAPES.caption, SHAPES.questions, SHAPES.facts, SHAPES.parse
score, missing, vocabulary = SHAPES.score, SHAPES.missing, SHAPES.vocabulary
