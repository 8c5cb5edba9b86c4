"""`painter-distilled`: the distilled drafter of the included painter, on pictures that the painter draws itself.

Stage `pictures` lets the painter draw at its own guidance and temperature and records what is learnt from, `draw`
teaches the drafter, `finish` measures it and writes the finished folder. On one thread 64 pictures take about 12
seconds and a step of 16 about half a second, so all of it 20 minutes of a core.

The drafter begins as some of the painter's own layers. It learns the guided distributions behind the painter's codes
and, in a part of the pictures, from what a draft's first passes find: behind some place there are no codes, or the
drafter's own guesses with the picture's noise, which is not stored but follows from its seed
(`visspec.sampling.Gumbel`). What such places can know fades with their distance from the last known code, and so does
their weight.

Seeds: 7 (draw); FIRST_SEED and on (pictures). Shapes: B pictures, P ids of the longest prompt, T codes or, in training,
elements (codes but the last), V codes, d hidden size, K most likely codes of a distribution.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.accept.exact import Exact
from visspec.accept.rejection import Rejection
from visspec.io.files import write_json
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.safe_drafter import SafeDrafter
from visspec.loop.stats import acceptance_by_depth
from visspec.models.distilled.drafter import DistilledDrafter, words
from visspec.models.distilled.head import BLANK, GUESSED, KNOWN, DistilledHead, DistilledLayer
from visspec.models.eagle.image_drafter import CaptureTarget
from visspec.models.image_codes.target import ImageAR
from visspec.models.janus.target import Janus
from visspec.sampling import Gumbel
from visspec.toys.recipes import cards, recipe
from visspec.toys.recipes.painter_drafter import Pictures, held_out, painter, request_of, temperature_of
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.worlds import world
from visspec.train.capture import capture
from visspec.train.validation import measure
from visspec.types import Acceptance, Request, State

FIRST_SEED = 7 << 27  # noise and prompts of no other recipe, below the held-out ones
BATCH = 64  # pictures in a file
LIKELY = 32  # codes of a distribution that are stored
LAYERS = (0, 1, 7)  # of the painter's, that the drafter begins as
MIXTURE = (0.15, 0.2)  # shares of pictures with missing codes, and with guesses
FADE = 0.9  # weight of a place behind known codes, of that before it
REST = 0.1  # weight of cross-entropy beside total variation
NAME = "painter-distilled"
SEED = HELD_OUT_SEED + 1000  # noise of the measured pictures, of no other stage
TOGETHER = 16  # pictures that are measured in a batch
SHAPES = ((24, 1), (24, 2), (24, 4), (12, 6), (16, 6), (32, 6))  # levels, refine
FEW = 16  # pictures that these, and `rejection`, are measured on


@torch.no_grad()
def record_pictures(family: Janus, request: Request, first: int) -> dict[str, Tensor]:
    """Pictures of a request whose row b draws from the seed `first + b`, all on the CPU: `seed` (B,), `words` (B, P)
    bool, `prompt` (B, P, d) the painter's inputs, `codes` (B, T), `likely` and `law` (B, T - 1, K) the
    distributions after all codes but the last: the likely codes, and logarithms.
    """
    lesson = capture(CaptureTarget(family), Exact(), request)
    codes = lesson.ids[:, lesson.prompt_length :].short()
    law, likely = lesson.logits.log_softmax(dim=-1).topk(LIKELY, dim=-1)
    assert lesson.attention is not None and lesson.embeddings is not None
    return {
        "seed": torch.arange(first, first + len(codes)),
        "words": lesson.attention.bool(),
        "prompt": lesson.embeddings.half(),
        "codes": codes,
        "likely": likely.short(),
        "law": law.half(),
    }


def noise(seeds: Tensor, count: int, width: int) -> Tensor:
    """(B, count, width): the Gumbel numbers of the first places of pictures with these seeds."""
    return Gumbel([torch.Generator().manual_seed(int(seed)) for seed in seeds], width).window(count)


def files(count: int) -> list[str]:
    """Names of the files with the first so many pictures."""
    return [f"pictures-{number}.pt" for number in range(-(-count // BATCH))]


def coders(options: argparse.Namespace) -> dict[Path, recipe.Coder]:
    """What draws `options.pictures` pictures."""
    family = painter(options.target)
    draw = Pictures(family, world("shapes"), BATCH, family.default_guidance, FIRST_SEED)

    def drawn(number: int) -> dict[str, Tensor]:
        return record_pictures(family, draw(number), FIRST_SEED + number * BATCH)

    return {options.out / file: partial(drawn, number) for number, file in enumerate(files(options.pictures))}


write_pictures = partial(recipe.write_coded, coders, keep=True)


def read_pictures(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Files in their order, prompts padded on the left to one length."""
    parts = [torch.load(folder / name, weights_only=True) for name in names]
    longest = max(part["words"].shape[1] for part in parts)
    for part in parts:
        missing = longest - part["words"].shape[1]
        part["words"] = F.pad(part["words"], (missing, 0))
        part["prompt"] = F.pad(part["prompt"], (0, 0, missing, 0))
    return recipe.concatenate(parts)


