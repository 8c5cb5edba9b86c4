"""`painter-mar` and its drafter from zero: continuous tokens in random orders.

Stage `tokens` codes pictures with the autoencoder of `painter-continuous`, `draw` trains the painter on tokens drawn
from its posterior, `draft` a smaller MAR on the painter's head, and `finish` writes both folders with model cards and
provenance.

Data: the pairs of `animals`. Embeddings of classes are learnt as sums of those of their facts and written into the
published table at the end. Seeds: 4 (draw), 5 (draft). One CPU core.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GenerationConfig

from visspec.api import zoo
from visspec.cache import gather_rows
from visspec.models.continuous import model as continuous_painter
from visspec.models.mar.images import LabelledMARImages
from visspec.models.mar.model import MARImageConfig, MARImageModel, load
from visspec.models.mar.network import UNCONDITIONAL, MARConfig
from visspec.models.mar.target import MARTarget, parallel
from visspec.models.vectors.diffusion_head import schedule
from visspec.sampling import Normals
from visspec.toys.recipes import animals, cards, continuous_autoencoder
from visspec.toys.recipes.animals import GRID, LABELS
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.continuous_autoencoder import CONFIG, SIZE, measure
from visspec.toys.recipes.continuous_painter import DEFAULTS, NEARNESS, TokenStage, VectorOptions
from visspec.toys.recipes.painter_score import to_uint8
from visspec.toys.recipes.recipe import Coder, Recipe, write_coded
from visspec.types import Sampling

NAMES = {"painter": "painter-mar", "drafter": "painter-mar-drafter"}
GUIDANCES = (1.0, 2.0, 4.0)
ITERATIONS = (16, 8)  # of published parallel decoding, measured beside one token at a time
SEED = 0
SIZES: dict[str, dict[str, int]] = {
    "painter": {"width": 128, "depth": 3, "heads": 4, "head_width": 128, "head_depth": 4, "buffer": 8},
    "drafter": {"width": 128, "depth": 1, "heads": 4, "head_width": 128, "head_depth": 4, "buffer": 8},
}
FACT = 0.05  # initial deviation of a fact's embedding
TIMES = 2  # levels of noise of a token in a step; published 4
# Of the parts that a drafter has of the painter, only the head is not trained on.
PLACES = ("encoder", "decoder", "diffusion")  # parts whose tables of places are the painter's
SHARED = ("mar.class_emb", "mar.z_proj", "mar.z_proj_ln", "mar.decoder_norm", "mar.diffloss")


def build(name: str, autoencoder: dict | None = None, sizes: dict | None = None) -> MARImageModel:
    """A fresh painter or drafter with the published initial weights; `sizes` override those of SIZES (for tests)."""
    network = SIZES[name] | {"size": SIZE, "tokens": GRID**2, "classes": len(LABELS)} | (sizes or {})
    steps = network.pop("denoising_steps", 100)
    model = MARImageModel(MARImageConfig(network, LABELS, "velocity", steps, autoencoder))
    model.mar.begin()
    return model


def included_autoencoder() -> AutoencoderKL:
    """The autoencoder of `painter-continuous`."""
    return continuous_painter.load(zoo.included_folder("painter-continuous")).autoencoder.requires_grad_(False)


def assemble(trained: MARImageModel, autoencoder: AutoencoderKL) -> MARImageModel:
    """A copy of a trained painter with an autoencoder, ready to draw."""
    network = {name: value for name, value in trained.config.network.items() if name in MARConfig.__annotations__}
    painter = build("painter", CONFIG, network | {"denoising_steps": trained.config.denoising_steps})
    painter.mar.load_state_dict(trained.mar.state_dict())
    painter.autoencoder.load_state_dict(autoencoder.state_dict())
    return painter.eval()


def draw(
    painter: MARImageModel, prompts: list[str], guidance: float, seed: int, iterations: int = GRID**2, batch: int = 48
) -> np.ndarray:
    """Pictures uint8 (B, S, S, 3), in as many iterations; one token in each by default, as in plain decoding."""
    family, out = LabelledMARImages(painter), []
    target, layout = MARTarget(family), family.layout()
    for start in range(0, len(prompts), batch):
        texts = prompts[start : start + batch]
        generators = [torch.Generator().manual_seed(seed * 10_000 + start + i) for i in range(len(texts))]
        prompt = family.prompt(texts, guidance != 1.0).ordered(layout.positions, generators)
        noise = Normals(generators, painter.config.denoising_steps, SIZE)
        tokens = parallel(target, prompt, noise, iterations, Sampling(1.0, guidance=guidance))
        with torch.inference_mode():
            out.append(to_uint8(family.pixels(tokens, layout) * 2 - 1))
    return np.concatenate(out)


class MaskedStage(TokenStage):
    """What both models' stages share: pictures of which a random part is known."""

    def begin(self, options: argparse.Namespace) -> None:
        """Take the folder's tokens."""
        self.autoencoder = included_autoencoder()
        self.take(options, self.autoencoder)

    def masked(self) -> tuple[Tensor, ...]:
        """Tokens (B, T, SIZE), classes (B,), which tokens are known (B, T), as many in each row, and the places of the
        others (B, T - K). Of the numbers of them, small ones are the likelier: what the class says is then most.
        """
        classes, values, dropped = self.batch()
        order = torch.rand(values.shape[:2]).argsort(dim=1)
        count = int(values.shape[1] * torch.rand(()) ** 2)
        known = torch.zeros(values.shape[:2], dtype=torch.bool).scatter(1, order[:, :count], True)
        return values, classes.masked_fill(dropped, UNCONDITIONAL), known, order[:, count:]

    def conditions(self, model: MARImageModel, values: Tensor, classes: Tensor, known: Tensor) -> Tensor:
        """Conditions (B, T, C) of all tokens."""
        return model.mar(values, known, classes, [int(known[0].sum())] * len(known))


