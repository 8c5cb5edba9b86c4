"""Tiny random image models made from configurations, and prompts for them made by hand."""

from __future__ import annotations

import functools

import torch
import transformers as tf
from tests.tiny import enliven
from transformers.models.janus.configuration_janus import JanusVisionConfig, JanusVQVAEConfig

PAD, BOS, EOS, BOI = 0, 1, 2, 3
SIDE, CODES = 4, 24


@functools.cache
def janus(seed: int = 0):
    """Stock Janus with a 4 x 4 grid of 24 codes."""
    torch.manual_seed(seed)
    vision = JanusVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8 * SIDE, patch_size=8, mlp_ratio=1.0,
        num_image_tokens=SIDE * SIDE,
        projection_dim=32,
    )  # fmt: skip
    vq = JanusVQVAEConfig(
        embed_dim=4, num_embeddings=CODES, latent_channels=32, base_channels=32, channel_multiplier=[1, 1, 1, 1],
        num_res_blocks=1, projection_dim=32, image_token_embed_dim=32,
    )  # fmt: skip
    text = tf.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    config = tf.JanusConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), vq_config=vq.to_dict(), image_token_id=39
    )
    model = tf.JanusForConditionalGeneration(config).eval()
    enliven(model, seed)
    with torch.no_grad():
        model.model.generation_head.vision_head.weight.mul_(1.5)
    model.generation_config = tf.GenerationConfig(
        bos_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS, guidance_scale=3.0, max_length=64,
        generation_kwargs={"boi_token_id": BOI},
    )  # fmt: skip
    return model


def prompts(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged prompts that end with the begin-of-image token, padded on the left: ids and attention (rows, 7)."""
    words = [[7, 8], [9, 10, 11, 12], [13], [14, 15, 16, 17, 18], [19, 20, 21]]
    ids = torch.full((rows, 7), PAD)
    for b in range(rows):
        line = [BOS, *words[b % len(words)], BOI]
        ids[b, 7 - len(line) :] = torch.tensor(line)
    return ids, ids != PAD
