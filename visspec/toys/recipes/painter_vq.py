"""Stage 1 of the painter recipe: a narrow JanusVQVAE that codes 8 x 8 pixels as one of 1,024 unit vectors.

The stock class compares encoder outputs with the codebook as they are, but normalises codes before decoding. With a
codebook of unit vectors both agree: the nearest code is the one with the largest cosine. The codebook follows the
encoder by moving averages and codes that nobody uses restart at encoder outputs.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import JanusVQVAE

from visspec.toys.recipes.painter_build import vq_config
from visspec.toys.recipes.painter_codes import decoded, inked, latents, measure, nearest
from visspec.toys.recipes.painter_data import FIRST_SEED, SIDE, crowded, pair, pixels
from visspec.train.stages import Stage

WARM = 0.05  # share of the steps before codes replace the encoder's outputs
RESTARTS = 0.8  # share of the steps in which unused codes restart
DECAY = 0.96  # of the codebook's moving averages, per step
CUT_OUT = 0.65  # share of the steps on cut-outs of crowded scenes, a quarter of the work of whole ones
CROWDED = 0.85  # until this share of the steps every other batch of whole scenes is crowded
COMMITMENT = 0.02  # weight of the squared distance between encoder outputs and their codes
VQ_FILES = ("vq.pt", "composed.pt", "decoder.pt")  # checkpoints of the VQ model, in the order they are made
LOW_EVERY = 4  # every fourth batch is drawn at the low resolution


def picture_loss(made: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """L1 and half L2 of pixels, L1 of their differences along both axes; shapes and one pixel around weigh fourfold."""
    weight = 1 + 3 * F.max_pool2d(inked(true), 3, 1, 1)
    error = made - true
    loss = (weight * (error.abs() + 0.5 * error.square())).mean()
    loss = loss + (weight[..., 1:, :] * error.diff(dim=-2).abs()).mean()
    return loss + (weight[..., 1:] * error.diff(dim=-1).abs()).mean()


class Codebook:
    """Moving averages of the unit vectors assigned to each code; all workers keep the same ones."""

    def __init__(self, vq: JanusVQVAE, workers: int):
        self.weight, self.workers = vq.quantize.embedding.weight, workers
        self.weight.requires_grad_(False)
        self.weight.copy_(F.normalize(self.weight, dim=-1))
        self.count = torch.ones(len(self.weight))
        self.sum = self.weight.clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors a checkpoint needs beside the codebook itself."""
        return {"count": self.count, "sum": self.sum}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take the averages of a checkpoint."""
        self.count, self.sum = state["count"], state["sum"]

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.workers > 1:
            dist.broadcast(tensor, 0)
        return tensor

    @torch.no_grad()
    def start(self, unit: torch.Tensor) -> None:
        """Take random vectors of (N, embed_dim) as codes, the first worker's."""
        chosen = unit[torch.randint(len(unit), (len(self.weight),))].clone()
        self.weight.copy_(self._share(chosen))
        self.sum, self.count = self.weight.clone(), torch.ones(len(self.weight))

    @torch.no_grad()
    def follow(self, unit: torch.Tensor, owner: torch.Tensor) -> None:
        """Move every code towards the mean direction of the vectors (N, embed_dim) that `owner` (N) gives it."""
        fresh = torch.zeros(len(self.weight), self.weight.shape[1] + 1)
        fresh.index_add_(0, owner, torch.cat([unit, torch.ones(len(unit), 1)], 1))
        if self.workers > 1:
            dist.all_reduce(fresh)
        self.sum.mul_(DECAY).add_(fresh[:, :-1], alpha=1 - DECAY)
        self.count.mul_(DECAY).add_(fresh[:, -1], alpha=1 - DECAY)
        self.weight.copy_(F.normalize(self.sum, dim=-1))

    @torch.no_grad()
    def restart(self, unit: torch.Tensor) -> int:
        """Replace codes used less than a thirtieth of the mean by random vectors of (N, embed_dim); how many."""
        unit = unit.unique(dim=0)  # every patch of plain ground is the same
        dead = self.count < self.count.mean() / 30
        chosen = self._share(unit[torch.randint(len(unit), (len(self.weight),))].clone())
        self.weight[dead] = chosen[dead]
        self.count[dead] = self.count.mean()
        self.sum[dead] = chosen[dead] * self.count.mean()
        return int(dead.sum())


