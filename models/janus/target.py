"""Janus and Janus-Pro on stock `JanusForConditionalGeneration`, image mode. (Chen et al. 2025.)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, StaticCache

from visspec.models.attention.pass_inputs import CACHE
from visspec.models.image_codes.family import EncodedPrompt, Family, ImageLayout, generate_options
from visspec.models.image_codes.target import ImageAR
from visspec.types import Processor, Sampling


class Janus(Family):
    """The stock model as a family of image codes. Prompts end with the begin-of-image token; the unconditional prompt
    has padding in place of its words.

    `processor` is a `JanusProcessor`, or anything that turns texts into left-padded ids. A negative prompt is encoded
    like any other; an empty one is the unconditional prompt.
    """

    target = ImageAR

    def __init__(self, model: Any, processor: Processor | None):
        config, inner = model.config, model.model
        self.model, self.processor, self.name = model, processor, config.model_type
        self.side, self.pixel_side = config.vq_config.num_patches, config.vision_config.image_size
        self.decoder, self.vq = inner.language_model, inner.vqmodel
        self.codes = config.vq_config.num_embeddings
        self.mlp_head = inner.generation_head.proj_out, inner.generation_head.vision_head
        self.codebook = F.normalize(self.vq.quantize.embedding.weight.detach().float(), dim=-1)
        settings = model.generation_config
        self.default_guidance = float(settings.guidance_scale or 5.0)  # the default of generate
        more = getattr(settings, "generation_kwargs", None) or {}  # only set if the checkpoint's file has it
        self.keeps = (settings.bos_token_id, more.get("boi_token_id"))
        self.pad = settings.pad_token_id
        ids = {"bos_token_id": self.keeps[0], "pad_token_id": self.pad}
        ids["generation_kwargs={'boi_token_id': ...}"] = self.keeps[1]
        if missing := [name for name, value in ids.items() if value is None]:
            raise ValueError(
                f"generation_config: got no {', '.join(missing)}. Set model.generation_config ="
                " GenerationConfig(bos_token_id=..., pad_token_id=..., generation_kwargs={'boi_token_id': ...}) to the"
                " ids of the model's tokenizer."
            )

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        return ImageLayout.only(self.side, self.pixel_side, height, width, "as it was trained")

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> EncodedPrompt:
        if negative is None or not guided:
            batch = self._tokenize(texts)
            return self.from_ids(batch["input_ids"], batch["attention_mask"].bool(), guided)
        batch, count = self._tokenize([*texts, *negative]), len(texts)
        (ids, other), (mask, real) = (x.split(count) for x in (batch["input_ids"], batch["attention_mask"].bool()))
        has_words_B1 = torch.tensor([[bool(text.strip())] for text in negative], device=ids.device)
        other = torch.where(has_words_B1, other, self._without_words(ids))
        return self.from_ids(ids, mask, guided, other, torch.where(has_words_B1, real, mask))

    def _tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        batch = self.require_processor()(text=texts, generation_mode="image", padding=True, return_tensors="pt")
        return {name: batch[name].to(self.decoder.device) for name in ("input_ids", "attention_mask")}

    def from_ids(
        self,
        ids: Tensor,
        attention: Tensor,
        guided: bool,
        negative: Tensor | None = None,
        negative_attention: Tensor | None = None,
    ) -> EncodedPrompt:
        """Build the prompt from ids (B, L) that end with the begin-of-image token, as stock `generate` takes them, and
        negative ids of the same shape (None: the unconditional prompt).
        """
        rows = ids
        if guided:
            rows = torch.cat([ids, self._without_words(ids) if negative is None else negative])
            attention = torch.cat([attention, attention if negative_attention is None else negative_attention])
        return EncodedPrompt(ids, self.model.get_input_embeddings()(rows), attention, tokens=rows)

    def _without_words(self, ids: Tensor) -> Tensor:
        """Return the unconditional prompt, as stock `generate` builds it."""
        is_grammar = (ids == self.keeps[0]) | (ids == self.keeps[1])
        return torch.where(is_grammar, ids, self.pad)

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

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        decoded = self.model.decode_image_tokens(tokens).permute(0, 3, 1, 2).float()
        return (decoded / 2 + 0.5).clamp(0, 1)
