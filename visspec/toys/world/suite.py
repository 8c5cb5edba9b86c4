"""Prompts in GenEval's format: a grammar with generator and parser, a fixed suite, and scenes. `Suite` is what both
worlds share, `SHAPES` that of rendered shapes.

A prompt is GenEval's metadata dictionary: {"tag", "include": [{"class", "count", "color"?, "position"?}], "exclude"?,
"prompt"}; a prompt file has one JSON object per line. Tags, wording and field names are those of GenEval
(Ghosh et al. 2023, arXiv 2310.11513); only the classes differ. `ground` (texture, tint) is a field of ours in some
prompts of one object.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import permutations, product
from types import MappingProxyType
from typing import Any

import numpy as np

from visspec.toys.world.palette import CLASSES, COLOURS, GROUNDS
from visspec.toys.world.scene import Scene, Shape

RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}

# Scenes of prompts: continuous centres, radii and gaps as fractions of the side.
FREE_RADIUS = (0.11, 0.16)
FREE_GAP = 0.04
FREE_MARGIN = 0.02

Metadata = dict[str, Any]


def with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeio" else f"a {word}"


def _any(words: Iterable[str]) -> str:
    """A pattern of any of these words, the longest first; of none, one that never matches."""
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True)) or "(?!)"


def _item(kind: str, colour: str | None = None, count: int = 1, position: list | None = None) -> dict:
    item: dict = {"class": kind, "count": count}
    if colour:
        item["color"] = colour
    if position:
        item["position"] = position
    return item


def required_objects(metadata: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """(class, colour or None) of every object in the prompt, subject and reference in the order of `include`."""
    return [(item["class"], item.get("color")) for item in metadata["include"] for _ in range(item["count"])]


def holds(relation: str, subject: tuple[float, float], reference: tuple[float, float]) -> bool:
    """Whether two centres are a clear example of a relation: the other axis differs by less than half as much."""
    dx, dy = subject[0] - reference[0], subject[1] - reference[1]
    main, cross = {"left of": (-dx, dy), "right of": (dx, dy), "above": (-dy, dx), "below": (dy, dx)}[relation]
    return main > 0 and abs(cross) < main / 2


def placements(
    metadata: Mapping[str, Any], rng: np.random.Generator, sizes: tuple[float, float], half: float, gap: float
) -> list[tuple[float, float, float]]:
    """Centre and size of every object in the prompt, with `gap` between their boxes and in its relation if it has one.

    sizes: least and largest; half: what of a size is half the side of its box.
    """
    count = len(required_objects(metadata))
    relation = next((item["position"][0] for item in metadata["include"] if "position" in item), None)
    while True:
        placed: list[tuple[float, float, float]] = []
        for _ in range(count):
            size = float(rng.uniform(*sizes))
            reach = size * half
            x, y = (float(v) for v in rng.uniform(reach + FREE_MARGIN, 1 - reach - FREE_MARGIN, size=2))
            if any(max(abs(x - u), abs(y - v)) < reach + s * half + gap for u, v, s in placed):
                break
            placed.append((x, y, size))
        if len(placed) == count and (relation is None or holds(relation, placed[1][:2], placed[0][:2])):
            return placed


class Suite:
    """The prompts of one world: every sentence of its tasks, a fixed suite of them, and scenes that show them."""

    world: str  # as messages call it
    sizes: Mapping[str, int]  # prompts of each task in the fixed suite
    seed: int  # of the fixed suite
    colours: tuple[str, ...] = ()
    grounds: tuple[tuple[str, str], ...] = ()  # texture and tint that prompts of one object may name
    words: str = ""  # of sentences, beside names, colours, numbers, relations and those that all have

    @property
    def tasks(self) -> tuple[str, ...]:
        """Their tags."""
        return tuple(self.sizes)

    def names(self) -> tuple[str, ...]:
        """Classes that prompts are made of."""
        raise NotImplementedError

    def alone(self) -> tuple[str, ...]:
        """Those of prompts of one object."""
        return self.names()

    def known(self) -> tuple[str, ...]:
        """Classes that are understood in a sentence."""
        return self.names()

    def many(self, kind: str, count: int) -> str:
        """Several objects of a class, in words."""
        raise NotImplementedError

    def free_scene(self, metadata: Mapping[str, Any], rng: np.random.Generator) -> Scene:
        """A scene that matches a prompt exactly."""
        raise NotImplementedError

    def prompt_text(self, metadata: Metadata) -> str:
        """The sentence of a prompt's metadata, from its other fields."""
        items = metadata["include"]
        heads = [with_article(" ".join(filter(None, (item.get("color"), item["class"])))) for item in items]
        if metadata["tag"] == "counting":
            text = self.many(items[0]["class"], items[0]["count"])
        elif metadata["tag"] == "position":  # the reference object is listed first, the subject second
            text = f"{heads[1]} {items[1]['position'][0]} {heads[0]}"
        else:
            text = " and ".join(heads)
        if "ground" in metadata:
            text += " on a {} {} ground".format(*metadata["ground"])
        return f"a photo of {text}"

    def make(self, tag: str, include: list[dict], ground: tuple[str, str] | None = None) -> Metadata:
        """Metadata of a tag and its objects, with GenEval's `exclude` for counting and the sentence."""
        out: Metadata = {"tag": tag, "include": include}
        if tag == "counting":
            out["exclude"] = [_item(include[0]["class"], count=include[0]["count"] + 1)]
        if ground:
            out["ground"] = list(ground)
        return out | {"prompt": self.prompt_text(out)}

    def every(self, tag: str) -> Iterator[Metadata]:
        """Every prompt of one task, in a fixed order."""
        if tag not in self.sizes:
            raise ValueError(f"tag: got {tag!r}, expected one of {self.tasks}")
        names, make = self.names(), self.make
        pairs = list(permutations(names, 2))
        if tag == "single_object":
            yield from (make(tag, [_item(a)], ground) for a in self.alone() for ground in (None, *self.grounds))
        elif tag == "two_object":
            yield from (make(tag, [_item(a), _item(b)]) for a, b in pairs)
        elif tag == "counting":
            yield from (make(tag, [_item(a, count=n)]) for a in names for n in NUMBERS)
        elif tag == "colors":
            yield from (make(tag, [_item(a, c)]) for a in names for c in self.colours)
        elif tag == "position":
            yield from (make(tag, [_item(b), _item(a, position=[r, 0])]) for (a, b), r in product(pairs, RELATIONS))
        else:
            colours = list(permutations(self.colours, 2))
            yield from (make(tag, [_item(a, c), _item(b, d)]) for (a, b), (c, d) in product(pairs, colours))

    def chosen(self, tag: str, rng: np.random.RandomState) -> list[Metadata]:
        """Those of a task that the fixed suite has."""
        return some(list(self.every(tag)), self.sizes[tag], rng)

    def suite(self) -> list[Metadata]:
        """The fixed suite."""
        return [json.loads(line) for line in _suite(self)]

    def parse(self, prompt: str) -> Metadata:
        """Metadata of a sentence of the grammar; ValueError for any other sentence."""
        one, two = (pattern.fullmatch(prompt) for pattern in _patterns(self))
        out = None
        if prompt in _count_classes(self):
            out = self.make("counting", [_item(*_count_classes(self)[prompt])])
        elif one:
            ground = (one[3], one[4]) if one[3] else None
            out = self.make("colors" if one[1] else "single_object", [_item(one[2], one[1])], ground)
        elif two:
            first, second = _item(two[2], two[1]), _item(two[5], two[4])
            if two[3] != "and":
                out = self.make("position", [second, first | {"position": [two[3], 0]}])
            else:
                out = self.make("color_attr" if two[1] else "two_object", [first, second])
        if out is not None and out["prompt"] == prompt:
            coloured = out["tag"] in ("colors", "color_attr")
            distinct = len({item["class"] for item in out["include"]}) == len(out["include"])
            if distinct and all(("color" in item) == coloured for item in out["include"]):
                return out
        raise ValueError(f"prompt: got {prompt!r}, expected a sentence of the {self.world} world's grammar")

    def vocabulary(self) -> list[str]:
        """Every word a prompt can use, sorted."""
        words = (*RELATIONS, *NUMBERS.values(), *self.colours, *self.names(), self.words)
        return sorted(set(f"a an photo of and {' '.join(words)}".split()))

    def sample_prompt(self, rng: np.random.Generator, tag: str | None = None) -> Metadata:
        """A prompt of the whole grammar: task uniform unless given, then uniform in the task."""
        rows = _grammar(self, tag or self.tasks[int(rng.integers(len(self.tasks)))])
        return json.loads(rows[int(rng.integers(len(rows)))])


