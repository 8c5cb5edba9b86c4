"""Prompts about rendered shapes in GenEval's format: a grammar with generator and parser, a fixed suite, and scenes.

A prompt is GenEval's metadata dictionary: {"tag", "include": [{"class", "count", "color"?, "position"?}], "exclude"?,
"prompt"}; a prompt file has one JSON object per line. Tags, wording and field names are those of GenEval
(Ghosh et al. 2023, arXiv 2310.11513); only the classes differ.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import permutations, product

import numpy as np

from visspec.toys.world.palette import CLASSES, COLOURS, GROUNDS
from visspec.toys.world.scene import HELD_OUT_PAIRS, Shape, ShapeScene

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
SIZES = {"single_object": 8, "two_object": 56, "counting": 24, "colors": 80, "position": 100, "color_attr": 100}
SUITE_SEED = 20260101

# The free tier: continuous centres, radii and gaps as fractions of the side.
FREE_RADIUS = (0.11, 0.16)
FREE_GAP = 0.04
FREE_MARGIN = 0.02

Metadata = dict


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _plural(word: str) -> str:
    return word + ("es" if word.endswith(("s", "x")) else "s")


def _item(kind: str, colour: str | None = None, count: int = 1, position: list | None = None) -> dict:
    item: dict = {"class": kind, "count": count}
    if colour:
        item["color"] = colour
    if position:
        item["position"] = position
    return item


def prompt_text(metadata: Metadata) -> str:
    """The sentence of a prompt's metadata, from its `tag` and `include` alone."""
    items = metadata["include"]
    if metadata["tag"] == "counting":
        return f"a photo of {NUMBERS[items[0]['count']]} {_plural(items[0]['class'])}"
    names = [_article(" ".join(filter(None, (item.get("color"), item["class"])))) for item in items]
    if metadata["tag"] == "position":  # the reference object is listed first, the subject second
        return f"a photo of {names[1]} {items[1]['position'][0]} {names[0]}"
    return "a photo of " + " and ".join(names)


def make(tag: str, include: list[dict]) -> Metadata:
    """Metadata of a tag and its objects, with GenEval's `exclude` for counting and the sentence."""
    out: Metadata = {"tag": tag, "include": include}
    if tag == "counting":
        out["exclude"] = [_item(include[0]["class"], count=include[0]["count"] + 1)]
    return out | {"prompt": prompt_text(out)}


def every(tag: str) -> Iterator[Metadata]:
    """Every prompt of one task: 8, 56, 24, 80, 224 or 5,040 of them, in a fixed order."""
    pairs = list(permutations(CLASSES, 2))
    if tag == "single_object":
        yield from (make(tag, [_item(a)]) for a in CLASSES)
    elif tag == "two_object":
        yield from (make(tag, [_item(a), _item(b)]) for a, b in pairs)
    elif tag == "counting":
        yield from (make(tag, [_item(a, count=n)]) for a in CLASSES for n in NUMBERS)
    elif tag == "colors":
        yield from (make(tag, [_item(a, c)]) for a in CLASSES for c in COLOURS)
    elif tag == "position":
        yield from (make(tag, [_item(b), _item(a, position=[r, 0])]) for (a, b), r in product(pairs, RELATIONS))
    elif tag == "color_attr":
        colours = list(permutations(COLOURS, 2))
        yield from (make(tag, [_item(a, c), _item(b, d)]) for (a, b), (c, d) in product(pairs, colours))
    else:
        raise ValueError(f"tag must be one of {TASKS}, not {tag!r}")


def held_out(metadata: Metadata) -> bool:
    """Whether a prompt has a (colour, class) pair that is excluded from training."""
    return any((item.get("color"), item["class"]) in HELD_OUT_PAIRS for item in metadata["include"])


@cache
def _suite() -> tuple[str, ...]:
    rng = np.random.RandomState(SUITE_SEED)  # the stream of the legacy generator is stable
    out = []
    for tag in TASKS:
        rows = list(every(tag))
        if len(rows) > SIZES[tag]:
            rows = [rows[i] for i in sorted(rng.permutation(len(rows))[: SIZES[tag]])]
        out += [json.dumps(row) for row in rows]
    return tuple(out)


def suite(split: str = "all") -> list[Metadata]:
    """The fixed suite: all 368 prompts, or those in (`train`) or excluded from (`held_out`) training."""
    if split not in ("all", "train", "held_out"):
        raise ValueError(f"split must be 'all', 'train' or 'held_out', not {split!r}")
    rows = [json.loads(line) for line in _suite()]
    return rows if split == "all" else [row for row in rows if held_out(row) == (split == "held_out")]


_NOUN = rf"an? (?:({'|'.join(COLOURS)}) )?({'|'.join(CLASSES)})"
_ONE = re.compile(f"a photo of {_NOUN}")
_TWO = re.compile(f"a photo of {_NOUN} (and|{'|'.join(RELATIONS)}) {_NOUN}")
_MANY = re.compile(f"a photo of ({'|'.join(NUMBERS.values())}) ({'|'.join(map(_plural, CLASSES))})")


