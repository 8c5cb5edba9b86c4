"""Folder with a VAR and its autoencoder, in transformers' layout. Its class names are the prompts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedConfig

from visspec.models.folders import OwnImageModel
from visspec.models.layers import same_table
from visspec.models.scales.multiscale import GROUPS, MultiScaleShape, MultiScaleVAE, ScaleSizes
from visspec.models.var.network import VAR, VARConfig


class VARImageConfig(PreTrainedConfig):
    """network: sizes, see `VARConfig`, without codes (the autoencoder's) and scales. grids: rows and columns of each
    map. labels: the prompt of each class. autoencoder: see `MultiScaleShape`.
    """

    model_type = "var_image"

    def __init__(
        self,
        network: dict[str, Any] | None = None,
        grids: list[list[int]] | None = None,
        labels: list[str] | None = None,
        autoencoder: dict[str, Any] | None = None,
        **options: Any,
    ):
        self.network = {"width": 32, "depth": 1, "heads": 2} | (network or {})
        self.grids = [[1, 1], [2, 2]] if grids is None else [list(grid) for grid in grids]
        self.labels = ["a picture"] if labels is None else labels
        small: dict[str, Any] = {"codes": 64, "size": 16, "channels": GROUPS, "multipliers": (1, 1), "blocks": 1}
        self.autoencoder = asdict(MultiScaleShape(**small | (autoencoder or {})))
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels: got {len(self.labels)} names with duplicates, expected unique names")
        self.sizes  # noqa: B018, raises for an invalid network
        super().__init__(**options)

    @property
    def shape(self) -> MultiScaleShape:
        return MultiScaleShape(**self.autoencoder | {"multipliers": tuple(self.autoencoder["multipliers"])})

    @property
    def sizes(self) -> VARConfig:
        return VARConfig(
            **self.network,
            scales=ScaleSizes(tuple((rows, columns) for rows, columns in self.grids)),
            codes=self.shape.codes,
            code_size=self.shape.size,
            classes=len(self.labels),
        )


class VARImageModel(OwnImageModel):
    """`var` generates maps of codes; `autoencoder` converts between them and images."""

    config_class = VARImageConfig
    base_model_prefix = "var"
    class_conditional = True

    def __init__(self, config: VARImageConfig):
        super().__init__(config)
        self.var = VAR(config.sizes)
        self.autoencoder = MultiScaleVAE(config.shape)
        self.post_init()

    @property
    def image_codec(self) -> MultiScaleVAE:
        return self.autoencoder


def check_codebook(name: str, other: VARImageModel, model: VARImageModel) -> None:
    """Raise ValueError unless both models have the same codebook."""
    own, theirs = (one.autoencoder.quantize.embedding.weight for one in (other, model))
    if not same_table(own, theirs, 1e-3):
        raise ValueError(f"{name}: got a model with another codebook, expected the model's {len(theirs)} codes")


load = VARImageModel.read
