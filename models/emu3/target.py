"""Emu3-Gen on stock `Emu3ForConditionalGeneration`. (Wang et al. 2024; transformers `emu3`.)

An image consists of rows of codes, each followed by a row end, then the ids for end of frame, end of image and end of
text, as fixed by the `prefix_allowed_tokens_fn` on transformers' page of this model. Its guidance mixes log-softmax
values: the same distribution as with mixed logits, because each branch's normalizer only shifts them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec.models.image_codes.family import (
    EncodedPrompt,
    Family,
    ImageLayout,
    Vocabulary,
    generate_codes,
    grid_of,
    left_padded,
    positions_from_mask,
)
from visspec.models.image_codes.target import ImageAR
from visspec.types import Processor, Sampling

NEGATIVE = (  # the authors' own negative prompt, see the model card
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality,"
    " low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)


class Emu3(Family):
    """Prompts state the size and end with the image wrapper token. `negative` is the default negative prompt.

    `processor` is an `Emu3Processor`, or anything that takes texts in the same way and whose `tokenizer` has the ids.
    """

    target = ImageAR
    side = 720  # default size in pixels

    def __init__(self, model: PreTrainedModel, processor: Processor, negative: str = NEGATIVE):
        self.model, self.processor, self.name, self.negative = model, processor, model.config.model_type, negative
        inner, tokenizer = model.model, self.require_processor().tokenizer
        self.decoder = inner.text_model
        codes = inner.vocabulary_mapping.img2bpe_mapping_tensor.long()
        self.codes, self.grammar = len(codes), 4
        ends = [inner.vocabulary_mapping.eol_token_id]
        ends += [getattr(tokenizer, f"{name}_token_id", None) for name in ("eof", "eoi", "eos")]
        self.vocabulary = Vocabulary(torch.cat([codes, torch.tensor(ends)]), self.codes)
        self.pad = tokenizer.pad_token_id or 0
        self.codebook = inner.vqmodel.quantize.embedding.weight.detach().float()
        self.factor = inner.vqmodel.spatial_scale_factor
        self.default_guidance = float(model.generation_config.guidance_scale or 3.0)

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        height, width = height or self.side, width or self.side
        row_end, *tail = range(self.codes, self.codes + self.grammar)
        return ImageLayout.lines(*grid_of(height, width, self.factor), row_end, tuple(tail))

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> EncodedPrompt:
        layout = layout or self.layout()
        others = [self.negative] * len(texts) if negative is None else negative
        # the authors put the size into the negative prompt, too; transformers' page leaves it out
        batch = self._tokenize([*texts, *others] if guided else texts, layout)
        rows = [row[real].tolist() for row, real in zip(batch["input_ids"], batch["attention_mask"].bool())]
        both, mask = left_padded(rows, self.pad, self.decoder.device)
        embeds = self.model.get_input_embeddings()(both)
        # `generate` counts the positions of both branches from their first word
        return EncodedPrompt(both[: len(texts)], embeds, mask, positions_from_mask(mask, layout.positions))

    def stock(self, texts: list[str], sampling: Sampling, layout: ImageLayout, **options: object) -> Tensor:
        inputs = self._tokenize(texts, layout)
        guidance: dict[str, Any] = {"guidance_scale": sampling.guidance}
        if sampling.guidance != 1.0:
            negative = self._tokenize([self.negative] * len(texts), layout)
            guidance |= {
                "negative_prompt_ids": negative["input_ids"],
                "negative_prompt_attention_mask": negative["attention_mask"],
            }
        return generate_codes(self.model, self.vocabulary, inputs, layout, sampling, **guidance, **options)

    def _tokenize(self, texts: list[str], layout: ImageLayout) -> dict[str, Tensor]:
        rows, columns = layout.grid
        batch = self.processor(
            text=texts,
            return_for_image_generation=True,
            ratio=f"{columns}:{rows}",
            image_area=rows * columns * self.processor.downsample_ratio**2,
            padding=True,
            return_tensors="pt",
        )
        return {name: batch[name].to(self.decoder.device) for name in ("input_ids", "attention_mask")}

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        decoded = self.model.model.vqmodel.decode(tokens.view(-1, *layout.grid)).float()
        options = self.processor.image_processor
        mean, std = (decoded.new_tensor(x)[:, None, None] for x in (options.image_mean, options.image_std))
        return (decoded * std + mean).clamp(0, 1)
