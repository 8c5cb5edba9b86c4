"""Pictures of the next-scale painters: one shape on plain ground, whose prompt is their class; and codes of theirs."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch

from visspec.eval.world.scene import HELD_OUT_SEED, Scene
from visspec.eval.world.suite import Metadata, every, free_scene, suite
from visspec.models.nets.multiscale import MultiScaleVAE, Scales
from visspec.recipes.painter_data import crowded, pixels, settled

SIDES = (1, 2, 3, 4, 6, 8, 10, 12)  # of the maps
SCALES = Scales.square(*SIDES)
SIDE = 48  # pixels of a picture
TASKS = ("single_object", "colors")
ROWS = [row for tag in TASKS for row in every(tag)]  # a class each
LABELS = [row["prompt"] for row in ROWS]
# Shapes stand on corners of the finest map's cells, for the reason of `painter_data.STEP`, and have one of two radii.
STEP, RADII = 4 / SIDE, (6 / SIDE, 8 / SIDE)
FIRST_SEED = {"vq": 3 << 27, "codes": 5 << 27, "decoder": 7 << 27}  # below HELD_OUT_SEED
BATCH = 32


def painted(metadata: Metadata, rng: np.random.Generator) -> Scene:
    """A settled scene on plain ground that shows what a prompt asks for."""
    while True:
        if (scene := settled(free_scene(metadata, rng, ("plain",)), STEP, RADII)) is not None:
            return scene


def pair(seed: int) -> tuple[int, Scene]:
    """Class and scene number `seed`: the task uniform, then the prompt."""
    rng = np.random.default_rng(seed)
    tag = TASKS[int(rng.integers(len(TASKS)))]
    some = [number for number, row in enumerate(ROWS) if row["tag"] == tag]
    number = some[int(rng.integers(len(some)))]
    return number, painted(ROWS[number], rng)


class Scenes:
    """Pictures (N, 3, side, side) in -1..1 of numbers: scenes of prompts, and crowded ones by turns; kept as uint8."""

    def __init__(self, numbers: list[int], side: int):
        self.numbers, self.side = numbers, side
        self.kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __call__(self, places: list[int]) -> torch.Tensor:
        for i in places:
            if i not in self.kept:
                seed = FIRST_SEED["vq"] + self.numbers[i]
                scene = dataclasses.replace(crowded(seed), ground="plain") if seed % 2 else pair(seed)[1]
                self.kept[i] = ((pixels([scene], self.side)[0] + 1) * 127.5).round().to(torch.uint8)
        return torch.stack([self.kept[i] for i in places]).float() / 127.5 - 1


def rows_of_labels(share: int = 1) -> list[Metadata]:
    """The suite's prompts [::share] that are classes."""
    return [row for row in suite() if row["tag"] in TASKS][::share]


def held_out(rows: list[Metadata]) -> torch.Tensor:
    """A picture of each prompt, with seeds no training pair has."""
    return pixels([painted(row, np.random.default_rng(HELD_OUT_SEED + i)) for i, row in enumerate(rows)], SIDE)


def write_codes(options: argparse.Namespace, codec: MultiScaleVAE) -> None:
    """Write `options.pairs` pairs to codes.pt: classes (N,) and codes (N, T), int16."""
    file, begun = options.out / "codes.pt", time.time()
    if options.resume and file.exists():
        return
    classes: list[int] = []
    codes: list[torch.Tensor] = []
    for start in range(0, options.pairs, BATCH):
        numbers, scenes = zip(*(pair(FIRST_SEED["codes"] + i) for i in range(start, min(start + BATCH, options.pairs))))
        classes += numbers
        codes.append(codec.encode(pixels(list(scenes), SIDE), SCALES).short())
    torch.save({"classes": torch.tensor(classes, dtype=torch.int16), "codes": torch.cat(codes)}, file)
    print(json.dumps({"file": file.name, "pairs": options.pairs, "s": round(time.time() - begun)}), flush=True)


def read_codes(folder: Path) -> dict[str, torch.Tensor]:
    """What `write_codes` wrote."""
    return torch.load(folder / "codes.pt", weights_only=True)
