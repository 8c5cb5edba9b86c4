"""Stage `draw` of the any-order painter's recipe: codes after prompts, in orders that are drawn anew for every row."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, JanusProcessor, JanusVQVAE

from visspec.api.images import ImageOutput, ImagePipeline
from visspec.loop.visits import halton, spread
from visspec.models.randar.model import RandARImageConfig, RandARImageModel
from visspec.toys.recipes.any_order_data import included_vq, read_tokens
from visspec.toys.recipes.painter_build import build_processor
from visspec.toys.recipes.painter_draw import DROPPED
from visspec.toys.recipes.painter_score import summary, to_uint8, verdicts
from visspec.toys.recipes.painter_tokens import PROMPT
from visspec.toys.world.suite import Metadata, suite
from visspec.train.stages import Stage

NETWORK = {"layers": 6, "heads": 4, "hidden_size": 192, "intermediate": 512}
FEATURES = 64  # of a word
NAMED = 0.5  # share of the rows in a named order, of which there are three; the others' are random
WHOLE = 0.2  # share of the rows with a whole picture's codes, of which the first half is given, as in inpainting


def build(vq: JanusVQVAE, network: dict | None = None) -> RandARImageModel:
    """A fresh painter around a taught VQ model; `network` overrides sizes (for tests)."""
    vocab = len(build_processor().tokenizer)
    model = RandARImageModel(RandARImageConfig(NETWORK | (network or {}), vocab, PROMPT, FEATURES, vq.config))
    model.begin()
    model.vqmodel.load_state_dict(vq.state_dict())
    model.vqmodel.requires_grad_(False).eval()
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, guidance_scale=2.0)
    return model


def orders(rng: np.random.Generator, rows: int, side: int) -> torch.Tensor:
    """(rows, side^2) orders of places: random ones, and the named ones of `visspec.loop.visits`."""
    named = (tuple(range(side * side)), halton(side, side), spread(side, side))
    found = [
        list(named[rng.integers(len(named))]) if rng.random() < NAMED else rng.permutation(side * side).tolist()
        for _ in range(rows)
    ]
    return torch.tensor(found)


def draw(
    model: RandARImageModel, processor: JanusProcessor, prompts: list[str], guidance: float, seed: int, batch: int = 23,
    **options,
) -> ImageOutput:  # fmt: skip
    """Pictures of prompts as the pipeline draws them, floats (B, S, S, 3); `options` are its own."""
    pipe = ImagePipeline(model, processor)
    pipe.set_progress_bar_config(disable=True)
    seeds = [seed * 10_000 + i for i in range(len(prompts))]
    return pipe(prompts, guidance_scale=guidance, seed=seeds, batch_size=batch, output_type="pt", **options)


def score(
    model: RandARImageModel,
    processor: JanusProcessor,
    rows: list[Metadata],
    guidance: float,
    seed: int = 0,
    **options,
) -> dict:
    """GenEval of one picture a prompt, passes of the network a code, and the seconds it took."""
    begun = time.time()
    out = draw(model, processor, [row["prompt"] for row in rows], guidance, seed, **options)
    passes = [(int(numbers.max()) + 1) / numbers.size for numbers in out.passes]
    figures = summary(verdicts(to_uint8(torch.stack(list(out.images)) * 2 - 1), rows), rows)
    record = {"guidance": guidance, "passes": round(sum(passes) / len(passes), 4), **figures}
    return record | {"seconds": round(time.time() - begun, 1)}


class AnyOrderStage(Stage):
    """Training of words and network; the VQ model stays as it is."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(6)
        self.model = build(included_vq()).train()
        self.model.vqmodel.eval()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        super().__init__(
            options, rank, "any-order.pt", options.steps, options.rate, trained, 0.05, {"model": self.model}
        )
        self.processor, self.data = build_processor(), read_tokens(options.out, options.pairs)

    def rows(self) -> tuple[torch.Tensor, ...]:
        """This worker's ids (B, PROMPT), codes in their order and the order (B, places), and rows of whole pictures and
        without words (B,).
        """
        per_step, known = self.options.rows * self.workers, len(self.data["ids"])
        epoch, step = divmod(self.step, max(1, known // per_step))
        chosen = np.random.default_rng(epoch).permutation(known)[step * per_step :][:per_step][
            self.rank :: self.workers
        ]
        rng = np.random.default_rng((6, self.step, self.rank))
        whole, dropped = (torch.from_numpy(rng.random(len(chosen)) < share) for share in (WHOLE, DROPPED))
        codes = torch.where(whole[:, None], self.data["whole"][chosen], self.data["codes"][chosen]).long()
        order = orders(rng, len(chosen), self.model.net.config.grid)
        return self.data["ids"][chosen].long(), codes.gather(1, order), order, whole, dropped

    def loss(self) -> torch.Tensor:
        """Cross-entropy of the codes of the next batch; of whole pictures, of the half that comes last."""
        ids, codes, order, whole, dropped = self.rows()
        net = self.model.net
        with torch.autocast("cpu", torch.bfloat16):
            words, real = self.model.features(ids, ids != self.processor.tokenizer.pad_token_id)
            words = torch.where(dropped[:, None, None], net.cls_embedding.absent(words), words)
            logits = net.distributions(net.prefix(words), codes, order, real)
        losses = F.cross_entropy(logits.float().transpose(1, 2), codes, reduction="none")
        self.notes["first"] = round(losses[~whole, 0].mean().item(), 3)
        self.notes["last"] = round(losses[~whole, -codes.shape[1] // 4 :].mean().item(), 3)
        counted = ~whole[:, None] | (torch.arange(codes.shape[1]) >= codes.shape[1] // 2)
        return (losses * counted).sum() / counted.sum()

    def report(self) -> dict:
        """GenEval on a few prompts, drawn by the pipeline, on the first worker only."""
        if self.rank:
            return {}
        self.model.eval()
        rows = suite()[:: 4 * self.options.every_prompt]
        found = score(self.model, self.processor, rows, 2.0, drafter="none")
        self.model.train()
        self.model.vqmodel.eval()
        return found
