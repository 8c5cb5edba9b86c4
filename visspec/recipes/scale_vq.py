"""Stage `vq` of the next-scale painters' recipe: the trainer of `visspec train vq` on rendered scenes."""

import argparse
from pathlib import Path

import torch

from visspec.models.nets.layouts_var import load_var_vae
from visspec.models.nets.multiscale import MultiScaleVAE
from visspec.recipes.painter_score import summary, to_uint8, verdicts
from visspec.recipes.painter_vq import picture_loss
from visspec.recipes.scale_data import SCALES, SIDES, Scenes, held_out, rows_of_labels
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
        return figures | measure(load_vq(self.options.out.parent)) if figures else {}


def load_vq(folder: Path) -> MultiScaleVAE:
    """The autoencoder of a recipe's folder."""
    return load_var_vae(folder / "vq").requires_grad_(False)


def measure(codec: MultiScaleVAE) -> dict:
    """GenEval of one held-out picture a prompt, and of what is decoded of its codes."""
    rows = rows_of_labels()
    true = held_out(rows)
    made = torch.cat([codec.decode(codec.encode(part, SCALES), SCALES) for part in true.split(32)])
    figures = [summary(verdicts(to_uint8(pictures), rows), rows)["geneval"] for pictures in (true, made)]
    return dict(zip(("rendered", "decoded"), figures))
