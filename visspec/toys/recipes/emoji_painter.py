"""`painter-emoji` and `painter-emoji-lowres` from zero: a small Janus that draws an animal of the emoji world on a
ground of its prompt, and its sibling of a quarter of the codes, on the VQ model of the included one.

The stages and networks are those of the shapes' painter (`visspec.toys.recipes.painter`), with what is of shapes alone
left out: whole pictures are coded by the stock encoder, and of the throw-away heads there is one, which tells the
prompt's animal at every code. Codes of grain and of soft edges are ambiguous, which is what this world is for: `finish`
measures how flat the distributions are.

Data: prompts of `visspec.toys.world.emoji.suite` of one animal, half of them with a ground; scenes with seeds from
2^30 on are never trained on. Seeds: 0 (vq), 1 (draw).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import JanusForConditionalGeneration, JanusProcessor, JanusVQVAE

from visspec.api import zoo
from visspec.api.loading import load_image_model
from visspec.io.checkpoint import read_json
from visspec.io.options import option
from visspec.toys.recipes import cards, painter_build, painter_data, recipe
from visspec.toys.recipes.painter import sheet
from visspec.toys.recipes.painter_data import held_out
from visspec.toys.recipes.painter_draw import GUIDANCES, DrawStage, draw, draw_codes
from visspec.toys.recipes.painter_score import score, verdicts
from visspec.toys.recipes.painter_vq import CUT_OUT, PainterVQStage, latents, load_vq, nearest, redrawn
from visspec.toys.world.emoji.scene import EmojiScene, PlacedEmoji, sample_ground
from visspec.toys.world.emoji.suite import subjects
from visspec.toys.world.suite import Metadata
from visspec.toys.world.worlds import world

NAME, OF, SIDE = "painter-emoji", "emoji", 96
EMOJI = world(OF)
SIBLING = "painter-emoji-lowres"
DRAWN = {False: "draw.pt", True: "draw-lowres.pt"}
PROMPT = 16  # ids of the longest prompt
SHARD = 2000
FIRST_SEED = {"vq": 0, "tokens": 1 << 28}  # both below HELD_OUT_SEED
SIDES, OFFSET, MOST_TURN = (0.64, 0.68), 0.02, 2.0  # of the animals: what is drawn is at home in the middle
WINDOW = 48  # pixels a side of the cut-outs that the VQ model starts with
TOLD, TOLD_UNTIL = 0.3, 0.6  # weight of telling the animal at the first step; share of the steps when it is 0
SEED = 0  # of the measured pictures
ROLES = {
    False: "It is the image target whose laws are flat, as those of large painters are.",
    True: "It is the low-resolution sibling of `painter-emoji`: the same words and the same VQ weights, a smaller text "
    "model,\nfor drafting at low resolution.",
}


@dataclass
class EmojiOptions(recipe.CodedOptions):
    lowres: bool = option("the 48-pixel sibling, on the VQ model in --out or that of the included painter", False)


def paint_scene(metadata: Metadata, rng: np.random.Generator) -> EmojiScene:
    """A scene of one animal near the middle, on the prompt's ground or a random one."""
    x, y = (0.5 + float(v) for v in rng.uniform(-OFFSET, OFFSET, size=2))
    side, turn = float(rng.uniform(*SIDES)), float(rng.uniform(-MOST_TURN, MOST_TURN))
    picture = PlacedEmoji(metadata["include"][0]["class"], x, y, side, turn)
    ground, tint, seed = sample_ground(rng)
    ground, tint = metadata.get("ground", (ground, tint))
    return EmojiScene((picture,), ground, seed, tint)


def pair(seed: int) -> tuple[Metadata, EmojiScene]:
    """Prompt and scene number `seed`; every second prompt names no ground."""
    rng = np.random.default_rng(seed)
    metadata = EMOJI.prompt(rng)
    if rng.random() < 0.5:
        metadata = EMOJI.suite.make("single_object", metadata["include"])
    return metadata, paint_scene(metadata, rng)


def side_of(vq: JanusVQVAE) -> int:
    """Pixels along a side of a VQ model's pictures."""
    return painter_build.PATCH * vq.config.num_patches


def take_vq(options: argparse.Namespace) -> None:
    """The VQ model of the included painter, where the folder has none."""
    if (options.out / "vq.pt").exists():
        return
    weights = load_image_model(NAME)[0].model.vqmodel.state_dict()
    stage = read_json(zoo.included_folder(NAME), cards.PROVENANCE)["vq"]
    torch.save(
        {"vq": weights, "step": stage["steps"], "seconds": stage["seconds"], "loss": stage.get("loss")},
        options.out / "vq.pt",
    )


