"""`painter-any-order`: a RandAR behind words, on the codes of the included painter's VQ model.

Stage `tokens` codes pictures with the VQ model of `painter`, `draw` trains a RandAR behind words on them, in orders
that are drawn anew for every row, and `finish` writes a complete folder with a model card and its provenance.

The included VQ model codes pieces of a scene apart, so that a patch has one code wherever it stands; its encoder gives
other codes of a whole picture (`painter_vq`). A picture that is given for inpainting can only be coded whole.

Data: the pairs of the painter's recipe. Seeds: 6 (draw). Two CPU cores, 1.6 s a step and 55 ms a pair.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, JanusProcessor, JanusVQVAE

from visspec.api.images import ImagePipeline
from visspec.api.loading import load_image_model
from visspec.loop.visits import halton, spread
from visspec.models.randar.model import RandARImageConfig, RandARImageModel, load
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter_build import PROMPT, build_processor
from visspec.toys.recipes.painter_data import FIRST_SEED, SIDE, pair, pixels
from visspec.toys.recipes.painter_draw import DROPPED
from visspec.toys.recipes.painter_score import draw_pictures, geneval, pictures_of, to_uint8
from visspec.toys.recipes.painter_vq import encode
from visspec.toys.recipes.recipe import (
    Coder,
    PairOptions,
    Recipe,
    TrainingStage,
    coding_stage,
    in_batches,
    mixed_precision,
    read_coded,
    shards,
    training_stage,
)
from visspec.toys.world.suite import Metadata, suite

NAME, SEED = "painter-any-order", 0
GUIDANCES = (1.0, 2.0, 3.0)
ORDERS = ("halton", "spread", "raster")
DRAFTERS = ("none", "ahead:levels=4", "ahead:levels=8", "jacobi:window=8", "neighbours:levels=8")
NETWORK = {"layers": 6, "heads": 4, "hidden_size": 192, "intermediate": 512}
FEATURES = 64  # of a word
NAMED = 0.5  # share of the rows in a named order, of which there are three; the others' are random
WHOLE = 0.2  # share of the rows with a whole picture's codes, of which the first half is given, as in inpainting
SHARD = 1000  # pairs in a file
BATCH = 32


def included_vq() -> JanusVQVAE:
    """The VQ model of `painter`."""
    model, _ = load_image_model("painter")
    return model.model.vqmodel.eval().requires_grad_(False)


@torch.no_grad()
def coded_pairs(vq: JanusVQVAE, numbers: range) -> dict[str, torch.Tensor]:
    """Pairs of these numbers: `ids` (N, PROMPT), `codes` and `whole` (N, places), all int16."""

    def whole(some: range) -> dict[str, torch.Tensor]:
        pictures = pixels([pair(FIRST_SEED["tokens"] + i)[1] for i in some], SIDE[False])
        return {"whole": vq.encode(pictures).image_tokens.view(len(some), -1).short()}

    found = encode(vq, "tokens", numbers, False, BATCH)
    return {"ids": found["ids"], "codes": found["codes"]} | in_batches(whole, numbers, BATCH)


def files(folder: Path, count: int) -> dict[Path, range]:
    """Files of the first so many pairs, and the pairs in each."""
    return shards(folder, "any-order", range(count), SHARD)


def coders(options: argparse.Namespace) -> dict[Path, Coder]:
    """What makes each file of coded pairs."""
    vq = included_vq()
    return {file: partial(coded_pairs, vq, part) for file, part in files(options.out, options.pairs).items()}


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


def score(
    model: RandARImageModel,
    processor: JanusProcessor,
    rows: list[Metadata],
    guidance: float,
    seed: int = 0,
    **options: str,
) -> dict:
    """GenEval of one picture a prompt, passes of the network a code, and the seconds it took; `options` are the
    pipeline's.
    """
    begun = time.time()
    out = draw_pictures(ImagePipeline(model, processor), [row["prompt"] for row in rows], guidance, seed, 23, **options)
    passes = [(int(numbers.max()) + 1) / numbers.size for numbers in out.passes]
    record = {"guidance": guidance, "passes": round(sum(passes) / len(passes), 4)}
    return record | geneval(to_uint8(pictures_of(out)), rows) | {"seconds": round(time.time() - begun, 1)}


class AnyOrderStage(TrainingStage):
    """Training of words and network; the VQ model stays as it is."""

    name, seed = "any-order.pt", 6

    def build(self, options: argparse.Namespace) -> dict:
        self.model = build(included_vq()).train()
        self.model.vqmodel.eval()
        self.processor, self.data = build_processor(), read_coded(files(options.out, options.pairs))
        return {"model": self.model}

    def rows(self) -> tuple[torch.Tensor, ...]:
        """This worker's ids (B, PROMPT), codes in their order and the order (B, places), and rows of whole pictures and
        without words (B,).
        """
        chosen = self.chosen(len(self.data["ids"]))
        rng = np.random.default_rng((6, self.step, self.rank))
        whole, dropped = (torch.from_numpy(rng.random(len(chosen)) < share) for share in (WHOLE, DROPPED))
        codes = torch.where(whole[:, None], self.data["whole"][chosen], self.data["codes"][chosen]).long()
        order = orders(rng, len(chosen), self.model.net.config.grid)
        return self.data["ids"][chosen].long(), codes.gather(1, order), order, whole, dropped

    def loss(self) -> torch.Tensor:
        """Cross-entropy of the codes of the next batch; of whole pictures, of the half that comes last."""
        ids, codes, order, whole, dropped = self.rows()
        net = self.model.net
        with mixed_precision():
            words, real = self.model.features(ids, ids != self.processor.tokenizer.pad_token_id)
            words = torch.where(dropped[:, None, None], net.cls_embedding.absent(words), words)
            logits = net.distributions(net.prefix(words), codes, order, real)
        losses = F.cross_entropy(logits.float().transpose(1, 2), codes, reduction="none")
        self.notes["first"] = round(losses[~whole, 0].mean().item(), 3)
        self.notes["last"] = round(losses[~whole, -codes.shape[1] // 4 :].mean().item(), 3)
        counted = ~whole[:, None] | (torch.arange(codes.shape[1]) >= codes.shape[1] // 2)
        return (losses * counted).sum() / counted.sum()

    def figures(self) -> dict:
        """GenEval on a few prompts, drawn by the pipeline."""
        return score(self.model, self.processor, suite()[:: 4 * self.options.every_prompt], 2.0, drafter="none")


def finish(options: argparse.Namespace) -> None:
    """Write the folder from the last checkpoint, read it back, measure it and describe it."""
    saved, stage = cards.read_stage(options.out / "any-order.pt")
    made, processor, folder = build(included_vq()), build_processor(), options.out / NAME
    made.load_state_dict(saved["model"])
    save(made, processor, folder, torch.float16)
    model, rows = load(folder), suite()[:: options.every_prompt]
    few = rows[::4]
    sweep = [score(model, processor, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    model.generation_config.guidance_scale = guidance
    model.generation_config.save_pretrained(folder)

    def passes(order: str) -> dict[str, float]:
        drawn = (score(model, processor, few, guidance, SEED, order=order, drafter=drafter) for drafter in DRAFTERS)
        return dict(zip(DRAFTERS, (record["passes"] for record in drawn)))

    drawn = {o: score(model, processor, rows, guidance, SEED, order=o, drafter="none") for o in ORDERS}
    taken = {order: passes(order) for order in ORDERS}
    cells = {o: [f"{drawn[o]['geneval']:.3f}", *(f"{taken[o][drafter]:.3f}" for drafter in DRAFTERS)] for o in ORDERS}
    rows_a_step = options.rows * options.workers
    measured = {"sweep": sweep, "swept": len(rows[::2]), "pictures": drawn, "few": len(few), "passes": taken}
    about = {"draw": stage, "seeds": {"draw": 6, "measured": SEED}, "rows": rows_a_step, "pairs": options.pairs}
    cards.describe(
        options,
        NAME,
        model,
        measured,
        about,
        globals(),
        places=model.net.config.grid**2,
        prompts=len(rows),
        rows=cards.table([order, *cells[order]] for order in ORDERS),
        drafters=[f"`{drafter}`" for drafter in DRAFTERS],
        guidance=guidance,
        seen=stage["steps"] * rows_a_step,
    )
    cards.say(folder, draw=stage, guidance=guidance)


PAINTER = Recipe(
    NAME,
    "Train an any-order painter on the codes of the included painter's VQ model.",
    PairOptions,
    {"tokens": coding_stage(coders), "draw": training_stage(AnyOrderStage), "finish": finish},
    {"pairs": 6000, "steps": 4500, "every_prompt": 8},
)
