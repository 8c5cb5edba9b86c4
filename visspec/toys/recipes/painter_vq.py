"""The painter's VQ model: a narrow JanusVQVAE that codes 8 x 8 pixels as one of 1,024 unit vectors.

The stock class compares encoder outputs with the codebook as they are, but normalises codes before decoding. With a
codebook of unit vectors both agree: the nearest code is the one with the largest cosine. The codebook follows the
encoder by moving averages and codes that nobody uses restart at encoder outputs.

For training the painter, the ground and each shape of a scene are coded apart and put together. The stock encoder's
group norms and attention see the whole picture, so that the same patch has other codes in other pictures: the codes of
an empty plain ground alone held three nats each, far more than the prompt says. Coded apart, every patch means the same
wherever it stands, and what is left to predict is the scene.

`PainterVQStage` teaches the model pictures. `ComposedStage` goes on with scenes that are coded apart, `VQDecoderStage`
with the decoder alone: codes stay what they are, so it may as well run after the text model has learnt them. `coders`
writes prompts and codes of a picture each.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import JanusVQVAE

from visspec.toys.recipes.painter_build import PATCH, build_tokenizer, prompt_ids, vq_config
from visspec.toys.recipes.painter_data import (
    FIRST_SEED,
    SIDE,
    bound_pair,
    crowded_scene,
    held_out,
    paint_scene,
    pair,
    pixels,
)
from visspec.toys.recipes.painter_score import geneval, to_uint8
from visspec.toys.recipes.recipe import (
    Coder,
    TrainingStage,
    evaluating,
    in_batches,
    mixed_precision,
    read_coded,
    shards,
)
from visspec.toys.world.scene import Scene, Shape
from visspec.toys.world.suite import Metadata, suite

WINDOW = 48  # pixels a side of the picture in which a shape is coded
WARM = 0.05  # share of the steps before codes replace the encoder's outputs
RESTARTS, COMPOSED_RESTARTS = 0.8, 0.5  # shares of the steps of both stages in which unused codes restart
DECAY = 0.96  # of the codebook's moving averages, per step
CUT_OUT = 0.65  # share of the steps on cut-outs of crowded scenes, a quarter of the work of whole ones
CROWDED = 0.85  # until this share of the steps every other batch of whole scenes is crowded
COMMITMENT = 0.02  # weight of the squared distance between encoder outputs and their codes
VQ_FILES = ("vq.pt", "composed.pt", "decoder.pt")  # checkpoints of the VQ model, in the order they are made
LOW_EVERY = 4  # every fourth batch is drawn at the low resolution
# Kinds of pairs: every task's, and the one task's that takes longest to learn.
KINDS: dict[str, Callable[[int], tuple[Metadata, Scene]]] = {"tokens": pair, "bound": bound_pair}
SHARES = {"tokens": 1.0, "bound": 0.5}  # pairs of a kind for each that --pairs asks for
SHARD = 8000  # pairs in a file at most: coding more of them in one go fills the memory with freed blocks


def latents(vq: JanusVQVAE, pictures: torch.Tensor) -> torch.Tensor:
    """Encoder outputs scaled to unit length, float32 (B, rows, columns, embed_dim)."""
    with mixed_precision(vq.training):
        raw = vq.quant_conv(vq.encoder(pictures))
    return F.normalize(raw.float().permute(0, 2, 3, 1), dim=-1)


def decode_codes(vq: JanusVQVAE, codes: torch.Tensor) -> torch.Tensor:
    """Pictures float32 (B, 3, S, S) of unit codes (B, rows, columns, embed_dim), for any grid."""
    with mixed_precision(vq.training):
        return vq.decoder(vq.post_quant_conv(codes.permute(0, 3, 1, 2).contiguous())).float()


def nearest(vq: JanusVQVAE, unit: torch.Tensor) -> torch.Tensor:
    """Index of the nearest code, int64, of unit vectors (..., embed_dim)."""
    return (unit @ vq.quantize.embedding.weight.T).argmax(-1)


def ink_mask(true: torch.Tensor) -> torch.Tensor:
    """Where pictures (B, 3, S, S) show a shape: 1.0 or 0.0, (B, 1, S, S).

    Grounds stay within 30 grey levels of the canvas grey and no colour of a shape does.
    """
    return ((true - 0.2).abs().amax(1, keepdim=True) > 0.26).float()


def crop_window(shape: Shape, side: int) -> tuple[int, int, Scene]:
    """First row and column (in patches) of a window of WINDOW pixels around a shape, and the scene in that window."""
    most = (side - WINDOW) // PATCH
    row, column = (min(most, max(0, round((at * side - WINDOW / 2) / PATCH))) for at in (shape.y, shape.x))
    x, y = ((at * side - first * PATCH) / WINDOW for at, first in ((shape.x, column), (shape.y, row)))
    return row, column, Scene((Shape(shape.kind, shape.colour, x, y, shape.radius * side / WINDOW),))


def compose(vq: JanusVQVAE, scenes: list[Scene], low: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit latents float32 (B, grid, grid, embed_dim), and bool (B, grid, grid) where they show part of a shape.

    A patch of plain ground is the same everywhere. A patch with parts of two shapes is the larger part's.
    """
    side = SIDE[low]
    grid, window = side // PATCH, WINDOW // PATCH
    textured = [i for i, scene in enumerate(scenes) if scene.ground != "plain"]
    grounds = [Scene(())] + [Scene((), scenes[i].ground, scenes[i].texture_seed) for i in textured]
    cut = [(i, *crop_window(shape, side)) for i, scene in enumerate(scenes) for shape in scene.things]
    alone = pixels([scene for *_, scene in cut], WINDOW)
    of_ground, of_shape = latents(vq, pixels(grounds, side)), latents(vq, alone)
    plain = F.normalize(of_ground[0].mean((0, 1)), dim=-1)
    out = plain.expand(len(scenes), grid, grid, -1).clone()
    out[textured] = of_ground[1:]
    most = torch.zeros(out.shape[:3])
    share = F.avg_pool2d(ink_mask(alone), PATCH)[:, 0]
    for (i, row, column, _), latent, ink in zip(cut, of_shape, share):
        here = (i, slice(row, row + window), slice(column, column + window))
        larger = ink > most[here]
        out[here] = torch.where(larger[..., None], latent, out[here])
        most[here] = torch.where(larger, ink, most[here])
    return out, most > 0


