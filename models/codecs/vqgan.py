"""Convolutional taming-style VQ image codecs (arXiv 2012.09841), as diffusers' stock `VQModel`.

LlamaGen's VQ-16 and VQ-8, Janus's tokenizer and the VQGAN of Chameleon, Anole and Lumina-mGPT differ in widths, in
their codebook and in whether the coarsest level has attention; all of them are settings of one stock class. If a
published decoder L2-normalizes looked-up codes, the codebook is stored normalized, so that the stock class needs no
flag. `vq_layout.py` loads the published key layouts.

Shapes: B images, T = rows * columns codes, D code size, K codes.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from diffusers import ConfigMixin
from diffusers.models.autoencoders.vq_model import VQModel
from torch import Tensor


def settings_of(model: ConfigMixin) -> dict[str, Any]:
    """Return the arguments that a diffusers model was created with."""
    return {name: value for name, value in model.config.items() if not name.startswith("_")}


class ImageCodec:
    """A stock `VQModel` that converts between codes and pixels."""

    def __init__(self, model: VQModel):
        self.model = model

    @property
    def codebook(self) -> Tensor:
        """The vectors that the decoder uses, (K, D)."""
        return self.model.quantize.embedding.weight.detach()

    @property
    def factor(self) -> int:
        """Pixels per code, along one side."""
        return 2 ** (len(self.model.config["block_out_channels"]) - 1)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        self.model.to(*args, **kwargs)
        return self

    @torch.no_grad()
    def decode(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Decode codes (B, T) in raster order to pixels (B, height, width, 3), float32 in [-1, 1].

        Raises ValueError for a code outside the codebook, which would abort the process on CUDA.
        """
        rows, columns = grid
        codes = self.codebook.shape[0]
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < codes:
            raise ValueError(f"tokens: got {int(tokens.min())}..{int(tokens.max())}, expected codes 0..{codes - 1}")
        latents = self.codebook[tokens.to(self.codebook.device)].unflatten(1, (rows, columns))
        pixels = self.model.decode(latents.permute(0, 3, 1, 2), force_not_quantize=True).sample
        return pixels.permute(0, 2, 3, 1).float().clamp(-1, 1)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, height, width, 3) in [-1, 1] to the nearest codes (B, T), int64."""
        latent = self.model.encode(pixels.permute(0, 3, 1, 2).to(self.model.dtype)).latents
        near = torch.cdist(latent.float().permute(0, 2, 3, 1).flatten(1, 2), self.codebook.float()[None])
        return near.argmin(-1)