@torch.no_grad()
def codes_of(vq: JanusVQVAE, scenes: list[EmojiScene], batch: int = 16) -> torch.Tensor:
    """Codes int64 (B, rows, columns) of rendered scenes."""
    parts = [EMOJI.pixels(scenes[i : i + batch], side_of(vq)) for i in range(0, len(scenes), batch)]
    return torch.cat([nearest(vq, latents(vq, part)) for part in parts])


def reconstruction(vq: JanusVQVAE, rows: list[Metadata]) -> dict:
    """Pixel error and codes in use on held-out scenes, and the detector's verdict on the decoded pictures."""
    scenes = held_out(rows, paint_scene)
    with recipe.evaluating(vq):
        made, figures = redrawn(vq, codes_of(vq, scenes), EMOJI.pixels(scenes, side_of(vq)), 16)
    right = verdicts(made, rows, OF)
    return {"right": sum(right) / len(right), "prompts": len(rows)} | figures


class EmojiVQStage(PainterVQStage):
    """The VQ model on cut-outs first, on whole pictures last."""

    def batch(self) -> torch.Tensor:
        """This worker's pictures of this step: a pure function of step, rank and workers."""
        whole, rows = self.step >= CUT_OUT * self.steps, self.options.vq_rows
        first = FIRST_SEED["vq"] + (self.step * self.workers + self.rank) * 2 * rows
        made = EMOJI.pixels([pair(first + i)[1] for i in range(rows if whole else 2 * rows)], SIDE)
        if whole:
            return made
        corners = np.random.default_rng(first).integers(8, SIDE - WINDOW - 7, size=(len(made), 2))
        return torch.stack([part[:, y : y + WINDOW, x : x + WINDOW] for part, (y, x) in zip(made, corners)])

    def figures(self) -> dict:
        return reconstruction(self.vq, EMOJI.prompts()[:: 8 * self.options.every_prompt])


def files(folder: Path, low: bool, count: int) -> dict[Path, range]:
    """Files of so many coded pairs, and the pairs in each."""
    return recipe.shards(folder, "tokens-lowres" if low else "tokens", range(count), SHARD)


def coders(options: argparse.Namespace) -> dict[Path, recipe.Coder]:
    """What makes the files: `ids` (N, PROMPT), `codes` (N, positions) and `animal` (N), int16."""
    vq, tokenizer = load_vq(options.out, options.lowres), painter_build.build_tokenizer(OF)

    def coded(numbers: range) -> dict[str, torch.Tensor]:
        rows, scenes = zip(*(pair(FIRST_SEED["tokens"] + i) for i in numbers))
        ids = painter_build.prompt_ids(tokenizer, [row["prompt"] for row in rows], PROMPT)
        animal = torch.tensor([subjects().index(row["include"][0]["class"]) for row in rows])
        return {"ids": ids.short(), "codes": codes_of(vq, list(scenes)).flatten(1).short(), "animal": animal.short()}

    return {
        file: partial(recipe.in_batches, coded, numbers, 16)
        for file, numbers in files(options.out, options.lowres, options.pairs).items()
    }


@torch.no_grad()
def law(model: JanusForConditionalGeneration, rows: list[Metadata], batch: int = 8) -> dict:
    """Of the distribution of a code after those of held-out scenes, guidance 1: mean entropy in nats, top-1, top-10 and
    top-100 mass, and loss.
    """
    codes = codes_of(model.model.vqmodel, held_out(rows, paint_scene)).flatten(1)
    ids = painter_build.prompt_ids(painter_build.build_tokenizer(OF), [row["prompt"] for row in rows], PROMPT)
    pad = model.config.get_text_config().pad_token_id
    sums, count = torch.zeros(5), 0
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        out = draw_codes(model, ids[part], (ids[part] != pad).long(), codes[part])
        log_p = out.logits.float().log_softmax(-1)
        top = log_p.exp().topk(100).values.flatten(0, 1)
        entropy = -(log_p.exp() * log_p).sum(-1).flatten()
        masses = [top[:, :k].sum(1) for k in (1, 10, 100)]
        sums += torch.stack([v.sum() for v in (entropy, *masses, out.losses.flatten())])
        count += entropy.numel()
    names = ("entropy", "top_1", "top_10", "top_100", "loss")
    return {"codes": count} | {name: round(v, 4) for name, v in zip(names, (sums / count).tolist())}


def drawing(
    model: JanusForConditionalGeneration, processor: JanusProcessor, seed: int = SEED
) -> Callable[..., dict[str, Any]]:
    """`score` of the pictures that a painter draws, of prompts and a guidance."""
    return partial(score, partial(draw, model, processor, seed=seed), of=OF)


