"""Folder with a MAR and its autoencoder, in transformers' layout. Its class names are the prompts."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from diffusers import AutoencoderKL
from transformers import PreTrainedConfig

from visspec.models.folders import OwnImageModel
from visspec.models.mar.network import MAR, MARConfig
from visspec.models.vectors.diffusion_head import Schedule, schedule


class MARImageConfig(PreTrainedConfig):
    """network: sizes, see `MARConfig`. labels: the prompt of each class. predicts: what the head predicts, a key of
    `PREDICTIONS` (noise in published MAR). denoising_steps: per token. autoencoder: configuration of an `AutoencoderKL`
    whose latents are the tokens, or None for a drafter.
    """

    model_type = "mar_image"

    def __init__(
        self,
        network: dict[str, Any] | None = None,
        labels: list[str] | None = None,
        predicts: str = "noise",
        denoising_steps: int = 100,
        autoencoder: dict[str, Any] | None = None,
        **options: Any,
    ):
        sizes = MARConfig(
            **({"width": 32, "depth": 1, "heads": 2, "head_width": 32, "head_depth": 1} | (network or {}))
        )
        self.network, self.labels = asdict(sizes), [str(i) for i in range(sizes.classes)] if labels is None else labels
        if len(set(self.labels)) != sizes.classes:
            raise ValueError(f"labels: got {len(set(self.labels))} names, expected {sizes.classes}, one for each class")
        self.predicts, self.denoising_steps, self.autoencoder = predicts, denoising_steps, autoencoder
        super().__init__(**options)


class MARImageModel(OwnImageModel):
    """`mar`, and `autoencoder` if the configuration has one."""

    config_class = MARImageConfig
    base_model_prefix = "mar"
    class_conditional = True

    def __init__(self, config: MARImageConfig):
        super().__init__(config)
        self.mar = MAR(MARConfig(**config.network))
        with torch.device("cpu"):  # a schedule needs real numbers, even if the weights are on `meta`
            self.schedule()  # raises for unknown predictions
        if config.autoencoder is not None:
            self.autoencoder = AutoencoderKL(**config.autoencoder)
        self.post_init()

    @property
    def image_codec(self) -> AutoencoderKL | None:
        return None if self.config.autoencoder is None else self.autoencoder

    def schedule(self, steps: int | None = None) -> Schedule:
        """Return the steps of a token's chain, by default `denoising_steps`, with noise in the last one."""
        plan = schedule(self.config.denoising_steps if steps is None else steps, learned=True)
        return replace(plan, predicts=self.config.predicts)


load = MARImageModel.read
