"""`painter-upsampler` and `painter-emoji-upsampler`, which enlarge low-resolution drafts, on the codes that a painter
and its sibling were trained on.

Every pair of shards of their `tokens` stages (--tokens) holds the same scenes at 48 and at 96 pixels a side.
The last eighth is kept out of training and measured. One CPU core, a few minutes.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.models.drafting.checkpoint import write
from visspec.models.lowres.upsampler import Upsampler, UpsamplerConfig
from visspec.toys.recipes import cards, emoji_painter
from visspec.toys.recipes.painter_build import CODES, grid
from visspec.toys.recipes.painter_vq import read_tokens
from visspec.toys.recipes.recipe import PairOptions, Recipe, Stages, TrainingStage, read_coded
from visspec.train.stages import OneCycleStage

PAINTERS = {"shapes": "painter", "emoji": "painter-emoji"}
PAIRS = {"shapes": 64_000, "emoji": 16_000}


@dataclass
class UpsamplerOptions(PairOptions):
    tokens: Path = option("folder of the painters' recipes, both tokens stages", Path("runs/painter"))
    world: str = option("what the pictures show", "shapes", choices=tuple(PAINTERS))


def coded(world: str, folder: Path, low: bool, count: int) -> dict[str, torch.Tensor]:
    """So many pairs of a painter's `tokens` stage."""
    if world == "emoji":
        return read_coded(emoji_painter.files(folder, low, count))
    return read_tokens(folder, "tokens", low, 0, count)


def pairs(world: str, folder: Path, count: int) -> dict[str, torch.Tensor]:
    """`small` (N, 6, 6), `large` (N, 12, 12) codes of the same scenes, int64, and of shapes `ink` (N, 12, 12), bool."""
    small, large = (coded(world, folder, low, count) for low in (True, False))
    if not torch.equal(small["ids"], large["ids"]):
        raise ValueError(f"tokens: {folder} has other scenes at 48 than at 96 pixels, expected the same pairs")
    shapes = {"small": (small["codes"], grid(True)), "large": (large["codes"], grid(False))}
    out = {name: codes.long().unflatten(1, (side, side)) for name, (codes, side) in shapes.items()}
    return out | {"ink": large["ink"].unflatten(1, (grid(False), grid(False)))} if "ink" in large else out


@torch.no_grad()
def score(model: Upsampler, data: dict[str, torch.Tensor]) -> dict[str, float]:
    """Shares of codes named rightly, the most frequent code's share, and that of the codes that show shapes."""
    made = torch.cat([model(part).argmax(-1) for part in data["small"].split(256)])
    right, common = made == data["large"], data["large"].flatten().mode().values
    figures = {"right": right, "common": data["large"] == common}
    figures |= {"shapes": right[data["ink"]]} if "ink" in data else {}
    return {name: float(hits.float().mean()) for name, hits in figures.items()}


class UpsamplerStage(TrainingStage, OneCycleStage):
    """Training on all pairs but the last eighth, which is measured."""

    name, seed, decay = "upsampler.pt", 0, 0.01
    rises, betas = 0.05, (0.9, 0.999)

    def build(self, options: argparse.Namespace) -> dict:
        data = pairs(options.world, options.tokens, options.pairs)
        kept = len(data["small"]) // 8
        self.data, self.held = ({k: part[at] for k, part in data.items()} for at in (slice(-kept), slice(-kept, None)))
        self.model = Upsampler(UpsamplerConfig(CODES))
        return {"model": self.model}

    def loss(self) -> torch.Tensor:
        rows = torch.randint(len(self.data["small"]), (self.options.rows,))
        logits = self.model(self.data["small"][rows])
        return F.cross_entropy(logits.flatten(0, 2), self.data["large"][rows].flatten())

    def figures(self) -> dict:
        return score(self.model, self.held)


def finish(options: argparse.Namespace) -> None:
    """Write the folder from the last checkpoint, with its figures and its card."""
    stage = UpsamplerStage(options, 0)
    stage.restore()
    measured, seconds = score(stage.model, stage.held), stage.seconds
    about = {"seed": 0, "steps": stage.step, "rows": options.rows, "seconds": round(seconds), "measured": measured}
    painter = PAINTERS[options.world]
    record = provenance(recipe=f"visspec.toys {painter}-upsampler", **about)
    write(options.out, stage.model, record, torch.float16)
    pictures = len(stage.held["small"])
    shapes = f",\n{measured['shapes']:.1%} of those that show shapes" if "shapes" in measured else ""
    figures = {"painter": painter, "shapes": shapes, "minutes": round(seconds / 60, 1), "pictures": pictures}
    card = cards.fill("painter-upsampler", record, stage.model, {}, **figures)
    cards.publish(options.out, card)
    cards.say(options.out, **measured)


STAGES: Stages = {"train": UpsamplerStage, "finish": finish}
DEFAULTS = {"steps": 900, "rows": 64, "rate": 2e-3, "every": 100}
OF_SHAPES, OF_EMOJI = (
    Recipe(
        f"{painter}-upsampler",
        f"Train the up-sampler of drafts at low resolution for {painter}.",
        UpsamplerOptions,
        STAGES,
        DEFAULTS | {"world": world, "pairs": PAIRS[world]},
    )
    for world, painter in PAINTERS.items()
)