@torch.no_grad()
def compose_codes(vq: JanusVQVAE, scenes: list[Scene], low: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int64 (B, grid, grid) of scenes, and where they show part of a shape."""
    with mixed_precision():
        unit, ink = compose(vq, scenes, low)
    return nearest(vq, unit), ink


def usage(codes: torch.Tensor, count: int) -> dict:
    """How many of so many codes are used, and their perplexity."""
    share = torch.bincount(codes.flatten(), minlength=count) / codes.numel()
    entropy = -(share * (share + 1e-12).log()).sum()
    return {"codes": int((share > 0).sum()), "perplexity": round(float(torch.exp(entropy)), 1)}


@torch.no_grad()
def redrawn(vq: JanusVQVAE, codes: torch.Tensor, true: torch.Tensor, batch: int) -> tuple[np.ndarray, dict]:
    """Pictures uint8 (B, S, S, 3) of codes (B, rows, columns), and figures: their distance from the true ones (B, 3, S,
    S) in grey levels, and codes in use.
    """
    made = torch.cat([decode_codes(vq, vq.quantize.embedding(part)) for part in codes.split(batch)]).clamp(-1, 1)
    error = round(float((made - true).abs().mean()) * 127.5, 2)
    return to_uint8(made), {"grey_levels": error} | usage(codes, len(vq.quantize.embedding.weight))


@torch.no_grad()
def measure(vq: JanusVQVAE, low: bool, every: int = 4) -> dict:
    """GenEval of decoded held-out scenes of the suite's prompts [::every], pixel error, codes in use."""
    rows = suite()[::every]
    scenes = held_out(rows, paint_scene)
    with evaluating(vq):
        made, figures = redrawn(vq, compose_codes(vq, scenes, low)[0], pixels(scenes, SIDE[low]), 32)
    return geneval(made, rows) | figures


def picture_loss(made: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """L1 and half L2 of pixels, L1 of their differences along both axes; shapes and one pixel around weigh fourfold."""
    weight = 1 + 3 * F.max_pool2d(ink_mask(true), 3, 1, 1)
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


def quantise(vq: JanusVQVAE, book: Codebook, unit: torch.Tensor, restart: bool) -> tuple[torch.Tensor, torch.Tensor]:
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


class PainterVQStage(TrainingStage):
    """Training of the VQ model: 48-pixel cut-outs of crowded scenes first, whole scenes of the prompts' kind last."""

    name, decay = "vq.pt", 0.01
    seed: int | None = 0
    steps_option, rate_option = "vq_steps", "vq_rate"

    def __init__(self, options: argparse.Namespace, rank: int):
        super().__init__(options, rank)
        torch.manual_seed(rank)

    def build(self, options: argparse.Namespace) -> dict:
        self.vq = JanusVQVAE(vq_config(False)).train()
        self.book = Codebook(self.vq, options.workers)
        return {"vq": self.vq, "book": self.book}

    def batch(self) -> torch.Tensor:
        """This worker's pictures of this step: a pure function of step, rank and workers."""
        rows, low = self.options.vq_rows, self.step % LOW_EVERY == LOW_EVERY - 1
        whole = self.step >= CUT_OUT * self.steps
        rows = rows if whole and not low else 2 * rows
        first = FIRST_SEED["vq"] + (self.step * self.workers + self.rank) * 2 * self.options.vq_rows
        crowd = not whole or (self.step % 2 == 0 and self.step < CROWDED * self.steps)
        scenes = [crowded_scene(first + i) if crowd else pair(first + i)[1] for i in range(rows)]
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
            return picture_loss(decode_codes(self.vq, unit), true)
        if self.step == warm:
            self.book.start(flat)
        restart = self.step % 20 == 10 and self.step < RESTARTS * self.steps
        chosen, commitment = quantise(self.vq, self.book, unit, restart)
        return picture_loss(decode_codes(self.vq, chosen), true) + commitment

    def figures(self) -> dict:
        return measure(self.vq, False, self.options.every_prompt * (1 if self.step == self.steps else 4))


def load_vq(folder: Path, low: bool) -> JanusVQVAE:
    """The VQ model of `folder` for pictures of either resolution: the newest of VQ_FILES."""
    vq, file = JanusVQVAE(vq_config(low)), folder / "composed.pt"
    vq.load_state_dict(torch.load(file if file.exists() else folder / "vq.pt", weights_only=True)["vq"])
    if (folder / "decoder.pt").exists():
        saved = torch.load(folder / "decoder.pt", weights_only=True)
        for name, part in (("decoder", vq.decoder), ("post", vq.post_quant_conv)):
            part.load_state_dict(saved[name])
    return vq.eval()


class ComposedStage(PainterVQStage):
    """Training of all of the VQ model on composed scenes, from the first stage's."""

    name, seed, steps_option, rate_share = "composed.pt", None, "composed_steps", 0.5

    def build(self, options: argparse.Namespace) -> dict:
        self.vq = load_vq(options.out, False).train()
        self.book = Codebook(self.vq, options.workers)
        return {"vq": self.vq, "book": self.book}

    def scenes(self) -> tuple[list[Scene], bool]:
        """This worker's scenes, every fourth time to be drawn at the low resolution."""
        rows, low = self.options.vq_rows, self.step % LOW_EVERY == LOW_EVERY - 1
        first = FIRST_SEED[self.file.stem] + (self.step * self.workers + self.rank) * rows
        return [pair(first + i)[1] for i in range(rows)], low

    def loss(self) -> torch.Tensor:
        """Picture and commitment loss of the next batch; the codebook follows on the way."""
        scenes, low = self.scenes()
        unit, _ = compose(self.vq, scenes, low)
        restart = self.step % 20 == 10 and self.step < COMPOSED_RESTARTS * self.steps
        chosen, commitment = quantise(self.vq, self.book, unit, restart)
        return picture_loss(decode_codes(self.vq, chosen), pixels(scenes, SIDE[low])) + commitment


class VQDecoderStage(ComposedStage):
    """Training of the decoder on pictures of the prompts' kind; encoder and codebook are frozen."""

    name, steps_option = "decoder.pt", "decoder_steps"

    def build(self, options: argparse.Namespace) -> dict:
        self.vq = load_vq(options.out, False).train()
        for part in (self.vq.encoder, self.vq.quant_conv, self.vq.quantize):
            part.requires_grad_(False)
        return {"decoder": self.vq.decoder, "post": self.vq.post_quant_conv}

    def loss(self) -> torch.Tensor:
        """Picture loss of the next batch."""
        scenes, low = self.scenes()
        codes = self.vq.quantize.embedding(compose_codes(self.vq, scenes, low)[0])
        return picture_loss(decode_codes(self.vq, codes), pixels(scenes, SIDE[low]))


def encode(vq: JanusVQVAE, kind: str, numbers: range, low: bool, batch: int = 64) -> dict[str, torch.Tensor]:
    """Pairs of these numbers of a kind: `ids` (N, PROMPT) and `codes` (N, grid^2), both int16; `ink` (N, grid^2), bool,
    tells the codes whose pixels show part of a shape.
    """
    tokenizer = build_tokenizer()

    def coded(some: range) -> dict[str, torch.Tensor]:
        rows, scenes = zip(*(KINDS[kind](FIRST_SEED[kind] + i) for i in some))
        codes, ink = compose_codes(vq, list(scenes), low)
        ids = prompt_ids(tokenizer, [row["prompt"] for row in rows])
        return {"ids": ids.short(), "codes": codes.flatten(1).short(), "ink": ink.flatten(1)}

    return in_batches(coded, numbers, batch)


def files(folder: Path, kind: str, low: bool, first: int, count: int) -> dict[Path, range]:
    """Files that hold a kind's part of the pairs number first..first+count, and the pairs of the kind in each."""
    numbers = range(int(first * SHARES[kind]), int((first + count) * SHARES[kind]))
    return shards(folder, f"{kind}-{SIDE[low]}", numbers, int(SHARD * SHARES[kind]))


def coders(options: argparse.Namespace) -> dict[Path, Coder]:
    """What makes each file of `options.pairs` pairs, and of those of the other kind."""
    vq, low = load_vq(options.out, options.lowres), options.lowres
    return {
        file: partial(encode, vq, kind, numbers, low)
        for kind in KINDS
        for file, numbers in files(options.out, kind, low, options.first, options.pairs).items()
    }


def read_tokens(folder: Path, kind: str, low: bool, first: int, count: int) -> dict[str, torch.Tensor]:
    """All shards in order: ids (N, PROMPT), codes (N, grid^2) and ink (N, grid^2), as `encode` makes them.

    `number` (N,), int64, tells which pair of its kind each is.
    """
    found = files(folder, kind, low, first, count)
    return read_coded(found) | {"number": torch.tensor([number for numbers in found.values() for number in numbers])}
