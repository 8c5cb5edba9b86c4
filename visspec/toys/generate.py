"""Pictures of a world with captions for training drafters.

`write_pictures("shapes", "scenes", 1000)` writes a folder for `visspec train drafter --data scenes` and
`datasets.load_dataset("imagefolder", data_dir="scenes")`.
"""

import json
from pathlib import Path

from PIL import Image

from visspec.toys.world import captions, render, scene
from visspec.toys.world.emoji import captions as emoji_captions
from visspec.toys.world.emoji import render as emoji_render
from visspec.toys.world.emoji import scene as emoji_scene

SIDES = {"shapes": 96, "emoji": 120}  # side in pixels


def picture(world: str, seed: int) -> tuple[Image.Image, str]:
    """Return picture number `seed` of a world, "shapes" or "emoji", and its caption. Pictures from
    `scene.HELD_OUT_SEED` on are held out; the first 256 of these are in `visspec/toys/heldout`.

    Args:
        world: "shapes" or "emoji".
        seed: Number of the picture.
    """
    if world not in SIDES:
        raise ValueError(f"world: got {world!r}, expected one of {', '.join(SIDES)}.")
    if world == "shapes":
        sample = scene.scene_from_seed(seed)
        return Image.fromarray(render.render(sample, SIDES[world])), captions.caption(sample)
    faces = emoji_scene.scene_from_seed(seed)
    return Image.fromarray(emoji_render.render(faces, SIDES[world])), emoji_captions.caption(faces)


def write_pictures(world: str, folder: str | Path, count: int, first: int = 0) -> None:
    """Write `count` pictures, starting with number `first`, as PNGs, and metadata.jsonl with their captions.

    Args:
        world: "shapes" or "emoji".
        folder: Where to write.
        count: Number of pictures.
        first: Number of the first picture.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metadata.jsonl", "w", encoding="utf-8") as file:
        for number in range(first, first + count):
            image, caption = picture(world, number)
            image.save(folder / f"{number:06}.png")
            file.write(json.dumps({"file_name": f"{number:06}.png", "caption": caption}) + "\n")
