"""Stage `vq` of the next-scale painters' recipe: the trainer of `visspec train vq` on rendered scenes."""

import argparse
import math
from pathlib import Path

import torch

from visspec.models.nets.layouts_var import load_var_vae, save_vae
from visspec.models.nets.multiscale import MultiScaleVAE
from visspec.recipes.painter_data import pixels
from visspec.recipes.painter_score import summary, to_uint8, verdicts
from visspec.recipes.painter_vq import picture_loss
from visspec.recipes.scale_data import FIRST_SEED, SCALES, SIDE, SIDES, Scenes, held_out, pair, rows_of_labels
from visspec.recipes.stages import Stage
from visspec.recipes.train_vq import VQStage

SEED = 7
SHAPE = {"codes": 256, "size": 16, "channels": 32, "levels": 3, "blocks": 1}


class ScenesVQStage(VQStage):
    """Training of the autoencoder; shapes weigh more than ground, as for the painter's VQ model."""

    source = Scenes

    def __init__(self, options: argparse.Namespace, rank: int):
        folder: Path = options.out / "vq"
        folder.mkdir(parents=True, exist_ok=True)
        own = SHAPE | {
            "sides": SIDES, "out": folder, "seed": SEED, "steps": options.vq_steps,
            "rows": options.vq_rows, "rate": options.vq_rate, "device": "cpu",
        }  # fmt: skip
        super().__init__(argparse.Namespace(**vars(options) | own), rank, list(range(options.vq_pictures)))

    def pixel_loss(self, features: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Of what features are decoded to."""
        return picture_loss(self.model.decoder(self.model.post_quant_conv(features)), true)

    def report(self) -> dict:
        """That of `VQStage`, and GenEval of held-out pictures of the prompts, coded and decoded."""
        figures = super().report()
        return figures | measure(load_var_vae(self.options.out)) if figures else {}


class DecoderStage(Stage):
    """More training of the decoder alone, on scenes of the prompts' kind; no code changes."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(SEED + 4)
        self.model = load_var_vae(options.out / "vq").requires_grad_(False)
        trained = [*self.model.decoder.parameters(), *self.model.post_quant_conv.parameters()]
        for parameter in trained:
            parameter.requires_grad_(True)
        super().__init__(
            options, rank, "decoder.pt", options.decoder_steps, options.vq_rate / 2, trained, 0.01,
            {"model": self.model},
        )  # fmt: skip

    def loss(self) -> torch.Tensor:
        """Picture loss of the next batch's codes, decoded."""
        rows = self.options.vq_rows
        first = FIRST_SEED["decoder"] + (self.step * self.workers + self.rank) * rows
        true = pixels([pair(first + i)[1] for i in range(rows)], SIDE)
        with torch.no_grad():
            features = self.model.quantize.features(self.model.encode(true, SCALES), SCALES)
        return picture_loss(self.model.decoder(self.model.post_quant_conv(features)), true)

    def report(self) -> dict:
        """That of `measure`; the folder is written."""
        if self.rank:
            return {}
        save_vae(self.options.out / "decoder", self.model, SCALES)
        return measure(self.model)


def load_vq(folder: Path) -> MultiScaleVAE:
    """The autoencoder of a recipe's folder, with the decoder of the last stage that is done."""
    done = folder / "decoder"
    return load_var_vae(done if done.exists() else folder / "vq").requires_grad_(False)


def measure(codec: MultiScaleVAE) -> dict:
    """GenEval of one held-out picture a prompt, and of what is decoded of its codes."""
    rows = rows_of_labels()
    true = held_out(rows)
    made = torch.cat([codec.decode(codec.encode(part, SCALES), SCALES) for part in true.split(32)])
    figures = [summary(verdicts(to_uint8(pictures), rows), rows)["geneval"] for pictures in (true, made)]
    error = (made - true).square().mean().item()
    return dict(zip(("rendered", "decoded"), figures)) | {"decoded_psnr": round(10 * math.log10(4 / error), 2)}
