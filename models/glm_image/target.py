"""GLM-Image's autoregressive stage on stock `GlmImageForConditionalGeneration`. (Z.ai 2025; transformers `glm_image`.)

From a text it generates a small grid of codes, then the large one, then an end marker. Position ids are cells of those
grids, computed by the model's own function. diffusers' `GlmImagePipeline`, a diffusion model, decodes codes to pixels.

Shapes: r rows and c columns of the grid, P = 32 pixels per code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from visspec.models.image_codes.family import EncodedPrompt, Family, ImageLayout, Vocabulary, generate_codes
from visspec.models.image_codes.target import ImageAR
from visspec.types import FREE, Processor, Sampling

FACTOR = 32  # pixels per code along one side; fixed in the model's processor
PREVIEW = 16  # codes along one side of a square preview


class GlmImage(Family):
    """`processor` is a `GlmImageProcessor`; its `target_h` and `target_w` are the default size.

    Args:
        diffusion: Decodes codes to pixels: diffusers' `GlmImagePipeline`, or `functools.partial(pipeline,
            num_inference_steps=30)`. Without it only codes are available. It decodes images one at a time, with their
            seeds.
    """

    target = ImageAR
    guided = False
    no_pixels = "the codes of GLM-Image need diffusers' GlmImagePipeline, parts={'diffusion': pipeline}"

    def __init__(self, model: PreTrainedModel, processor: Processor, diffusion: Callable[..., Any] | None = None):
        if diffusion is not None:
            self.no_pixels = ""
        self.diffusion, config = diffusion, model.config
        self.model, self.processor, self.name = model, processor, config.model_type
        self.decoder = model.model.language_model
        self.codes, self.grammar = config.vq_config.num_embeddings, 1
        # the head also has ids that are neither codes nor the end marker; they are never part of an image
        ids = torch.cat([torch.arange(self.codes), torch.tensor([config.image_end_token_id])])
        self.vocabulary = Vocabulary(ids, self.codes)
        self.codebook = F.normalize(model.model.vqmodel.quantize.embedding.weight.detach().float(), dim=-1)

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        usual: list[int] = [getattr(self.processor, name, 1024) for name in ("target_h", "target_w")]
        height, width = height or usual[0], width or usual[1]
        if height % FACTOR or width % FACTOR or not all(self._preview(height, width)):
            raise ValueError(f"height, width: got {height} x {width}, expected multiples of {FACTOR}, not too narrow.")
        return self.grids((height // FACTOR, width // FACTOR), self._preview(height, width))

    def grids(self, grid: tuple[int, int], preview: tuple[int, int]) -> ImageLayout:
        """Return the layout of an image grid after a preview grid, both (rows, columns)."""
        offset, count = preview[0] * preview[1], grid[0] * grid[1]
        return ImageLayout(grid, torch.tensor([FREE] * (offset + count) + [self.codes]), offset)

    @staticmethod
    def _preview(height: int, width: int) -> tuple[int, int]:
        ratio = height / width if width else 0.0
        return int(ratio**0.5 * PREVIEW), int(ratio and (1 / ratio) ** 0.5 * PREVIEW)

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> EncodedPrompt:
        self.refuse_negative(negative)
        return self.from_inputs(self._tokenize(texts, layout or self.layout()))

    def stock(self, texts: list[str], sampling: Sampling, layout: ImageLayout, **options: object) -> Tensor:
        return generate_codes(self.model, self.vocabulary, self._tokenize(texts, layout), layout, sampling, **options)

    def _tokenize(self, texts: list[str], layout: ImageLayout) -> dict[str, Tensor]:
        rows, columns = layout.grid
        size = {"target_h": rows * FACTOR, "target_w": columns * FACTOR}
        batch = self.require_processor().apply_chat_template(
            [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts],
            tokenize=True,
            return_dict=True,
            processor_kwargs={"padding": True, "return_tensors": "pt", **size},
        )
        return {name: value.to(self.decoder.device) for name, value in batch.items()}

    def from_inputs(self, inputs: dict[str, Tensor]) -> EncodedPrompt:
        """Build the prompt from generate's inputs: input_ids, attention_mask, image_grid_thw, images_per_sample."""
        ids, attention = inputs["input_ids"], inputs["attention_mask"]
        model = self.model.model
        saved = model._cached_decode_position_ids, model._prefill_len  # the function below overwrites them
        seen_ABL, _ = model.get_rope_index(
            ids,
            image_grid_thw=inputs["image_grid_thw"],
            images_per_sample=inputs["images_per_sample"],
            attention_mask=attention,
        )
        drawn_ABT = model._cached_decode_position_ids.permute(1, 0, 2)
        model._cached_decode_position_ids, model._prefill_len = saved
        positions = torch.cat([seen_ABL, drawn_ABT.to(seen_ABL)], dim=-1)
        return EncodedPrompt(ids, self.model.get_input_embeddings()(ids), attention.bool(), positions)

    def render(self, tokens: Tensor, layout: ImageLayout, texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        """Decode codes (B, r c) to (B, 3, r P, c P) with `diffusion`, which takes each code four times, as a square."""
        if self.diffusion is None:
            return self.pixels(tokens, layout)
        rows, columns = layout.grid
        ids_B4N = tokens.view(-1, rows, columns).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)
        images = [
            self.diffusion(
                prompt=text,
                prior_token_ids=ids_B4N[b : b + 1],
                height=rows * FACTOR,
                width=columns * FACTOR,
                generator=torch.Generator().manual_seed(seed),
                output_type="pt",
            ).images
            for b, (text, seed) in enumerate(zip(texts, seeds, strict=True))
        ]
        return torch.cat(images).float()
