"""`painter-emoji` from zero: a small Janus that draws an animal of the emoji world on a ground of its prompt.

The stages and networks are those of the shapes' painter (`visspec.toys.recipes.painter`), with what is of shapes
alone left
out: whole pictures are coded by the stock encoder, and of the throw-away heads there is one, which tells the prompt's
animal at every code. Codes of grain and of soft edges are ambiguous, which is what this world is for: `finish` measures
how flat the distributions are.

Data: prompts of `visspec.toys.world.emoji.suite` of one animal, half of them with a ground; scenes with seeds from
2^30 on are never trained on. Seeds: 0 (vq), 1 (draw).
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import JanusForConditionalGeneration, JanusProcessor

from visspec.io.files import replacing
from visspec.io.options import option
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter import sheet
from visspec.toys.recipes.painter_build import TEXT, build_model, build_processor, build_tokenizer, generation_config
from visspec.toys.recipes.painter_codes import decoded, latents, nearest
from visspec.toys.recipes.painter_draw import DROPPED, GUIDANCES, draw, drawn
from visspec.toys.recipes.painter_score import summary, to_uint8, verdicts
from visspec.toys.recipes.painter_tokens import prompt_ids, without_words
from visspec.toys.recipes.painter_vq import CUT_OUT, PainterVQStage, load_vq
from visspec.toys.recipes.recipe import Options, Recipe, trained
from visspec.toys.world.emoji.scene import EmojiScene, PlacedEmoji, sample_ground
from visspec.toys.world.emoji.suite import subjects
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.suite import Metadata
from visspec.toys.world.worlds import world
from visspec.train.stages import Stage

NAME, OF, SIDE = "painter-emoji", "emoji", 96
PROMPT = 16  # ids of the longest prompt
SHARD = 2000
FIRST_SEED = {"vq": 0, "tokens": 1 << 28}  # both below HELD_OUT_SEED
SIDES, OFFSET, MOST_TURN = (0.64, 0.68), 0.02, 2.0  # of the animals: what is drawn is at home in the middle
WINDOW = 48  # pixels a side of the cut-outs that the VQ model starts with
TOLD, TOLD_UNTIL = 0.3, 0.6  # weight of telling the animal at the first step; share of the steps when it is 0
SEED = 0  # of the measured pictures


def painted(metadata: Metadata, rng: np.random.Generator) -> EmojiScene:
    """A scene of one animal near the middle, on the prompt's ground or a random one."""
    x, y = (0.5 + float(v) for v in rng.uniform(-OFFSET, OFFSET, size=2))
    side, turn = float(rng.uniform(*SIDES)), float(rng.uniform(-MOST_TURN, MOST_TURN))
    picture = PlacedEmoji(metadata["include"][0]["class"], x, y, side, turn)
    ground, tint, seed = sample_ground(rng)
    ground, tint = metadata.get("ground", (ground, tint))
    return EmojiScene((picture,), ground, tint, seed)


def pair(seed: int) -> tuple[Metadata, EmojiScene]:
    """Prompt and scene number `seed`; every second prompt names no ground."""
    rng = np.random.default_rng(seed)
    metadata = world(OF).prompt(rng)
    if rng.random() < 0.5:
        metadata = world(OF).suite.make("single_object", metadata["include"])
    return metadata, painted(metadata, rng)


def pixels(scenes: list[EmojiScene]) -> torch.Tensor:
    """Rendered pictures in -1..1, float32 (B, 3, SIDE, SIDE)."""
    batch = torch.from_numpy(np.stack([world(OF).render(scene, SIDE) for scene in scenes]))
    return batch.permute(0, 3, 1, 2).float() / 127.5 - 1


def held_out(rows: list[Metadata]) -> list[EmojiScene]:
    """One scene a prompt, drawn with seeds no training pair has."""
    return [painted(row, np.random.default_rng(HELD_OUT_SEED + i)) for i, row in enumerate(rows)]


@torch.no_grad()
def codes_of(vq, scenes: list[EmojiScene], batch: int = 16) -> torch.Tensor:
    """Codes int64 (B, 144) of rendered scenes."""
    parts = [pixels(scenes[i : i + batch]) for i in range(0, len(scenes), batch)]
    return torch.cat([nearest(vq, latents(vq, part)).flatten(1) for part in parts])


@torch.no_grad()
def reconstruction(vq, rows: list[Metadata]) -> dict:
    """Pixel error and codes in use on held-out scenes, and the detector's verdict on the decoded pictures."""
    was = vq.training
    vq.eval()
    scenes = held_out(rows)
    codes = codes_of(vq, scenes)
    side = SIDE // 8
    made = torch.cat([decoded(vq, vq.quantize.embedding(part).unflatten(1, (side, side))) for part in codes.split(16)])
    vq.train(was)
    law = torch.bincount(codes.flatten(), minlength=len(vq.quantize.embedding.weight)) / codes.numel()
    right = verdicts(to_uint8(made.clamp(-1, 1)), rows, world(OF).detector())
    error = float((made.clamp(-1, 1) - pixels(scenes)).abs().mean()) * 127.5
    used = {"codes": int((law > 0).sum()), "perplexity": round(float(torch.exp(-(law * (law + 1e-12).log()).sum())), 1)}
    return {"right": sum(right) / len(right), "prompts": len(rows), "grey_levels": round(error, 2)} | used


