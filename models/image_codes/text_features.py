"""Prompt features from a text encoder, for image models that read no ids: LlamaGen and Infinity.

Shapes: B texts, T words of the longest text, F feature size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForTextEncoding, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

NO_ENCODER = (
    "processor: got None, expected a text encoder, T5Features(tokenizer, encoder), which `visspec convert` takes as"
    " --text google/flan-t5-xl"
)
FOLDER = "text_encoder"  # subfolder of an image model's folder


class T5Features:
    """Encodes texts with an encoder such as T5's: features (B, T, F) and a mask (B, T) bool, padded on the right.

    Args:
        tokenizer, encoder: From transformers (`T5TokenizerFast`, `T5EncoderModel`; published models use
            google/flan-t5-xl).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: PreTrainedModel):
        self.tokenizer, self.encoder = tokenizer, encoder

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        batch = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(self.encoder.device)
        output = self.encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return output.last_hidden_state, batch["attention_mask"].bool()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        self.encoder.to(*args, **kwargs)
        return self

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both to a subfolder of an image model's folder."""
        for part in (self.tokenizer, self.encoder):
            part.save_pretrained(Path(folder) / FOLDER)

    @classmethod
    def from_pretrained(cls, where: str | Path, **options: object) -> Self:
        """Load from a folder or hub id, safetensors only.

        Args:
            options: Arguments of the encoder's `from_pretrained`.
        """
        encoder = AutoModelForTextEncoding.from_pretrained(where, use_safetensors=True, **options)
        return cls(AutoTokenizer.from_pretrained(where), encoder.eval())
