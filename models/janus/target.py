"""Janus and Janus-Pro on stock `JanusForConditionalGeneration`, image mode. (Chen et al. 2025.)"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, StaticCache

from visspec.models.attention.pass_inputs import CACHE
from visspec.models.image_codes.chat_prompt import ChatPromptFamily
from visspec.models.image_codes.family import ImageLayout, generate_options
from visspec.models.image_codes.target import ImageAR
from visspec.types import Processor, Sampling


class Janus(ChatPromptFamily):
    """The stock model as a family of image codes."""

    target = ImageAR

    def __init__(self, model: Any, processor: Processor):
        config, inner = model.config, model.model
        super().__init__(model, processor, config.vq_config.num_patches, config.vision_config.image_size)
        self.decoder = inner.language_model
        self.codes = config.vq_config.num_embeddings
        self.mlp_head = inner.generation_head.proj_out, inner.generation_head.vision_head
        self.codebook = F.normalize(inner.vqmodel.quantize.embedding.weight.detach().float(), dim=-1)

    def stock(self, texts: list[str], sampling: Sampling, layout: ImageLayout, **options: object) -> Tensor:
        scale, own, inputs = sampling.guidance, generate_options(sampling), self._tokenize(texts)
        room = {"config": self.decoder.config, "max_cache_len": inputs["input_ids"].shape[1] + layout.positions}
        static = options.pop("cache_implementation", "static") == "static"  # 5.17's `generate` can't build it
        cache = StaticCache(**room) if static else DynamicCache(config=self.decoder.config)
        own |= {CACHE: cache, "guidance_scale": scale, "generation_mode": "image"}
        return self.model.generate(**inputs, **own, **options)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.model.generation_head(hidden)

    def encode(self, pixels: Tensor) -> Tensor:
        vq = self.model.model.vqmodel
        return vq.encode(2 * pixels.to(vq.dtype) - 1).image_tokens.view(len(pixels), -1)

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        decoded = self.model.decode_image_tokens(tokens).permute(0, 3, 1, 2).float()
        return (decoded / 2 + 0.5).clamp(0, 1)
