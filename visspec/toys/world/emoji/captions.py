"""Captions of scenes of the emoji world, in the words on which its captioner was trained."""

from visspec.toys.world.captions import FIRST, NUMBERS, PLACES
from visspec.toys.world.emoji.scene import EmojiScene
from visspec.toys.world.scene import GRID

SAME_ROW, LOWER_ROW = "to the right of it , {p} , we see {d} .", "lower down , {p} , lies {d} ."


def caption(scene: EmojiScene) -> str:
    """Return a scene's caption: number, ground, every picture in raster order, and a relation."""
    things = scene.things
    out = [f"this scene shows {NUMBERS[len(things)]} picture{'s' * (len(things) != 1)} ."]
    out.append(f"behind lies a {scene.ground} {scene.tint} ground .")
    for i, thing in enumerate(things):
        same_row = i > 0 and thing.cell // GRID == things[i - 1].cell // GRID
        sentence = FIRST if i == 0 else SAME_ROW if same_row else LOWER_ROW
        out.append(sentence.format(p=PLACES[thing.cell], d=f"a {thing.size} {thing.name}"))
    if len(things) > 1:
        first, last = things[0], things[-1]
        relation = "left of" if first.cell // GRID == last.cell // GRID else "above"
        out.append(f"the {first.name} is {relation} the {last.name} .")
    return " ".join([*out, "nothing else is to be seen ."])
