"""Captions of rendered shapes, in the words on which the included captioner was trained.

A caption is what the captioner should say in greedy decoding. Words and marks are lower case and separated by spaces.
"""

from visspec.toys.world.scene import GRID, Scene

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
FIRST = "{p} there is {d} ."
# Sentences for the second thing, the third, ...: {d} is the thing, {p} its place.
SAME_ROW = (
    "to the right of it , {p} , we see {d} .",
    "further along {p} comes {d} .",
    "beside that one , {p} , {d} was drawn .",
    "the same row also holds {d} {p} .",
    "at last {p} one finds {d} .",
)
LOWER_ROW = (
    "lower down , {p} , lies {d} .",
    "further down {p} we find {d} .",
    "beneath these , {p} , {d} can be seen .",
    "down {p} another figure appears , {d} .",
    "the last one , {p} , is {d} .",
)


def caption(scene: Scene) -> str:
    """Return the caption of a scene: number of shapes, ground, then every shape in raster order."""
    things = scene.things
    out = [f"this picture shows {NUMBERS[len(things)]} shapes in all ."]
    out.append(f"the ground behind them is a {scene.ground} grey .")
    for i, thing in enumerate(things):
        sentence = FIRST
        if i:
            rows = SAME_ROW if thing.cell // GRID == things[i - 1].cell // GRID else LOWER_ROW
            sentence = rows[i - 1]
        out.append(sentence.format(p=PLACES[thing.cell], d=f"a {thing.size} {thing.colour} {thing.kind}"))
    empty = scene.at(CENTRE) is None
    out.append("the middle of the picture stays empty ." if empty else "nothing else is to be seen .")
    return " ".join(out)
