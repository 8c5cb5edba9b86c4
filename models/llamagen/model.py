"""A LlamaGen, or a RandAR of classes, with its codec in one folder, as transformers writes folders."""

from __future__ import annotations

from typing import ClassVar

from diffusers import VQModel

from visspec.models.codecs.vqgan import ImageCodec
from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.llamagen.network import LlamaGen, LlamaGenConfig
from visspec.models.llamagen.randar import RandAR


class LlamaGenImageConfig(PartsConfig):
    """network: sizes, as in `LlamaGenConfig`. codec: configuration of a stock `VQModel`."""

    model_type = "llamagen_image"


class LlamaGenImageModel(OwnImageModel):
    """`net` draws codes, `codec` turns them into pictures and back."""

    config_class = LlamaGenImageConfig
    base_model_prefix = "net"
    network: ClassVar[type[LlamaGen]] = LlamaGen

    def __init__(self, config: LlamaGenImageConfig):
        super().__init__(config)
        sizes = LlamaGenConfig(**config.network)
        self.net, self.codec = self.network(sizes), VQModel(**config.codec)
        self.class_conditional = sizes.condition == "class"
        self.text_features = 0 if self.class_conditional else sizes.caption_width
        self.post_init()

    @property
    def image_codec(self) -> ImageCodec:
        return ImageCodec(self.codec)


class RandARClassConfig(LlamaGenImageConfig):
    """Of a RandAR, likewise."""

    model_type = "randar_classes"


class RandARClassModel(LlamaGenImageModel):
    """`net` draws codes in any order."""

    config_class = RandARClassConfig
    network = RandAR
