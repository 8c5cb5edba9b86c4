"""Folder with a NextStep-1 and its image tokenizer, in transformers' layout."""

from __future__ import annotations

from diffusers import AutoencoderKL
from transformers import Qwen2Config

from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.nextstep.network import NextStep, NextStepConfig


class NextStepImageConfig(PartsConfig):
    """network: `sizes`, see `NextStepConfig`; the `decoder`, see `Qwen2Config`; and whether tokens are `normalised`.
    codec: configuration of an `AutoencoderKL`.
    """

    model_type = "nextstep_image"


class NextStepImageModel(OwnImageModel):
    """`net` generates vectors; `codec` decodes them to images."""

    config_class = NextStepImageConfig
    base_model_prefix = "net"

    def __init__(self, config: NextStepImageConfig):
        super().__init__(config)
        network = config.network
        sizes, decoder = NextStepConfig(**network["sizes"]), Qwen2Config.from_dict(network["decoder"])
        self.net, self.codec = NextStep(sizes, decoder, network["normalised"]), AutoencoderKL(**config.codec)
        self.post_init()
