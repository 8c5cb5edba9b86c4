"""Stages of the next-scale painters' recipe: both learn codes of classes, then the small one the large one's
distributions.

Half of the large model's batches have its first maps alone: these say what is drawn and where, a pass over them costs a
third, and in CoDe they are all that it draws. The small model's second stage is CoDe's distillation, of all maps, the
last ones weighted by `LATE`, because the same weights draft whole pictures for exact speculation.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig

from visspec.api.images import ImagePipeline
from visspec.models.scales.multiscale import MultiScaleVAE, Quantizer, ScaleSizes
from visspec.models.var.model import VARImageConfig, VARImageModel
from visspec.models.var.network import VAR
from visspec.toys.recipes import animals
from visspec.toys.recipes.animals import LABELS, facts
from visspec.toys.recipes.painter_score import draw_pictures, pictures_of, to_uint8
from visspec.toys.recipes.recipe import mixed_precision
from visspec.toys.recipes.scale_codes import SCALES, load_vq

SIZES: dict[str, dict[str, Any]] = {
    "painter": {"width": 160, "depth": 6, "heads": 5, "shared": True},
    "small": {"width": 96, "depth": 2, "heads": 3, "shared": True},
}
FIRST, FIRST_SHARE = 6, 0.5  # maps of a short batch, and the share of the large model's batches that are short
LATE = 3.0  # weight of the maps behind FIRST in the distillation
DEVIATION = 0.02  # of initial weights
BATCH = 44  # pictures that are drawn together


def build(name: str, codec: MultiScaleVAE, sizes: dict | None = None) -> VARImageModel:
    """A fresh painter around a taught autoencoder; `sizes` override those of SIZES (for tests)."""
    grids = [list(grid) for grid in SCALES.grids]
    config = VARImageConfig(SIZES[name] | (sizes or {}), grids, LABELS, dataclasses.asdict(codec.shape))
    model = VARImageModel(config)
    begin(model.var)
    model.autoencoder.load_state_dict(codec.state_dict())
    model.autoencoder.requires_grad_(False).eval()
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, guidance_scale=2.0)
    return model


def begin(net: VAR) -> None:
    """Initial weights: small, those into the residual smaller with the depth; modulation is the identity."""
    for name, weight in net.named_parameters():
        if weight.dim() < 2 or name.endswith("scale_mul_1H11"):
            continue
        deeper = name.endswith(("attn.proj.weight", "fc2.weight"))
        nn.init.trunc_normal_(weight, std=DEVIATION / (2 * net.config.depth) ** 0.5 if deeper else DEVIATION)
        if name.endswith("ada_gss"):
            with torch.no_grad():
                weight[:, :, :2] = 1.0  # gates
                weight[:, :, 2:] = 0.0


def inputs(quantizer: Quantizer, codes_BT: Tensor, scales: ScaleSizes = SCALES) -> Tensor:
    """What a VAR reads of whole pictures, (B, T - first, c): after each map but the last the sum, on the next grid."""
    total, parts = quantizer.blank(len(codes_BT), scales, codes_BT.device), []
    for k, codes in enumerate(codes_BT.split(scales.sizes, dim=1)[:-1]):
        total = total + quantizer.part(k, scales, codes)
        parts.append(quantizer.shrink(total, k + 1, scales))
    return torch.cat(parts, dim=1)


class SharedClassEmbedding:
    """A network with embeddings of classes that are sums of those of their facts, so that a short training shares them;
    `fold_classes` writes them into the published table.
    """

    def __init__(self, model: VARImageModel):
        self.model, self.net = model, model.var
        self.facts, self.parts = facts(), nn.Embedding(facts().shape[1], self.net.config.width)
        nn.init.normal_(self.parts.weight, std=0.5)
        levels = torch.tensor(SCALES.levels)
        self.seen = (levels[None] <= levels[:, None])[None, None]
        self.net.class_emb.requires_grad_(False)

    def logits(self, classes_B: Tensor, read_BTc: Tensor, maps: int) -> Tensor:
        """(B, codes of the first maps, V), each given the maps before."""
        length = SCALES.begins[maps]
        given = self.facts[classes_B] @ self.parts.weight
        x = torch.cat([self.net.first(given), self.net.embed(read_BTc[:, : length - 1], 1)], dim=1)
        mask = self.seen[..., :length, :length]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, scale=1.0)

        hidden = self.net(x, given, attend, torch.arange(length))
        return self.net.logits(hidden, given).float()

    @torch.no_grad()
    def fold_classes(self) -> VARImageModel:
        """The model, with its table of classes."""
        self.net.class_emb.weight.copy_(self.facts @ self.parts.weight)
        return self.model


def weights(maps: int, late: float = 1.0) -> Tensor:
    """(T,) of the codes of the first maps, sum 1: a map counts by its side, those behind FIRST `late` times."""
    sides = torch.tensor([size**0.5 * (late if k >= FIRST else 1.0) for k, size in enumerate(SCALES.sizes[:maps])])
    sizes = torch.tensor(SCALES.sizes[:maps])
    return torch.repeat_interleave(sides / sides.sum() / sizes, sizes)


class CodesStage(animals.ClassStage):
    """Training on codes of classes."""

    data_file = "codes.pt"

    size: str  # of SIZES
    seed: int
    decay = 0.02
    short = 0.0  # share of the batches that have the first maps alone

    def build(self, options: argparse.Namespace) -> dict:
        self.read(options)
        self.taught = SharedClassEmbedding(build(self.size, load_vq(options.out)))
        self.model = self.taught.model.train()
        return {"model": self.model, "classes": self.taught.parts}

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """This worker's classes (B,), codes (B, T) and what is read of them, a pure function of seed, step and rank."""
        chosen, dropped = self.batch_rows()
        classes, codes = self.data["classes"][chosen].long(), self.data["codes"][chosen].long()
        classes = classes.masked_fill(dropped, len(LABELS))
        with torch.no_grad():
            return classes, codes, inputs(self.model.autoencoder.quantize, codes)

    def report_losses(self, losses_BT: Tensor) -> None:
        """Nats of a code, of the first and of the last maps."""
        for name, k in (("first", 0), ("sixth", FIRST - 1), ("last", len(SCALES) - 1)):
            part = losses_BT[:, SCALES.begins[k] : SCALES.begins[k + 1]]
            if part.shape[1]:
                self.notes[name] = round(part.mean().item(), 3)

    def loss(self) -> Tensor:
        classes, codes, read = self.batch()
        short = np.random.default_rng((self.seed, self.step)).random() < self.short
        maps = FIRST if short else len(SCALES)
        codes = codes[:, : SCALES.begins[maps]]
        with mixed_precision():
            logits = self.taught.logits(classes, read, maps)
        losses = F.cross_entropy(logits.transpose(1, 2), codes, reduction="none")
        self.report_losses(losses.detach())
        return (losses @ weights(maps)).mean()

    def figures(self) -> dict:
        asked = animals.rows(4 * self.options.every_prompt)
        return animals.score(partial(pictures, self.taught.fold_classes(), seed=0), asked, guidance=2.0)


