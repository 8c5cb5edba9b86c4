"""Pictures of the continuous painter: scenes of one or two shapes on plain ground, and the tokens of their latents."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from visspec.toys.recipes.painter_build import build_tokenizer
from visspec.toys.recipes.painter_codes import inked
from visspec.toys.recipes.painter_data import crowded, pixels, settled
from visspec.toys.recipes.painter_reading import progress
from visspec.toys.recipes.painter_tokens import prompt_ids
from visspec.toys.world.scene import ShapeScene
from visspec.toys.world.suite import Metadata, free_scene, sample_prompt

SIDE, PATCH, SIZE = 64, 8, 8  # pixels a side of a picture and of a token, numbers of a token
GRID = SIDE // PATCH
TASKS = ("single_object", "colors", "two_object")
# Shapes stand on a grid of half patches and have one of two radii, as those of the other painter and for its reasons.
STEP, RADII = 4 / SIDE, (8 / SIDE, 10 / SIDE)
FIRST_SEED = {"autoencoder": 0, "crowded": 1 << 27, "tokens": 1 << 28, "decoder": 1 << 29}  # all below HELD_OUT_SEED


def painted(metadata: Metadata, rng: np.random.Generator) -> ShapeScene:
    """A settled scene on plain ground that shows what a prompt asks for."""
    while True:
        if (scene := settled(free_scene(metadata, rng, ("plain",)), STEP, RADII)) is not None:
            return scene


def pair(seed: int) -> tuple[Metadata, ShapeScene]:
    """Prompt and scene number `seed`: task uniform of TASKS, then prompt uniform in the task."""
    rng = np.random.default_rng(seed)
    metadata = sample_prompt(rng, tag=TASKS[int(rng.integers(len(TASKS)))])
    return metadata, painted(metadata, rng)


def mixed(first: int, count: int) -> torch.Tensor:
    """Pictures (count, 3, SIDE, SIDE) number `first` and on: scenes of prompts and crowded ones by turns."""
    scenes = [
        dataclasses.replace(crowded(FIRST_SEED["crowded"] + i), ground="plain") if i % 2 else pair(i)[1]
        for i in range(first, first + count)
    ]
    return pixels(scenes, SIDE)


@torch.no_grad()
def write_tokens(options: argparse.Namespace, autoencoder: AutoencoderKL) -> None:
    """Write `options.pairs` pairs to tokens.pt: prompts, means of the tokens, where shapes are, and what is begun.

    ids (N, PROMPT); means (N, tokens, SIZE) of the posterior, float16; ink (N, tokens), whether a token's pixels show
    part of a shape; begun (N, tokens, 7), as `painter_reading.progress` makes it.
    """
    file, begun = options.out / "tokens.pt", time.time()
    if options.resume and file.exists():
        return
    tokenizer, parts = build_tokenizer(), []
    for start in range(0, options.pairs, 64):
        numbers = range(start, min(start + 64, options.pairs))
        rows, scenes = zip(*(pair(FIRST_SEED["tokens"] + i) for i in numbers))
        pictures = pixels(list(scenes), SIDE)
        ink = torch.nn.functional.avg_pool2d(inked(pictures), PATCH)[:, 0] > 0
        told = np.stack([progress(*each, shown.numpy()) for each, shown in zip(zip(rows, scenes), ink)])
        parts.append(
            {
                "ids": prompt_ids(tokenizer, [row["prompt"] for row in rows]).short(),
                "means": tokens_of(autoencoder.encode(pictures).latent_dist.mean).half(),
                "ink": ink.flatten(1),
                "begun": torch.from_numpy(told),
            }
        )
    torch.save({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, file)
    print(json.dumps({"file": file.name, "pairs": options.pairs, "s": round(time.time() - begun)}), flush=True)


def tokens_of(latents: torch.Tensor) -> torch.Tensor:
    """Latents (B, SIZE, rows, columns) as tokens (B, rows * columns, SIZE), in raster order."""
    return latents.flatten(2).transpose(1, 2)


def read_tokens(folder: Path) -> dict[str, torch.Tensor]:
    """What `write_tokens` wrote."""
    return torch.load(folder / "tokens.pt", weights_only=True)
