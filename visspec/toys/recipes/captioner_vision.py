"""Stage 1 of the captioner recipe: teach the vision tower with dense labels for every patch.

A caption loss alone learns to see very slowly at this scale, because each image gives a few bits at the end of a
long chain. Here each patch predicts, through throw-away linear heads, what its layout cell holds (of the shapes class,
colour and size; of the emoji name and size; or nothing), where the cell is, and facts of the whole scene (count,
ground): about 180 labels an image.
"""

import argparse
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from visspec.toys.recipes.recipe import TrainingStage, mixed_precision
from visspec.toys.world.scene import GRID
from visspec.toys.world.worlds import World, world
from visspec.train.stages import OneCycleStage

SIDE = 6  # patches along an image: two by two to a layout cell
MEAN = STD = (0.5, 0.5, 0.5)
# Width and layers of a world's tower.
TOWERS = {"shapes": (128, 4), "emoji": (192, 4)}
UNTOLD = -100  # a label that cross_entropy passes over

_steps = (np.arange(SIDE) + 0.5) / SIDE * GRID
_PATCH_CELL = (_steps.astype(int)[:, None] * GRID + _steps.astype(int)[None, :]).reshape(-1)  # (SIDE^2,) cell 0..8


def vision_config(world: World) -> CLIPVisionConfig:
    """The world's tower: 36 patches and a class token."""
    width, layers = TOWERS[world.name]
    return CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=world.side,
        patch_size=world.side // SIDE,
        hidden_act="gelu",
    )


def head_sizes(world: World) -> dict[str, int]:
    """Classes of every throw-away head: what a cell holds, or nothing; a patch's number; facts of the whole scene."""
    held = {name: len(words) + 1 for name, words in world.facts.items()}
    scene = {name: len(words) for name, words in world.settings.items()}
    return held | {"patch": SIDE * SIDE, "count": len(world.counts)} | scene


def patch_labels(scenes: list, world: World) -> dict[str, torch.Tensor]:
    """Labels of every patch, int64 (B, SIDE^2) for each head; a count that captions never have is UNTOLD."""
    out = {name: np.zeros((len(scenes), SIDE * SIDE), np.int64) for name in head_sizes(world)}
    number = {name: {word: i for i, word in enumerate(words)} for name, words in (world.facts | world.settings).items()}
    for row, scene in enumerate(scenes):
        held = {cell: thing for cell in range(GRID * GRID) if (thing := scene.at(cell))}
        for name in world.facts:
            cells = np.zeros(GRID * GRID, np.int64)  # 0 is "empty"
            for cell, thing in held.items():
                cells[cell] = number[name][getattr(thing, name)] + 1
            out[name][row] = cells[_PATCH_CELL]
        for name in world.settings:
            out[name][row] = number[name][getattr(scene, name)]
        out["patch"][row] = np.arange(SIDE * SIDE)
        out["count"][row] = world.counts.index(len(held)) if len(held) in world.counts else UNTOLD
    return {name: torch.from_numpy(value) for name, value in out.items()}


def patch_features(tower: CLIPVisionModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """What LLaVA's projector sees: last layer, class token dropped, (B, SIDE^2, hidden)."""
    return tower(pixel_values, output_hidden_states=True).hidden_states[-1][:, 1:]


def heads_of(world: World) -> nn.ModuleDict:
    """Fresh throw-away heads."""
    width = TOWERS[world.name][0]
    return nn.ModuleDict({name: nn.Linear(width, n) for name, n in head_sizes(world).items()})


@torch.no_grad()
def accuracy(tower: CLIPVisionModel, heads: nn.ModuleDict, world: World, count: int = 256) -> dict[str, float]:
    """Share of right labels on held-out scenes, by head."""
    scenes = world.scenes(count)
    features, labels = patch_features(tower, world.pixels(scenes)), patch_labels(scenes, world)
    shares = {name: (head(features).argmax(-1) == labels[name]).float().mean() for name, head in heads.items()}
    return {name: round(float(share), 4) for name, share in shares.items()}


def seen_in(saved: dict[str, Any], world: World) -> dict[str, float]:
    """`accuracy` of a checkpoint of `VisionStage`."""
    tower, heads = CLIPVisionModel(vision_config(world)), heads_of(world)
    tower.load_state_dict(saved["tower"])
    heads.load_state_dict(saved["heads"])
    return accuracy(tower, heads, world)


class VisionStage(TrainingStage, OneCycleStage):
    """Training of the tower on batches of fresh scenes; its checkpoint is the result, too."""

    name, seed, decay = "vision.pt", 0, 0.02
    steps_option, rate_option, rate_share = "vision_steps", None, 1e-3
    rises = 0.08

    def build(self, options: argparse.Namespace) -> dict:
        self.world = world(options.world)
        self.tower, self.heads = CLIPVisionModel(vision_config(self.world)), heads_of(self.world)
        self.tower.set_attn_implementation("eager")  # five times faster than sdpa in bfloat16 on short CPU sequences
        return {"tower": self.tower, "heads": self.heads}

    def loss(self) -> torch.Tensor:
        """Summed cross-entropies of all heads, on this worker's scenes of the batch."""
        first, rows = self.step * self.options.vision_rows, self.options.vision_rows
        scenes = [self.world.lesson(first + i) for i in range(self.rank, rows, self.workers)]
        labels = patch_labels(scenes, self.world)
        with mixed_precision():
            features = patch_features(self.tower, self.world.pixels(scenes))
        flat = features.float()
        losses = [
            F.cross_entropy(head(flat).flatten(0, 1), labels[name].flatten()) for name, head in self.heads.items()
        ]
        return torch.stack(losses).sum()

    def figures(self) -> dict:
        return accuracy(self.tower, self.heads, self.world)