class MARStage(MaskedStage):
    """Training of the painter, published but for what the head says, the velocity, and how many tokens are known."""

    name, seed = "mar.pt", 4

    def build(self, options: argparse.Namespace) -> dict:
        self.model = build("painter").train()
        self.begin(options)
        plan = schedule(len(self.signal), learned=True).steps
        # of the coefficients by time, in which the chain's steps run backwards
        self.low, self.high, self.move = (part.flip(0) for part in (plan.low, plan.high, plan.move))
        self.facts = animals.facts()[:-1, :-1]
        self.table = nn.Linear(self.facts.shape[1], self.model.mar.config.width, bias=False)
        nn.init.normal_(self.table.weight, std=FACT)
        self.model.mar.class_emb.requires_grad_(False)
        return {"model": self.model, "facts": self.table}

    def loss(self) -> Tensor:
        """Squared error of the velocity, and the divergence of the step's Gaussian with the mean held fixed, which
        teaches the deviation (Nichol and Dhariwal 2021, section 3.1).
        """
        values, classes, known, hidden = self.masked()
        given = {"class_emb.weight": self.table(self.facts)}
        call = (values, known, classes, [int(known[0].sum())] * len(known))
        conditions = functional_call(self.model.mar, given, call)
        values, conditions = (gather_rows(part, hidden) for part in (values, conditions))
        x, times, velocity = self.noised(values, TIMES)
        made, said = self.model.mar.head(x, times, conditions).chunk(2, dim=-1)
        error = made - velocity
        simple = error.square().mean()
        bound = self.divergence(error.detach(), said, times).mean()
        self.notes["velocity"], self.notes["bits"] = round(simple.item(), 4), round(bound.item(), 4)
        return simple + bound

    def divergence(self, error: Tensor, said: Tensor, times: Tensor) -> Tensor:
        """KL in bits a number, of the posterior's Gaussian from the model's; error: of the velocity."""
        low, high, move, noise = (part[times][..., None] for part in (self.low, self.high, self.move, self.noise))
        log_sigma = low + (said + 1) / 2 * (high - low)
        shift = (move * noise * error).square()
        nats = log_sigma - low + ((2 * low).exp() + shift) / (2 * (2 * log_sigma).exp()) - 0.5
        return nats / torch.log(torch.tensor(2.0))

    def checkpoint(self, loss: float) -> None:
        """Write the table of classes too."""
        with torch.no_grad():
            self.model.mar.class_emb.weight.copy_(self.table(self.facts))
        super().checkpoint(loss)

    def figures(self) -> dict:
        painter, asked = assemble(self.model, self.autoencoder), animals.rows(4 * self.options.every_prompt)
        return animals.score(partial(draw, painter, seed=SEED), asked, guidance=2.0, iterations=GRID**2)


