"""Folder with a LlamaGen, or a RandAR of classes, and its codec, in transformers' layout."""

from __future__ import annotations

from typing import ClassVar

from diffusers import VQModel

from visspec.models.codecs.vqgan import ImageCodec
from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.llamagen.network import LlamaGen, LlamaGenConfig
from visspec.models.llamagen.randar import RandAR


class LlamaGenImageConfig(PartsConfig):
    """network: sizes, see `LlamaGenConfig`. codec: configuration of a stock `VQModel`."""

    model_type = "llamagen_image"


class LlamaGenImageModel(OwnImageModel):
    """`net` generates codes; `codec` converts between them and images."""

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
    """Configuration of a RandAR, with the same fields."""

    model_type = "randar_classes"


class RandARClassModel(LlamaGenImageModel):
    """`net` generates codes in any order."""

    config_class = RandARClassConfig
    network = RandAR
