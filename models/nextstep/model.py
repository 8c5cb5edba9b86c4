"""A NextStep-1 with its image tokenizer in one folder, as transformers writes folders."""

from __future__ import annotations

from diffusers import AutoencoderKL
from transformers import Qwen2Config

from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.nextstep.network import NextStep, NextStepConfig


class NextStepImageConfig(PartsConfig):
    """network: `sizes` as in `NextStepConfig`, the `decoder` as in `Qwen2Config`, and whether tokens are `normalised`.
    codec: configuration of an `AutoencoderKL`.
    """

    model_type = "nextstep_image"


class NextStepImageModel(OwnImageModel):
    """`net` draws vectors, `codec` turns them into pictures."""

    config_class = NextStepImageConfig
    base_model_prefix = "net"

    def __init__(self, config: NextStepImageConfig):
        super().__init__(config)
        network = config.network
        sizes, decoder = NextStepConfig(**network["sizes"]), Qwen2Config.from_dict(network["decoder"])
        self.net, self.codec = NextStep(sizes, decoder, network["normalised"]), AutoencoderKL(**config.codec)
        self.post_init()
