"""Folder with a LlamaGen, or a RandAR of classes, and its codec, in transformers' layout, and their published weights
(RandAR's are LlamaGen's with queries).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

from diffusers import VQModel

from visspec.models.codecs.vq_layout import ImageCodec, load_llamagen_vq, settings_of
from visspec.models.folders import OwnImageModel, PartsConfig
from visspec.models.llamagen.network import GUIDANCE, SIZES, LlamaGen, LlamaGenConfig, RandAR
from visspec.models.published_tensors import Weights

IMAGENET = 1000  # number of classes of the published models
QUERIES = "pos_instruct_embeddings"
TOP_K = {"class": 2000, "caption": 1000}  # from the published sampling scripts
NOT_WEIGHTS = r"freqs_cis$|causal_mask$|layers\.\d+\.attention\.kv_cache\."


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


def load_llamagen(path: str | Path, grid: int | None = None, heads: int | None = None) -> LlamaGen:
    """Load a LlamaGen transformer from a .safetensors file or folder, or a `RandAR` if the weights have its queries.

    Args:
        grid: Rows of codes, required because the published weights do not contain it (16 for 256 pixels with VQ-16, 24
            for 384, 32 for 512).
        heads: Number of heads, only for sizes that were not published.

    A table of 1000 classes has no null class, so that the model does not support guidance; other tables have one.
    """
    weights = Weights.read(path, dropped=NOT_WEIGHTS)
    if grid is None:
        raise ValueError(f"grid: {path} does not contain the image's rows of codes, expected grid=16, 24 or 32.")
    config = config_of(weights, grid, heads)
    return weights.load((RandAR if QUERIES in weights else LlamaGen)(config))


def published(weights: Path, vq: Path, size: int | None = None, heads: int | None = None) -> LlamaGenImageModel:
    """Build a LlamaGen or RandAR with its codec from published files.

    Args:
        size: Side of its images, in pixels.
    """
    codec = load_llamagen_vq(vq)
    if size is None or size % codec.factor:
        raise ValueError(
            f"size: got {size}, expected the side of the model's images in pixels, a multiple of {codec.factor} (--size"
            f" 256, 384 or 512), which {weights.name} does not contain."
        )
    net = load_llamagen(weights, size // codec.factor, heads)
    if (codes := len(codec.codebook)) != net.config.codes:
        raise ValueError(f"vq: got a codec with {codes} codes, expected {net.config.codes} as in {weights.name}.")
    kind, condition = (RandARClassModel if isinstance(net, RandAR) else LlamaGenImageModel), net.config.condition
    entries = {"network": net.config.to_dict(), "codec": settings_of(codec.model)}
    settings = {"guidance_scale": GUIDANCE[condition] if net.guided else 1.0, "top_k": TOP_K[condition]}
    return kind.of(entries, settings, net=net, codec=codec.model)


def config_of(weights: Weights, grid: int, heads: int | None) -> LlamaGenConfig:
    """Infer the configuration from the shapes of published weights."""
    codes, hidden = weights.shape("tok_embeddings.weight", 2)
    rows, layers = weights.shape("layers.0.attention.wqkv.weight", 2)[0], weights.count("layers.")
    intermediate, where = weights.shape("layers.0.feed_forward.w1.weight", 2)[0], weights.where
    if heads is None:
        heads = {(n, d): h for n, h, d in SIZES.values()}.get((layers, hidden))
        if heads is None:
            raise ValueError(f"heads: {where} has {layers} layers of width {hidden}, expected heads=... for this size.")
    if heads < 1 or hidden % heads or rows % (hidden // heads) or (kv := rows * heads // hidden - heads) < 2 or kv % 2:
        raise ValueError(
            f"heads: got {heads} for a wqkv of {rows} x {hidden}, expected the number it was trained with."
        )
    sized = partial(
        LlamaGenConfig, layers, heads, hidden, grid, kv_heads=kv // 2, codes=codes, intermediate=intermediate
    )
    if "cls_embedding.uncond_embedding" in weights:
        prefix, width = weights.shape("cls_embedding.uncond_embedding", 2)
        return sized(condition="caption", prefix=prefix, caption_width=width)
    table = weights.shape("cls_embedding.embedding_table.weight", 2)[0]
    classes = IMAGENET if table == IMAGENET else table - 1
    return sized(classes=classes, null_class=table > classes)
