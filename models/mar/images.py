"""`MARImageModel`, a folder with a MAR, as a family of images: prompts are the names of its classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

from visspec.models.mar.model import MARImageModel, load
from visspec.models.mar.target import MARImages


class LabelledMARImages(MARImages):
    """settings: a generation_config in place of the model's. denoising_steps: of a vector, in place of the model's;
    fewer make another distribution, faster.
    """

    load = staticmethod(load)

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
        self.default_guidance = model.guidance(settings)
        self.labels = tuple(model.config.labels)
