"""`MARImageModel`, a folder with a MAR, as a family of images: prompts are the names of its classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

from visspec.models.image_codes.class_numbers import class_numbers
from visspec.models.image_codes.target import ImageLayout
from visspec.models.mar.model import MARImageModel
from visspec.models.mar.target import ClassPrompt, MARImages


class LabelledMARImages(MARImages):
    """settings: a generation_config in place of the model's. denoising_steps: of a vector, in place of the model's;
    fewer make another distribution, faster.
    """

    def __init__(
        self,
        model: MARImageModel,
        processor: Callable[..., Any] | None = None,
        *,
        settings: GenerationConfig | None = None,
        denoising_steps: int | None = None,
    ):
        autoencoder = None if model.config.autoencoder is None else model.autoencoder
        super().__init__(model.mar, processor, autoencoder, model.schedule(denoising_steps))
        found = getattr(settings or model.generation_config, "guidance_scale", None)
        self.default_guidance = 1.0 if found is None else float(found)
        self.labels = tuple(model.config.labels)
        self.numbers = {label: number for number, label in enumerate(self.labels)}

    def prompt(self, texts: list[str], guided: bool, layout: ImageLayout | None = None) -> Any:
        """Raises ValueError for a text that is no name and no number of a class."""
        unknown = [text for text in texts if text not in self.numbers and not text.strip().isdecimal()]
        if unknown:
            some = ", ".join(map(repr, list(self.numbers)[:2]))
            raise ValueError(
                f"prompt: got {unknown[0]!r}, expected one of the {len(self.numbers)} classes ({some}, ...)"
            )
        numbers = [str(self.numbers.get(text, text)) for text in texts]
        classes = class_numbers(numbers, self.model.config.classes, "prompt")
        return ClassPrompt(classes.to(self.model.device))