def some(rows: list[Metadata], count: int, rng: np.random.RandomState) -> list[Metadata]:
    """So many of the rows, in their order; all where there are no more."""
    return rows if len(rows) <= count else [rows[i] for i in sorted(rng.permutation(len(rows))[:count])]


# Rows are kept as text: whoever gets one may change it.
@cache
def _suite(own: Suite) -> tuple[str, ...]:
    rng = np.random.RandomState(own.seed)  # the stream of the legacy generator is stable
    return tuple(json.dumps(row) for tag in own.tasks for row in own.chosen(tag, rng))


@cache
def _grammar(own: Suite, tag: str) -> tuple[str, ...]:
    return tuple(json.dumps(row) for row in own.every(tag))


@cache
def _count_classes(own: Suite) -> dict[str, tuple[str, None, int]]:
    """Class and number of each sentence of several objects."""
    return {f"a photo of {own.many(kind, n)}": (kind, None, n) for kind in own.known() for n in NUMBERS}


@cache
def _patterns(own: Suite) -> tuple[re.Pattern, re.Pattern]:
    """Sentences of one object and of two."""
    noun = rf"an? (?:({_any(own.colours)}) )?({_any(own.known())})"
    textures, tints = (_any({ground[i] for ground in own.grounds}) for i in (0, 1))
    one = f"a photo of {noun}(?: on a ({textures}) ({tints}) ground)?"
    return re.compile(one), re.compile(f"a photo of {noun} (and|{_any(RELATIONS)}) {noun}")


