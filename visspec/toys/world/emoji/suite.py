"""Prompts about pictures of the emoji world in GenEval's format: a grammar with generator and parser, a fixed suite.

A prompt is GenEval's metadata dictionary, as in `visspec.toys.world.suite`; tasks are those without colours. The
subjects are the atlas's animals, of prompts of one object a third of them, which a small painter can learn. `ground`
(texture, tint) is a field of ours in some prompts of one object.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import permutations, product

import numpy as np

from visspec.toys.world.emoji.atlas import names, numbers
from visspec.toys.world.emoji.scene import GROUNDS, MOST_TURN, TINTS, EmojiScene, PlacedEmoji, sample_ground
from visspec.toys.world.suite import FREE_MARGIN, NUMBERS, RELATIONS, Metadata, holds

TASKS = ("single_object", "two_object", "counting", "position")
SIZES = {"single_object": 160, "two_object": 60, "counting": 40, "position": 100}
SUITE_SEED = 20260102
RUNS = (("rat", "chipmunk"), ("crab", "seal"))  # of animals in the order of the code points
ALONE = 3  # every third animal is the subject of prompts of one object
NOT_ALIVE = {"pig nose", "paw prints", "spiral shell", "microbe"}
SIDES = {1: (0.5, 0.66), 2: (0.32, 0.4), 3: (0.28, 0.34), 4: (0.28, 0.32)}  # of pictures, by their number
GAP = 0.02


@cache
def subjects() -> tuple[str, ...]:
    """The names that prompts use: animals."""
    found = [name for first, last in RUNS for name in names()[numbers()[first] : numbers()[last] + 1]]
    return tuple(name for name in found if name not in NOT_ALIVE)


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeio" else f"a {name}"


def _times(name: str, count: int) -> str:
    return f"{NUMBERS[count]} times {_article(name)}"


def make(tag: str, include: list[dict], ground: tuple[str, str] | None = None) -> Metadata:
    """Metadata of a tag and its objects, with GenEval's `exclude` for counting and the sentence."""
    out: Metadata = {"tag": tag, "include": include}
    heads = [_article(item["class"]) for item in include]
    if tag == "counting":
        kind, count = include[0]["class"], include[0]["count"]
        out["exclude"], text = [{"class": kind, "count": count + 1}], _times(kind, count)
    elif tag == "position":  # the reference object is listed first, the subject second
        text = f"{heads[1]} {include[1]['position'][0]} {heads[0]}"
    else:
        text = " and ".join(heads)
    if ground:
        out["ground"] = list(ground)
        text += f" on a {ground[0]} {ground[1]} ground"
    return out | {"prompt": f"a photo of {text}"}


def _item(name: str, count: int = 1, position: list | None = None) -> dict:
    return {"class": name, "count": count} | ({"position": position} if position else {})


def every(tag: str) -> Iterator[Metadata]:
    """Every prompt of one task, in a fixed order."""
    if tag == "single_object":
        grounds = [None, *product(GROUNDS, TINTS)]
        yield from (make(tag, [_item(a)], ground) for a in subjects()[::ALONE] for ground in grounds)
    elif tag == "two_object":
        yield from (make(tag, [_item(a), _item(b)]) for a, b in permutations(subjects(), 2))
    elif tag == "counting":
        yield from (make(tag, [_item(a, n)]) for a in subjects() for n in NUMBERS)
    elif tag == "position":
        pairs = product(permutations(subjects(), 2), RELATIONS)
        yield from (make(tag, [_item(b), _item(a, position=[how, 0])]) for (a, b), how in pairs)
    else:
        raise ValueError(f"tag: got {tag!r}, expected one of {TASKS}")


