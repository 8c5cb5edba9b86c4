"""Autoencoder of the painters of vectors, and their tokens.

The autoencoder is a small KL one with a broad posterior of fixed deviation. Acceptance between densities needs
distributions that are not sharp: of two Gaussians of deviation s and distance e, what they share falls with e / s. The
decoder is therefore trained on latents with noise of NOISE times the deviation of their means, and the tokens that a
painter learns are drawn from that posterior. In the stock class the deviation is then a bias; the means are normalised
over batches in training and by weights at the end.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from visspec.toys.recipes import animals
from visspec.toys.recipes.animals import SIDE
from visspec.toys.recipes.painter_score import to_uint8
from visspec.toys.recipes.painter_vq import picture_loss
from visspec.toys.recipes.recipe import Coder, TrainingStage

SIZE = 8  # numbers of a token
FIRST = {"autoencoder": 0, "tokens": 1 << 28}  # numbers of pairs
NOISE = 0.3  # posterior deviation over that of the means
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


@torch.no_grad()
def means(codec: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Means of the posterior of tokens, (B, tokens, SIZE) in raster order, float16."""
    return codec.encode(pictures).latent_dist.mean.flatten(2).mT.half()


def coders(options: argparse.Namespace, autoencoder: AutoencoderKL | None = None) -> dict[Path, Coder]:
    """What makes tokens.pt, `classes` and `means`; by the autoencoder of the folder unless one is given."""
    codec = autoencoder or load_autoencoder(options.out)
    return animals.coders(options, "tokens.pt", FIRST["tokens"], "means", partial(means, codec))


def moments(model: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Means of the latents as the encoder gives them, (B, SIZE, rows, columns)."""
    return model.quant_conv(model.encoder(pictures))[:, :SIZE]


class AutoencoderStage(TrainingStage):
    """Training of encoder and decoder on the prompts' pictures."""

    name, seed, decay = "autoencoder.pt", 0, 0.01
    steps_option, rate_option, rate_share = "autoencoder_steps", None, 2e-3

    def build(self, options: argparse.Namespace) -> dict:
        self.model = AutoencoderKL(**CONFIG).train()
        return {"model": self.model}

    def loss(self) -> torch.Tensor:
        """Picture loss of the next batch, decoded from normalised means with noise."""
        rows = self.options.rows
        first = FIRST["autoencoder"] + (self.step * self.workers + self.rank) * rows
        true = animals.pictures(range(first, first + rows))
        mean = moments(self.model, true)
        centre, spread = mean.mean((0, 2, 3), keepdim=True), mean.std((0, 2, 3), keepdim=True)
        latents = (mean - centre) / spread
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(self.step))
        made = self.model.decoder(self.model.post_quant_conv(latents + NOISE * noise))
        self.notes["grey"] = round((made.detach() - true).abs().mean().item() * 127.5, 2)
        return picture_loss(made, true)

    def figures(self) -> dict:
        return measure(normalize_latents(self.model), self.options.every_prompt * (8 if self.step < self.steps else 1))


@torch.no_grad()
def normalize_latents(trained: AutoencoderKL, count: int = 512) -> AutoencoderKL:
    """A copy in the stock class's own terms: normalised means, the posterior's deviation as a bias.

    Tokens drawn from the posterior of the prompts' pictures have mean 0 and deviation 1 in each of their numbers.
    """
    model = AutoencoderKL(**CONFIG)
    model.load_state_dict(trained.state_dict())
    model.eval()
    first = FIRST["tokens"]
    parts = [animals.pictures(range(i, i + 64)) for i in range(first - count, first, 64)]
    mean = torch.cat([moments(model, part) for part in parts])
    centre, before = mean.mean((0, 2, 3)), mean.std((0, 2, 3))  # what the decoder was trained with
    noise = NOISE * before
    spread = (before.square() + noise.square()).sqrt()
    conv, post = model.quant_conv, model.post_quant_conv
    conv.weight[:SIZE] /= spread[:, None, None, None]
    conv.bias[:SIZE] = (conv.bias[:SIZE] - centre) / spread
    conv.weight[SIZE:] = 0.0
    conv.bias[SIZE:] = 2 * (noise / spread).log()
    post.weight *= (spread / before)[None, :, None, None]
    return model


def load_autoencoder(folder: Path) -> AutoencoderKL:
    """The autoencoder of `folder`, normalised."""
    model = AutoencoderKL(**CONFIG)
    model.load_state_dict(torch.load(folder / "autoencoder.pt", weights_only=True)["model"])
    return normalize_latents(model)


@torch.no_grad()
def measure(model: AutoencoderKL, every: int = 1) -> dict:
    """Pixel error, right animals and posterior deviation over held-out pictures, decoded from sampled latents."""
    rows = animals.rows(every)
    true = animals.held_out(rows)
    posterior = model.encode(true).latent_dist
    latents = posterior.sample(torch.Generator().manual_seed(0))
    made = torch.cat([model.decode(part).sample for part in latents.split(64)]).clamp(-1, 1)
    error = (made - true).abs().mean().item() * 127.5
    figures = animals.geneval(to_uint8(made), rows)
    deviation = posterior.std[0, :, 0, 0].tolist()
    return figures | {
        "grey_levels": round(error, 2),
        "psnr": round(-10 * math.log10((made - true).square().mean().item() / 4), 2),
        "posterior_deviation": [round(s, 3) for s in deviation],
        "latent_deviation": round(latents.std().item(), 3),
    }
