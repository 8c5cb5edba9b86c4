"""Stage 2 of the painter recipe: the VQ model on scenes whose grounds and shapes are coded apart (painter_codes.py).

`ComposedStage` goes on with all of it. `VQDecoderStage` trains the decoder alone: codes stay what they are, so it may
as well run after the text model has learnt them.
"""

import argparse

import torch
from transformers import JanusVQVAE

from visspec.toys.recipes.painter_codes import compose, composed, decoded, measure
from visspec.toys.recipes.painter_data import FIRST_SEED, SIDE, pair, pixels
from visspec.toys.recipes.painter_vq import LOW_EVERY, Codebook, load_vq, picture_loss, quantised
from visspec.toys.world.scene import ShapeScene
from visspec.train.stages import Stage

RESTARTS = 0.5  # share of the steps in which unused codes restart


class _Pieces(Stage):
    """What both stages share: their batches and their report."""

    vq: JanusVQVAE

    def batch(self) -> tuple[list[ShapeScene], bool]:
        """This worker's scenes, every fourth time to be drawn at the low resolution."""
        rows, low = self.options.vq_rows, self.step % LOW_EVERY == LOW_EVERY - 1
        first = FIRST_SEED[self.file.stem] + (self.step * self.workers + self.rank) * rows
        return [pair(first + i)[1] for i in range(rows)], low

    def report(self) -> dict:
        """Figures of the reconstructions, on the first worker only."""
        every = self.options.every_prompt * (1 if self.step == self.steps else 4)
        return measure(self.vq, False, every) if self.rank == 0 else {}


class VQDecoderStage(_Pieces):
    """Training of the decoder on pictures of the prompts' kind; encoder and codebook are frozen."""

    def __init__(self, options: argparse.Namespace, rank: int):
        self.vq = load_vq(options.out, False).train()
        parts = {"decoder": self.vq.decoder, "post": self.vq.post_quant_conv}
        for part in (self.vq.encoder, self.vq.quant_conv, self.vq.quantize):
            part.requires_grad_(False)
        trained = [p for part in parts.values() for p in part.parameters()]
        rate = options.vq_rate / 2
        super().__init__(options, rank, "decoder.pt", options.decoder_steps, rate, trained, 0.01, parts)

    def loss(self) -> torch.Tensor:
        """Picture loss of the next batch."""
        scenes, low = self.batch()
        codes = self.vq.quantize.embedding(composed(self.vq, scenes, low)[0])
        return picture_loss(decoded(self.vq, codes), pixels(scenes, SIDE[low]))


class ComposedStage(_Pieces):
    """Training of all of the VQ model on composed scenes, from the first stage's."""

    def __init__(self, options: argparse.Namespace, rank: int):
        self.vq = load_vq(options.out, False).train()
        self.book = Codebook(self.vq, options.workers)
        trained = [p for p in self.vq.parameters() if p.requires_grad]
        parts, rate = {"vq": self.vq, "book": self.book}, options.vq_rate / 2
        super().__init__(options, rank, "composed.pt", options.composed_steps, rate, trained, 0.01, parts)
        torch.manual_seed(rank)

    def loss(self) -> torch.Tensor:
        """Picture and commitment loss of the next batch; the codebook follows on the way."""
        scenes, low = self.batch()
        unit, _ = compose(self.vq, scenes, low)
        restart = self.step % 20 == 10 and self.step < RESTARTS * self.steps
        chosen, commitment = quantised(self.vq, self.book, unit, restart)
        return picture_loss(decoded(self.vq, chosen), pixels(scenes, SIDE[low])) + commitment
