"""Pictures, tokens and autoencoder of the continuous painter: scenes of one or two shapes on plain ground.

The autoencoder is a small KL one with a broad posterior of fixed deviation. Acceptance between densities needs
distributions that are not sharp: of two Gaussians of deviation s and distance e, what they share falls with e / s. The
decoder is therefore trained on latents with noise of NOISE times the deviation of their means, and the tokens that a
painter learns are drawn from that posterior. In the stock class the deviation is then a bias; the means are normalised
over batches in training and by weights at the end.
"""

import argparse
import dataclasses
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from visspec.toys.recipes import painter_data
from visspec.toys.recipes.painter_build import build_tokenizer, prompt_ids
from visspec.toys.recipes.painter_data import crowded_scene, held_out, pixels, rows_of
from visspec.toys.recipes.painter_draw import progress
from visspec.toys.recipes.painter_score import geneval, to_uint8
from visspec.toys.recipes.painter_vq import ink_mask, picture_loss
from visspec.toys.recipes.recipe import Coder, TrainingStage, in_batches
from visspec.toys.world.scene import Scene
from visspec.toys.world.suite import Metadata, sample_prompt

SIDE, PATCH, SIZE = 64, 8, 8  # pixels a side of a picture and of a token, numbers of a token
GRID = SIDE // PATCH
TASKS = ("single_object", "colors", "two_object")
# Shapes stand on a grid of half patches and have one of two radii, as those of the other painter and for its reasons.
STEP, RADII = 4 / SIDE, (8 / SIDE, 10 / SIDE)
FIRST_SEED = {"autoencoder": 0, "crowded": 1 << 27, "tokens": 1 << 28, "decoder": 1 << 29}  # all below HELD_OUT_SEED
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

painted = partial(painter_data.paint_scene, grounds=("plain",), step=STEP, radii=RADII)


def pair(seed: int) -> tuple[Metadata, Scene]:
    """Prompt and scene number `seed`: task uniform of TASKS, then prompt uniform in the task."""
    rng = np.random.default_rng(seed)
    metadata = sample_prompt(rng, tag=TASKS[int(rng.integers(len(TASKS)))])
    return metadata, painted(metadata, rng)


def mixed_pictures(first: int, count: int) -> torch.Tensor:
    """Pictures (count, 3, SIDE, SIDE) number `first` and on: scenes of prompts and crowded ones by turns."""
    scenes = [
        dataclasses.replace(crowded_scene(FIRST_SEED["crowded"] + i), ground="plain") if i % 2 else pair(i)[1]
        for i in range(first, first + count)
    ]
    return pixels(scenes, SIDE)


def coders(options: argparse.Namespace, autoencoder: AutoencoderKL | None = None) -> dict[Path, Coder]:
    """What makes tokens.pt of `options.pairs` pairs: prompts, means of the tokens, where shapes are, and what is begun;
    by the autoencoder of the folder unless it is given.

    ids (N, PROMPT); means (N, tokens, SIZE) of the posterior, float16; ink (N, tokens), whether a token's pixels show
    part of a shape; begun (N, tokens, 7), as `painter_draw.progress` makes it.
    """
    tokenizer, codec = build_tokenizer(), autoencoder or load_autoencoder(options.out)

    def coded(numbers: range) -> dict[str, torch.Tensor]:
        pairs = [pair(FIRST_SEED["tokens"] + i) for i in numbers]
        pictures = pixels([scene for _, scene in pairs], SIDE)
        ink = F.avg_pool2d(ink_mask(pictures), PATCH)[:, 0] > 0
        return {
            "ids": prompt_ids(tokenizer, [row["prompt"] for row, _ in pairs]).short(),
            "means": codec.encode(pictures).latent_dist.mean.flatten(2).mT.half(),  # in raster order
            "ink": ink.flatten(1),
            "begun": torch.from_numpy(np.stack([progress(*each, part.numpy()) for each, part in zip(pairs, ink)])),
        }

    return {options.out / "tokens.pt": partial(in_batches, coded, range(options.pairs), 64)}


