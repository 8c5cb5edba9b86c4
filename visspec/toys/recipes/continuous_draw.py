"""Stages 2 and 3 of the continuous painter's recipe: the painter learns tokens after prompts, the drafter its head."""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import nn
from transformers import LlamaConfig

from visspec.models.continuous.model import ContinuousImageConfig, ContinuousImageModel, Sampler
from visspec.models.vectors.diffusion_head import cosine_levels
from visspec.toys.recipes.captioner_build import special_ids
from visspec.toys.recipes.continuous_autoencoder import CONFIG, load_autoencoder, rows_of_tasks
from visspec.toys.recipes.continuous_data import GRID, SIZE, read_tokens
from visspec.toys.recipes.painter_build import build_tokenizer
from visspec.toys.recipes.painter_draw import DROPPED, NEAR_WEIGHT, beside
from visspec.toys.recipes.painter_score import summary, to_uint8, verdicts
from visspec.toys.recipes.painter_tokens import prompt_ids, without_words
from visspec.toys.world.palette import CLASSES, COLOURS
from visspec.toys.world.suite import Metadata
from visspec.train.stages import Stage

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


def score(
    model: ContinuousImageModel, rows: list[Metadata], guidance: float, seed: int = 0, temperature: float = 1.0
) -> dict:
    """GenEval of one picture a prompt, and the seconds it took."""
    begun = time.time()
    pictures = draw(model, [row["prompt"] for row in rows], guidance, seed, temperature)
    record = {"guidance": guidance, "temperature": temperature, **summary(verdicts(pictures, rows), rows)}
    return record | {"seconds": round(time.time() - begun, 1)}


class TokenStage(Stage):
    """What both models' stages share: batches of prompts and sampled tokens, and levels of noise."""

    def __init__(
        self, options: argparse.Namespace, rank: int, file: str, steps: int, trained: list, parts: dict,
        autoencoder: AutoencoderKL | None = None,
    ):  # fmt: skip
        super().__init__(options, rank, file, steps, options.rate, trained, 0.05, parts)
        self.data, self.tokenizer = read_tokens(options.out), build_tokenizer()
        posterior = load_autoencoder(options.out) if autoencoder is None else autoencoder
        self.deviation = posterior.quant_conv.bias[SIZE:].detach().div(2).exp()
        level = cosine_levels().float()
        self.signal, self.noise = level.sqrt(), (1 - level).sqrt()

    def rows(self) -> tuple[torch.Tensor, ...]:
        """This worker's ids and their mask (B, PROMPT), tokens (B, T, SIZE), ink (B, T), progress, rows without words.

        A tenth of the prompts are without their words; tokens are drawn from the posterior anew in each epoch.
        """
        per_step, known = self.options.rows * self.workers, len(self.data["ids"])
        epoch, step = divmod(self.step, known // per_step)
        order = np.random.default_rng(epoch).permutation(known)[step * per_step :][:per_step][self.rank :: self.workers]
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

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(1)
        self.model = build("painter").train()
        self.reading = nn.ModuleList(nn.Linear(self.model.z_proj.out_features, count) for count in LABELS)
        trained = [*self.model.parameters(), *self.reading.parameters()]
        parts = {"model": self.model, "reading": self.reading}
        super().__init__(options, rank, "draw.pt", options.steps, trained, parts)

    def fade(self) -> float:
        """What is left of the weight of the throw-away heads, 1 to 0."""
        return min(1.0, max(0.0, (FADE[1] - self.step / self.steps) / (FADE[1] - FADE[0])))

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
        if fade := self.fade():
            first = ids.shape[1] - 1
            state = middle[0] if torch.is_tensor(middle[0]) else middle[0][0]
            labels, asked = begun[~dropped][..., 2:].unbind(-1), state[~dropped, first:]
            wrong = [F.cross_entropy(head(asked).mT, label) for head, label in zip(self.reading, labels)]
            read = torch.stack(wrong).sum()
            self.notes["reading"] = round(read.item(), 3)
            total = total + fade * READING_WEIGHT * read
        return total

    def report(self) -> dict:
        """GenEval on a sixth of the prompts of its tasks."""
        if self.rank:
            return {}
        painter = assembled(self.options.out, self.model)
        return score(painter, rows_of_tasks(6 * self.options.every_prompt), 2.0)


class ContinuousDraftStage(TokenStage):
    """Training of the drafter: its velocity is to be the painter's at the same points, after the same tokens.

    It has the painter's head, unchanged, and learns the conditions of it: from all tokens and from those conditions of
    the painter that are known, its own in drafts. A distribution learnt from the painter's is nearer to it than one
    that is learnt from data: the drafter's own mistakes are the only difference.
    """

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(2)
        self.painter = load_painter(options.out)
        self.model = drafter_of(self.painter).train()
        self.model.head.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        super().__init__(options, rank, "drafter.pt", options.drafter_steps, trained, {"model": self.model})

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

    def report(self) -> dict:
        """Nothing: acceptance is measured on the finished pair."""
        return {}


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


def assembled(folder: Path, model: ContinuousImageModel) -> ContinuousImageModel:
    """A copy of a trained painter with the autoencoder of `folder`, ready to draw."""
    painter = build("painter", CONFIG)
    painter.load_state_dict(model.state_dict(), strict=False)
    painter.autoencoder.load_state_dict(load_autoencoder(folder).state_dict())
    return painter.eval()


def load_painter(folder: Path) -> ContinuousImageModel:
    """The painter of `folder` as trained so far, without autoencoder."""
    painter = build("painter")
    painter.load_state_dict(torch.load(folder / "draw.pt", weights_only=True)["model"])
    return painter.eval().requires_grad_(False)
