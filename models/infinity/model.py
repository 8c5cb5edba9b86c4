"""An Infinity with its autoencoder in one folder, as transformers writes folders."""

from __future__ import annotations

from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.infinity.network import Infinity, InfinityConfig
from visspec.models.scales.bsq import BSQVAE, BSQShape
from visspec.models.scales.multiscale import ScaleSizes


class InfinityImageConfig(PartsConfig):
    """network: sizes, as in `InfinityConfig`, with `grids` for its scales. codec: as in `BSQShape`."""

    model_type = "infinity_image"

    @property
    def sizes(self) -> InfinityConfig:
        """The network's."""
        fields = dict(self.network)
        scales = ScaleSizes(tuple((rows, columns) for rows, columns in fields.pop("grids")))
        reach = fields.pop("reach", None)
        return InfinityConfig(**fields, scales=scales, reach=reach and tuple(reach))


class InfinityImageModel(OwnImageModel):
    """`net` draws maps of bits, `codec` turns them into pictures and back."""

    config_class = InfinityImageConfig
    base_model_prefix = "net"

    def __init__(self, config: InfinityImageConfig):
        super().__init__(config)
        self.net = Infinity(config.sizes)
        self.codec = BSQVAE(BSQShape(**config.codec | {"multipliers": tuple(config.codec["multipliers"])}))
        self.text_features = config.sizes.text
        self.post_init()
