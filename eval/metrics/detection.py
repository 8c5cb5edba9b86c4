"""Interfaces of GenEval's detector and colour classifier, and colours that a detector has measured itself."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

UNKNOWN = "unknown"  # for objects with none of the ten colours


@dataclass(frozen=True)
class Detection:
    """One object: label, score 0..1, box (x0, y0, x1, y1) in pixels, mask bool (height, width), colour if known."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = field(default=None, repr=False, compare=False)
    colour: str | None = None


@dataclass(frozen=True)
class DetectionResult:
    """A detector's result for one image. If `refused` is not empty, it is the reason why the image fails."""

    detections: tuple[Detection, ...]
    refused: str = ""


class Detector(Protocol):
    """`closed_set`: whether all classes are detected, not only those of the prompt; `strict` needs it.

    `fingerprint` identifies weights and settings. `original` is True only for GenEval's own detector.
    """

    name: str
    fingerprint: str
    closed_set: bool
    original: bool
    max_overlap: float  # boxes of one class overlapping more than this are merged; 1.0 disables merging

    def threshold(self, tag: str) -> float:
        """Scores must exceed this for a task."""

    def detect(self, image: Image.Image, classes: Sequence[str]) -> DetectionResult:
        """Objects of the given classes in an RGB image (a closed-set detector may return others too)."""


class ColourClassifier(Protocol):
    """Names the colour of detected objects; `original` is True only for GenEval's own classifier."""

    name: str
    fingerprint: str
    original: bool

    def classify(self, image: Image.Image, detections: Sequence[Detection], label: str) -> list[str]:
        """A colour word for each detection of one class."""


def digest(*parts: object) -> str:
    """Short stable hash of printable settings and bytes."""
    plain = [hashlib.blake2b(part).hexdigest() if isinstance(part, bytes) else part for part in parts]
    return hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()


def file_digest(path: str | Path) -> str:
    """Hex SHA-256 digest of a file's bytes, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DetectedColours:
    """Colours measured by the detector."""

    name = "detected"
    fingerprint = "detected-1"
    original = False

    def classify(self, image: Image.Image, detections: Sequence[Detection], label: str) -> list[str]:
        return [d.colour or UNKNOWN for d in detections]
