"""GenEval of pictures in memory: a world's detector and colours, GenEval's own judgement."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from visspec.api.images import ImageOutput, ImagePipeline
from visspec.eval.metrics.detection import DetectedColours
from visspec.eval.metrics.geneval import judge, select_detections, summarise
from visspec.toys.world.suite import Metadata
from visspec.toys.world.worlds import world

JUDGED_AT = 96  # smaller pictures are enlarged to this side before the detector sees them


def to_uint8(pictures: torch.Tensor) -> np.ndarray:
    """Pictures in -1..1, (B, 3, S, S), as uint8 (B, S, S, 3)."""
    grey = ((pictures.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return grey.permute(0, 2, 3, 1).numpy()


def verdicts(pictures: np.ndarray, rows: Sequence[Metadata], of: str = "shapes") -> list[bool]:
    """Whether each picture, uint8 (B, S, S, 3), shows what its prompt asks for, by the detector of a world."""
    detector, colours = world(of).detector(), DetectedColours()
    out = []
    for picture, row in zip(pictures, rows):
        image = Image.fromarray(picture)
        if image.width < JUDGED_AT:
            image = image.resize((JUDGED_AT, JUDGED_AT), Image.Resampling.BICUBIC)
        found = detector.detect(image, ())
        out.append(not found.refused and judge(None, select_detections(found, 0.0), row, colours)[0])
    return out


def geneval(pictures: np.ndarray, rows: Sequence[Metadata], of: str = "shapes") -> dict:
    """Right ones of pictures, uint8 (B, S, S, 3), of these prompts by task, their unweighted mean (GenEval's overall
    score), and the share of all prompts.
    """
    right = verdicts(pictures, rows, of)
    found = summarise({"tag": row["tag"], "metadata": row["prompt"], "correct": ok} for ok, row in zip(right, rows))
    tasks = {tag: round(task["score"], 4) for tag, task in found["tasks"].items()}
    return {"geneval": round(found["overall"], 4), "images": round(found["correct_images"], 4), "tasks": tasks}


def score(
    draw: Callable[..., np.ndarray], rows: Sequence[Metadata], of: str = "shapes", **settings: float
) -> dict[str, Any]:
    """The settings, GenEval of one picture a prompt, and the seconds it took; draw(prompts, **settings)."""
    begun = time.time()
    found = geneval(draw([row["prompt"] for row in rows], **settings), rows, of)
    return settings | found | {"seconds": round(time.time() - begun, 1)}


def draw_pictures(
    pipe: ImagePipeline, prompts: list[str], guidance: float | None, seed: int, batch: int, **options
) -> ImageOutput:
    """Pictures of prompts as the pipeline draws them, floats (B, 3, S, S); `options` are its own."""
    pipe.set_progress_bar_config(disable=True)
    seeds = [seed * 10_000 + i for i in range(len(prompts))]
    return pipe(prompts, guidance_scale=guidance, seed=seeds, batch_size=batch, output_type="pt", **options)


def pictures_of(out: ImageOutput) -> torch.Tensor:
    """The pictures of a pipeline in -1..1, (B, 3, S, S)."""
    return torch.stack(list(out.images)) * 2 - 1