class EmojiVQStage(PainterVQStage):
    """The VQ model on cut-outs first, on whole pictures last."""

    def batch(self) -> torch.Tensor:
        """This worker's pictures of this step: a pure function of step, rank and workers."""
        whole, rows = self.step >= CUT_OUT * self.steps, self.options.vq_rows
        first = FIRST_SEED["vq"] + (self.step * self.workers + self.rank) * 2 * rows
        made = pixels([pair(first + i)[1] for i in range(rows if whole else 2 * rows)])
        if whole:
            return made
        corners = np.random.default_rng(first).integers(8, SIDE - WINDOW - 7, size=(len(made), 2))
        return torch.stack([part[:, y : y + WINDOW, x : x + WINDOW] for part, (y, x) in zip(made, corners)])

    def report(self) -> dict:
        """Figures of the reconstructions, on the first worker only."""
        return reconstruction(self.vq, world(OF).prompts()[::8]) if self.rank == 0 else {}


def shards(options: argparse.Namespace) -> dict[Path, range]:
    """Files of the coded pairs, and the pairs in each."""
    starts = range(0, options.pairs, SHARD)
    return {options.out / f"tokens-{s}.pt": range(s, min(s + SHARD, options.pairs)) for s in starts}


def write_tokens(options: argparse.Namespace) -> None:
    """Code `options.pairs` pairs: `ids` (N, PROMPT), `codes` (N, 144) and `animal` (N), int16."""
    vq, tokenizer = load_vq(options.out, False), build_tokenizer(OF)
    for file, numbers in shards(options).items():
        if options.resume and file.exists():
            continue
        begun = time.time()
        rows, scenes = zip(*(pair(FIRST_SEED["tokens"] + i) for i in numbers))
        ids = prompt_ids(tokenizer, [row["prompt"] for row in rows], PROMPT)
        animal = torch.tensor([subjects().index(row["include"][0]["class"]) for row in rows])
        with replacing(file) as draft:
            codes = codes_of(vq, list(scenes))
            torch.save({"ids": ids.short(), "codes": codes.short(), "animal": animal.short()}, draft)
        print(json.dumps({"file": file.name, "pairs": len(numbers), "s": round(time.time() - begun)}), flush=True)


@torch.no_grad()
def law(model: JanusForConditionalGeneration, rows: list[Metadata], batch: int = 8) -> dict:
    """Of the distribution of a code after those of held-out scenes, guidance 1: mean entropy in nats, top-1, top-10 and
    top-100 mass, and loss.
    """
    codes = codes_of(model.model.vqmodel, held_out(rows))
    ids = prompt_ids(build_tokenizer(OF), [row["prompt"] for row in rows], PROMPT)
    pad = model.config.get_text_config().pad_token_id
    sums, count = torch.zeros(5), 0
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        out = drawn(model, ids[part], (ids[part] != pad).long(), codes[part])
        log_p = out.logits.float().log_softmax(-1)
        top = log_p.exp().topk(100).values.flatten(0, 1)
        entropy = -(log_p.exp() * log_p).sum(-1).flatten()
        masses = [top[:, :k].sum(1) for k in (1, 10, 100)]
        sums += torch.stack([v.sum() for v in (entropy, *masses, out.losses.flatten())])
        count += entropy.numel()
    names = ("entropy", "top_1", "top_10", "top_100", "loss")
    return {"codes": count} | {name: round(v, 4) for name, v in zip(names, (sums / count).tolist())}


def score(model, processor, rows: list[Metadata], guidance: float, seed: int = SEED) -> dict:
    """The detector's verdicts on one picture a prompt."""
    begun = time.time()
    pictures = draw(model, processor, [row["prompt"] for row in rows], guidance, seed)
    record = {"guidance": guidance, **summary(verdicts(pictures, rows, world(OF).detector()), rows)}
    return record | {"seconds": round(time.time() - begun, 1)}


