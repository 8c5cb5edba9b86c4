"""What the painters of 64 tokens learn: one of twelve emoji animals on a smooth or cloudy ground, 64 pixels a side.

A picture's prompt is its class: twelve animals, each on no named ground or on one of twelve. Seeds from HELD_OUT_SEED
on are never trained on.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.toys.recipes import emoji_painter, painter_build, painter_data, painter_score
from visspec.toys.recipes.painter_draw import DROPPED
from visspec.toys.recipes.recipe import Coder, TrainingStage, in_batches
from visspec.toys.world.emoji.detector import EmojiDetector
from visspec.toys.world.emoji.scene import EmojiScene
from visspec.toys.world.suite import Metadata
from visspec.toys.world.worlds import world

OF = "animals"
WORLD = world(OF)
SUITE = WORLD.suite
SIDE, GRID = WORLD.side, WORLD.side // painter_build.PATCH
PROMPT = 13  # ids of the longest prompt
ROWS = list(SUITE.every("single_object"))  # a class each
LABELS = [row["prompt"] for row in ROWS]
BARE = 0.25  # share of the pictures whose prompt names no ground
BATCH = 32

build_tokenizer = partial(painter_build.build_tokenizer, OF)
build_processor = partial(painter_build.build_processor, of=OF, side=SIDE)
prompt_ids = partial(painter_build.prompt_ids, length=PROMPT)
detector = partial(EmojiDetector, sides=(0.5, 0.8))
geneval, score = partial(painter_score.geneval, of=OF), partial(painter_score.score, of=OF)
pixels = WORLD.pixels


def paint_scene(metadata: Metadata, rng: np.random.Generator) -> EmojiScene:
    """The animal near the middle, on the prompt's ground or a random one of the suite's."""
    ground = metadata.get("ground", SUITE.grounds[int(rng.integers(len(SUITE.grounds)))])
    return emoji_painter.paint_scene(metadata | {"ground": ground}, rng)


def pair(seed: int) -> tuple[int, EmojiScene]:
    """Class and scene number `seed`."""
    rng = np.random.default_rng(seed)
    number, each = int(rng.integers(len(ROWS))), 1 + len(SUITE.grounds)
    if rng.random() < BARE:
        number -= number % each
    return number, paint_scene(ROWS[number], rng)


def pictures(numbers: range) -> Tensor:
    """Those of the pairs of these numbers."""
    return pixels([pair(i)[1] for i in numbers])


def rows(every: int = 1) -> list[Metadata]:
    """The suite's prompts [::every]."""
    return WORLD.prompts()[::every]


def held_out(asked: list[Metadata]) -> Tensor:
    """A picture of each prompt, with seeds no training pair has."""
    return pixels(painter_data.held_out(asked, paint_scene))


def coders(
    options: argparse.Namespace, file: str, first: int, name: str, read: Callable[[Tensor], Tensor]
) -> dict[Path, Coder]:
    """What makes a file of `options.pairs` pairs from number `first` on: `classes` (N,), and pictures as `read`."""

    def coded(numbers: range) -> dict[str, Tensor]:
        classes, scenes = zip(*map(pair, numbers))
        return {"classes": torch.tensor(classes, dtype=torch.int16), name: read(pixels(scenes))}

    return {options.out / file: partial(in_batches, coded, range(first, first + options.pairs), BATCH)}


def facts() -> Tensor:
    """(classes + 1, facts) float: the animal, the ground's texture and tint or none; the last row is no class."""
    texture, tint = (list(dict.fromkeys(part)) for part in zip(*SUITE.grounds))
    names = [*SUITE.names(), *texture, *tint]
    table = torch.zeros(len(ROWS) + 1, len(names) + 1)
    for number, row in enumerate(ROWS):
        for fact in (row["include"][0]["class"], *row.get("ground", ())):
            table[number, names.index(fact)] = 1.0
    table[-1, -1] = 1.0
    return table


class ClassStage(TrainingStage):
    """Training on the coded pictures of a folder's file."""

    data_file: str

    def read(self, options: argparse.Namespace) -> None:
        """Take the file's tensors."""
        self.data = torch.load(options.out / self.data_file, weights_only=True)

    def batch_rows(self) -> tuple[Tensor, Tensor]:
        """This worker's rows (B,), and which of them are without their class: a tenth."""
        chosen = torch.from_numpy(self.chosen(len(self.data["classes"])))
        rng = np.random.default_rng((self.seed or 0, self.step, self.rank))
        return chosen, torch.from_numpy(rng.random(len(chosen)) < DROPPED)


class Telling(nn.Linear):
    """A throw-away head that tells the animal at every place: from the loss of tokens alone, a network that reads words
    takes long to look at them at all.
    """

    def __init__(self, width: int):
        super().__init__(width, len(SUITE.names()))

    def loss(self, hidden: Tensor, classes: Tensor, dropped: Tensor) -> Tensor:
        """Cross-entropy of the animals of classes (B,) in hidden states (B, T, width); rows that are `dropped` do not
        count.
        """
        animals = (classes // (len(ROWS) // self.out_features)).masked_fill(dropped, -100)
        told = self(hidden.float()).transpose(1, 2)
        return F.cross_entropy(told, animals[:, None].expand(-1, told.shape[-1]), ignore_index=-100)
