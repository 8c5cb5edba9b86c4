"""`painter-continuous` and its drafter from zero: continuous tokens, drawn by a diffusion head.

Stage `autoencoder` teaches a small `AutoencoderKL` with a broad posterior, `decoder` goes on with its decoder alone,
`tokens` codes pictures with it, `draw` trains the painter on tokens drawn from that posterior, `draft` a smaller model
of the same form on the painter's head, and `finish` writes both folders with model cards and provenance.

Data: scenes of one or two shapes on plain ground, 64 pixels a side, after prompts of GenEval's tasks for one object,
colours and two objects; seeds from 2^30 on are never trained on. Seeds: 0 (autoencoder), 1 (draw), 2 (draft), 3
(decoder). One CPU core, about an hour.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import nn
from transformers import GenerationConfig, LlamaConfig

from visspec.io.options import option
from visspec.models.continuous.model import ContinuousImageConfig, ContinuousImageModel, Sampler, load
from visspec.models.vectors.diffusion_head import cosine_levels
from visspec.toys.recipes import cards, painter_build
from visspec.toys.recipes.captioner_build import save, special_ids
from visspec.toys.recipes.continuous_autoencoder import (
    CONFIG,
    GRID,
    SIDE,
    SIZE,
    TASKS,
    AutoencoderDecoderStage,
    AutoencoderStage,
    coders,
    load_autoencoder,
    measure,
)
from visspec.toys.recipes.painter_build import PROMPT, build_tokenizer, prompt_ids, without_words
from visspec.toys.recipes.painter_data import rows_of
from visspec.toys.recipes.painter_draw import DROPPED, NEAR_WEIGHT, beside
from visspec.toys.recipes.painter_score import score, to_uint8
from visspec.toys.recipes.recipe import PairOptions, Recipe, TrainingStage, coding_stage, training_stage
from visspec.toys.world.palette import CLASSES, COLOURS

SIZES: dict[str, dict[str, Any]] = {
    "painter": {
        "text": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 3},
        "head_width": 192,
        "head_depth": 6,
    },
    "drafter": {
        "text": {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 3},
        "head_width": 192,
        "head_depth": 6,
        "feature": 192,
    },
}
TIMES = 2  # levels of noise of a token in a step
READING_WEIGHT = 0.1  # of the throw-away heads' loss
FADE = (0.5, 0.8)  # shares of the steps between which it falls to 0
AHEAD, BEGINS = 4, 0.1  # tokens of a draft, and how often one begins: there the drafter reads its own conditions
SHARED = ("decoder.embed_tokens", "decoder.norm", "z_proj", "rows", "columns", "head")  # parts it has of the painter
NEARNESS = 0.1  # weight of the squared distance of its conditions from the painter's
LABELS = (3, 1 + len(CLASSES), 1 + len(COLOURS), 1 + len(CLASSES), 1 + len(COLOURS))  # shapes begun, next one, newest
NAMES = {"painter": "painter-continuous", "drafter": "painter-continuous-drafter"}
PARTS = ("autoencoder", "decoder", "draw", "drafter")  # stages that train
GUIDANCES = (1.0, 1.5, 2.0, 3.0)
SEED = 0


def build(name: str, autoencoder: dict | None = None, sizes: dict | None = None) -> ContinuousImageModel:
    """A fresh painter or drafter; `sizes` override those of SIZES (for tests)."""
    tokenizer, own = build_tokenizer(), SIZES[name] | (sizes or {})
    text = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, **special_ids(tokenizer), **own.pop("text")
    )
    model = ContinuousImageModel(ContinuousImageConfig(text, SIZE, GRID, autoencoder=autoencoder, **own))
    model.head.begin()
    return model


def draw(
    model: ContinuousImageModel,
    prompts: list[str],
    guidance: float,
    seed: int,
    temperature: float = 1.0,
    batch: int = 48,
) -> np.ndarray:
    """Pictures uint8 (B, S, S, 3) of the plain loop."""
    tokenizer, out = build_tokenizer(), []
    sampler, generator = Sampler(model, guidance, temperature), torch.Generator().manual_seed(seed)
    for start in range(0, len(prompts), batch):
        ids = prompt_ids(tokenizer, prompts[start : start + batch])
        seen = ids != tokenizer.pad_token_id
        if guidance != 1.0:
            ids, seen = torch.cat([ids, without_words(tokenizer, ids)]), seen.repeat(2, 1)
        with torch.inference_mode():
            out.append(to_uint8(model.pixels(sampler(ids, seen, generator)) * 2 - 1))
    return np.concatenate(out)


class TokenStage(TrainingStage):
    """What the stages of painters of vectors and of their drafters share: batches of prompts and sampled tokens, and
    levels of noise.
    """

    def read(self, options: argparse.Namespace, autoencoder: AutoencoderKL) -> None:
        """Take the folder's tokens, whose posterior is the autoencoder's."""
        self.data, self.tokenizer = torch.load(options.out / "tokens.pt", weights_only=True), build_tokenizer()
        self.deviation = autoencoder.quant_conv.bias[SIZE:].detach().div(2).exp()
        level = cosine_levels().float()
        self.signal, self.noise = level.sqrt(), (1 - level).sqrt()

    def rows(self) -> tuple[torch.Tensor, ...]:
        """This worker's ids and their mask (B, PROMPT), tokens (B, T, SIZE), ink (B, T), progress, rows without words.

        A tenth of the prompts are without their words; tokens are drawn from the posterior anew in each epoch.
        """
        order = self.chosen(len(self.data["ids"]))
        ids = self.data["ids"][order].long()
        mask = ids != self.tokenizer.pad_token_id
        rng = torch.Generator().manual_seed(self.step * self.workers + self.rank)
        dropped = torch.rand(len(ids), generator=rng) < DROPPED
        ids = torch.where(dropped[:, None], without_words(self.tokenizer, ids), ids)
        means = self.data["means"][order].float()
        values = means + self.deviation * torch.randn(means.shape, generator=rng)
        return ids, mask, values, self.data["ink"][order], self.data["begun"][order].long(), dropped

    def noised(self, values: torch.Tensor, count: int = TIMES) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points of the forward process of tokens (B, T, SIZE): (count, B, T, SIZE), their times (count, B, T), and the
        velocities there.
        """
        times = torch.randint(len(self.signal), (count, *values.shape[:2]))
        signal, noise = self.signal[times][..., None], self.noise[times][..., None]
        eps = torch.randn(count, *values.shape)
        return signal * values + noise * eps, times, signal * eps - noise * values


