"""What a recipe is: a name, stages in their order, and options whose defaults made the weights that are included.

`python -m visspec.toys NAME --out FOLDER [--stage STAGE ...] [--resume] [options of its own]` runs one of `RECIPES`.
Its options are the fields of a dataclass: `steps: int = option("...", 800)` is `--steps`. A stage is a function of the
parsed options; those that train run a `visspec.train.stages.Stage` in `options.workers` processes.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from visspec.io.options import add_options, option
from visspec.train.stages import Stage, begin, in_workers

# Included weights, or a file, by name, and where their recipe is.
RECIPES = {
    "captioner": "captioner:CAPTIONER",
    "captioner-small": "captioner:SMALL",
    "captioner-emoji": "captioner:EMOJI",
    "captioner-vispec": "captioner_drafter:SHAPES",
    "captioner-emoji-vispec": "captioner_drafter:EMOJI",
    "painter": "painter:PAINTER",
    "painter-lowres": "painter:LOWRES",
    "painter-upsampler": "painter_upsampler:UPSAMPLER",
    "painter-eagle": "painter_drafter:OF_SHAPES",
    "painter-emoji": "emoji_painter:PAINTER",
    "painter-emoji-eagle": "painter_drafter:OF_EMOJI",
    "painter-distilled": "painter_distilled:DRAFTER",
    "painter-any-order": "any_order_painter:PAINTER",
    "painter-continuous": "continuous_painter:PAINTER",
    "painter-mar": "mar_painter:PAINTER",
    "painter-var": "scale_painter:PAINTER",
    "emoji-atlas": "emoji_atlas:ATLAS",
}
ALL = "all"


@dataclass
class Options:
    """What every recipe is asked."""

    out: Path = option("folder for checkpoints and what is finished")
    resume: bool = option("take up the checkpoints in --out", False)
    every: int = option("steps between reports and checkpoints", 500)
    workers: int = option("processes of a stage, one thread each", 1)
    every_prompt: int = option("measure what is finished on every such prompt", 1)
    note: str = option("sentences for the card, say on the machine's load", "")


@dataclass
class DrafterOptions:
    """What the recipes of drafters are asked that `visspec.train.loop` trains; mostly its own options."""

    out: Path = option("folder of the run")
    target: str | None = option("included name or folder of the target", None)
    steps: int = option("steps of training", 3000)
    batch: int = option("outputs that the target makes together", 48)
    rows: int = option("outputs of a training step", 8)
    group: int = option("batches that are trained on by turns", 8)
    reuse: int = option("times that each output is used", 4)
    loss: str = option("after the opening", "tv", choices=("tv", "soft_ce", "kl"))
    opening: float = option("share of steps on soft_ce before --loss", 0.6)
    rate: float = option("peak learning rate", 2e-3)
    unroll: int = option("self-fed steps", 5)
    middle: int | None = option("width of the MLP; default the target's", None)
    levels: int = option("depth that the drafter asks for; not trained", 5)
    validate_every: int = option("steps between validations", 500)
    save_every: int = option("steps between checkpoints", 100)
    threads: int = option("of each of the two: training, and the target ahead", 1)
    seed: int = option("of weights and batches", 0)
    resume: bool = option("take up the last checkpoint in --out", False)
    export: Path | None = option("folder for the finished weights, in half precision", None)


@dataclass(frozen=True)
class Recipe:
    """How one included model is made. `stages` are run in their order; `extra` ones only where they are asked for."""

    name: str
    about: str
    options: type  # a dataclass
    stages: Mapping[str, Callable[[argparse.Namespace], object]]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # other than those of `options`
    extra: tuple[str, ...] = ()
    threads: int = 1  # of stages without workers

    def parser(self) -> argparse.ArgumentParser:
        """The command line, of the options' fields."""
        parser = argparse.ArgumentParser(f"python -m visspec.toys {self.name}", description=self.about)
        names = tuple(self.stages)
        if len(names) > 1:
            parser.add_argument("--stage", nargs="+", choices=(*names, ALL), default=[ALL], help="in this order")
        add_options(parser, self.options)
        parser.set_defaults(stage=[ALL], **self.defaults)
        return parser

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The options of a command line."""
        return self.parser().parse_args(arguments)

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Run those of the stages that --stage names, in their order; "all" is all of them but the extra ones."""
        options = self.parse(arguments)
        begin(options, self.threads)
        for name, stage in self.stages.items():
            if name in options.stage or (ALL in options.stage and name not in self.extra):
                stage(options)


def trained(stage: Callable[[argparse.Namespace, int], Stage]) -> Callable[[argparse.Namespace], None]:
    """A recipe's stage that trains."""
    return partial(in_workers, stage)


def recipe(name: str) -> Recipe:
    """The recipe of a name; ValueError for any other."""
    if name not in RECIPES:
        raise ValueError(f"recipe: got {name!r}, expected one of {', '.join(RECIPES)}")
    module, row = RECIPES[name].split(":")
    return getattr(import_module(f"visspec.toys.recipes.{module}"), row)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: a recipe's name, and its own options."""
    name, *rest = arguments if arguments is not None else sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"python -m visspec.toys NAME --out FOLDER [--stage STAGE ...] ...\n\nNAME: {', '.join(RECIPES)}")
        return
    if name not in RECIPES:
        sys.exit(f"recipe: got {name!r}, expected one of {', '.join(RECIPES)}")
    recipe(name).run(rest)
