"""Folder with an Infinity and its autoencoder, in transformers' layout, and their published weights: safetensors,
converted from `infinity_*.pth`, the shards of the 8B model and `infinity_vae_*.pth` (`visspec convert`).

Blocks may be in chunks (`block_chunks.c.module.i`), as in all released models, or not (`blocks.n`). Convolutions and
norms of the autoencoder may be in wrappers (`conv1.conv`, `norm1.norm`) or not; the authors' own code reads both.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path

from visspec.models.codecs.vq_layout import load_stock
from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.infinity.network import COUNTS, GRIDS, GUIDANCE, Infinity, InfinityConfig, schedule
from visspec.models.published_tensors import Weights
from visspec.models.scales.bsq import BSQVAE, BSQShape
from visspec.models.scales.multiscale import ScaleSizes

CHUNK = r"block_chunks\.(\d+)\.module\.(\d+)\."
# these follow from the scales
NOT_WEIGHTS = r"(lvl_1L|attn_bias_for_masking|Infinity_visible_kvlen|Infinity_invisible_qlen)$"
NOT_VAE_WEIGHTS = r"quantizer?\.lfq\.mask$"  # powers of two
UNWRAPPED = [
    (r"(conv_in|conv_out|conv1|conv2|nin_shortcut|sample\.conv)\.conv\.", r"\1."),
    (r"(norm1|norm2|norm_out)\.norm\.", r"\1."),
]


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


def load_infinity(path: str | Path, scales: ScaleSizes | None = None) -> Infinity:
    """Load an Infinity network from a .safetensors file or a folder of them.

    Args:
        scales: Size and shape of its images, which the weights do not contain; default `infinity.schedule()`, square
            images of a megapixel.
    """
    weights = Weights.read(path, dropped=NOT_WEIGHTS)
    places = {(int(match[1]), int(match[2])) for match in map(re.compile(CHUNK).match, weights) if match}
    each = max((place for _, place in places), default=-1) + 1  # blocks per chunk
    weights = weights.renamed([(f"^{CHUNK}", lambda match: f"blocks.{int(match[1]) * each + int(match[2])}.")])
    width, code_size = weights.shape("word_embed.weight", 2)
    longest, text = weights.shape("cfg_uncond", 2)
    config = InfinityConfig(
        width,
        weights.count("blocks."),
        heads=weights.shape("blocks.0.sa.scale_mul_1H11", 4)[1],
        scales=scales or schedule(),
        code_size=code_size,
        text=text,
        pool=weights.shape("text_proj_for_sos.ca.mat_q", 3)[1],
        longest=longest,
        levels=weights.shape("lvl_embed.weight", 2)[0],
        hidden=weights.shape("blocks.0.ffn.fc1.weight", 2)[0],
    )
    return weights.load(Infinity(config))


def load_infinity_vae(path: str | Path, patch: int = 1) -> BSQVAE:
    """Load Infinity's autoencoder from safetensors.

    Args:
        patch: 2 for the 8B model's (`d56_f8_14_patchify`).
    """
    weights = Weights.read(path, UNWRAPPED, NOT_VAE_WEIGHTS)
    bits = weights.shape("decoder.conv_in.weight", 4)[1]
    return load_stock(weights, BSQVAE(BSQShape(bits, *weights.encoder(), patch)))


def published(weights: Path, vq: Path, size: int = 1024) -> InfinityImageModel:
    """Build an Infinity with its autoencoder from published files.

    Args:
        size: Side of its square images, in pixels.
    """
    pixels = {16 * GRIDS[1.0][count - 1][0]: name for name, count in COUNTS.items()}
    if size not in pixels:
        raise ValueError(f"size: got {size}, expected a side in pixels, {', '.join(map(str, pixels))}.")
    net, bits = load_infinity(weights, schedule(1.0, pixels[size])), load_infinity_vae(vq).shape.bits
    codec = load_infinity_vae(vq, patch=math.isqrt(net.config.code_size // bits))
    network = {name: value for name, value in vars(net.config).items() if name != "scales"}
    entries = {"network": network | {"grids": net.config.scales.grids}, "codec": asdict(codec.shape)}
    settings = {"guidance_scale": GUIDANCE, "temperature": 0.5, "top_p": 0.97}
    return InfinityImageModel.of(entries, settings, net=net, codec=codec)
