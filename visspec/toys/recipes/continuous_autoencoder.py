"""Stage 1 of the continuous painter's recipe: a small KL autoencoder with a broad posterior of fixed deviation.

Acceptance between densities needs distributions that are not sharp: of two Gaussians of deviation s and distance e,
what they share falls with e / s. The decoder is therefore trained on latents with noise of NOISE times the deviation of
their means, and the tokens that a painter learns are drawn from that posterior. In the stock class the deviation is
then a bias; the means are normalised over batches in training and by weights at the end.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from visspec.toys.recipes.continuous_data import FIRST_SEED, SIDE, SIZE, TASKS, mixed, painted, pair
from visspec.toys.recipes.painter_data import pixels
from visspec.toys.recipes.painter_score import summary, to_uint8, verdicts
from visspec.toys.recipes.painter_vq import picture_loss
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.suite import Metadata, suite
from visspec.train.stages import Stage

NOISE = 0.3  # posterior deviation over that of the means, on the pictures of this stage
CONFIG = {
    "block_out_channels": (32, 48, 64, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": SIZE,
    "norm_num_groups": 8,
    "mid_block_add_attention": False,
    "sample_size": SIDE,
    "scaling_factor": 1.0,
}
DECODER = ("post_quant_conv", "decoder")


def rows_of_tasks(every: int = 1) -> list[Metadata]:
    """The suite's prompts [::every] of the tasks that the painter knows."""
    return [row for row in suite() if row["tag"] in TASKS][::every]


def moments(model: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Means of the latents as the encoder gives them, (B, SIZE, rows, columns)."""
    return model.quant_conv(model.encoder(pictures))[:, :SIZE]


class AutoencoderStage(Stage):
    """Training of encoder and decoder on scenes of the prompts' kind and crowded ones."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(0)
        self.model = AutoencoderKL(**CONFIG).train()
        trained = list(self.model.parameters())
        super().__init__(
            options, rank, "autoencoder.pt", options.autoencoder_steps, 2e-3, trained, 0.01, {"model": self.model}
        )

    def loss(self) -> torch.Tensor:
        """Picture loss of the next batch, decoded from normalised means with noise."""
        rows = self.options.rows
        true = mixed(FIRST_SEED["autoencoder"] + (self.step * self.workers + self.rank) * rows, rows)
        mean = moments(self.model, true)
        centre, spread = mean.mean((0, 2, 3), keepdim=True), mean.std((0, 2, 3), keepdim=True)
        latents = (mean - centre) / spread
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(self.step))
        made = self.model.decoder(self.model.post_quant_conv(latents + NOISE * noise))
        self.notes["grey"] = round((made.detach() - true).abs().mean().item() * 127.5, 2)
        return picture_loss(made, true)

    def report(self) -> dict:
        """Figures of the reconstructions."""
        return measure(normalize_latents(self.model), self.options.every_prompt * (8 if self.step < self.steps else 1))


@torch.no_grad()
def normalize_latents(trained: AutoencoderKL, count: int = 512) -> AutoencoderKL:
    """A copy in the stock class's own terms: normalised means, the posterior's deviation as a bias.

    Tokens drawn from the posterior of the prompts' pictures have mean 0 and deviation 1 in each of their numbers.
    """
    model = AutoencoderKL(**CONFIG)
    model.load_state_dict(trained.state_dict())
    model.eval()
    mean = torch.cat([moments(model, mixed(first, 64)) for first in range(0, count, 64)])
    noise = NOISE * mean.std((0, 2, 3))
    scenes = [pair(FIRST_SEED["tokens"] - 1 - i)[1] for i in range(count)]
    own = torch.cat([moments(model, pixels(scenes[first : first + 64], SIDE)) for first in range(0, count, 64)])
    centre = own.mean((0, 2, 3))
    spread = (own.var((0, 2, 3)) + noise.square()).sqrt()
    before, after = mean.mean((0, 2, 3)), mean.std((0, 2, 3))  # what the decoder was trained with
    conv, post = model.quant_conv, model.post_quant_conv
    conv.weight[:SIZE] /= spread[:, None, None, None]
    conv.bias[:SIZE] = (conv.bias[:SIZE] - centre) / spread
    conv.weight[SIZE:] = 0.0
    conv.bias[SIZE:] = 2 * (noise / spread).log()
    post.bias += post.weight[:, :, 0, 0] @ ((centre - before) / after)
    post.weight *= (spread / after)[None, :, None, None]
    return model


def load_autoencoder(folder: Path) -> AutoencoderKL:
    """The autoencoder of `folder`, settled, with the decoder that was trained last."""
    model = AutoencoderKL(**CONFIG)
    model.load_state_dict(torch.load(folder / "autoencoder.pt", weights_only=True)["model"])
    model = normalize_latents(model)
    if (folder / "decoder.pt").exists():
        saved = torch.load(folder / "decoder.pt", weights_only=True)
        for name in DECODER:
            getattr(model, name).load_state_dict(saved[name])
    return model


class AutoencoderDecoderStage(Stage):
    """More training of the decoder alone, on the prompts' pictures: tokens stay what they are, so it may as well run
    after the painter has learnt them.
    """

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(3)
        self.model = load_autoencoder(options.out).train()
        parts = {name: getattr(self.model, name) for name in DECODER}
        trained = [p for part in parts.values() for p in part.parameters()]
        super().__init__(options, rank, "decoder.pt", options.decoder_steps, 2e-3, trained, 0.01, parts)

    def loss(self) -> torch.Tensor:
        """Picture loss of the next batch, decoded from sampled tokens."""
        rows = self.options.rows
        first = FIRST_SEED["decoder"] + (self.step * self.workers + self.rank) * rows
        true = pixels([pair(i)[1] for i in range(first, first + rows)], SIDE)
        with torch.no_grad():
            latents = self.model.encode(true).latent_dist.sample(torch.Generator().manual_seed(self.step))
        return picture_loss(self.model.decode(latents).sample, true)

    def report(self) -> dict:
        """Figures of the reconstructions."""
        self.model.eval()
        figures = measure(self.model, self.options.every_prompt * (8 if self.step < self.steps else 1))
        self.model.train()
        return figures


@torch.no_grad()
def measure(model: AutoencoderKL, every: int = 1) -> dict:
    """Pixel error, GenEval and posterior deviation over scenes of held-out seeds, decoded from sampled latents."""
    rows = rows_of_tasks(every)
    true = pixels([painted(row, np.random.default_rng(HELD_OUT_SEED + i)) for i, row in enumerate(rows)], SIDE)
    posterior = model.encode(true).latent_dist
    latents = posterior.sample(torch.Generator().manual_seed(0))
    made = torch.cat([model.decode(part).sample for part in latents.split(64)]).clamp(-1, 1)
    error = (made - true).abs().mean().item() * 127.5
    figures = summary(verdicts(to_uint8(made), rows), rows)
    deviation = posterior.std[0, :, 0, 0].tolist()
    return figures | {
        "grey_levels": round(error, 2),
        "psnr": round(-10 * math.log10((made - true).square().mean().item() / 4), 2),
        "posterior_deviation": [round(s, 3) for s in deviation],
        "latent_deviation": round(latents.std().item(), 3),
    }