def parse(prompt: str) -> Metadata:
    """Metadata of a sentence of the grammar; ValueError for any other sentence."""
    if many := _MANY.fullmatch(prompt):
        count = next(n for n, word in NUMBERS.items() if word == many[1])
        return make("counting", [_item(next(k for k in CLASSES if _plural(k) == many[2]), count=count)])
    if one := _ONE.fullmatch(prompt):
        out = make("colors" if one[1] else "single_object", [_item(one[2], one[1])])
    elif two := _TWO.fullmatch(prompt):
        first, second = _item(two[2], two[1]), _item(two[5], two[4])
        if two[3] != "and":
            out = make("position", [second, first | {"position": [two[3], 0]}])
        else:
            out = make("color_attr" if two[1] else "two_object", [first, second])
    else:
        raise ValueError(f"the prompt {prompt!r} is not a sentence of the shape world's grammar")
    coloured = [("color" in item) for item in out["include"]]
    wants_colour = out["tag"] in ("colors", "color_attr")
    distinct = len({item["class"] for item in out["include"]}) == len(out["include"])
    if out["prompt"] != prompt or any(c != wants_colour for c in coloured) or not distinct:
        raise ValueError(f"the prompt {prompt!r} is not a sentence of the shape world's grammar")
    return out


def vocabulary() -> list[str]:
    """Every word a prompt can use, sorted."""
    words = "a an photo of and " + " ".join((*RELATIONS, *NUMBERS.values(), *COLOURS, *CLASSES, *map(_plural, CLASSES)))
    return sorted(set(words.split()))


def wanted(metadata: Metadata) -> list[tuple[str, str | None]]:
    """(class, colour or None) of every object in the prompt, subject and reference in the order of `include`."""
    return [(item["class"], item.get("color")) for item in metadata["include"] for _ in range(item["count"])]


def holds(relation: str, subject: tuple[float, float], reference: tuple[float, float]) -> bool:
    """Whether two centres are a clear example of a relation: the other axis differs by less than half as much."""
    dx, dy = subject[0] - reference[0], subject[1] - reference[1]
    main, cross = {"left of": (-dx, dy), "right of": (dx, dy), "above": (-dy, dx), "below": (dy, dx)}[relation]
    return main > 0 and abs(cross) < main / 2


def colours_for(rng: np.random.Generator, items: list[tuple[str, str | None]], pairs: str = "any") -> list[str]:
    """A colour for each wanted object: the given one, else uniform over those of the split for its class."""
    out = []
    for kind, colour in items:
        free = [c for c in COLOURS if pairs != "train" or (c, kind) not in HELD_OUT_PAIRS]
        out.append(colour or free[int(rng.integers(len(free)))])
    return out


def free_scene(
    metadata: Metadata, rng: np.random.Generator, grounds: tuple[str, ...] = GROUNDS, pairs: str = "any"
) -> ShapeScene:
    """A scene of the free tier that matches a prompt exactly, with FREE_GAP between boxes."""
    items = wanted(metadata)
    relation = next((item["position"][0] for item in metadata["include"] if "position" in item), None)
    while True:
        placed: list[tuple[float, float, float]] = []
        for _ in items:
            radius = float(rng.uniform(*FREE_RADIUS))
            x, y = (float(v) for v in rng.uniform(radius + FREE_MARGIN, 1 - radius - FREE_MARGIN, size=2))
            if any(max(abs(x - u), abs(y - v)) < radius + r + FREE_GAP for u, v, r in placed):
                break
            placed.append((x, y, radius))
        if len(placed) < len(items):
            continue
        if relation is None or holds(relation, placed[1][:2], placed[0][:2]):
            break
    colours = colours_for(rng, items, pairs)
    shapes = [Shape(kind, c, *where) for (kind, _), c, where in zip(items, colours, placed)]
    ground = grounds[int(rng.integers(len(grounds)))]
    return ShapeScene(tuple(sorted(shapes, key=lambda s: (s.y, s.x))), ground, int(rng.integers(1 << 31)))


def sample_prompt(rng: np.random.Generator, split: str = "all", tag: str | None = None) -> Metadata:
    """A prompt of the whole grammar: task uniform unless given, then uniform in the task and the split."""
    chosen = tag or TASKS[int(rng.integers(len(TASKS)))]
    rows = _grammar(chosen)
    while True:
        row = json.loads(rows[int(rng.integers(len(rows)))])
        if split == "all" or held_out(row) == (split == "held_out"):
            return row
        if split == "held_out" and chosen not in ("colors", "color_attr"):
            raise ValueError(f"no prompt of the task {chosen!r} is held out: it names no colour")


@cache
def _grammar(tag: str) -> tuple[str, ...]:
    return tuple(json.dumps(row) for row in every(tag))
