"""The best of several images of a prompt, by a score of pictures: selection, which changes the distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PIL import Image

from visspec.eval.metrics import named
from visspec.io import included

Score = Callable[[Sequence[Image.Image], str], list[float]]  # images of one prompt: the higher, the better
NAMES = "detector, or clip:MODEL"


def scorer(name: str, prompts: Sequence[str], device: str = "cpu") -> Score:
    """A score by name. Raises ValueError for an unknown one, and for prompts that it can't judge."""
    kind, _, model = name.partition(":")
    if kind == "detector" and not model:
        if not included.table().scorer:
            raise ValueError(f"scorer: got {name!r} where no detector is included, expected {NAMES}")
        return included.load(included.table().scorer)(prompts)
    if kind == "clip" and model:
        return by_clip(model, device)
    raise ValueError(f"scorer: got {name!r}, expected {NAMES}")


def by_clip(model: str, device: str = "cpu") -> Score:
    """Cosines of a CLIP model, a folder or a hub id."""
    clip = named.clip(model, device)
    return lambda images, prompt: clip.cosines(images, [prompt] * len(images)).tolist()


def best(scores: Sequence[float]) -> int:
    """The first of the highest scores."""
    return max(range(len(scores)), key=lambda i: (scores[i], -i))
