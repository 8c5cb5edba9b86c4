"""`painter-continuous` and its drafter from zero: continuous tokens, drawn by a diffusion head.

Stage `autoencoder` teaches a small `AutoencoderKL` with a broad posterior, `tokens` codes pictures with it, `draw`
trains the painter on tokens drawn from that posterior, `draft` a smaller model of the same form on the painter's head,
and `finish` writes both folders with model cards and provenance.

Data: the pairs of `animals`. Seeds: 0 (autoencoder), 1 (draw), 2 (draft). One CPU core.
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
from visspec.toys.recipes import animals, cards, painter_build
from visspec.toys.recipes.animals import (
    GRID,
    OF,
    PROMPT,
    ClassStage,
    Telling,
    build_processor,
    build_tokenizer,
    prompt_ids,
)
from visspec.toys.recipes.captioner_build import save, special_ids
from visspec.toys.recipes.continuous_autoencoder import (
    CONFIG,
    SIZE,
    AutoencoderStage,
    coders,
    load_autoencoder,
    measure,
)
from visspec.toys.recipes.painter_build import without_words
from visspec.toys.recipes.painter_score import to_uint8
from visspec.toys.recipes.recipe import PairOptions, Recipe, write_coded

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
TOLD, FADE = 0.1, (0.4, 0.6)  # weight of telling the animal, and shares of the steps between which it falls to 0
AHEAD, BEGINS = 4, 0.1  # tokens of a draft, and how often one begins: there the drafter reads its own conditions
SHARED = ("decoder.embed_tokens", "decoder.norm", "z_proj", "rows", "columns", "head")  # parts it has of the painter
NEARNESS = 0.1  # weight of the squared distance of its conditions from the painter's
NAMES = {"painter": "painter-continuous", "drafter": "painter-continuous-drafter"}
PARTS = ("autoencoder", "draw", "drafter")  # stages that train
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


class TokenStage(ClassStage):
    """What the stages of painters of vectors and of their drafters share: batches of tokens, and levels of noise."""

    data_file = "tokens.pt"

    def take(self, options: argparse.Namespace, autoencoder: AutoencoderKL) -> None:
        """Take the folder's tokens, whose posterior is the autoencoder's."""
        self.read(options)
        self.deviation = autoencoder.quant_conv.bias[SIZE:].detach().div(2).exp()
        level = cosine_levels().float()
        self.signal, self.noise = level.sqrt(), (1 - level).sqrt()

    def batch(self) -> tuple[torch.Tensor, ...]:
        """This worker's classes (B,), tokens (B, T, SIZE), drawn anew in each epoch, and rows without words (B,)."""
        chosen, dropped = self.batch_rows()
        rng = torch.Generator().manual_seed(self.step * self.workers + self.rank)
        means = self.data["means"][chosen].float()
        values = means + self.deviation * torch.randn(means.shape, generator=rng)
        return self.data["classes"][chosen].long(), values, dropped

    def noised(self, values: torch.Tensor, count: int = TIMES) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points of the forward process of tokens (B, T, SIZE): (count, B, T, SIZE), their times (count, B, T), and the
        velocities there.
        """
        times = torch.randint(len(self.signal), (count, *values.shape[:2]))
        signal, noise = self.signal[times][..., None], self.noise[times][..., None]
        eps = torch.randn(count, *values.shape)
        return signal * values + noise * eps, times, signal * eps - noise * values


class WordStage(TokenStage):
    """Of models that read prompts."""

    def rows(self) -> tuple[torch.Tensor, ...]:
        """This worker's ids and their mask (B, PROMPT), tokens (B, T, SIZE), classes, and rows without words (B,)."""
        classes, values, dropped = self.batch()
        ids = self.ids[classes]
        mask = ids != self.tokenizer.pad_token_id
        return torch.where(dropped[:, None], without_words(self.tokenizer, ids), ids), mask, values, classes, dropped

    def take(self, options: argparse.Namespace, autoencoder: AutoencoderKL) -> None:
        super().take(options, autoencoder)
        self.tokenizer = build_tokenizer()
        self.ids = prompt_ids(self.tokenizer, animals.LABELS)


