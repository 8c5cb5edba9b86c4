"""Pictures that the painter draws itself, with what a distilled drafter learns from: distributions and noise.

A picture's noise is not stored: it follows from its seed (`visspec.sampling.Gumbel`).
Shapes: B pictures, P ids of the longest prompt, T codes, d hidden size, K most likely codes of a distribution.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.accept.exact import Exact
from visspec.api.loading import load_image_model
from visspec.io.files import replacing
from visspec.models.eagle.image_drafter import CaptureTarget
from visspec.models.image_codes.families import family_of
from visspec.models.janus.target import Janus
from visspec.sampling import Gumbel
from visspec.toys.recipes.painter_drafter import Pictures, held_out, request_of
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.worlds import world
from visspec.train.capture import capture
from visspec.types import Request

FIRST_SEED = 7 << 27  # noise and prompts of no other recipe, below the held-out ones
BATCH = 64  # pictures in a file
LIKELY = 32  # codes of a distribution that are stored
HELD_OUT = "held-out.pt"


def painter(name: str) -> Janus:
    """The family of an included painter, or of a folder. Raises ValueError for another model."""
    family = family_of(*load_image_model(name))
    if not isinstance(family, Janus):
        raise ValueError(f"target: got a model of the type {family.name!r}, expected a painter, which is a Janus")
    return family


@torch.no_grad()
def recorded(family: Janus, request: Request, first: int) -> dict[str, Tensor]:
    """Pictures of a request whose row b draws from the seed `first + b`, all on the CPU: `seed` (B,), `words` (B, P)
    bool, `prompt` (B, P, d) the painter's inputs, `codes` (B, T), `likely` and `distribution` (B, T - 1, K) the
    distributions after all codes but the last: the likely codes, and logarithms.
    """
    lesson = capture(CaptureTarget(family), Exact(), request)
    codes = lesson.ids[:, lesson.prompt_length :].short()
    law, likely = lesson.logits.log_softmax(dim=-1).topk(LIKELY, dim=-1)
    assert lesson.attention is not None and lesson.embeddings is not None
    return {
        "seed": torch.arange(first, first + len(codes)),
        "words": lesson.attention.bool(),
        "prompt": lesson.embeddings.half(),
        "codes": codes,
        "likely": likely.short(),
        "law": law.half(),
    }


def noise(seeds: Tensor, count: int, width: int) -> Tensor:
    """(B, count, width): the Gumbel numbers of the first places of pictures with these seeds."""
    return Gumbel([torch.Generator().manual_seed(int(seed)) for seed in seeds], width).window(count)


def write_pictures(options: argparse.Namespace) -> None:
    """Draw the held-out pictures and `options.pictures` others; files that are there are kept."""
    family, seen = painter(options.target), world("shapes")
    guidance = family.default_guidance
    draw = Pictures(family, seen, BATCH, guidance, FIRST_SEED)
    held = request_of(family, held_out(seen, BATCH), HELD_OUT_SEED, guidance)
    for file in [HELD_OUT, *files(options.pictures)]:
        begun = time.time()
        if (options.out / file).exists():
            continue
        number = -1 if file == HELD_OUT else int(file[9:-3])
        request, first = (held, HELD_OUT_SEED) if number < 0 else (draw(number), FIRST_SEED + number * BATCH)
        found = recorded(family, request, first)
        with replacing(options.out / file) as made:
            torch.save(found, made)
        print(json.dumps({"file": file, "pictures": BATCH, "s": round(time.time() - begun, 1)}), flush=True)


def files(count: int) -> list[str]:
    """Names of the files with the first so many pictures."""
    return [f"pictures-{number}.pt" for number in range(-(-count // BATCH))]


def read_pictures(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Files in their order, prompts padded on the left to one length."""
    wanted = ("seed", "words", "prompt", "codes", "likely", "law")
    parts = [{k: v for k, v in torch.load(folder / name, weights_only=True).items() if k in wanted} for name in names]
    longest = max(part["words"].shape[1] for part in parts)
    for part in parts:
        missing = longest - part["words"].shape[1]
        part["words"] = F.pad(part["words"], (missing, 0))
        part["prompt"] = F.pad(part["prompt"], (0, 0, missing, 0))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