@torch.no_grad()
def begun(family: Janus, layers: tuple[int, ...]) -> DistilledHead:
    """A network of these layers of a painter, with its head; kinds and places say nothing yet."""
    decoder, last = family.decoder, family.model.model.generation_head
    theta = float((decoder.config.rope_parameters or {}).get("rope_theta", 10000.0))
    config = DistilledDrafter.config_for(
        family, layers=len(layers), temperature=temperature_of(family), rope_theta=theta
    )
    head = DistilledHead(config)
    for place, number in enumerate(layers):
        own, theirs = head.layers[place], decoder.layers[number]
        assert isinstance(own, DistilledLayer)
        attention, mlp = theirs.self_attn, theirs.mlp
        turned = [adjacent(part.weight, config.heads) for part in (attention.q_proj, attention.k_proj)]
        own.qkv.weight.copy_(torch.cat([*turned, attention.v_proj.weight]))
        own.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        pairs: list[tuple[nn.Module, nn.Module]] = [(own.out, attention.o_proj), (own.down, mlp.down_proj)]
        pairs += [(own.norm_in, theirs.input_layernorm), (own.norm_mlp, theirs.post_attention_layernorm)]
        for to, of in pairs:
            to.load_state_dict(of.state_dict())
    head.norm_out.weight.copy_(decoder.norm.weight)
    head.inner.load_state_dict(last.proj_out.state_dict())
    head.codes.load_state_dict(last.vision_head.state_dict())
    for part in head.codes.parameters():
        part.div_(config.temperature)
    return head


