"""`painter-eagle` and `painter-emoji-eagle`: drafters of the painters, on pictures that the painters draw themselves.

Online distillation (`visspec.train.loop`): the painter draws batches of pictures at its own guidance and temperature
in one thread, while the drafter learns the distributions of those before in another. Two CPU cores, no accelerator.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visspec.accept.exact import Exact
from visspec.accept.rejection import Rejection
from visspec.api import loading as targets
from visspec.api.train_drafter import fresh_or_resumed, plan_of, train
from visspec.eval.bench.paired import geometric_mean
from visspec.io.files import write_json
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.drafting.checkpoint import PROVENANCE
from visspec.models.eagle.image_drafter import CaptureTarget, ImageFeatureDrafter
from visspec.models.eagle.image_head import ImageHeadConfig
from visspec.models.image_codes.families import family_of
from visspec.models.image_codes.target import ImageAR
from visspec.models.janus.target import Janus
from visspec.toys.recipes import cards
from visspec.toys.recipes.recipe import DrafterOptions, Recipe
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.worlds import WORLDS, World, world
from visspec.train.loop import Trainer
from visspec.train.validation import measure
from visspec.types import Request, Sampling

FIRST_SEED = 3 << 28  # noise and prompts of no other recipe, below the held-out ones
POOL = 8  # batches of prompts drawn together and sorted by length: most batches are not padded
VALIDATED = 8  # prompts watched during training
SHAPES: dict[str, dict[str, Any]] = {
    "chain of 4": {"levels": 4},
    "chain of 5": {"levels": 5},
    "chain of 6": {"levels": 6},
    "grown tree of 24 nodes, 4 wide, depth 5": {"tree": "dynamic", "levels": 5},
    "static tree 4-6-6-4-2": {"tree": "static", "shape": "4-6-6-4-2"},
}
TIMED = "chain of 5"
NAMES = {
    "shapes": {"painter": "painter", "name": "painter-eagle", "prompt": "a photo of a red circle"},
    "emoji": {"painter": "painter-emoji", "name": "painter-emoji-eagle", "prompt": "a photo of a penguin"},
}


def painter(name: str) -> Janus:
    """The family of an included painter, or of a folder. Raises ValueError for another model."""
    family = family_of(*targets.load_image_model(name))
    if not isinstance(family, Janus):
        raise ValueError(f"target: got a model of the type {family.name!r}, expected a painter, which is a Janus")
    return family


def temperature_of(family: Janus) -> float:
    """The painter's own temperature."""
    return float(getattr(family.model.generation_config, "temperature", None) or 1.0)


def request_of(family: Janus, texts: list[str], seed: int, guidance: float) -> Request:
    """A picture of each text, at the painter's own temperature; row b draws from the seed `seed + b`."""
    with torch.no_grad():
        prompt = family.prompt(texts, guidance != 1.0)
    layout = family.layout()
    sampling = Sampling(temperature=temperature_of(family), guidance=guidance)
    request = Request(prompt, prompt.ids, layout.positions, sampling, grid=layout.grid)
    request.generators = [torch.Generator(prompt.ids.device).manual_seed(seed + b) for b in range(len(texts))]
    return request


class Pictures:
    """Batches of requests for pictures of the grammar's prompts: a pure function of their number."""

    def __init__(self, family: Janus, world: World, rows: int, guidance: float, first: int = FIRST_SEED):
        self.world, self.family, self.rows, self.guidance, self.first = world, family, rows, guidance, first

    def __call__(self, number: int) -> Request:
        pool, place = divmod(number, POOL)
        rng = np.random.default_rng((self.first, pool))
        texts = sorted(
            (self.world.prompt(rng)["prompt"] for _ in range(POOL * self.rows)), key=lambda t: len(t.split())
        )
        chosen = texts[place * self.rows :][: self.rows]
        return request_of(self.family, chosen, self.first + number * self.rows, self.guidance)