class ShapeSuite(Suite):
    """368 prompts about eight shapes and ten colours."""

    world = "shape"
    sizes: Mapping[str, int] = MappingProxyType(
        {"single_object": 8, "two_object": 56, "counting": 24, "colors": 80, "position": 100, "color_attr": 100}
    )
    seed = 20260101
    colours = tuple(COLOURS)

    def names(self) -> tuple[str, ...]:
        return CLASSES

    @property
    def words(self) -> str:  # type: ignore[override]
        return " ".join(self.many(kind, 2) for kind in CLASSES)

    def many(self, kind: str, count: int) -> str:
        return f"{NUMBERS[count]} {kind}" + ("es" if kind.endswith(("s", "x")) else "s")

    def free_scene(
        self,
        metadata: Mapping[str, Any],
        rng: np.random.Generator,
        grounds: tuple[str, ...] = GROUNDS,
    ) -> Scene:
        """A scene that matches a prompt exactly, with FREE_GAP between boxes."""
        items, placed = required_objects(metadata), placements(metadata, rng, FREE_RADIUS, 1.0, FREE_GAP)
        colours = [colour or list(COLOURS)[int(rng.integers(len(COLOURS)))] for _, colour in items]
        shapes = [Shape(kind, c, *where) for (kind, _), c, where in zip(items, colours, placed)]
        ground = grounds[int(rng.integers(len(grounds)))]
        return Scene(tuple(sorted(shapes, key=lambda s: (s.y, s.x))), ground, int(rng.integers(1 << 31)))


SHAPES = ShapeSuite()
TASKS, SIZES = SHAPES.tasks, SHAPES.sizes
suite, every, make, parse, vocabulary = SHAPES.suite, SHAPES.every, SHAPES.make, SHAPES.parse, SHAPES.vocabulary
free_scene, sample_prompt = SHAPES.free_scene, SHAPES.sample_prompt
