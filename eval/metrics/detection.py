"""Interfaces of GenEval's detector and colour classifier, and colours measured by a detector itself."""

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from PIL import Image
from tqdm import tqdm

Item = TypeVar("Item")
UNKNOWN = "unknown"  # colour of objects that have none of the ten colours


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
    """A detector's result for one image. If not empty, `refused` is the reason why the image fails."""

    detections: tuple[Detection, ...]
    refused: str = ""


class Detector(Protocol):
    """Detects all classes that it knows, not only those of a prompt, because `strict` counts the others. `fingerprint`
    identifies weights and settings. `original` is True only for GenEval's own detector.
    """

    name: str
    fingerprint: str
    original: bool

    def threshold(self, tag: str) -> float:
        """Return the value that scores must exceed for a task."""

    def detect(self, image: Image.Image) -> DetectionResult:
        """Detect the objects in an RGB image."""


class ColourClassifier(Protocol):
    """Names the colour of detected objects; `original` is True only for GenEval's own classifier."""

    name: str
    fingerprint: str
    original: bool

    def classify(self, image: Image.Image, detections: Sequence[Detection], label: str) -> list[str]:
        """Return a colour word for each detection of one class."""


def with_progress(items: Iterable[Item], unit: str = "img") -> Iterable[Item]:
    """The items, on a terminal with a bar that goes when they end."""
    return tqdm(items, unit=unit, leave=False, disable=not sys.stderr.isatty())


def digest(*parts: object) -> str:
    """Return a short stable hash of printable settings and bytes."""
    plain = [hashlib.blake2b(part).hexdigest() if isinstance(part, bytes) else part for part in parts]
    return hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return the hex SHA-256 digest of a file's bytes, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DetectedColours:
    """Colours measured by the detector."""

    name = "detected"
    fingerprint = "detected-1"
    original = False

    def classify(self, image: Image.Image, detections: Sequence[Detection], label: str) -> list[str]:
        return [d.colour or UNKNOWN for d in detections]