class MARDraftStage(MaskedStage):
    """Training of the drafter: its head's outputs are to be the painter's at the same points, after the same tokens.

    It has the painter's head, unchanged, and learns the conditions of it.
    """

    name, seed, steps_option = "mar-drafter.pt", 5, "drafter_steps"

    def build(self, options: argparse.Namespace) -> dict:
        self.painter = build("painter")
        self.painter.load_state_dict(torch.load(options.out / "mar.pt", weights_only=True)["model"])
        self.painter.eval().requires_grad_(False)
        self.model = drafter_of(self.painter).train()
        self.begin(options)
        return {"model": self.model}

    def loss(self) -> Tensor:
        """Squared distance of what both heads say, and of the conditions."""
        values, classes, known, hidden = self.masked()
        made, wanted = (self.conditions(model, values, classes, known) for model in (self.model, self.painter))
        values, made, wanted = (gather_rows(part, hidden) for part in (values, made, wanted))
        x, times, _ = self.noised(values)
        with torch.no_grad():
            said = self.painter.mar.head(x, times, wanted)
        losses = (self.model.mar.head(x, times, made) - said).square()
        self.notes["velocity"] = round(losses[..., :SIZE].mean().item(), 4)
        return losses.mean() + NEARNESS * (made - wanted).square().mean()


def drafter_of(painter: MARImageModel, sizes: dict | None = None) -> MARImageModel:
    """A fresh drafter with the painter's tables and head."""
    model = build("drafter", sizes=sizes)
    for name in SHARED:
        model.get_submodule(name).load_state_dict(painter.get_submodule(name).state_dict())
    with torch.no_grad():
        for name in ("fake_latent", "mask_token", *(f"{part}_pos_embed_learned" for part in PLACES)):
            getattr(model.mar, name).copy_(getattr(painter.mar, name))
    model.mar.head.requires_grad_(False)
    return model


def coders(options: argparse.Namespace) -> dict[Path, Coder]:
    """What makes tokens.pt, by the autoencoder of `painter-continuous`."""
    return continuous_autoencoder.coders(options, included_autoencoder())


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read the painter back, measure it and describe them."""
    saved, stages = cards.read_stages(options.out, {"draw": "mar.pt", "drafter": "mar-drafter.pt"})
    about = stages | {"compute_dtype": "float32", "times": TIMES}
    made, drafter = build("painter"), build("drafter")
    made.load_state_dict(saved["draw"]["model"])
    drafter.load_state_dict(saved["drafter"]["model"])
    folder = options.out / NAMES["painter"]
    save(assemble(made, included_autoencoder()), None, folder, torch.float16)
    model, rows = load(folder), animals.rows(options.every_prompt)
    half, tokens = partial(animals.score, partial(draw, model, seed=SEED + 1), rows[::2]), GRID**2
    sweep = [half(guidance=guidance, iterations=tokens) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    GenerationConfig(do_sample=True, temperature=1.0, guidance_scale=guidance).save_pretrained(folder)
    drawing = partial(draw, model, seed=SEED)
    one, *fewer = (animals.score(drawing, rows, guidance=guidance, iterations=n) for n in (tokens, *ITERATIONS))
    decoded = measure(model.autoencoder, options.every_prompt)
    shown = {f"drawn, guidance {guidance}": one}
    shown |= {f"the same in {r['iterations']} iterations, several tokens at a time": r for r in fewer}
    shown["decoded tokens"] = decoded
    cards.describe(
        options,
        NAMES["painter"],
        model,
        {"sweep": sweep, "swept": len(rows[::2]), "pictures": [one, *fewer], "decoded": decoded},
        about | {"seeds": {"draw": 4, "measured": SEED}},
        globals(),
        prompts=len(rows),
        rows=cards.table([name, f"{found['images']:.3f}"] for name, found in shown.items()),
    )
    about |= {"seeds": {"draft": 5}}
    cards.describe_drafter(options, NAMES["drafter"], drafter, load, about, globals())
    cards.say(options.out, stages=stages)


PAINTER = Recipe(
    NAMES["painter"],
    "Train the MAR painter and its drafter.",
    VectorOptions,
    {
        "tokens": partial(write_coded, coders),
        "draw": MARStage,
        "draft": MARDraftStage,
        "finish": finish,
    },
    DEFAULTS | {"drafter_steps": 3000, "steps": 3000, "rate": 1e-3},
)
