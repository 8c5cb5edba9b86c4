"""What a recipe is: a name, stages in their order, and options whose defaults made the weights that are included.

`python -m visspec.toys NAME --out FOLDER [--stage STAGE ...] [--resume] [options of its own]` runs one of `RECIPES`.
Its options are the fields of a dataclass: `steps: int = option(800, "...")` is `--steps`. A stage is a function of the
parsed options; those that train run a `visspec.train.stages.Stage` in `options.workers` processes.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

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


def option(default: Any, text: str, choices: Sequence[str] = ()) -> Any:
    """A field of options with its line of help."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass
class Options:
    """What every recipe is asked."""

    out: Path = field(metadata={"help": "folder for checkpoints and what is finished"})
    resume: bool = option(False, "take up the checkpoints in --out")
    every: int = option(500, "steps between reports and checkpoints")
    workers: int = option(1, "processes of a stage, one thread each")
    every_prompt: int = option(1, "measure what is finished on every such prompt")
    note: str = option("", "sentences for the card, say on the machine's load")


@dataclass
class DrafterOptions:
    """What the recipes of drafters are asked that `visspec.train.loop` trains; mostly its own options."""

    out: Path = field(metadata={"help": "folder of the run"})
    target: str | None = option(None, "included name or folder of the target")
    steps: int = option(3000, "steps of training")
    batch: int = option(48, "outputs that the target makes together")
    rows: int = option(8, "outputs of a training step")
    group: int = option(8, "batches that are trained on by turns")
    reuse: int = option(4, "times that each output is used")
    loss: str = option("tv", "after the opening", ("tv", "soft_ce", "kl"))
    opening: float = option(0.6, "share of steps on soft_ce before --loss")
    rate: float = option(2e-3, "peak learning rate")
    unroll: int = option(5, "self-fed steps")
    middle: int | None = option(None, "width of the MLP; default the target's")
    levels: int = option(5, "depth that the drafter asks for; not trained")
    validate_every: int = option(500, "steps between validations")
    save_every: int = option(100, "steps between checkpoints")
    threads: int = option(1, "of each of the two: training, and the target ahead")
    seed: int = option(0, "of weights and batches")
    resume: bool = option(False, "take up the last checkpoint in --out")
    export: Path | None = option(None, "folder for the finished weights, in half precision")


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
        kinds = get_type_hints(self.options)
        for each in fields(self.options):
            parser.add_argument(f"--{each.name.replace('_', '-')}", **_argument(each, kinds[each.name]))
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


def _argument(each: Field, kind: Any) -> dict[str, Any]:
    """How argparse is to read one field."""
    given: dict[str, Any] = {"help": each.metadata["help"].replace("%", "%%")}
    if each.default is MISSING:
        given["required"] = True
    elif kind is not bool:
        given["default"] = each.default
    if kind is bool:
        return given | {"action": "store_true"}
    if isinstance(kind, UnionType):  # `int | None`
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is tuple:  # `tuple[int, ...]`, or of as many as it says
        parts = get_args(kind)
        given["nargs"], kind = ("+" if Ellipsis in parts else len(parts)), parts[0]
    if choices := each.metadata.get("choices"):
        given["choices"] = choices
    return given | {"type": kind}


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