def held_out(world: World, count: int) -> list[str]:
    """Prompts of the suite, evenly spread over the painter's tasks."""
    rows = world.prompts()
    return [rows[i * len(rows) // count]["prompt"] for i in range(count)]


class ImageValidation:
    """tau of chains under `rejection`, on held-out noise."""

    def __init__(self, family: Janus, world: World, drafter: ImageFeatureDrafter, guidance: float):
        self.world, self.family, self.drafter, self.guidance = world, family, drafter, guidance
        self.target = CaptureTarget(family)

    def __call__(self) -> dict[str, Any]:
        request = request_of(self.family, held_out(self.world, VALIDATED), HELD_OUT_SEED, self.guidance)
        found = measure(self.target, self.drafter, Rejection(), [request], self.drafter.traits.levels)
        return {"tau_sampled": round(found.tau, 3), "by_depth": found.by_depth}


def figures(family: Janus, world: World, head, count: int, guidance: float) -> dict[str, Any]:
    """tau of every shape under `rejection`, of a chain under `exact`, and the clock of one picture at a time."""
    texts, positions = held_out(world, count), family.layout().positions
    target = ImageAR(family, features=True)
    table: dict[str, dict[str, Any]] = {}
    for name, options in SHAPES.items():
        drafter = ImageFeatureDrafter(head, family, **options)
        for rule in (Rejection(), Exact()) if name == TIMED else (Rejection(),):
            request = request_of(family, texts, HELD_OUT_SEED + 1000, guidance)
            found = measure(target, SafeDrafter(drafter, target.capabilities), rule, [request], drafter.traits.levels)
            label = name if isinstance(rule, Rejection) else f"{name}, rule exact"
            passes = 1 + (positions - 1) / found.tau  # of a picture, the prompt's included
            entry = {"tau": found.tau, "passes": passes, "fewer": positions / passes}
            table[label] = {k: round(v, 2) for k, v in entry.items()} | {"by_depth": found.by_depth}
    settings = {"prompts": count, "guidance": guidance, "temperature": temperature_of(family), "positions": positions}
    timed = time_pair(family, ImageFeatureDrafter(head, family, **SHAPES[TIMED]), texts, guidance)
    return settings | {"table": table} | timed


def time_pair(family: Janus, drafter, texts: list[str], guidance: float) -> dict[str, Any]:
    """Plain decoding against drafted, one picture at a time, in alternation; geometric mean of the ratios."""
    plain, fed = ImageAR(family), ImageAR(family, features=True)
    guarded, seconds = SafeDrafter(drafter, fed.capabilities), []
    for i, text in enumerate([texts[0], *texts]):  # the first pair warms up
        pair = []
        for target, used in ((plain, None), (fed, guarded)):
            request = request_of(family, [text], HELD_OUT_SEED + 2000 + i, guidance)
            begun = time.perf_counter()
            decode(target, used, Rejection(), request, FixedLength(drafter.traits.levels))
            pair.append(time.perf_counter() - begun)
        seconds.append(pair)
    plainly, fast = (sorted(column)[len(column) // 2] for column in zip(*seconds[1:]))
    return {
        "ratio": round(geometric_mean([slow / fast for slow, fast in seconds[1:]]), 2),
        "plain_seconds": round(plainly, 2),
        "drafted_seconds": round(fast, 2),
    }


def card(head, record: dict[str, Any], megabytes: float, of: str = "shapes") -> str:
    """The README of a checkpoint from its provenance with its measured figures."""
    found, training = record["measured"], record["training"]
    plan = training["plan"]
    groups = math.ceil(training["step"] / (plan["group"] * math.ceil(plan["batch"] / plan["rows"]) * plan["reuse"]))
    columns = ("tau", "passes", "fewer")
    lines = ([name, *(str(e[c]) for c in columns)] for name, e in found["table"].items())
    return cards.fill(
        "painter-eagle",
        record,
        head,
        globals(),
        megabytes=megabytes,
        lines=cards.table([*cells[:-1], f"{cells[-1]} x"] for cells in lines),
        depths=" ".join(f"{x:.2f}" for x in found["table"][TIMED]["by_depth"]),
        threads=torch.get_num_threads(),
        pictures=groups * plan["group"] * plan["batch"],
        minutes=training["seconds"] / 60,
        note=record.get("note", ""),
        **NAMES[of],
    )


def export(run: Path, folder: Path, family: Janus, world: World, count: int) -> dict[str, Any]:
    """Write a finished run's weights in half precision, read them back, measure them, and write the card."""
    drafter = ImageFeatureDrafter.from_pretrained(run, family)
    record = json.loads((run / PROVENANCE).read_text()) | {"stored_as": "float16"}
    drafter.save_pretrained(folder, record, torch.float16)
    stored = ImageFeatureDrafter.from_pretrained(folder, family)
    assert isinstance(stored.config, ImageHeadConfig)
    found = figures(family, world, stored.head, count, stored.config.guidance)
    record["measured"] = found
    write_json(folder / cards.PROVENANCE, record)
    megabytes = (folder / "model.safetensors").stat().st_size / 1e6
    cards.publish(folder, card(stored.head, record, megabytes, world.name))
    return found


@dataclass
class PainterDrafterOptions(DrafterOptions):
    target: str = option("included name or folder of the target", "painter")
    world: str = option("whose prompts the painter draws", "shapes", choices=WORLDS)
    start: Path | None = option("drafter folder whose weights the run starts from", None)
    prompts: int = option("prompts that finished weights are measured on", 16)
    note: str = option("sentence for the card, say on what --start was trained", "")


def run(options: argparse.Namespace) -> None:
    """Train, and with --export write what is finished."""
    torch.set_num_threads(options.threads)
    family = painter(str(options.target))
    sizes = {"levels": options.levels} | ({"intermediate": options.middle} if options.middle else {})
    drafter = fresh_or_resumed(family, options.out, options.resume, options.seed, ImageFeatureDrafter, **sizes)
    if options.start and not options.resume:
        drafter.head.load_state_dict(ImageFeatureDrafter.from_pretrained(options.start, family).head.state_dict())
        drafter.refresh()
    guidance, seen = drafter.config.guidance, world(options.world)
    record = provenance(family.model, seed=options.seed, recipe="painter_drafter", target=Path(options.target).name)
    record |= {"note": options.note} if options.note else {}
    validate = ImageValidation(family, seen, drafter, guidance)
    pictures = Pictures(family, seen, options.batch, guidance, FIRST_SEED + (options.seed << 20))
    plan, rule = plan_of(options), Rejection()
    train(Trainer(validate.target, drafter, rule, pictures, plan, options.out, record, validate), options.resume)
    if options.export:
        print(json.dumps(export(options.out, options.export, family, seen, options.prompts)))


DEFAULTS = {"steps": 500, "batch": 64, "group": 2, "opening": 0.5, "rate": 1.8e-3, "levels": 5}
OF_SHAPES = Recipe(
    "painter-eagle", "Train the drafter of the painter of shapes.", PainterDrafterOptions, {"train": run}, DEFAULTS
)
OF_EMOJI = Recipe(
    "painter-emoji-eagle",
    "Train the drafter of the painter of emoji.",
    PainterDrafterOptions,
    {"train": run},
    DEFAULTS | {"target": "painter-emoji", "world": "emoji", "steps": 1400, "group": 4, "rate": 1.5e-3},
)
