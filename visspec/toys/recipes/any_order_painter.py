"""`painter-any-order`: a RandAR behind words, on the codes of `painter-emoji`'s VQ model.

Stage `tokens` codes pictures with the VQ model of `painter-emoji`, `draw` trains a RandAR behind words on them, in
orders that are drawn anew for every row, and `finish` writes a complete folder with a model card and its provenance.

Data: the pairs of `animals`. Seeds: 6 (draw). One CPU core.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, JanusProcessor, JanusVQVAE, JanusVQVAEConfig

from visspec.api.images import ImagePipeline
from visspec.api.loading import load_image_model
from visspec.loop.visits import halton, spread
from visspec.models.randar.model import RandARImageConfig, RandARImageModel, load
from visspec.toys.recipes import animals, cards
from visspec.toys.recipes.animals import GRID, PROMPT, ClassStage, Telling, build_processor
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter_score import draw_pictures, pictures_of, to_uint8
from visspec.toys.recipes.painter_vq import latents, nearest
from visspec.toys.recipes.recipe import Coder, PairOptions, Recipe, mixed_precision, write_coded
from visspec.toys.world.suite import Metadata

NAME, SEED = "painter-any-order", 0
GUIDANCES = (1.0, 2.0, 3.0)
ORDERS = ("halton", "spread", "raster")
DRAFTERS = ("none", "ahead:levels=4", "ahead:levels=8", "jacobi:window=8", "neighbours:levels=8")
NETWORK = {"layers": 5, "heads": 4, "hidden_size": 192, "intermediate": 512}
FEATURES = 64  # of a word
NAMED = 0.5  # share of the rows in a named order, of which there are three; the others' are random
TOLD, FADE = 0.2, (0.4, 0.6)  # weight of telling the animal, and shares of the steps between which it falls to 0
FIRST = 1 << 28  # number of the first pair


def included_vq() -> JanusVQVAE:
    """The VQ model of `painter-emoji`, for pictures of the animals' side."""
    model, _ = load_image_model("painter-emoji")
    vq = JanusVQVAE(JanusVQVAEConfig(**model.config.vq_config.to_dict() | {"num_patches": GRID}))
    vq.load_state_dict(model.model.vqmodel.state_dict())
    return vq.eval().requires_grad_(False)


def coded(vq: JanusVQVAE, pictures: torch.Tensor) -> torch.Tensor:
    """Codes int16 (B, places) of pictures."""
    return nearest(vq, latents(vq, pictures)).flatten(1).short()


def coders(options: argparse.Namespace) -> dict[Path, Coder]:
    """What makes the file of coded pairs: `classes` (N,) and `codes` (N, places), int16."""
    return animals.coders(options, "tokens.pt", FIRST, "codes", partial(coded, included_vq()))


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
    model: RandARImageModel, processor: JanusProcessor, rows: list[Metadata], guidance: float, seed: int, **options: str
) -> tuple[np.ndarray, float]:
    """Pictures of prompts, uint8 (B, S, S, 3), and mean passes of the network a code; `options` are the pipeline's."""
    out = draw_pictures(ImagePipeline(model, processor), [row["prompt"] for row in rows], guidance, seed, 24, **options)
    passes = [(int(numbers.max()) + 1) / numbers.size for numbers in out.passes]
    return to_uint8(pictures_of(out)), round(sum(passes) / len(passes), 4)


def score(
    model: RandARImageModel,
    processor: JanusProcessor,
    rows: list[Metadata],
    guidance: float,
    seed: int = 0,
    **options: str,
) -> dict:
    """Right animals of one picture a prompt, passes a code, and the seconds it took."""
    begun = time.time()
    pictures, passes = draw(model, processor, rows, guidance, seed, **options)
    record = {"guidance": guidance, "passes": passes}
    return record | animals.geneval(pictures, rows) | {"seconds": round(time.time() - begun, 1)}


