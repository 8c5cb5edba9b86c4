"""Stage 1 of the captioner recipe: teach the vision tower with dense labels for every patch.

A caption loss alone learns to see very slowly at this scale, because each image gives a few bits at the end of a
long chain. Here each patch predicts, through throw-away linear heads, what its layout cell holds (class, colour and
size, or nothing), where the cell is, and two facts of the whole scene (count, ground): about 180 labels an image.
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

from visspec.eval.world.palette import CLASSES, COLOURS, GROUNDS, SIZES
from visspec.eval.world.render import render
from visspec.eval.world.scene import COUNTS, GRID, Scene, held_out_scenes, scene_from_seed
from visspec.files import replacing

IMAGE_SIZE = 96
PATCH_SIZE = 16  # two by two patches to a layout cell
SIDE = IMAGE_SIZE // PATCH_SIZE
MEAN = STD = (0.5, 0.5, 0.5)

_COLOUR_INDEX = {name: i + 1 for i, name in enumerate(COLOURS)}  # 0 is "empty" for class, colour and size
_CLASS_INDEX = {name: i + 1 for i, name in enumerate(CLASSES)}
_SIZE_INDEX = {name: i + 1 for i, name in enumerate(SIZES)}
_HEADS = {
    "class": len(CLASSES) + 1,
    "colour": len(COLOURS) + 1,
    "size": len(SIZES) + 1,
    "patch": SIDE * SIDE,
    "count": len(COUNTS),
    "ground": len(GROUNDS),
}
_steps = (np.arange(SIDE) + 0.5) / SIDE * GRID
_PATCH_CELL = (_steps.astype(int)[:, None] * GRID + _steps.astype(int)[None, :]).reshape(-1)  # (SIDE^2,) cell 0..8


def vision_config() -> CLIPVisionConfig:
    """The tower: 4 layers of width 128, 36 patches and a class token."""
    return CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        hidden_act="gelu",
    )


def pixels(scenes: list[Scene]) -> torch.Tensor:
    """Rendered and normalised images, float32 (B, 3, IMAGE_SIZE, IMAGE_SIZE), as the image processor gives them."""
    batch = torch.from_numpy(np.stack([render(scene, IMAGE_SIZE) for scene in scenes]))
    return batch.permute(0, 3, 1, 2).float() / 127.5 - 1


def patch_labels(scenes: list[Scene]) -> dict[str, torch.Tensor]:
    """Labels of every patch, int64 (B, SIDE^2) for each head."""
    out = {name: np.zeros((len(scenes), SIDE * SIDE), np.int64) for name in _HEADS}
    for row, scene in enumerate(scenes):
        cells = np.zeros((3, GRID * GRID), np.int64)
        for shape in scene.shapes:
            cells[:, shape.cell] = _CLASS_INDEX[shape.kind], _COLOUR_INDEX[shape.colour], _SIZE_INDEX[shape.size]
        out["class"][row], out["colour"][row], out["size"][row] = cells[:, _PATCH_CELL]
        out["patch"][row] = np.arange(SIDE * SIDE)
        out["count"][row] = COUNTS.index(len(scene.shapes))
        out["ground"][row] = GROUNDS.index(scene.ground)
    return {name: torch.from_numpy(value) for name, value in out.items()}


def patch_features(tower: CLIPVisionModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """What LLaVA's projector sees: last layer, class token dropped, (B, SIDE^2, hidden)."""
    return tower(pixel_values, output_hidden_states=True).hidden_states[-1][:, 1:]


@torch.no_grad()
def _accuracy(tower: CLIPVisionModel, heads: nn.ModuleDict, scenes: list[Scene]) -> dict[str, float]:
    features = patch_features(tower, pixels(scenes))
    labels = patch_labels(scenes)
    return {name: float((head(features).argmax(-1) == labels[name]).float().mean()) for name, head in heads.items()}


def teach_vision(
    folder: Path, steps: int, batch: int = 128, peak: float = 1e-3, resume: bool = False, every: int = 100
) -> Path:
    """Train the tower for `steps` batches of fresh scenes; `folder`/vision.pt is both checkpoint and result."""
    torch.manual_seed(0)
    tower = CLIPVisionModel(vision_config())
    tower.set_attn_implementation("eager")  # five times faster than sdpa in bfloat16 on short CPU sequences
    heads = nn.ModuleDict({name: nn.Linear(tower.config.hidden_size, n) for name, n in _HEADS.items()})
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
    held_out = held_out_scenes(256)
    for step in range(first, steps):
        scenes = [scene_from_seed(step * batch + i) for i in range(batch)]
        labels = patch_labels(scenes)
        with torch.autocast("cpu", torch.bfloat16):
            features = patch_features(tower, pixels(scenes))
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
            record = {name: round(value, 4) for name, value in _accuracy(tower, heads, held_out).items()}
            record |= {"step": step + 1, "loss": round(loss.item(), 4), "s": round(time.time() - begun)}
            print(json.dumps({"stage": "vision", **record}), flush=True)
            state: dict[str, Any] = {"tower": tower.state_dict(), "heads": heads.state_dict()}
            state |= {"optimiser": optimiser.state_dict(), "schedule": schedule.state_dict()}
            state |= {"step": step + 1, "seconds": time.time() - begun}
            with replacing(file) as draft:
                torch.save({**state, "accuracy": record}, draft)
    return file