def moments(model: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Means of the latents as the encoder gives them, (B, SIZE, rows, columns)."""
    return model.quant_conv(model.encoder(pictures))[:, :SIZE]


class AutoencoderStage(TrainingStage):
    """Training of encoder and decoder on scenes of the prompts' kind and crowded ones."""

    name, seed, decay = "autoencoder.pt", 0, 0.01
    steps_option, rate_option, rate_share = "autoencoder_steps", None, 2e-3

    def build(self, options: argparse.Namespace) -> dict:
        self.model = AutoencoderKL(**CONFIG).train()
        return {"model": self.model}

    def loss(self) -> torch.Tensor:
        """Picture loss of the next batch, decoded from normalised means with noise."""
        rows = self.options.rows
        true = mixed_pictures(FIRST_SEED["autoencoder"] + (self.step * self.workers + self.rank) * rows, rows)
        mean = moments(self.model, true)
        centre, spread = mean.mean((0, 2, 3), keepdim=True), mean.std((0, 2, 3), keepdim=True)
        latents = (mean - centre) / spread
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(self.step))
        made = self.model.decoder(self.model.post_quant_conv(latents + NOISE * noise))
        self.notes["grey"] = round((made.detach() - true).abs().mean().item() * 127.5, 2)
        return picture_loss(made, true)

    def as_stock_model(self) -> AutoencoderKL:
        """The model in the stock class's own terms."""
        return normalize_latents(self.model)

    def figures(self) -> dict:
        """Figures of the reconstructions."""
        return measure(self.as_stock_model(), self.options.every_prompt * (8 if self.step < self.steps else 1))


@torch.no_grad()
def normalize_latents(trained: AutoencoderKL, count: int = 512) -> AutoencoderKL:
    """A copy in the stock class's own terms: normalised means, the posterior's deviation as a bias.

    Tokens drawn from the posterior of the prompts' pictures have mean 0 and deviation 1 in each of their numbers.
    """
    model = AutoencoderKL(**CONFIG)
    model.load_state_dict(trained.state_dict())
    model.eval()
    mean = torch.cat([moments(model, mixed_pictures(first, 64)) for first in range(0, count, 64)])
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


class AutoencoderDecoderStage(AutoencoderStage):
    """More training of the decoder alone, on the prompts' pictures: tokens stay what they are, so it may as well run
    after the painter has learnt them.
    """

    name, seed = "decoder.pt", 3
    steps_option = "decoder_steps"

    def build(self, options: argparse.Namespace) -> dict:
        self.model = load_autoencoder(options.out).train()
        return {name: getattr(self.model, name) for name in DECODER}

    def loss(self) -> torch.Tensor:
        """Picture loss of the next batch, decoded from sampled tokens."""
        rows = self.options.rows
        first = FIRST_SEED["decoder"] + (self.step * self.workers + self.rank) * rows
        true = pixels([pair(i)[1] for i in range(first, first + rows)], SIDE)
        with torch.no_grad():
            latents = self.model.encode(true).latent_dist.sample(torch.Generator().manual_seed(self.step))
        return picture_loss(self.model.decode(latents).sample, true)

    def finished(self) -> AutoencoderKL:
        return self.model


@torch.no_grad()
def measure(model: AutoencoderKL, every: int = 1) -> dict:
    """Pixel error, GenEval and posterior deviation over scenes of held-out seeds, decoded from sampled latents."""
    rows = rows_of(TASKS, every)
    true = pixels(held_out(rows, painted), SIDE)
    posterior = model.encode(true).latent_dist
    latents = posterior.sample(torch.Generator().manual_seed(0))
    made = torch.cat([model.decode(part).sample for part in latents.split(64)]).clamp(-1, 1)
    error = (made - true).abs().mean().item() * 127.5
    figures = geneval(to_uint8(made), rows)
    deviation = posterior.std[0, :, 0, 0].tolist()
    return figures | {
        "grey_levels": round(error, 2),
        "psnr": round(-10 * math.log10((made - true).square().mean().item() / 4), 2),
        "posterior_deviation": [round(s, 3) for s in deviation],
        "latent_deviation": round(latents.std().item(), 3),
    }
