"""`RandARImageModel`, a folder with a RandAR and its VQ model, as a family of images: prompts are texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from visspec.models.randar.model import JanusCodec, RandARImageModel
from visspec.models.randar.target import RandARImages


class PromptedRandARImages(RandARImages):
    """settings: a generation_config in place of the model's."""

    def __init__(
        self,
        model: RandARImageModel,
        processor: Callable[..., Any] | None = None,
        *,
        settings: GenerationConfig | None = None,
    ):
        super().__init__(model.net, processor, JanusCodec(model.vqmodel))
        self.image_model = model
        self.default_guidance = model.guidance(settings)

    def _condition(self, texts: list[str], name: str) -> tuple[Tensor, Tensor | None]:
        batch = self.require_processor()(text=texts, generation_mode="image", padding=True, return_tensors="pt")
        ids, real = (batch[part].to(self.image_model.device) for part in ("input_ids", "attention_mask"))
        try:
            return self.image_model.features(ids, real.bool())
        except ValueError as error:
            raise ValueError(str(error).replace("prompt", name, 1)) from None