def adjacent(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection whose rotated channels are halves apart, as transformers has them, side by side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class DistilStage(recipe.TrainingStage):
    """Training of a `DistilledHead` for a painter."""

    name, seed, decay = "distilled.pt", 7, 0.02

    def build(self, options: argparse.Namespace) -> dict:
        self.family = painter(options.target)
        self.head = begun(self.family, LAYERS).train()
        self.drafter = DistilledDrafter(self.head, self.family)
        self.data = read_pictures(options.out, files(options.pictures))
        return {"head": self.head}

    def batch(self) -> dict[str, Tensor]:
        """This worker's pictures of the next step."""
        chosen = self.chosen(len(self.data["codes"]), 7)
        return {name: part[chosen] for name, part in self.data.items()}

    def loss(self) -> Tensor:
        """Cross-entropy with the painter's distributions; later total variation, and a little of it."""
        rng = np.random.default_rng((7, self.step, self.rank))
        batch = self.batch()
        with recipe.mixed_precision():
            logits, weight_BT = read_batch(self.head, self.drafter.table, batch, rng)
        cross_BT, apart_BT = distances(logits.float() / self.head.config.temperature, batch)
        sure = weight_BT == 1
        self.notes |= {"cross": round(cross_BT[sure].mean().item(), 4), "apart": round(apart_BT[sure].mean().item(), 4)}
        cross, apart = ((part * weight_BT).sum() / weight_BT.sum() for part in (cross_BT, apart_BT))
        return cross if self.step < self.options.opening * self.steps else apart + REST * cross

    def figures(self) -> dict[str, Any]:
        """Tokens a pass on held-out prompts and noise."""
        if not self.options.watched:
            return {}
        target = ImageAR(self.family)
        texts = held_out(world("shapes"), self.options.watched)
        request = request_of(self.family, texts, HELD_OUT_SEED, self.head.config.guidance)
        drafter = SafeDrafter(self.drafter, target.capabilities)
        found = measure(target, drafter, Exact(), [request], self.drafter.traits.levels)
        passes = 1 + (self.head.config.positions - 1) / found.tau
        return {"tau": round(found.tau, 3), "passes": round(passes, 2), "by_depth": found.by_depth[:8]}


def read_batch(
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


@dataclass
class DistilledOptions(recipe.Options):
    target: str = option("the painter that draws: an included one, or a folder", "painter")
    pictures: int = option("pictures to learn from", 1664)
    steps: int = option("steps of the draw stage", 600)
    rows: int = option("pictures in a batch of one worker", 16)
    rate: float = option("peak learning rate", 1e-3)
    opening: float = option("share of the steps that learn by cross-entropy alone", 0.5)
    every: int = option("steps between reports and checkpoints", 150)
    watched: int = option("held-out pictures of a report during training", 8)
    measured: int = option("held-out pictures that the finished one is measured on", 64)
    export: Path | None = option("folder to write the finished drafter to (default: inside --out)", None)


def prompts(count: int) -> list[str]:
    """Prompts of the suite, of which the first `FEW` are spread over it as all are."""
    texts, stride = held_out(world("shapes"), count), max(1, count // FEW)
    return [text for first in range(stride) for text in texts[first::stride]]


def drawn(family: Janus, drafter: DistilledDrafter | None, rule: Acceptance, texts: list[str]) -> list[State]:
    """Held-out pictures in batches, at a fixed depth of drafts."""
    target, states = ImageAR(family), []
    levels = 1 if drafter is None else drafter.traits.levels
    for start in range(0, len(texts), TOGETHER):
        request = request_of(family, texts[start : start + TOGETHER], SEED + start, family.default_guidance)
        guarded = None if drafter is None else SafeDrafter(drafter, target.capabilities)
        states.append(decode(target, guarded, rule, request, FixedLength(levels)))
    return states


def figures(states: list[State], plain: list[State], positions: int) -> dict[str, Any]:
    """Passes, and how many pictures are those of plain decoding."""
    rounds = [r for state in states for r in state.trace.rounds]
    pairs = [pair for one, two in zip(states, plain) for pair in zip(one.tokens, two.tokens)]
    passes = 1 + sum(len(r.committed) for r in rounds) / len(pairs)
    calls = sum(state.trace.calls["draft_pass"] for state in states) / max(len(rounds), 1)
    taken = {"passes": round(passes, 2), "passes_a_token": round(passes / positions, 4)}
    counts = {"identical": sum(one == two for one, two in pairs), "faults": sum(state.trace.faults for state in states)}
    return {"pictures": len(pairs)} | taken | {"draft_passes_a_round": round(calls, 2)} | counts


def measured(family: Janus, folder: Path, count: int) -> dict[str, Any]:
    """Figures of a finished folder."""
    positions, texts = family.layout().positions, prompts(count)
    few, plain = texts[:FEW], drawn(family, None, Exact(), texts)
    drafter = DistilledDrafter.from_pretrained(folder, family)
    rules: dict[str, Any] = {}
    shapes = []
    for name, rule in (("exact", Exact()), ("rejection", Rejection())):
        states = drawn(family, drafter, rule, texts if name == "exact" else few)
        rules[name] = figures(states, plain, positions)
        if name == "exact":
            rounds = [r for state in states for r in state.trace.rounds]
            rules[name]["by_depth"] = [round(share, 3) for share in acceptance_by_depth(rounds)]
    for levels, refine in SHAPES:
        other = DistilledDrafter.from_pretrained(folder, family, levels=levels, refine=refine)
        shapes.append(
            {"levels": levels, "refine": refine, **figures(drawn(family, other, Exact(), few), plain, positions)}
        )
    return {"rules": rules, "shapes": shapes, "levels": drafter.traits.levels, "refine": drafter.refine}


def finish(options: argparse.Namespace) -> None:
    """Write the folder from the last checkpoint in half precision, read it back, measure it and describe it."""
    saved = torch.load(options.out / "distilled.pt", weights_only=True)
    family = painter(options.target)
    head = begun(family, LAYERS)
    head.load_state_dict(saved["head"])
    folder = options.export or options.out / NAME
    about = {
        "target": Path(options.target).name,
        "stored_as": "float16",
        "draw": {name: saved[name] for name in ("step", "seconds", "loss")},
        "seeds": {"pictures": FIRST_SEED, "draw": 7, "measured": SEED},
        "plan": {name: getattr(options, name) for name in ("pictures", "steps", "rows", "rate", "opening")},
        "note": options.note,
    }
    record = provenance(family.model, recipe=f"visspec.toys {NAME}", **about)
    DistilledDrafter(head, family).save_pretrained(folder, record, torch.float16)
    found = measured(family, folder, options.measured)
    record |= {"weights": cards.identity(folder / "model.safetensors"), "measured": found}
    write_json(folder / cards.PROVENANCE, record)
    cards.publish(folder, card(head, family, record))
    cards.say(folder, **found["rules"])


def card(head: DistilledHead, family: Janus, record: dict[str, Any]) -> str:
    """The card, from the provenance of the weights."""
    found = record["measured"]
    columns = ("pictures", "passes", "passes_a_token", "draft_passes_a_round")
    of = {name: "" if name == "exact" else ", of its law" for name in found["rules"]}
    rules = (
        [f"`{name}`", *(str(e[c]) for c in columns), f"{e['identical']} of {e['pictures']}{of[name]}"]
        for name, e in found["rules"].items()
    )
    other = ("levels", "refine", "passes", "draft_passes_a_round")
    return cards.fill(
        NAME,
        record,
        head,
        globals(),
        temperature=temperature_of(family),
        positions=family.layout().positions,
        megabytes=record["weights"]["bytes"] / 1e6,
        rules=cards.table(rules),
        shapes=cards.table([str(e[c]) for c in other] for e in found["shapes"]),
        few=found["shapes"][0]["pictures"],
        depths=" ".join(f"{x:.2f}" for x in found["rules"]["exact"]["by_depth"]),
        minutes=record["draw"]["seconds"] / 60,
    )


DRAFTER = recipe.Recipe(
    NAME,
    "Train the distilled drafter of the included painter.",
    DistilledOptions,
    {"pictures": write_pictures, "draw": DistilStage, "finish": finish},
)
