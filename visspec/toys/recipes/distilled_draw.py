"""Stage `draw` of the distilled drafter's recipe: the painter's guided distributions, from codes that may be guesses.

The drafter begins as some of the painter's own layers. It learns the distributions behind the painter's codes and, in a
part of the pictures, from what a draft's first passes find: behind some place there are no codes, or the drafter's own
guesses with the picture's noise. What such places can know fades with their distance from the last known code, and so
does their weight.

Shapes: B pictures, P prompt, T elements (codes but the last), V codes, K most likely codes of a distribution.
"""

import argparse
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visspec.accept.exact import Exact
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.distilled.drafter import DistilledDrafter, config_for, words
from visspec.models.distilled.head import BLANK, GUESSED, KNOWN, DistilledHead
from visspec.models.image_codes.target import ImageAR
from visspec.models.janus.target import Janus
from visspec.toys.recipes.distilled_data import files, noise, painter, read_pictures
from visspec.toys.recipes.painter_drafter import held_out, request_of, temperature_of
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.worlds import world
from visspec.train.stages import Stage
from visspec.train.validation import measure

LAYERS = (0, 1, 7)  # of the painter's, that the drafter begins as
MIXTURE = (0.15, 0.2)  # shares of pictures with missing codes, and with guesses
FADE = 0.9  # weight of a place behind known codes, of that before it
REST = 0.1  # weight of cross-entropy beside total variation


@torch.no_grad()
def begun(family: Janus, layers: tuple[int, ...]) -> DistilledHead:
    """A network of these layers of a painter, with its head; kinds and places say nothing yet."""
    decoder, last = family.decoder, family.model.model.generation_head
    config = config_for(
        family, layers=len(layers), temperature=temperature_of(family), rope_theta=rope_theta(decoder.config)
    )
    head = DistilledHead(config)
    for place, number in enumerate(layers):
        own: Any = head.layers[place]
        theirs = decoder.layers[number]
        attention, mlp = theirs.self_attn, theirs.mlp
        turned = [adjacent(part.weight, config.heads) for part in (attention.q_proj, attention.k_proj)]
        own.qkv.weight.copy_(torch.cat([*turned, attention.v_proj.weight]))
        own.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        pairs = [(own.out, attention.o_proj), (own.down, mlp.down_proj)]
        pairs += [(own.norm_in, theirs.input_layernorm), (own.norm_mlp, theirs.post_attention_layernorm)]
        for to, of in pairs:
            to.weight.copy_(of.weight)
    head.norm_out.weight.copy_(decoder.norm.weight)
    head.inner.load_state_dict(last.proj_out.state_dict())
    head.codes.load_state_dict(last.vision_head.state_dict())
    for part in head.codes.parameters():
        part.div_(config.temperature)
    return head


