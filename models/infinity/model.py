"""Folder with an Infinity and its autoencoder, in transformers' layout."""

from __future__ import annotations

from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.infinity.network import Infinity, InfinityConfig
from visspec.models.scales.bsq import BSQVAE, BSQShape
from visspec.models.scales.multiscale import ScaleSizes


class InfinityImageConfig(PartsConfig):
    """network: sizes, see `InfinityConfig`, with `grids` for its scales. codec: see `BSQShape`."""

    model_type = "infinity_image"

    @property
    def sizes(self) -> InfinityConfig:
        fields = dict(self.network)
        scales = ScaleSizes(tuple((rows, columns) for rows, columns in fields.pop("grids")))
        reach = fields.pop("reach", None)
        return InfinityConfig(**fields, scales=scales, reach=reach and tuple(reach))


class InfinityImageModel(OwnImageModel):
    """`net` generates bit maps; `codec` converts between them and images."""

    config_class = InfinityImageConfig
    base_model_prefix = "net"

    def __init__(self, config: InfinityImageConfig):
        super().__init__(config)
        self.net = Infinity(config.sizes)
        self.codec = BSQVAE(BSQShape(**config.codec | {"multipliers": tuple(config.codec["multipliers"])}))
        self.text_features = config.sizes.text
        self.post_init()
