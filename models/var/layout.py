"""Folder with a VAR and its autoencoder, in transformers' layout (class names are the prompts), and published weights.

Published are transformers (d16 to d36; 512 pixels with shared modulation) and a multi-scale VQ autoencoder:
safetensors, converted from `var_d*.pth` and `vae_ch160v4096z32.pth` (`visspec convert`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from visspec.models.codecs.vq_layout import CODEBOOK, load_stock
from visspec.models.folders import OwnImageModel
from visspec.models.layers import same_table
from visspec.models.published_tensors import Weights, read_all_tensors, rename
from visspec.models.scales.multiscale import GROUPS, MultiScaleShape, MultiScaleVAE, ScaleSizes
from visspec.models.var.network import GUIDANCE, VAR, VARConfig

NOT_WEIGHTS = r"attn_bias_for_masking$"  # follows from the scales
NOT_VQ_WEIGHTS = r"quantize\.ema_vocab_hit_SV$"  # a histogram of used codes
SMOOTH = "quantize.quant_resi.qresi_ls."


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
            raise ValueError(f"labels: got {len(self.labels)} names with duplicates, expected unique names.")
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


def check_codebook(name: str, other: VARImageModel, model: VARImageModel) -> None:
    """Raise ValueError unless both models have the same codebook."""
    own, theirs = (one.autoencoder.quantize.embedding.weight for one in (other, model))
    if not same_table(own, theirs, 1e-3):
        raise ValueError(f"{name}: got a model with another codebook, expected the model's {len(theirs)} codes.")


def load_var(path: str | Path) -> VAR:
    """Load a VAR network from a .safetensors file or folder. Its configuration follows from shapes of the weights, the
    scales from the level of each position.
    """
    weights = Weights.read(path, dropped=NOT_WEIGHTS)
    width, code_size = weights.shape("word_embed.weight", 2)
    weights.shape("lvl_1L", 2)
    config = VARConfig(
        width,
        weights.count("blocks."),
        heads=weights.shape("blocks.0.attn.scale_mul_1H11", 4)[1],
        scales=_scales(weights["lvl_1L"][0], weights.where),
        codes=weights.shape("head.weight", 2)[0],
        code_size=code_size,
        classes=weights.shape("class_emb.weight", 2)[0] - 1,
        hidden=weights.shape("blocks.0.ffn.fc1.weight", 2)[0],
        shared="shared_ada_lin.1.weight" in weights,
    )
    del weights["lvl_1L"]
    return weights.load(VAR(config))


def _scales(level_L: Tensor, where: str | Path) -> ScaleSizes:
    levels = level_L.long().tolist()
    sizes = tuple(levels.count(k) for k in range(max(levels, default=-1) + 1))
    if not sizes or levels != [k for k, size in enumerate(sizes) for _ in range(size)]:
        raise ValueError(f"checkpoint: lvl_1L of {where} is {levels[:8]}..., expected the level of each position.")
    sides = [math.isqrt(size) for size in sizes]
    if any(side**2 != size for side, size in zip(sides, sizes)):
        raise ValueError(f"checkpoint: {where} has maps of {sizes} codes, expected squares.")
    return ScaleSizes.square(*sides)


def load_var_vae(path: str | Path) -> MultiScaleVAE:
    """Load VAR's autoencoder, or another with its layout."""
    weights = Weights(path, rename(_split(read_all_tensors(path)), (), NOT_VQ_WEIGHTS))
    (codes, size), kernel = weights.shape(CODEBOOK, 2), weights.shape("quant_conv.weight", 4)[2]
    shape = MultiScaleShape(codes, size, *weights.encoder(), weights.count(SMOOTH), kernel)
    return load_stock(weights, MultiScaleVAE(shape))


def _split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split attention's fused projection into queries, keys and values, as in taming's layout."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.attn[^.]*(?:\.\d+)?)\.qkv\.(weight|bias)", name)
        if match is None:
            split[name] = tensor
            continue
        split |= {f"{match[1]}.{part}.{match[2]}": third for part, third in zip("qkv", tensor.chunk(3))}
    return split


def published(weights: Path, vq: Path) -> VARImageModel:
    """Build a VAR with its autoencoder from published files."""
    net, codec = load_var(weights), load_var_vae(vq)
    network = {name: getattr(net.config, name) for name in ("width", "depth", "heads", "hidden", "shared")}
    grids = [list(grid) for grid in net.config.scales.grids]
    labels = [str(number) for number in range(net.config.classes)]
    entries = {"network": network, "grids": grids, "labels": labels, "autoencoder": asdict(codec.shape)}
    settings = {"guidance_scale": GUIDANCE, "top_k": 900, "top_p": 0.96}
    return VARImageModel.of(entries, settings, var=net, autoencoder=codec)
