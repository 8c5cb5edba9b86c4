"""Images of continuous tokens: tokens to latents, and latents to pixels by a KL autoencoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def unpatchify(values_BTd: Tensor, grid: tuple[int, int], patch: int = 1) -> Tensor:
    """Latents (B, channels, rows patch, columns patch) of tokens in raster order: d = channels patch^2, as MAR and
    NextStep-1 have them.
    """
    values = values_BTd.unflatten(2, (-1, patch, patch)).unflatten(1, grid)  # B, rows, columns, channels, patch, patch
    return values.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def pixels(autoencoder: Any, latents: Tensor) -> Tensor:
    """(B, 3, height, width) in [0, 1] of latents, scaled as the generator has them. autoencoder: an `AutoencoderKL`."""
    config = autoencoder.config
    latents = latents / config.scaling_factor + (config.shift_factor or 0.0)
    return (autoencoder.decode(latents.to(autoencoder.dtype)).sample.float() / 2 + 0.5).clamp(0, 1)
