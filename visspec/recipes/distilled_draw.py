"""Stage `draw` of the distilled drafter's recipe: the painter's laws, from guesses that the drafter makes itself.

A picture is cut into stretches as drafting leaves them: each begins behind a code that the painter has just drawn, and
what stands before that is known with the painter's states. In every picture of a batch the later places of a stretch
hold nothing, the guesses of one or two passes of the drafter with the picture's own noise, or the painter's codes, to
which passes converge. One pass learns from all stretches.

Shapes: B pictures, P prompt, T elements (codes but the last), V codes, K most likely codes of a law.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visspec.accept.exact import Exact
from visspec.eval.world.scene import HELD_OUT_SEED
from visspec.eval.world.worlds import world
from visspec.loop.guard import Guarded
from visspec.models.drafters.distilled import DistilledDrafter, config_for
from visspec.models.nets.distilled_head import BLANK, GUESSED, KNOWN, DistilledHead
from visspec.models.targets.image_ar import ImageAR
from visspec.recipes.distilled_data import files, noise, painter, read_pictures
from visspec.recipes.painter_drafter import held_out, request_of, temperature_of
from visspec.recipes.stages import Stage
from visspec.train.validation import measure

STRETCH = (6, 40)  # places between two codes behind which a stretch begins
MIXTURE = (0.15, 0.25)  # shares of pictures whose places hold nothing, and guesses
FADE = 0.8  # weight of a place in these, of that before it: what comes late in a stretch can't be known there
REST = 0.1  # weight of cross-entropy beside total variation


class DistilStage(Stage):
    """Training of a `DistilledHead` for the included painter."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(7)
        self.family = painter()
        config = config_for(self.family, temperature=temperature_of(self.family))
        self.head = DistilledHead(config).train()
        self.drafter = DistilledDrafter(self.head, self.family)
        trained = list(self.head.parameters())
        super().__init__(options, rank, "distilled.pt", options.steps, options.rate, trained, 0.02, {"head": self.head})
        self.data = read_pictures(options.out, files(options.pictures))

    def chosen(self, rng: np.random.Generator) -> dict[str, Tensor]:
        """This worker's pictures of the next step."""
        per_step, known = self.options.rows * self.workers, len(self.data["codes"])
        epoch, step = divmod(self.step, max(1, known // per_step))
        order = np.random.default_rng((7, epoch)).permutation(known)[step * per_step :][:per_step]
        return {name: part[order[self.rank :: self.workers]] for name, part in self.data.items()}

    def loss(self) -> Tensor:
        """Cross-entropy with the painter's laws; later total variation, and a little of it."""
        rng = np.random.default_rng((7, self.step, self.rank))
        batch = self.chosen(rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits, weight_BT = attempted(self.head, self.drafter.table, batch, rng)
        cross_BT, apart_BT = distances(logits.float() / self.head.config.temperature, batch)
        whole = (weight_BT == 1).all(dim=1)  # rows with the painter's codes
        cross, apart = ((part * weight_BT).sum() / weight_BT.sum() for part in (cross_BT, apart_BT))
        self.notes |= {
            "cross": round(cross_BT[whole].mean().item(), 4),
            "apart": round(apart_BT[whole].mean().item(), 4),
        }
        return cross if self.step < self.options.opening * self.steps else apart + REST * cross

    def report(self) -> dict[str, Any]:
        """Tokens a pass on held-out prompts and noise, on the first worker only."""
        if self.rank or not self.options.watched:
            return {}
        self.head.eval()
        target = ImageAR(self.family, features=True)
        texts = held_out(world("shapes"), self.options.watched)
        request = request_of(self.family, texts, HELD_OUT_SEED, self.head.config.guidance)
        drafter = Guarded(self.drafter, target.capabilities)
        found = measure(target, drafter, Exact(), [request], self.drafter.traits.levels)
        self.head.train()
        passes = 1 + (self.head.config.positions - 1) / found.tau
        return {"tau": round(found.tau, 3), "passes": round(passes, 2), "by_depth": found.by_depth[:8]}


def attempted(
    head: DistilledHead, table: Tensor, batch: dict[str, Tensor], rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Logits (B, T, V) of a batch of `read_pictures`, from places as drafting finds them, and the weight of each
    element, (B, T); see the module.
    """
    codes_BT = batch["codes"][:, :-1].long()
    rows, count = codes_BT.shape
    begun_BT = torch.from_numpy(beginnings(rng, rows, count))
    element_T = torch.arange(count)
    memory, mask = remembered(head, table, batch, begun_BT)
    own = begun_BT == element_T
    run = partial(head, element=element_T.expand(rows, -1), memory=memory, mask_BTS=mask)
    share, guesses = torch.from_numpy(rng.random(rows)), torch.zeros_like(codes_BT)
    blank_B, guessed_B = share < MIXTURE[0], (share >= MIXTURE[0]) & (share < sum(MIXTURE))
    kind_BT = torch.full_like(codes_BT, BLANK).masked_fill(own, KNOWN)
    if guessed_B.any():
        at = guessed_B.nonzero()[:, 0]
        numbers = noise(batch["seed"][at], count + 1, head.config.vocab)[:, 1:]  # the prefill draws the first code
        known, kind = torch.where(own[at], codes_BT[at], 0), kind_BT[at]
        for _ in range(int(rng.integers(1, 3))):
            with torch.no_grad():
                logits = head(table[known], kind, element_T.expand(len(at), -1), memory[:, :, at], mask[at]).float()
            drawn = (logits / head.config.temperature + numbers[..., : logits.shape[-1]]).argmax(dim=-1)
            known = torch.where(own[at], codes_BT[at], F.pad(drawn[:, :-1], (1, 0)))
            kind = torch.where(own[at], KNOWN, GUESSED)
        guesses[at] = known
    value_BT = torch.where(guessed_B[:, None], guesses, codes_BT)
    kind_BT = torch.where(blank_B[:, None] | own, kind_BT, GUESSED)
    fading = (blank_B | guessed_B)[:, None]
    return run(table[value_BT], kind_BT), torch.where(fading, FADE ** (element_T - begun_BT), 1.0)


def remembered(head: DistilledHead, table: Tensor, batch: dict[str, Tensor], begun_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of prompts and codes (layers, 2, B, H, P + T, E), and what elements see of it and of each other, given
    where their stretches begin: (B, T, P + T + T).
    """
    codes_BT, (rows, prompt) = batch["codes"][:, :-1].long(), batch["words"].shape
    element_S = torch.arange(-prompt, codes_BT.shape[1])
    embeds = torch.cat([batch["prompt"].float(), table[codes_BT]], dim=1)
    states = torch.cat([batch["read"].float(), batch["states"].float()], dim=1)
    stored = head.remembered(embeds, states, element_S.expand(rows, -1))
    before_BTT = element_S[prompt:] < begun_BT[..., None]
    words_BTP = batch["words"][:, None].expand(-1, codes_BT.shape[1], -1)
    together_BTT = begun_BT[..., None] == begun_BT[:, None]
    return stored, torch.cat([words_BTP, before_BTT, together_BTT.tril()], dim=2)


def beginnings(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """(rows, count): the element that each one's stretch begins with, of stretches of random lengths."""
    begun = np.zeros((rows, count), np.int64)
    for row in begun:
        at = int(rng.integers(1, STRETCH[1]))
        while at < count:
            row[at:] = at
            at += int(rng.integers(*STRETCH))
    return begun


def distances(logits_BTV: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy and total variation, (B, T), of the laws of these logits and the painter's, on its likely codes."""
    log_BTK = logits_BTV.log_softmax(dim=-1).gather(-1, batch["likely"].long())
    p_BTK = batch["law"].float().exp()
    cross = -(p_BTK * log_BTK).sum(dim=-1)
    shared = torch.minimum(p_BTK, log_BTK.exp()).sum(dim=-1)
    return cross, 1 - shared