@cache
def _suite() -> tuple[str, ...]:
    rng = np.random.RandomState(SUITE_SEED)  # the stream of the legacy generator is stable
    out = []
    for tag in TASKS:
        rows = list(every(tag))
        if tag == "single_object":  # up to half without a ground
            bare = [row for row in rows if "ground" not in row]
            rows = [row for row in rows if "ground" in row]
            half = min(SIZES[tag] // 2, len(bare))
            out += [json.dumps(bare[i]) for i in sorted(rng.permutation(len(bare))[:half])]
            out += [json.dumps(rows[i]) for i in sorted(rng.permutation(len(rows))[: SIZES[tag] - half])]
        else:
            out += [json.dumps(rows[i]) for i in sorted(rng.permutation(len(rows))[: SIZES[tag]])]
    return tuple(out)


def suite() -> list[Metadata]:
    """The fixed suite of 360 prompts."""
    return [json.loads(line) for line in _suite()]


@cache
def _patterns() -> tuple[re.Pattern, ...]:
    noun = rf"an? ({'|'.join(sorted(map(re.escape, names()), key=len, reverse=True))})"
    ground = rf"(?: on a ({'|'.join(GROUNDS)}) ({'|'.join(TINTS)}) ground)?"
    two = f"a photo of {noun} (and|{'|'.join(RELATIONS)}) {noun}"
    many = f"a photo of ({'|'.join(NUMBERS.values())}) times {noun}"
    return re.compile(f"a photo of {noun}{ground}"), re.compile(two), re.compile(many)


def parse(prompt: str) -> Metadata:
    """Metadata of a sentence of the grammar about any pictures of the atlas; ValueError for any other sentence."""
    one, two, many = (pattern.fullmatch(prompt) for pattern in _patterns())
    out = None
    if many:
        out = make("counting", [_item(many[2], next(n for n, word in NUMBERS.items() if word == many[1]))])
    elif one:
        out = make("single_object", [_item(one[1])], (one[2], one[3]) if one[2] else None)
    elif two and two[2] == "and":
        out = make("two_object", [_item(two[1]), _item(two[3])])
    elif two:
        out = make("position", [_item(two[3]), _item(two[1], position=[two[2], 0])])
    if out is None or out["prompt"] != prompt or (two and two[1] == two[3]):
        raise ValueError(f"prompt: got {prompt!r}, expected a sentence of the emoji world's grammar and its names")
    return out


def vocabulary() -> list[str]:
    """Every word a prompt about the subjects can use, sorted."""
    text = "a an photo of and on ground times " + " ".join((*RELATIONS, *NUMBERS.values(), *GROUNDS, *TINTS))
    return sorted(set(f"{text} {' '.join(subjects())}".split()))


def wanted(metadata: Metadata) -> list[str]:
    """Names of every object in the prompt, in the order of `include`."""
    return [item["class"] for item in metadata["include"] for _ in range(item["count"])]


def free_scene(metadata: Metadata, rng: np.random.Generator) -> EmojiScene:
    """A scene that matches a prompt exactly, with GAP between the tiles' boxes."""
    items, sides = wanted(metadata), SIDES[len(wanted(metadata))]
    relation = next((item["position"][0] for item in metadata["include"] if "position" in item), None)
    while True:
        placed: list[tuple[float, float, float]] = []
        for _ in items:
            side = float(rng.uniform(*sides))
            x, y = (float(v) for v in rng.uniform(side / 2 + FREE_MARGIN, 1 - side / 2 - FREE_MARGIN, size=2))
            if any(max(abs(x - u), abs(y - v)) < (side + s) / 2 + GAP for u, v, s in placed):
                break
            placed.append((x, y, side))
        if len(placed) == len(items) and (relation is None or holds(relation, placed[1][:2], placed[0][:2])):
            break
    turns = [float(turn) for turn in rng.uniform(-MOST_TURN, MOST_TURN, size=len(items))]
    pictures = [PlacedEmoji(name, *where, turn) for name, where, turn in zip(items, placed, turns)]
    ground, tint, seed = sample_ground(rng)
    ground, tint = metadata.get("ground", (ground, tint))
    return EmojiScene(tuple(sorted(pictures, key=lambda p: (p.y, p.x))), ground, tint, seed)


def sample_prompt(rng: np.random.Generator, tag: str | None = None) -> Metadata:
    """A prompt of the whole grammar: task uniform unless given, then uniform in the task."""
    rows = _grammar(tag or TASKS[int(rng.integers(len(TASKS)))])
    return json.loads(rows[int(rng.integers(len(rows)))])


@cache
def _grammar(tag: str) -> tuple[str, ...]:
    return tuple(json.dumps(row) for row in every(tag))