class AnyOrderStage(ClassStage):
    """Training of words and network; the VQ model stays as it is. A throw-away head tells the animal."""

    name, seed, data_file = "any-order.pt", 6, "tokens.pt"

    def build(self, options: argparse.Namespace) -> dict:
        self.model = build(included_vq()).train()
        self.model.vqmodel.eval()
        self.processor, self.telling = build_processor(), Telling(self.model.net.config.hidden_size)
        self.ids = animals.prompt_ids(self.processor.tokenizer, animals.LABELS)
        self.read(options)
        return {"model": self.model, "telling": self.telling}

    def loss(self) -> torch.Tensor:
        """Cross-entropy of the codes of the next batch, in an order of each row's own, and of the animals told."""
        chosen, dropped = self.batch_rows()
        classes, codes = self.data["classes"][chosen].long(), self.data["codes"][chosen].long()
        order = orders(np.random.default_rng((6, self.step, self.rank)), len(chosen), GRID)
        codes, ids, net = codes.gather(1, order), self.ids[classes], self.model.net
        middle: list[torch.Tensor] = []
        hook = net.layers[len(net.layers) // 2].register_forward_hook(lambda *call: middle.append(call[2]))
        with mixed_precision():
            words, real = self.model.features(ids, ids != self.processor.tokenizer.pad_token_id)
            words = torch.where(dropped[:, None, None], net.cls_embedding.absent(words), words)
            logits = net.distributions(net.prefix(words), codes, order, real)
        hook.remove()
        losses = F.cross_entropy(logits.float().transpose(1, 2), codes, reduction="none")
        self.notes["first"] = round(losses[:, 0].mean().item(), 3)
        self.notes["last"] = round(losses[:, -GRID:].mean().item(), 3)
        told = self.telling.loss(middle[0][:, PROMPT:], classes, dropped)
        self.notes["told"] = round(told.item(), 3)
        return losses.mean() + TOLD * self.fading(*FADE) * told

    def figures(self) -> dict:
        asked = animals.rows(4 * self.options.every_prompt)
        return score(self.model, self.processor, asked, 2.0, drafter="none")


def finish(options: argparse.Namespace) -> None:
    """Write the folder from the last checkpoint, read it back, measure it and describe it."""
    saved, stage = cards.read_stage(options.out / "any-order.pt")
    made, processor, folder = build(included_vq()), build_processor(), options.out / NAME
    made.load_state_dict(saved["model"])
    save(made, processor, folder, torch.float16)
    model, rows = load(folder), animals.rows(options.every_prompt)
    few = rows[::4]
    sweep = [score(model, processor, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    model.generation_config.guidance_scale = guidance
    model.generation_config.save_pretrained(folder)

    def passes(order: str) -> dict[str, float]:
        return {d: draw(model, processor, few, guidance, SEED, order=order, drafter=d)[1] for d in DRAFTERS}

    drawn = {o: score(model, processor, rows, guidance, SEED, order=o, drafter="none") for o in ORDERS}
    taken = {order: passes(order) for order in ORDERS}
    cells = {o: [f"{drawn[o]['images']:.3f}", *(f"{taken[o][drafter]:.3f}" for drafter in DRAFTERS)] for o in ORDERS}
    measured = {"sweep": sweep, "swept": len(rows[::2]), "pictures": drawn, "few": len(few), "passes": taken}
    cards.describe(
        options,
        NAME,
        model,
        measured,
        {"draw": stage, "seeds": {"draw": 6, "measured": SEED}},
        globals(),
        places=model.net.config.grid**2,
        prompts=len(rows),
        rows=cards.table([order, *cells[order]] for order in ORDERS),
        drafters=[f"`{drafter}`" for drafter in DRAFTERS],
    )
    cards.say(folder, draw=stage, guidance=guidance)


PAINTER = Recipe(
    NAME,
    "Train the any-order painter.",
    PairOptions,
    {"tokens": partial(write_coded, coders), "draw": AnyOrderStage, "finish": finish},
    {"pairs": 12_000, "steps": 3000, "every": 600},
)
