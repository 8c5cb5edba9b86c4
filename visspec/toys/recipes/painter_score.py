"""GenEval of pictures in memory: the shape world's detector and colours, GenEval's own judgement."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from visspec.eval.metrics.detection import DetectedColours, Detector
from visspec.eval.metrics.geneval import judge, kept, summarise
from visspec.toys.judges import ShapeWorldDetector
from visspec.toys.world.suite import Metadata

JUDGED_AT = 96  # smaller pictures are enlarged to this side before the detector sees them


def to_uint8(pictures: torch.Tensor) -> np.ndarray:
    """Pictures in -1..1, (B, 3, S, S), as uint8 (B, S, S, 3)."""
    grey = ((pictures.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return grey.permute(0, 2, 3, 1).numpy()


def verdicts(pictures: np.ndarray, rows: Sequence[Metadata], detector: Detector | None = None) -> list[bool]:
    """Whether each picture, uint8 (B, S, S, 3), shows what its prompt asks for; the shapes' detector unless given."""
    detector, colours = detector or ShapeWorldDetector(), DetectedColours()
    out = []
    for picture, row in zip(pictures, rows):
        image = Image.fromarray(picture)
        if image.width < JUDGED_AT:
            image = image.resize((JUDGED_AT, JUDGED_AT), Image.Resampling.BICUBIC)
        found = detector.detect(image, ())
        out.append(not found.refused and judge(None, kept(found, 0.0), row, colours)[0])
    return out


def summary(right: Sequence[bool], rows: Sequence[Metadata]) -> dict:
    """Right verdicts by task, their unweighted mean (GenEval's overall score), and the share of all prompts."""
    found = summarise({"tag": row["tag"], "metadata": row["prompt"], "correct": ok} for ok, row in zip(right, rows))
    tasks = {tag: round(task["score"], 4) for tag, task in found["tasks"].items()}
    return {"geneval": round(found["overall"], 4), "images": round(found["correct_images"], 4), "tasks": tasks}