def quantised(vq: JanusVQVAE, book: Codebook, unit: torch.Tensor, restart: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of unit vectors (B, rows, columns, embed_dim) with straight-through gradients, and the commitment loss.

    The codebook follows the vectors; with `restart` its unused codes start again.
    """
    flat = unit.detach().flatten(0, 2)
    owner = nearest(vq, flat)
    chosen = vq.quantize.embedding.weight[owner].view_as(unit).clone()
    book.follow(flat, owner)
    if restart:
        book.restart(flat)
    return unit + (chosen - unit).detach(), COMMITMENT * (unit - chosen).square().sum(-1).mean()


class PainterVQStage(Stage):
    """Training of the VQ model: 48-pixel cut-outs of crowded scenes first, whole scenes of the prompts' kind last."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(0)
        self.vq = JanusVQVAE(vq_config(False)).train()
        self.book = Codebook(self.vq, options.workers)
        trained = [p for p in self.vq.parameters() if p.requires_grad]
        parts = {"vq": self.vq, "book": self.book}
        super().__init__(options, rank, "vq.pt", options.vq_steps, options.vq_rate, trained, 0.01, parts)
        torch.manual_seed(rank)

    def batch(self) -> torch.Tensor:
        """This worker's pictures of this step: a pure function of step, rank and workers."""
        rows, low = self.options.vq_rows, self.step % LOW_EVERY == LOW_EVERY - 1
        whole = self.step >= CUT_OUT * self.steps
        rows = rows if whole and not low else 2 * rows
        first = FIRST_SEED["vq"] + (self.step * self.workers + self.rank) * 2 * self.options.vq_rows
        crowd = not whole or (self.step % 2 == 0 and self.step < CROWDED * self.steps)
        scenes = [crowded(first + i) if crowd else pair(first + i)[1] for i in range(rows)]
        if whole or low:
            return pixels(scenes, SIDE[low])
        top, left = (int(v) for v in np.random.default_rng(first).integers(SIDE[False] - SIDE[True], size=2))
        return pixels(scenes, SIDE[False])[..., top : top + SIDE[True], left : left + SIDE[True]].contiguous()

    def loss(self) -> torch.Tensor:
        """Picture and commitment loss of the next batch; the codebook follows on the way."""
        true = self.batch()
        unit = latents(self.vq, true)
        flat, warm = unit.detach().flatten(0, 2), int(WARM * self.steps)
        if self.step < warm:
            return picture_loss(decoded(self.vq, unit), true)
        if self.step == warm:
            self.book.start(flat)
        restart = self.step % 20 == 10 and self.step < RESTARTS * self.steps
        chosen, commitment = quantised(self.vq, self.book, unit, restart)
        return picture_loss(decoded(self.vq, chosen), true) + commitment

    def report(self) -> dict:
        """Figures of the reconstructions, on the first worker only."""
        every = self.options.every_prompt * (1 if self.step == self.steps else 4)
        return measure(self.vq, False, every) if self.rank == 0 else {}


def load_vq(folder: Path, low: bool) -> JanusVQVAE:
    """The VQ model of `folder` for pictures of either resolution: the newest of VQ_FILES."""
    vq, file = JanusVQVAE(vq_config(low)), folder / "composed.pt"
    vq.load_state_dict(torch.load(file if file.exists() else folder / "vq.pt", weights_only=True)["vq"])
    if (folder / "decoder.pt").exists():
        saved = torch.load(folder / "decoder.pt", weights_only=True)
        for name, part in (("decoder", vq.decoder), ("post", vq.post_quant_conv)):
            part.load_state_dict(saved[name])
    return vq.eval()
