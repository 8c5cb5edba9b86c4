"""Train a multi-scale VQ autoencoder (VAR's, arXiv 2404.02905) of a folder of images, or of what captions are of.

The command behind `visspec train vq --data DATA --out FOLDER`. The folder is what `load_var_vae` reads.

Every map of codes is to bring the sum of maps nearer to the encoder's features, and the features nearer to the sums:
the loss has the squared distance after each map, once for the codes and once, weighted, for the encoder; the decoder's
gradient goes to the features as if they were the sum. For the first steps features are not quantised; codes that
nobody uses start again at what some map was to bring. Pixels: absolute and half the squared error; there is no
perceptual and no adversarial loss, so textures come out smoother than VAR's.

Shapes: B images, T codes of all maps, S codes of a map, c numbers of a code, (H, W) the finest grid.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from visspec.api.training_data import TrainingData
from visspec.io.files import Json, write_json
from visspec.io.provenance import provenance
from visspec.models.scales.multiscale import GROUPS, MultiScaleShape, MultiScaleVAE, Quantizer, ScaleSizes
from visspec.models.var.layout import save_vae
from visspec.train.stages import Stage, begin, in_workers

COMMITMENT = 0.25  # weight of the distance in which the encoder's features move, as published
WARM = 0.05  # share of the steps before features are quantised
RESTARTS = 0.8  # share of the steps in which unused codes start again
PATIENCE = 50  # steps between restarts; a code that was not used since the last one is unused
HELD_OUT, MOST_HELD = 0.05, 64  # share of the images that only validates, at least one of them, at most 64


def quantise(quantize: Quantizer, features: Tensor, scales: ScaleSizes) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Features (B, c, H, W) -> their sum of maps, with the gradient going to the features; the loss; what each map was
    to bring, (B, S, c) of each; and all codes (B, T).
    """
    plain = features.detach()
    total, loss, brought, found = torch.zeros_like(plain), plain.new_zeros(()), [], []
    for at_BSc, codes_BS, part in quantize.maps(plain, scales):
        total = total + part
        loss = loss + F.mse_loss(total, plain) + COMMITMENT * F.mse_loss(features, total.detach())
        brought.append(at_BSc)
        found.append(codes_BS)
    return features + (total - features).detach(), loss / len(scales), brought, torch.cat(found, dim=1)


def square(image: Image.Image, side: int) -> np.ndarray:
    """The middle square of an image at `side` pixels, uint8 (side, side, 3)."""
    return np.asarray(ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC))


class Images:
    """The first images (N, 3, side, side) of records, in -1..1, read when first asked for and kept as uint8."""

    def __init__(self, data: TrainingData, records: range, side: int):
        self.data, self.records, self.side = data, records, side
        self.kept: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.records)

    def __call__(self, numbers: list[int]) -> Tensor:
        for i in numbers:
            if i not in self.kept:
                self.kept[i] = square(self.data.picture(self.records[i]), self.side)
        pixels = torch.from_numpy(np.stack([self.kept[i] for i in numbers]))
        return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


