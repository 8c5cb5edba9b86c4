"""Chameleon models that generate images, on stock `ChameleonForConditionalGeneration`: Anole and Lumina-mGPT. (arXiv
2405.09818, 2407.06135, 2408.02657.)

The stock forward forbids image tokens, so its backbone and its LM head are called separately. A `PromptStyle` describes
how the published models differ. transformers has no decoder for these codes; `codec` is one
(`visspec.models.codecs.vq_layout`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import VQModel
from torch import nn
from transformers import PreTrainedModel

from visspec.io.checkpoint import check_choice
from visspec.models.codecs.vq_layout import ImageCodec
from visspec.models.image_codes.family import (
    EncodedPrompt,
    Family,
    ImageLayout,
    Vocabulary,
    left_padded,
    positions_from_mask,
)
from visspec.models.image_codes.target import ImageAR
from visspec.registry import CODEC
from visspec.types import Processor

BOS, BEGIN, END, TURN = "<s>", "<racm3:break>", "<eoss>", "<reserved08706>"
MOVQGAN = "<MOVQGAN"  # prefix of the code names of another tokenizer
LARGEST = 2048  # largest side in pixels that a header can name


@dataclass(frozen=True)
class PromptStyle:
    """A model's prompt format in training. `{}` in `question` is the text; sizes are in pixels."""

    question: str
    guidance: float
    size: int  # trained size, or the default size of a model with several
    step: int = 0  # sides are multiples of this; 0: only `size` is supported
    row_end: str = ""  # token after every row of codes
    end: str = ""  # token after the image
    sized: bool = False  # the image begins with two tokens for its height and width in steps
    unconditional: tuple[str, ...] = (BOS,)  # prompt tokens before the header that the unconditional prompt keeps


STYLES = {
    "anole": PromptStyle("{}", guidance=3.0, size=512),
    "lumina": PromptStyle(
        "Generate an image of {width}x{height} according to the following prompt:\n{}",
        guidance=4.0,
        size=768,
        step=32,
        row_end="<reserved08799>",
        end=END,
        sized=True,
        unconditional=(),
    ),
}


class Chameleon(Family):
    """`processor` is a `ChameleonProcessor`, or anything with its `tokenizer`; `style` a name in STYLES or a style.

    A negative prompt is formatted like a prompt; an empty one is the style's unconditional prompt.
    """

    target = ImageAR

    def __init__(
        self, model: PreTrainedModel, processor: Processor, codec: Any = None, style: str | PromptStyle = "anole"
    ):
        if isinstance(style, str):
            check_choice("style", style, STYLES)
        self.style = STYLES[style] if isinstance(style, str) else style
        codec = stored_codec(model) if codec is None else codec
        self.model, self.processor, self.codec, self.name = model, processor, codec, model.config.model_type
        self.decoder, mapping = model.model, model.model.vocabulary_mapping
        self.token_ids: dict[str, int] = mapping.vocab_map
        if any(name.startswith(MOVQGAN) for name in self.token_ids):
            raise ValueError("model: got the codes of MoVQGAN (Lumina-mGPT 2.0), expected Chameleon's own.")
        codes = mapping.img2bpe_mapping_tensor.long()
        ends = [name for name in (self.style.row_end, self.style.end) if name]
        self.codes, self.grammar = len(codes), len(ends)
        self.vocabulary = Vocabulary(
            torch.cat([codes, torch.tensor([self.token_ids[name] for name in ends], dtype=torch.long)]), self.codes
        )
        if hasattr(model.model, "vqmodel"):
            self.vq = model.model.vqmodel
            self.codebook = self.vq.quantize.embedding.weight.detach().float()
        elif codec is not None:
            self.codebook = codec.codebook.float()
        self.factor = 2 ** (len(model.config.vq_config.channel_multiplier) - 1)
        self.default_guidance = self.style.guidance
        if codec is None:
            self.no_pixels = (
                "transformers has no decoder for Chameleon's codes and no codec was given (visspec convert anole MODEL"
                " --vq vqgan.ckpt, or parts={'codec': load_taming_vq(FILE)} of visspec.models.codecs.vq_layout)"
            )

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        style, height, width = self.style, height or self.style.size, width or self.style.size
        if not style.step and (height, width) != (style.size, style.size):
            raise ValueError(f"height, width: got {height} x {width}, expected {style.size} x {style.size}.")
        if style.step and any(side % style.step or not 0 < side <= LARGEST for side in (height, width)):
            raise ValueError(f"height, width: got {height} x {width}, expected multiples of {style.step} to {LARGEST}.")
        ids = iter(range(self.codes, self.codes + self.grammar))
        row_end, end = (next(ids) if name else None for name in (style.row_end, style.end))
        tail = () if end is None else (end,)
        return ImageLayout.lines(height // self.factor, width // self.factor, row_end, tail)

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> EncodedPrompt:
        layout = layout or self.layout()
        height, width = (side * self.factor for side in layout.grid)
        every = [*texts, *(negative or [])]
        questions = [self.style.question.format(text, height=height, width=width) for text in every]
        words = self.require_processor().tokenizer(questions, add_special_tokens=False)["input_ids"]
        others = [row if text.strip() else None for text, row in zip(negative or [], words[len(texts) :])]
        return self.from_words(words[: len(texts)], guided, layout, others or None)

    def from_words(
        self, words: list[list[int]], guided: bool, layout: ImageLayout, negative: list[list[int] | None] | None = None
    ) -> EncodedPrompt:
        """Build the prompt from the ids of each prompt's words, without special ids, and those of the negative prompts
        (None: the unconditional one).
        """
        ids, codes_per_step = self.token_ids, max(self.style.step // self.factor, 1)
        counts = [side // codes_per_step for side in layout.grid] if self.style.sized else []
        header = [ids[name] for name in (BEGIN, *(f"<reserved{8800 + count:05d}>" for count in counts))]
        rows = [[ids[BOS], *row, ids[TURN], *header] for row in words]
        if guided:
            plain = [*(ids[name] for name in self.style.unconditional), *header]
            others = negative or [None] * len(words)
            rows += [plain if row is None else [ids[BOS], *row, ids[TURN], *header] for row in others]
        both, mask = left_padded(rows, 0, self.decoder.device)
        embeds = self.model.get_input_embeddings()(both)
        return EncodedPrompt(both[: len(words)], embeds, mask, positions_from_mask(mask, layout.positions), both)


def stored_codec(model: PreTrainedModel) -> ImageCodec | None:
    """Load the codec from the folder of a model that `visspec convert` wrote, or return None if there is none."""
    where = model.config._name_or_path
    if not where or not (folder := Path(where, CODEC)).is_dir():
        return None
    model_vq = VQModel.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    return ImageCodec(nn.Module.to(model_vq, model.device, model.dtype).eval())
