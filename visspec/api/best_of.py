"""The best of several images of a prompt, by a score of pictures: selection, which changes the distribution of what is
drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PIL import Image

from visspec.eval.metrics import geneval, named
from visspec.toys.world import suite

Score = Callable[[Sequence[Image.Image], str], list[float]]  # images of one prompt: the higher, the better
NAMES = "detector, or clip:MODEL"


def scorer(name: str, prompts: Sequence[str], device: str = "cpu") -> Score:
    """A score by name. Raises ValueError for an unknown one, and for prompts that it can't judge."""
    kind, _, model = name.partition(":")
    if kind == "detector" and not model:
        for prompt in prompts:
            suite.parse(prompt)
        return by_detector
    if kind == "clip" and model:
        return by_clip(model, device)
    raise ValueError(f"scorer: got {name!r}, expected {NAMES}")


def by_detector(images: Sequence[Image.Image], prompt: str) -> list[float]:
    """Rendered shapes: 1 for a picture that is what its prompt says and 2 if nothing else is on it; for others, minus
    the number of things that are not as they should be.
    """
    detector, colours, metadata = named.detector("shapes"), named.colours("detected"), suite.parse(prompt)
    found = []
    for image in images:
        correct, strict, reasons, _ = geneval.judged(image, metadata, detector, colours)
        found.append(1.0 + bool(strict) if correct else -1.0 - reasons.count("\n"))
    return found


def by_clip(model: str, device: str = "cpu") -> Score:
    """Cosines of a CLIP model, a folder or a hub id."""
    clip = named.clip(model, device)
    return lambda images, prompt: clip.cosines(images, [prompt] * len(images)).tolist()


def best(scores: Sequence[float]) -> int:
    """The first of the highest scores."""
    return max(range(len(scores)), key=lambda i: (scores[i], -i))
