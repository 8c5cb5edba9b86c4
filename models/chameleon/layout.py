"""Loads Lumina-mGPT (arXiv 2408.02657) into transformers' Chameleon class, and stores Anole with its codec."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from visspec.io.checkpoint import check_folder, read_json
from visspec.models.codecs.vq_layout import load_taming_vq
from visspec.models.published_tensors import Weights, one_sentence, stock
from visspec.registry import CODEC

NORMS = (".q_norm.weight", ".q_norm.bias", ".k_norm.weight", ".k_norm.bias")
VQ = "model.vqmodel."


def load_lumina(path: str | Path) -> ChameleonForConditionalGeneration:
    """Load a folder of Lumina-mGPT into a stock model. Its norms of queries and keys are stored once per shard of
    heads. Without VQ weights, `model.model.vqmodel` is removed, and a codec must provide the codebook.
    """
    weights = Weights.read(path, dropped=r".*rotary_emb\.")
    weights.shape("model.embed_tokens.weight", 2)
    with one_sentence(path):
        config = ChameleonConfig.from_dict(read_json(Path(path), "config.json"))
    model = stock(ChameleonForConditionalGeneration, config, weights.dtype)
    if not any(name.startswith(VQ) for name in weights):
        del model.model.vqmodel
    for name in [name for name in weights if name.endswith(NORMS)]:
        heads = int((config.num_attention_heads if ".q_norm." in name else config.num_key_value_heads) or 1)
        shards = weights.shape(name, 2)[0]
        weights[name] = weights[name].repeat_interleave(max(heads // max(shards, 1), 1), dim=0)
    return weights.load(model)


def write_with_codec(folder: Path, vq: Path, out: Path) -> None:
    """Create a folder that links or copies the files of a model in transformers' form, and add its image codec.
    Raises ValueError for another model class, or for a codec with another number of codes.
    """
    entries = read_json(check_folder(folder), "config.json")
    if entries.get("model_type") != ChameleonConfig.model_type:
        raise ValueError(f"weights: {folder} is a {entries.get('model_type')}, expected Anole in transformers' form.")
    codec = load_taming_vq(vq)
    shape: Any = ChameleonConfig.from_dict(entries).vq_config
    codes = shape.num_embeddings
    if len(codec.codebook) != codes:
        raise ValueError(f"vq: got a codec with {len(codec.codebook)} codes, expected {codes} as in {folder}.")
    out.mkdir()
    for file in filter(Path.is_file, folder.iterdir()):
        try:
            os.link(os.path.realpath(file), out / file.name)
        except OSError:  # on another disk
            shutil.copyfile(file, out / file.name)
    codec.model.save_pretrained(out / CODEC)