class MultiScaleVQStage(Stage):
    """Training of encoder, decoder, quantiser and codebook together."""

    def __init__(self, options: argparse.Namespace, rank: int, data: TrainingData):
        torch.manual_seed(options.seed)
        self.scales, shape = ScaleSizes.square(*options.sides), shape_of(options)
        self.device = torch.device(options.device)
        self.model = MultiScaleVAE(shape).to(self.device).train()
        super().__init__(
            options,
            rank,
            "training.pt",
            options.steps,
            options.rate,
            list(self.model.parameters()),
            0.01,
            {"model": self.model},
        )
        side = options.sides[-1] * self.model.factor
        count = len(data.records)
        held = 0 if count == 1 else min(max(1, int(HELD_OUT * count)), MOST_HELD)
        self.held, self.images = Images(data, range(held or count), side), Images(data, range(held, count), side)
        self.used = torch.zeros(shape.codes, dtype=torch.bool, device=self.device)

    def batch(self) -> Tensor:
        """This worker's images of this step, a pure function of seed, step and rank."""
        rng = np.random.default_rng((self.options.seed, self.step, self.rank))
        chosen = rng.choice(len(self.images), self.options.rows, replace=len(self.images) < self.options.rows)
        pixels = self.images(chosen.tolist()).to(self.device)
        mirrored = torch.from_numpy(rng.random(len(pixels)) < 0.5).to(self.device)
        return torch.where(mirrored[:, None, None, None], pixels.flip(-1), pixels)

    def loss(self) -> Tensor:
        """Pixels' and codes' loss of the next batch; codes start again on the way."""
        true, model, quantize = self.batch(), self.model, self.model.quantize
        features = model.quant_conv(model.encoder(true))
        warm = int(WARM * self.steps)
        if self.step < warm:
            return self.pixel_loss(features, true)
        summed, loss, brought, codes = quantise(quantize, features, self.scales)
        self.used[codes.flatten()] = True
        first = self.step == warm
        if first or ((self.step - warm) % PATIENCE == 0 and self.step < RESTARTS * self.steps):
            self.restart(brought, all_of_them=first)
            summed, loss, _, _ = quantise(quantize, features, self.scales)
        self.notes["codes"] = round(loss.item(), 4)
        return self.pixel_loss(summed, true) + loss

    def pixel_loss(self, features: Tensor, true: Tensor) -> Tensor:
        """Of what features are decoded to."""
        error = self.model.decoder(self.model.post_quant_conv(features)) - true
        return error.abs().mean() + 0.5 * error.square().mean()

    @torch.no_grad()
    def restart(self, brought: list[Tensor], all_of_them: bool) -> None:
        """Unused codes become what some map was to bring: a map of equal chance, then a place of it. Workers draw their
        own batches, so all take the first one's.
        """
        weight = self.model.quantize.embedding.weight
        rng = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
        which = torch.randint(len(brought), (len(weight),), generator=rng).tolist()
        flat = [part.flatten(0, 1) for part in brought]
        fresh = torch.stack([flat[k][int(torch.randint(len(flat[k]), (), generator=rng))] for k in which])
        used = self.used.float()
        if self.workers > 1:
            torch.distributed.broadcast(fresh, 0)
            torch.distributed.all_reduce(used)
        keep = (used > 0) & (not all_of_them)
        weight.copy_(torch.where(keep[:, None], weight, fresh))
        self.used.zero_()

    @torch.no_grad()
    def report(self) -> dict:
        """PSNR in dB of held-out images, number and perplexity of the codes that they use; the folder is written."""
        if self.rank:
            return {}
        self.model.eval()
        squares, count, codes = 0.0, 0, []
        for start in range(0, len(self.held), self.options.rows):
            true = self.held(list(range(start, min(start + self.options.rows, len(self.held))))).to(self.device)
            codes.append(self.model.encode(true, self.scales))
            made = self.model.decode(codes[-1], self.scales)
            squares, count = squares + (made - true).square().sum().item(), count + true.numel()
        law = torch.bincount(torch.cat(codes).flatten(), minlength=self.model.shape.codes).double()
        law = law / law.sum()
        perplexity = torch.exp(-(law * law.clamp(min=1e-12).log()).sum()).item()
        figures = {
            "psnr": round(10 * math.log10(4 / max(squares / count, 1e-12)), 3),
            "codes_used": int((law > 0).sum()),
            "perplexity": round(perplexity, 1),
            "held_out": len(self.held),
        }
        save_vae(self.options.out, self.model, self.scales)
        own = ((name, value) for name, value in vars(self.options).items() if name not in ("run", "command", "what"))
        record = provenance(device=self.device, recipe="train_vq", step=self.step, measured=figures)
        record["options"] = {name: _as_json(value) for name, value in own}
        write_json(self.options.out / "provenance.json", record)
        self.model.train()
        return figures


def _as_json(value: object) -> Json:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def shape_of(options: argparse.Namespace) -> MultiScaleShape:
    """The autoencoder's; the width doubles at the coarsest level."""
    steps = (1,) * (options.levels - 1) + (2,)
    return MultiScaleShape(options.codes, options.size, options.channels, steps, options.blocks)


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that make no autoencoder, before work starts."""
    if options.channels % GROUPS:
        raise ValueError(f"channels: got {options.channels}, expected a multiple of {GROUPS}")
    if options.workers > 1 and options.device != "cpu":
        raise ValueError(f"workers: got {options.workers} on {options.device}, expected 1: several are for the CPU")
    if not 0 < options.rate < math.inf:
        raise ValueError(f"rate: got {options.rate}, expected a positive number")
    if not options.resume and (options.out / "training.pt").exists():
        raise ValueError(f"out: {options.out} has a checkpoint already, expected --resume or another folder")


def run(options: argparse.Namespace) -> None:
    """Train and save an autoencoder."""
    check(options)
    data = TrainingData(options.data)
    begin(options, 1 if options.workers > 1 else torch.get_num_threads())
    make = partial(MultiScaleVQStage, data=data)
    if options.workers > 1:
        in_workers(make, options)
    else:
        stage = make(options, 0)
        if options.resume:
            stage.restore()
        stage.run()
    print(json.dumps({"folder": str(options.out), "images": len(data.records)}), flush=True)