class ContinuousStage(WordStage):
    """Training of decoder and head on sampled tokens. A throw-away head tells the animal from a middle layer."""

    name, seed = "draw.pt", 1

    def build(self, options: argparse.Namespace) -> dict:
        self.model = build("painter").train()
        self.telling = Telling(self.model.z_proj.out_features)
        self.take(options, load_autoencoder(options.out))
        return {"model": self.model, "telling": self.telling}

    def loss(self) -> torch.Tensor:
        """Squared error of the velocity of the next batch, and of the animals told."""
        ids, mask, values, classes, dropped = self.rows()
        middle: list[torch.Tensor] = []
        depth = len(self.model.decoder.layers)
        hook = self.model.decoder.layers[depth // 2].register_forward_hook(lambda *call: middle.append(call[2]))
        hidden = self.model(ids, mask, values)
        hook.remove()
        x, times, velocity = self.noised(values)
        losses = (self.model.head(x, times, hidden) - velocity).square().mean()
        state = middle[0] if torch.is_tensor(middle[0]) else middle[0][0]
        told = self.telling.loss(state[:, ids.shape[1] - 1 :], classes, dropped)
        self.notes |= {"velocity": round(losses.item(), 4), "told": round(told.item(), 3)}
        return losses + TOLD * self.fading(*FADE) * told

    def figures(self) -> dict:
        painter = assemble(self.options.out, self.model)
        asked = animals.rows(4 * self.options.every_prompt)
        return animals.score(partial(draw, painter, seed=SEED), asked, guidance=2.0, temperature=1.0)


class ContinuousDraftStage(WordStage):
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
        self.take(options, load_autoencoder(options.out))
        return {"model": self.model}

    def loss(self) -> torch.Tensor:
        """Squared distance of both models' velocities, and of their conditions."""
        ids, mask, values, _, _ = self.rows()
        x, times, _ = self.noised(values)
        with torch.no_grad():
            conditions = self.painter(ids, mask, values)
            wanted = self.painter.head(x, times, conditions)
            begins = (torch.rand(values.shape[:2]) < BEGINS).float()
            ahead = F.max_pool1d(F.pad(begins, (AHEAD - 1, 0)), AHEAD, 1)[..., None].bool()
            features = torch.where(ahead, self.model(ids, mask, values, conditions), conditions)
        made = self.model(ids, mask, values, features)
        losses = (self.model.head(x, times, made) - wanted).square().mean()
        self.notes["velocity"] = round(losses.item(), 4)
        return losses + NEARNESS * (made - conditions).square().mean()


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
    autoencoder_steps: int = option("steps of the autoencoder", 1000)


def generation_config(guidance: float) -> GenerationConfig:
    """Sampling with classifier-free guidance."""
    return painter_build.image_generation(
        PROMPT + GRID**2, OF, do_sample=True, temperature=1.0, guidance_scale=guidance
    )


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read the painter back, measure it and describe them."""
    saved, stages = cards.read_stages(options.out, {part: f"{part}.pt" for part in PARTS})
    made, drafter = build("painter"), build("drafter")
    made.load_state_dict(saved["draw"]["model"])
    drafter.load_state_dict(saved["drafter"]["model"])
    folder = options.out / NAMES["painter"]
    save(assemble(options.out, made), build_processor(), folder, torch.float16)
    model, rows = load(folder), animals.rows(options.every_prompt)
    half = partial(animals.score, partial(draw, model, seed=SEED + 1), rows[::2])
    sweep = [half(guidance=guidance, temperature=1.0) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    generation_config(guidance).save_pretrained(folder)
    drawn = animals.score(partial(draw, model, seed=SEED), rows, guidance=guidance, temperature=1.0)
    decoded = measure(model.autoencoder, options.every_prompt)
    shown = {f"drawn, guidance {guidance}": drawn, "decoded tokens": decoded}
    deviation = decoded["posterior_deviation"]
    about = {"compute_dtype": "float32", "times": TIMES}
    own = {part: stage for part, stage in stages.items() if part != "drafter"}
    cards.describe(
        options,
        NAMES["painter"],
        model,
        {"sweep": sweep, "swept": len(rows[::2]), "pictures": drawn, "decoded": decoded},
        {"seeds": {"autoencoder": 0, "draw": 1, "measured": SEED}} | own | about,
        globals(),
        prompts=len(rows),
        rows=cards.table([name, f"{found['images']:.3f}"] for name, found in shown.items()),
        deviations=(min(deviation), max(deviation)),
        training=stages["autoencoder"]["seconds"] + stages["draw"]["seconds"],
    )
    about |= stages | {"seeds": {"draft": 2}}
    cards.describe_drafter(options, NAMES["drafter"], drafter, load, about, globals())
    cards.say(options.out, sweep=sweep, swept=len(rows[::2]), pictures=drawn, decoded=decoded)


DEFAULTS = {"pairs": 12_000, "rows": 16}
PAINTER = Recipe(
    NAMES["painter"],
    "Train the continuous painter and its drafter.",
    ContinuousOptions,
    {
        "autoencoder": AutoencoderStage,
        "tokens": partial(write_coded, coders),
        "draw": ContinuousStage,
        "draft": ContinuousDraftStage,
        "finish": finish,
    },
    DEFAULTS | {"steps": 2500, "every": 500},
)