def rope_theta(config: Any) -> float:
    """The base of a Llama's rotations."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def adjacent(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection whose rotated channels are halves apart, as transformers has them, side by side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class DistilStage(Stage):
    """Training of a `DistilledHead` for a painter."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(7)
        self.family = painter(options.target)
        self.head = begun(self.family, LAYERS).train()
        self.drafter = DistilledDrafter(self.head, self.family)
        trained = list(self.head.parameters())
        parts = {"head": self.head}
        super().__init__(options, rank, "distilled.pt", options.steps, options.rate, trained, 0.02, parts)
        self.data = read_pictures(options.out, files(options.pictures))

    def chosen(self, rng: np.random.Generator) -> dict[str, Tensor]:
        """This worker's pictures of the next step."""
        per_step, known = self.options.rows * self.workers, len(self.data["codes"])
        epoch, step = divmod(self.step, max(1, known // per_step))
        order = np.random.default_rng((7, epoch)).permutation(known)[step * per_step :][:per_step]
        return {name: part[order[self.rank :: self.workers]] for name, part in self.data.items()}

    def loss(self) -> Tensor:
        """Cross-entropy with the painter's distributions; later total variation, and a little of it."""
        rng = np.random.default_rng((7, self.step, self.rank))
        batch = self.chosen(rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits, weight_BT = attempted(self.head, self.drafter.table, batch, rng)
        cross_BT, apart_BT = distances(logits.float() / self.head.config.temperature, batch)
        sure = weight_BT == 1
        self.notes |= {"cross": round(cross_BT[sure].mean().item(), 4), "apart": round(apart_BT[sure].mean().item(), 4)}
        cross, apart = ((part * weight_BT).sum() / weight_BT.sum() for part in (cross_BT, apart_BT))
        return cross if self.step < self.options.opening * self.steps else apart + REST * cross

    def report(self) -> dict[str, Any]:
        """Tokens a pass on held-out prompts and noise, on the first worker only."""
        if self.rank or not self.options.watched:
            return {}
        self.head.eval()
        target = ImageAR(self.family)
        texts = held_out(world("shapes"), self.options.watched)
        request = request_of(self.family, texts, HELD_OUT_SEED, self.head.config.guidance)
        drafter = SafeDrafter(self.drafter, target.capabilities)
        found = measure(target, drafter, Exact(), [request], self.drafter.traits.levels)
        self.head.train()
        passes = 1 + (self.head.config.positions - 1) / found.tau
        return {"tau": round(found.tau, 3), "passes": round(passes, 2), "by_depth": found.by_depth[:8]}


def attempted(
    head: DistilledHead, table: Tensor, batch: dict[str, Tensor], rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Logits (B, T, V) of a batch of `read_pictures`, and the weight of each element, (B, T); see the module."""
    codes_BT = batch["codes"][:, :-1].long()
    rows, count = codes_BT.shape
    newest_B1 = torch.from_numpy(rng.integers(0, count, (rows, 1)))
    ahead_BT = torch.arange(count) - newest_B1
    share = torch.from_numpy(rng.random(rows))
    blank_B, guessed_B = share < MIXTURE[0], (share >= MIXTURE[0]) & (share < sum(MIXTURE))
    value_BT, kind_BT = codes_BT.clone(), torch.where(ahead_BT > 0, GUESSED, KNOWN)
    blank_BT = torch.where(ahead_BT > 0, BLANK, KNOWN)
    kind_BT[blank_B] = blank_BT[blank_B]
    if guessed_B.any():
        at = guessed_B.nonzero()[:, 0]
        numbers = noise(batch["seed"][at], count + 1, head.config.vocab)[:, 1:]  # the prefill draws the first code
        kind = blank_BT[at]
        for _ in range(int(rng.integers(1, 3))):
            with torch.no_grad():
                logits = run(head, table, {name: part[at] for name, part in batch.items()}, value_BT[at], kind)
            drawn = (logits.float() / head.config.temperature + numbers[..., : logits.shape[-1]]).argmax(dim=-1)
            value_BT[at] = torch.where(ahead_BT[at] > 0, F.pad(drawn[:, :-1], (1, 0)), codes_BT[at])
            kind = kind_BT[at]
    fading = (blank_B | guessed_B)[:, None]
    weight_BT = torch.where(fading, FADE ** ahead_BT.clamp(min=0), 1.0)
    return run(head, table, batch, value_BT, kind_BT), weight_BT


def run(head: DistilledHead, table: Tensor, batch: dict[str, Tensor], value_BT: Tensor, kind_BT: Tensor) -> Tensor:
    """Logits (B, T, V) behind prompts and codes, of the kinds (B, T)."""
    rows, count = value_BT.shape
    _, memory = head(*words(batch["prompt"].float(), batch["words"], head))
    own_TT = torch.ones(count, count, dtype=torch.bool).tril()
    mask = torch.cat([batch["words"][:, None].expand(-1, count, -1), own_TT.expand(rows, -1, -1)], dim=2)
    x_BTd, _ = head(table[value_BT], kind_BT, torch.arange(count).expand(rows, -1), memory, mask)
    return head.logits(x_BTd)


def distances(logits_BTV: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy and total variation, (B, T), of the distributions of these logits and the painter's, on its likely
    codes.
    """
    log_BTK = logits_BTV.log_softmax(dim=-1).gather(-1, batch["likely"].long())
    p_BTK = batch["law"].float().exp()
    return -(p_BTK * log_BTK).sum(dim=-1), 1 - torch.minimum(p_BTK, log_BTK.exp()).sum(dim=-1)