class EmojiDrawStage(DrawStage):
    """That of emoji, with one throw-away head."""

    def build(self, options: argparse.Namespace) -> dict:
        self.name = DRAWN[options.lowres]
        self.begin(options, options.lowres, OF)
        self.telling = nn.Linear(self.model.config.text_config.hidden_size, len(subjects()))
        self.data = recipe.read_coded(files(options.out, options.lowres, options.pairs))
        return {"model": self.model, "telling": self.telling}

    def loss(self) -> torch.Tensor:
        """Mean cross-entropy of the next batch's codes, a tenth of the rows without prompt, and of the animals told."""
        order = self.chosen(len(self.data["ids"]))
        dropped = self.dropped(len(order))
        out = self.output(self.data["ids"][order].long(), self.data["codes"][order].long(), dropped)
        loss, weight = out.losses.mean(), TOLD * max(0.0, 1 - self.step / (TOLD_UNTIL * self.steps))
        if not weight:
            return loss
        animals = self.data["animal"][order].long().masked_fill(dropped, -100)
        told = self.telling(out.layers[0].float()).transpose(1, 2)
        told = F.cross_entropy(told, animals[:, None].expand(-1, told.shape[-1]), ignore_index=-100)
        self.notes |= {"codes": round(loss.item(), 3), "told": round(told.item(), 3)}
        return loss + weight * told

    def figures(self) -> dict:
        """The distribution on held-out scenes, and verdicts on a few pictures."""
        rows = EMOJI.prompts()[:: 8 * self.options.every_prompt]
        return law(self.model, rows) | {"drawn": drawing(self.model, self.processor)(rows, guidance=2.0)}


def finish(options: argparse.Namespace) -> None:
    """Write the painter's folder from the last checkpoints, read it back, measure it and describe it."""
    low = options.lowres
    name, rows = SIBLING if low else NAME, EMOJI.prompts()[:: options.every_prompt]
    folder = options.out / name
    saved, stages = cards.read_stages(options.out, {"draw": DRAWN[low], "vq": "vq.pt"})
    model = painter_build.build_model(load_vq(options.out, low).state_dict(), low, of=OF)
    model.load_state_dict(saved["draw"]["model"])
    model = cards.half_precision_copy(model, painter_build.build_processor(low, OF), folder, attention="eager")
    processor = JanusProcessor.from_pretrained(folder)
    half = drawing(model, processor, SEED + 1)
    sweep = [half(rows[::2], guidance=guidance) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    painter_build.generation_config(low, guidance, of=OF).save_pretrained(folder)
    measured = {
        "sweep": sweep,
        "law": law(model, rows),
        "pictures": drawing(model, processor)(rows, guidance=guidance),
        "decoded": reconstruction(model.model.vqmodel, rows),
    }
    prompts = [row["prompt"] for row in rows[:: max(1, len(rows) // 16)]][:16]
    sheet(draw(model, processor, prompts, guidance, SEED + 2), prompts, options.out / f"{name}.png")
    about = stages | {"seeds": {"vq": 0, "draw": 1, "measured": SEED}, "pairs": options.pairs, "cores": options.workers}
    record = cards.origin(model, f"visspec.toys {name}", folder, measured, **about)
    cards.publish(folder, card(model, record, low))
    cards.say(folder, **measured)


def card(model: JanusForConditionalGeneration, record: dict, low: bool = False) -> str:
    """The model card's text, from the provenance of the weights."""
    codes = painter_build.grid(low) ** 2
    return cards.fill(
        NAME,
        record,
        model,
        globals(),
        name=SIBLING if low else NAME,
        role=ROLES[low],
        side=painter_data.SIDE[low],
        codes=codes,
        text=painter_build.TEXT[low],
        animals=len(EMOJI.suite.alone()),
        prompts=record["measured"]["law"]["codes"] // codes,
        minutes=sum(round(record[part]["seconds"] / 60) for part in ("vq", "draw")),
        shared=", the same weights as `painter-emoji`'s" if low else "",
        cores=cards.cores(record["cores"]),
    )


STAGES: recipe.Stages = {"tokens": partial(recipe.write_coded, coders), "draw": EmojiDrawStage, "finish": finish}
PAINTER = recipe.Recipe(
    NAME, "Train the painter of emoji.", EmojiOptions, {"vq": EmojiVQStage, **STAGES}, {"every": 250}
)
LOWRES = recipe.Recipe(
    SIBLING,
    "Train its low-resolution sibling.",
    EmojiOptions,
    {"vq": take_vq, **STAGES},
    {"every": 1000, "every_prompt": 4, "lowres": True, "rows": 16},
)
