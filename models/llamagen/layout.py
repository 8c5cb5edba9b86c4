"""LlamaGen's transformers, and RandAR's, which are the same with queries: the original checkpoints, and ours (the same
tensor names, with config.json).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from visspec.io.checkpoint import CONFIG, read_json, write_folder
from visspec.models.llamagen.network import SIZES, LlamaGen, LlamaGenConfig
from visspec.models.llamagen.randar import RandAR
from visspec.models.published_tensors import count, one_sentence, place, read_all_tensors, rename, require

KIND = "llamagen"
IMAGENET = 1000  # classes of the published models
QUERIES = "pos_instruct_embeddings"
NOT_WEIGHTS = r"freqs_cis$|causal_mask$|layers\.\d+\.attention\.kv_cache\."


def load_llamagen(
    path: str | Path,
    grid: int | None = None,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    classes: int | None = None,
) -> LlamaGen:
    """A LlamaGen transformer from a .safetensors file or folder, in evaluation mode; a `RandAR` where the weights have
    its queries.

    grid: rows of codes, required because the published weights do not contain it (16 for 256 pixels with VQ-16, 24 for
    384, 32 for 512). heads: only for sizes that were not published. dtype: default, that of the file. classes: default,
    1000 for a table of 1000 or 1001 rows, otherwise the number of rows minus one; a table without the extra row has no
    null class, and the model does not support guidance. A folder written by `save_llamagen` needs none of these. Raises
    ValueError before any weight is placed.
    """
    tensors = read_all_tensors(path)
    config = _saved_config(Path(path))
    if config is None:
        if grid is None:
            raise ValueError(f"grid: {path} does not tell the image's rows of codes, expected grid=16, 24 or 32")
        config = config_of(tensors, grid, heads, path, classes)
    elif classes not in (None, config.classes):
        raise ValueError(f"classes: got {classes}, expected {config.classes} as {path} says")
    elif (grid or config.grid) != config.grid or (heads or config.heads) != config.heads:
        found = f"{grid or config.grid} and {heads or config.heads}"
        raise ValueError(f"grid, heads: got {found}, expected {config.grid} and {config.heads} as {path} says")
    named = rename(tensors, (), NOT_WEIGHTS)
    kind = RandAR if QUERIES in tensors else LlamaGen
    model = kind(config).to(dtype or require(tensors, "tok_embeddings.weight", 2, path).dtype).eval()
    place(model, named, path)
    return model


def save_llamagen(folder: str | Path, model: LlamaGen) -> None:
    """Write config.json and model.safetensors; tensors keep their published names."""
    write_folder(folder, model.state_dict(), {"kind": KIND, **model.config.to_dict()})


def config_of(
    tensors: dict[str, Tensor], grid: int, heads: int | None, where: str | Path, classes: int | None = None
) -> LlamaGenConfig:
    """Infer the configuration from the shapes of published weights."""
    codes, hidden = require(tensors, "tok_embeddings.weight", 2, where).shape
    rows = require(tensors, "layers.0.attention.wqkv.weight", 2, where).shape[0]
    intermediate = require(tensors, "layers.0.feed_forward.w1.weight", 2, where).shape[0]
    layers = count(tensors, "layers.")
    if heads is None:
        heads = {(n, d): h for n, h, d in SIZES.values()}.get((layers, hidden))
        if heads is None:
            raise ValueError(f"heads: {where} has {layers} layers of width {hidden}, expected heads=... for this size")
    if heads < 1 or hidden % heads or rows % (hidden // heads) or (kv := rows * heads // hidden - heads) < 2 or kv % 2:
        raise ValueError(f"heads: got {heads} for a wqkv of {rows} x {hidden}, expected the number it was trained with")
    sized = partial(
        LlamaGenConfig, layers, heads, hidden, grid, kv_heads=kv // 2, codes=codes, intermediate=intermediate
    )
    if "cls_embedding.uncond_embedding" in tensors:
        prefix, width = require(tensors, "cls_embedding.uncond_embedding", 2, where).shape
        return sized(condition="caption", prefix=prefix, caption_width=width)
    table = require(tensors, "cls_embedding.embedding_table.weight", 2, where).shape[0]
    classes = classes or (IMAGENET if table == IMAGENET else table - 1)
    if table not in (classes, classes + 1):
        raise ValueError(f"classes: got {classes} for a table of {table} rows, expected {table - 1} or {table}")
    return sized(classes=classes, null_class=table > classes)


def _saved_config(path: Path) -> LlamaGenConfig | None:
    if not (path / CONFIG).is_file():
        return None
    data = read_json(path, CONFIG)
    if data.pop("kind", None) != KIND:
        return None
    with one_sentence(path):
        return LlamaGenConfig(**data)
