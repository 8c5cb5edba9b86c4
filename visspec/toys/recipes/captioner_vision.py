"""Stage 1 of the captioner recipe: teach the vision tower with dense labels for every patch.

A caption loss alone learns to see very slowly at this scale, because each image gives a few bits at the end of a
long chain. Here each patch predicts, through throw-away linear heads, what its layout cell holds (of the shapes class,
colour and size; of the emoji name and size; or nothing), where the cell is, and facts of the whole scene (count,
ground): about 180 labels an image.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from visspec.io.files import replacing
from visspec.toys.world.scene import GRID
from visspec.toys.world.worlds import World

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


def pixels(scenes: list, world: World) -> torch.Tensor:
    """Rendered and normalised images, float32 (B, 3, side, side), as the image processor gives them."""
    batch = torch.from_numpy(np.stack([world.render(scene) for scene in scenes]))
    return batch.permute(0, 3, 1, 2).float() / 127.5 - 1


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


@torch.no_grad()
def _accuracy(tower: CLIPVisionModel, heads: nn.ModuleDict, scenes: list, world: World) -> dict[str, float]:
    features = patch_features(tower, pixels(scenes, world))
    labels = patch_labels(scenes, world)
    return {name: float((head(features).argmax(-1) == labels[name]).float().mean()) for name, head in heads.items()}


def train_vision(
    folder: Path,
    world: World,
    steps: int,
    batch: int = 128,
    peak: float = 1e-3,
    resume: bool = False,
    every: int = 100,
    half: bool = True,
) -> Path:
    """Train the tower for `steps` batches of fresh scenes; `folder`/vision.pt is both checkpoint and result.

    With `half` in bfloat16.
    """
    torch.manual_seed(0)
    tower = CLIPVisionModel(vision_config(world))
    tower.set_attn_implementation("eager")  # five times faster than sdpa in bfloat16 on short CPU sequences
    heads = nn.ModuleDict({name: nn.Linear(tower.config.hidden_size, n) for name, n in head_sizes(world).items()})
    parameters = [*tower.parameters(), *heads.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=peak, weight_decay=0.02, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, peak, total_steps=steps, pct_start=0.08)
    file, first, begun = folder / "vision.pt", 0, time.time()
    if resume and file.exists():
        saved = torch.load(file, weights_only=True)
        tower.load_state_dict(saved["tower"])
        heads.load_state_dict(saved["heads"])
        optimiser.load_state_dict(saved["optimiser"])
        schedule.load_state_dict(saved["schedule"])
        first, begun = saved["step"], begun - saved["seconds"]
    held_out = world.scenes(256)
    for step in range(first, steps):
        scenes = [world.lesson(step * batch + i) for i in range(batch)]
        labels = patch_labels(scenes, world)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            features = patch_features(tower, pixels(scenes, world))
        features = features.float()
        losses = {
            name: F.cross_entropy(head(features).flatten(0, 1), labels[name].flatten()) for name, head in heads.items()
        }
        loss = sum(losses.values(), torch.zeros(()))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            record = {name: round(value, 4) for name, value in _accuracy(tower, heads, held_out, world).items()}
            record |= {"step": step + 1, "loss": round(loss.item(), 4), "s": round(time.time() - begun)}
            print(json.dumps({"stage": "vision", **record}), flush=True)
            state: dict[str, Any] = {"tower": tower.state_dict(), "heads": heads.state_dict()}
            state |= {"optimiser": optimiser.state_dict(), "schedule": schedule.state_dict()}
            state |= {"step": step + 1, "seconds": time.time() - begun}
            with replacing(file) as draft:
                torch.save({**state, "accuracy": record}, draft)
    return file