class ContinuousStage(TokenStage):
    """Training of decoder and head on sampled tokens.

    Throw-away heads tell from a middle layer which shape comes next and which is the newest: few tokens of a picture
    depend on the prompt, and from their loss alone the decoder takes long to look at it.
    """

    name, seed = "draw.pt", 1

    def build(self, options: argparse.Namespace) -> dict:
        self.model = build("painter").train()
        self.reading = nn.ModuleList(nn.Linear(self.model.z_proj.out_features, count) for count in LABELS)
        self.read(options, load_autoencoder(options.out))
        return {"model": self.model, "reading": self.reading}

    def loss(self) -> torch.Tensor:
        """Squared error of the velocity of the next batch. Tokens beside what is drawn already weigh twice."""
        ids, mask, values, ink, begun, dropped = self.rows()
        middle: list[torch.Tensor] = []
        depth = len(self.model.decoder.layers)
        hook = self.model.decoder.layers[depth // 2].register_forward_hook(lambda *call: middle.append(call[2]))
        hidden = self.model(ids, mask, values)
        hook.remove()
        x, times, velocity = self.noised(values)
        made = self.model.head(x, times, hidden)
        weight = torch.where(beside(ink, GRID), NEAR_WEIGHT, 1.0)
        losses = (made - velocity).square().mean((0, 3))
        self.notes["ink"] = round(losses[ink].mean().item(), 4)
        self.notes["ground"] = round(losses[~ink].mean().item(), 4)
        total = (losses * weight).sum() / weight.sum()
        if fade := self.fading(*FADE):
            first = ids.shape[1] - 1
            state = middle[0] if torch.is_tensor(middle[0]) else middle[0][0]
            labels, asked = begun[~dropped][..., 2:].unbind(-1), state[~dropped, first:]
            wrong = [F.cross_entropy(head(asked).mT, label) for head, label in zip(self.reading, labels)]
            read = torch.stack(wrong).sum()
            self.notes["reading"] = round(read.item(), 3)
            total = total + fade * READING_WEIGHT * read
        return total

    def figures(self) -> dict:
        """GenEval on a sixth of the prompts of its tasks."""
        painter = assemble(self.options.out, self.model)
        rows = rows_of(TASKS, 6 * self.options.every_prompt)
        return score(partial(draw, painter, seed=SEED), rows, guidance=2.0, temperature=1.0)


class ContinuousDraftStage(TokenStage):
    """Training of the drafter: its velocity is to be the painter's at the same points, after the same tokens.

    It has the painter's head, unchanged, and learns the conditions of it: from all tokens and from those conditions of
    the painter that are known, its own in drafts. A distribution learnt from the painter's is nearer to it than one
    that is learnt from data: the drafter's own mistakes are the only difference.
    """

    name, seed, steps_option = "drafter.pt", 2, "drafter_steps"

    def build(self, options: argparse.Namespace) -> dict:
        self.painter = build("painter")
        self.painter.load_state_dict(torch.load(options.out / "draw.pt", weights_only=True)["model"])
        self.painter.eval().requires_grad_(False)
        self.model = drafter_of(self.painter).train()
        self.model.head.requires_grad_(False)
        self.read(options, load_autoencoder(options.out))
        return {"model": self.model}

    def loss(self) -> torch.Tensor:
        """Squared distance of both models' velocities, and of their conditions."""
        ids, mask, values, ink, _, _ = self.rows()
        x, times, _ = self.noised(values)
        with torch.no_grad():
            conditions = self.painter(ids, mask, values)
            wanted = self.painter.head(x, times, conditions)
            begins = (torch.rand(values.shape[:2]) < BEGINS).float()
            ahead = F.max_pool1d(F.pad(begins, (AHEAD - 1, 0)), AHEAD, 1)[..., None].bool()
            features = torch.where(ahead, self.model(ids, mask, values, conditions), conditions)
        made = self.model(ids, mask, values, features)
        losses = (self.model.head(x, times, made) - wanted).square().mean((0, 3))
        self.notes["ink"] = round(losses[ink].mean().item(), 4)
        self.notes["velocity"] = round(losses.mean().item(), 4)
        return losses.mean() + NEARNESS * (made - conditions).square().mean()


def drafter_of(painter: ContinuousImageModel, sizes: dict | None = None) -> ContinuousImageModel:
    """A fresh drafter with the painter's embeddings and head. At first its conditions are about those it reads, each
    token's for the next: right where a picture goes on as before.
    """
    model = build("drafter", sizes=sizes)
    for name in SHARED:
        model.get_submodule(name).load_state_dict(painter.get_submodule(name).state_dict())
    nn.init.eye_(model.feature_proj.weight)
    nn.init.zeros_(model.feature_proj.bias)
    return model


def assemble(folder: Path, model: ContinuousImageModel) -> ContinuousImageModel:
    """A copy of a trained painter with the autoencoder of `folder`, ready to draw."""
    painter = build("painter", CONFIG)
    painter.load_state_dict(model.state_dict(), strict=False)
    painter.autoencoder.load_state_dict(load_autoencoder(folder).state_dict())
    return painter.eval()


@dataclass
class VectorOptions(PairOptions):
    """Options of the recipes of painters of vectors."""

    drafter_steps: int = option("drafter steps", 1800)


@dataclass
class ContinuousOptions(VectorOptions):
    """Those of this one."""

    autoencoder_steps: int = option("steps of the autoencoder", 800)
    decoder_steps: int = option("steps of its decoder alone", 450)


def generation_config(guidance: float) -> GenerationConfig:
    """Sampling with classifier-free guidance."""
    return painter_build.image_generation(PROMPT + GRID**2, do_sample=True, temperature=1.0, guidance_scale=guidance)


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read the painter back, measure it and describe them."""
    saved, stages = cards.read_stages(options.out, {part: f"{part}.pt" for part in PARTS})
    made, drafter = build("painter"), build("drafter")
    made.load_state_dict(saved["draw"]["model"])
    drafter.load_state_dict(saved["drafter"]["model"])
    folder = options.out / NAMES["painter"]
    save(assemble(options.out, made), painter_build.build_processor(side=SIDE), folder, torch.float16)
    model, rows = load(folder), rows_of(TASKS, options.every_prompt)
    half = partial(score, partial(draw, model, seed=SEED + 1), rows[::2])
    sweep = [half(guidance=guidance, temperature=1.0) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    generation_config(guidance).save_pretrained(folder)
    drawn = score(partial(draw, model, seed=SEED), rows, guidance=guidance, temperature=1.0)
    decoded = measure(model.autoencoder, options.every_prompt)
    shown = {f"drawn, guidance {guidance}": drawn, "decoded tokens": decoded}
    deviation = decoded["posterior_deviation"]
    rows_a_step = options.rows * options.workers
    coding = stages["autoencoder"]["seconds"] + stages["decoder"]["seconds"]
    about = {"compute_dtype": "float32", "rows": rows_a_step, "times": TIMES, "pairs": options.pairs}
    own = {part: stage for part, stage in stages.items() if part != "drafter"}
    cards.describe(
        options,
        NAMES["painter"],
        model,
        {"sweep": sweep, "swept": len(rows[::2]), "pictures": drawn, "decoded": decoded},
        {"seeds": {"autoencoder": 0, "draw": 1, "decoder": 3, "measured": SEED}} | own | about,
        globals(),
        prompts=len(rows),
        tasks=[cards.TITLES.get(tag, tag) for tag in TASKS],
        rows=cards.table(cards.score_row(name, found, TASKS) for name, found in shown.items()),
        guidance=guidance,
        deviations=(min(deviation), max(deviation)),
        coding=coding,
        training=coding + stages["draw"]["seconds"],
        seen=stages["draw"]["steps"] * rows_a_step,
    )
    save(drafter, None, options.out / NAMES["drafter"], torch.float16)
    cards.describe(
        options,
        NAMES["drafter"],
        load(options.out / NAMES["drafter"]),
        {"distance": stages["drafter"]["loss"]},
        {"seeds": {"draft": 2}} | stages | about,
        globals(),
    )
    cards.say(options.out, sweep=sweep, swept=len(rows[::2]), pictures=drawn, decoded=decoded)


DEFAULTS = {"pairs": 18_000, "rows": 16}
PAINTER = Recipe(
    NAMES["painter"],
    "Train the continuous painter and its drafter.",
    ContinuousOptions,
    {
        "autoencoder": training_stage(AutoencoderStage),
        "decoder": training_stage(AutoencoderDecoderStage),
        "tokens": coding_stage(coders),
        "draw": training_stage(ContinuousStage),
        "draft": training_stage(ContinuousDraftStage),
        "finish": finish,
    },
    DEFAULTS | {"steps": 3200, "every": 1000},
)