class ScaleStage(CodesStage):
    """Training of the painter."""

    name, seed, size, short = "painter.pt", 8, "painter", FIRST_SHARE


class SmallStage(CodesStage):
    """Training of the small painter."""

    name, seed, size = "small.pt", 9, "small"
    steps_option = "small_steps"


class RefineStage(CodesStage):
    """The small painter's distributions are to be the large one's, given the same maps: KL(large, small), no codes of
    data are targets.
    """

    name, seed, size = "refined.pt", 10, "small"
    steps_option, rate_share = "refine_steps", 0.5

    def build(self, options: argparse.Namespace) -> dict:
        parts = super().build(options)
        load_stage(self.taught, options.out / "small.pt")
        self.large = SharedClassEmbedding(build("painter", load_vq(options.out)))
        load_stage(self.large, options.out / "painter.pt")
        return parts

    def loss(self) -> Tensor:
        classes, _, read = self.batch()
        with mixed_precision():
            with torch.no_grad():
                wanted = self.large.logits(classes, read, len(SCALES)).log_softmax(-1)
            said = self.taught.logits(classes, read, len(SCALES)).log_softmax(-1)
        losses = (wanted.exp() * (wanted - said)).sum(-1)
        self.report_losses(losses.detach())
        return (losses @ weights(len(SCALES), LATE)).mean()


def load_stage(taught: SharedClassEmbedding, file: Path) -> None:
    """Load a stage's model from its checkpoint."""
    saved = torch.load(file, weights_only=True)
    taught.model.load_state_dict(saved["model"])
    taught.parts.load_state_dict(saved["classes"])


def pictures(model: VARImageModel, prompts: list[str], guidance: float, seed: int) -> np.ndarray:
    """Pictures uint8 (B, S, S, 3) of plain decoding."""
    return to_uint8(pictures_of(draw_pictures(ImagePipeline(model, None), prompts, guidance, seed, BATCH)))
