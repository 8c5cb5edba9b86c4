"""Families of images of continuous tokens: vectors from a diffusion head, which are latents of a KL autoencoder.

Shapes: B images, T tokens, d size of a token.
"""

from __future__ import annotations

from diffusers import AutoencoderKL
from torch import Tensor

from visspec.distributions import DenoisingSteps
from visspec.models.image_codes.family import Family, ImageLayout
from visspec.models.vectors.head_distribution import HeadDistributions
from visspec.types import Sampling

COLDEST = 1e-6  # minimum temperature; keeps the squares in couplings finite in float32


class VectorFamily(Family):
    """Base class of families whose tokens are vectors. patch: latents along one side of a token."""

    codes = 0
    draws = "vectors"
    default_drafter, default_rule = "none", "coupled"
    chains: HeadDistributions
    steps: DenoisingSteps
    autoencoder: AutoencoderKL | None = None
    patch = 1

    def use_autoencoder(self, autoencoder: AutoencoderKL | None, size: int, loader: str) -> None:
        """Set what decodes tokens of `size` numbers, and its pixels per token. `loader` is named if there is none.

        Raises:
            ValueError: Its latents do not fit the tokens.
        """
        self.autoencoder = autoencoder
        if autoencoder is None:
            self.no_pixels = f"no autoencoder was given ({loader})"
            return
        channels = autoencoder.config.latent_channels
        if channels * self.patch**2 != size:
            raise ValueError(f"autoencoder: got {channels} channels, which do not fit tokens of size {size}.")
        self.factor = self.patch * 2 ** (len(autoencoder.config.block_out_channels) - 1)

    def check_sampling(self, sampling: Sampling) -> None:
        for name, value, usual in (("top_k", sampling.top_k, 0), ("top_p", sampling.top_p, 1.0)):
            if value != usual:
                raise ValueError(f"{name}: got {value}, expected {usual}: vectors cannot be ranked.")
        if sampling.greedy:
            raise ValueError("temperature: got 0, expected a positive number: vectors have no most likely value.")
        if sampling.temperature < COLDEST:
            raise ValueError(f"temperature: got {sampling.temperature}, expected at least {COLDEST}.")

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        if self.autoencoder is None:
            return super().pixels(tokens, layout)
        config, latents = self.autoencoder.config, unpatchify(tokens, layout.grid, self.patch)
        latents = latents / config.scaling_factor + (config.shift_factor or 0.0)  # inverse of the generator's scaling
        decoded = self.autoencoder.decode(latents.to(self.autoencoder.dtype)).sample
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


def unpatchify(values_BTd: Tensor, grid: tuple[int, int], patch: int = 1) -> Tensor:
    """Convert tokens in raster order to latents (B, channels, rows patch, columns patch), with d = channels patch^2
    ordered as in MAR and NextStep-1.
    """
    values = values_BTd.unflatten(2, (-1, patch, patch)).unflatten(1, grid)  # B, rows, columns, channels, patch, patch
    return values.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
