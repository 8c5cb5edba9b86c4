"""Pictures of the next-scale painters: one shape on plain ground, whose prompt is their class; and codes of theirs."""

from pathlib import Path

import numpy as np
import torch

from visspec.models.scales.multiscale import ScaleSizes
from visspec.toys.recipes.painter_data import pixels, settled
from visspec.toys.world.scene import HELD_OUT_SEED, ShapeScene
from visspec.toys.world.suite import Metadata, every, free_scene, suite

SIDES = (1, 2, 3, 4, 6, 8, 10, 12)  # of the maps
SCALES = ScaleSizes.square(*SIDES)
SIDE = 96  # pixels of a picture
TASKS = ("single_object", "colors")
ROWS = [row for tag in TASKS for row in every(tag)]  # a class each
LABELS = [row["prompt"] for row in ROWS]
# Shapes stand on corners of the finest map's cells, for the reason of `painter_data.STEP`, and have one of two radii.
STEP, RADII = 8 / SIDE, (12 / SIDE, 16 / SIDE)
FIRST_SEED = {"codes": 5 << 27}  # below HELD_OUT_SEED
BATCH = 32


def painted(metadata: Metadata, rng: np.random.Generator) -> ShapeScene:
    """A settled scene on plain ground that shows what a prompt asks for."""
    while True:
        if (scene := settled(free_scene(metadata, rng, ("plain",)), STEP, RADII)) is not None:
            return scene


def pair(seed: int) -> tuple[int, ShapeScene]:
    """Class and scene number `seed`: the task uniform, then the prompt."""
    rng = np.random.default_rng(seed)
    tag = TASKS[int(rng.integers(len(TASKS)))]
    some = [number for number, row in enumerate(ROWS) if row["tag"] == tag]
    number = some[int(rng.integers(len(some)))]
    return number, painted(ROWS[number], rng)


def rows_of_labels(share: int = 1) -> list[Metadata]:
    """The suite's prompts [::share] that are classes."""
    return [row for row in suite() if row["tag"] in TASKS][::share]


def held_out(rows: list[Metadata]) -> torch.Tensor:
    """A picture of each prompt, with seeds no training pair has."""
    return pixels([painted(row, np.random.default_rng(HELD_OUT_SEED + i)) for i, row in enumerate(rows)], SIDE)


def read_codes(folder: Path) -> dict[str, torch.Tensor]:
    """Classes (N,) and codes (N, T) of the pairs, int16."""
    return torch.load(folder / "codes.pt", weights_only=True)