class EmojiDrawStage(Stage):
    """Training of everything but the VQ model and the unused understanding tower, with one throw-away head."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(1)
        self.model = build_model(load_vq(options.out, False).state_dict(), of=OF).train()
        self.model.set_attn_implementation("eager")
        for part in (self.model.model.vqmodel, self.model.model.vision_model, self.model.model.aligner):
            part.requires_grad_(False).eval()
        self.telling = nn.Linear(self.model.config.text_config.hidden_size, len(subjects()))
        parts = {"model": self.model, "telling": self.telling}
        trained = [p for part in parts.values() for p in part.parameters() if p.requires_grad]
        super().__init__(options, rank, "draw.pt", options.steps, options.rate, trained, 0.05, parts)
        self.tokenizer, self.processor = build_tokenizer(OF), build_processor(of=OF)
        coded = [torch.load(file, weights_only=True) for file in shards(options)]
        self.data = {name: torch.cat([part[name] for part in coded]) for name in ("ids", "codes", "animal")}

    def loss(self) -> torch.Tensor:
        """Mean cross-entropy of the next batch's codes, a tenth of the rows without prompt, and of the animals told."""
        per_step, n = self.options.rows * self.workers, len(self.data["ids"])
        epoch, step = divmod(self.step, n // per_step)
        order = np.random.default_rng(epoch).permutation(n)[step * per_step :][:per_step][self.rank :: self.workers]
        full, codes = self.data["ids"][order].long(), self.data["codes"][order].long()
        dropped = torch.from_numpy(np.random.default_rng((2, self.step, self.rank)).random(len(order)) < DROPPED)
        ids = torch.where(dropped[:, None], without_words(self.tokenizer, full), full)
        out = drawn(self.model, ids, (full != self.tokenizer.pad_token_id).long(), codes)
        loss, weight = out.losses.mean(), TOLD * max(0.0, 1 - self.step / (TOLD_UNTIL * self.steps))
        if not weight:
            return loss
        animals = self.data["animal"][order].long().masked_fill(dropped, -100)
        told = self.telling(out.layers[0].float()).transpose(1, 2)
        told = F.cross_entropy(told, animals[:, None].expand(-1, told.shape[-1]), ignore_index=-100)
        self.notes |= {"codes": round(loss.item(), 3), "told": round(told.item(), 3)}
        return loss + weight * told

    def report(self) -> dict:
        """The distribution on held-out scenes, and verdicts on a few pictures; the first worker refreshes the early
        folder.
        """
        if self.rank:
            return {}
        self.model.eval()
        rows = world(OF).prompts()
        found = law(self.model, rows[::8]) | {"drawn": score(self.model, self.processor, rows[::8], 2.0)}
        self.model.train()
        if self.options.early:
            save(self.model, self.processor, self.options.early, torch.float16)
        return found


@dataclass
class EmojiOptions(Options):
    """Options of the recipe."""

    vq_steps: int = option("steps of the VQ model", 2000)
    vq_rows: int = option("whole pictures in a VQ batch of one worker", 8)
    vq_rate: float = option("peak learning rate of the VQ model", 2e-3)
    pairs: int = option("pairs of prompt and picture", 16_000)
    steps: int = option("text-model steps", 4000)
    rows: int = option("pictures in a batch of one worker of the draw stage", 8)
    rate: float = option("peak learning rate of the text model", 1.5e-3)
    every: int = option("steps between reports and checkpoints", 250)
    early: Path | None = option("folder to refresh with a loadable model at each report", None)


def finish(options: argparse.Namespace) -> None:
    """Write `out`/painter-emoji from the last checkpoints, read it back, measure it and describe it."""
    folder, rows = options.out / NAME, world(OF).prompts()[:: options.every_prompt]
    (text, drawing), (_, coding) = (cards.read_stage(options.out / file) for file in ("draw.pt", "vq.pt"))
    model = build_model(load_vq(options.out, False).state_dict(), of=OF)
    model.load_state_dict(text["model"])
    save(model, build_processor(of=OF), folder, torch.float16)
    model = JanusForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    processor = JanusProcessor.from_pretrained(folder)
    sweep = [score(model, processor, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    generation_config(False, guidance, of=OF).save_pretrained(folder)
    measured = {
        "sweep": sweep,
        "law": law(model, rows),
        "pictures": score(model, processor, rows, guidance),
        "decoded": reconstruction(model.model.vqmodel, rows),
    }
    shown = [row["prompt"] for row in rows[:: max(1, len(rows) // 16)]][:16]
    sheet(draw(model, processor, shown, guidance, SEED + 2), shown, options.out / f"{NAME}.png")
    record = cards.origin(
        model, f"visspec.toys {NAME}", folder, measured, seeds={"vq": 0, "draw": 1, "measured": SEED},
        vq=coding, draw=drawing, pairs=options.pairs, cores=options.workers,
    )  # fmt: skip
    cards.publish(folder, card(model, record))
    cards.say(folder, **measured)


def card(model: JanusForConditionalGeneration, record: dict) -> str:
    """The model card's text, from the provenance of the weights."""
    measured = record["measured"]
    return cards.fill(
        NAME,
        record=record,
        side=SIDE,
        animals=len(world(OF).suite.alone()),
        prompts=measured["law"]["codes"] // 144,
        law=measured["law"],
        best=measured["pictures"],
        vq=measured["decoded"],
        sweep=cards.swept(measured["sweep"]),
        minutes=sum(round(record[part]["seconds"] / 60) for part in ("vq", "draw")),
        cores=cards.cores(record["cores"]),
        parameters=cards.millions(model),
        text=cards.layers(TEXT[False]),
        vocabulary=model.config.get_text_config().vocab_size,
    )


PAINTER = Recipe(
    NAME,
    "Train the painter of emoji.",
    EmojiOptions,
    {"vq": trained(EmojiVQStage), "tokens": write_tokens, "draw": trained(EmojiDrawStage), "finish": finish},
)
