"""What a recipe is: a name, stages in their order, and options whose defaults made the weights that are included.

`python -m visspec.toys NAME --out FOLDER [--stage STAGE ...] [--resume] [options of its own]` runs one of `RECIPES`.
Its options are the fields of a dataclass: `steps: int = option("...", 800)` is `--steps`. A stage is a function of the
parsed options, or a `TrainingStage`, which is run; `write_coded` writes what is learnt from, and the last one finishes
the folder (`cards`). The first two use `options.workers` processes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from visspec.io.files import replacing
from visspec.io.options import add_options, option
from visspec.train.stages import Stage, begin, in_workers, keep_memory

# Included weights, or a file, by name, and where their recipe is.
RECIPES = {
    "captioner": "captioner:CAPTIONER",
    "captioner-small": "captioner:SMALL",
    "captioner-emoji": "captioner:EMOJI",
    "captioner-vispec": "captioner_drafter:SHAPES",
    "captioner-emoji-vispec": "captioner_drafter:EMOJI",
    "painter": "painter:PAINTER",
    "painter-lowres": "painter:LOWRES",
    "painter-upsampler": "painter_upsampler:OF_SHAPES",
    "painter-emoji": "emoji_painter:PAINTER",
    "painter-emoji-lowres": "emoji_painter:LOWRES",
    "painter-emoji-upsampler": "painter_upsampler:OF_EMOJI",
    "painter-any-order": "any_order_painter:PAINTER",
    "painter-mar": "mar_painter:PAINTER",
    "painter-var": "scale_painter:PAINTER",
    "emoji-atlas": "emoji_atlas:ATLAS",
    "flipbook": "flipbook:FLIPBOOK",
}
ALL = "all"
BFLOAT16 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # others emulate it, forty times slower

Stages = dict[str, type[Stage] | Callable[[argparse.Namespace], object]]  # in their order


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
class PairOptions(Options):
    """What recipes are asked that learn from pairs of a prompt and a picture; each has defaults of its own."""

    pairs: int = option("pairs of prompt and picture", 16_000)
    steps: int = option("steps of the model's training", 4000)
    rows: int = option("pictures in a batch of one worker", 8)
    rate: float = option("peak learning rate", 1.5e-3)


@dataclass
class CodedOptions(PairOptions):
    """What those are asked that teach a VQ model first."""

    vq_steps: int = option("steps of the VQ model", 2000)
    vq_rows: int = option("whole pictures in a VQ batch of one worker", 8)
    vq_rate: float = option("peak learning rate of the VQ model", 2e-3)


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
    stages: Stages
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
                torch.set_num_threads(self.threads)
                if isinstance(stage, type):
                    in_workers(stage, options)
                else:
                    stage(options)


def mixed_precision(enabled: bool = True) -> torch.autocast:
    """Matrix products in bfloat16, on processors that have them."""
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled and BFLOAT16)


class TrainingStage(Stage):
    """What the stages of all recipes share. A subclass declares a checkpoint's name, a seed and the weight decay, makes
    its modules in `build`, and defines `loss` and, where there is something to tell, `figures`.
    """

    name: str  # of the checkpoint
    seed: int | None = None  # of the initial weights
    decay = 0.05
    steps_option = "steps"
    rate_option: str | None = "rate"  # of the largest learning rate; without one that is `rate_share` itself
    rate_share = 1.0

    def __init__(self, options: argparse.Namespace, rank: int):
        if self.seed is not None:
            torch.manual_seed(self.seed)
        parts = self.build(options)
        modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        steps = getattr(options, self.steps_option)
        peak = self.rate_share * (getattr(options, self.rate_option) if self.rate_option else 1.0)
        super().__init__(options, rank, self.name, steps, peak, trained, self.decay, parts)

    def build(self, options: argparse.Namespace) -> dict[str, Any]:
        """What a checkpoint holds, by name; parameters of its modules that require a gradient are trained."""
        raise NotImplementedError

    def chosen(self, known: int, *seed: int) -> np.ndarray:
        """Numbers below `known` of this worker's rows: an epoch has each of them once, in an order of its own."""
        per_step = self.options.rows * self.workers
        epoch, step = divmod(self.step, max(1, known // per_step))
        order = np.random.default_rng((*seed, epoch)).permutation(known)
        return order[step * per_step :][:per_step][self.rank :: self.workers]

    def fading(self, first: float, last: float) -> float:
        """A weight that is 1 until a share of the steps, and falls to 0 until another."""
        done = self.step / self.steps
        return 0.0 if done >= last else min(1.0, (last - done) / max(last - first, 1e-9))

    def figures(self) -> dict[str, Any]:
        """What is to be known of the modules as they stand, which are in evaluation mode."""
        return {}

    def report(self) -> dict[str, Any]:
        """`figures`, on the first worker only."""
        if self.rank:
            return {}
        with evaluating(*self.parts.values()):
            return self.figures()


@contextmanager
def evaluating(*parts: object) -> Iterator[None]:
    """Modules in evaluation mode, and afterwards in the modes that they had; what is no module is passed over."""
    modes = [(m, m.training) for part in parts if isinstance(part, nn.Module) for m in part.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


Coder = Callable[[], dict[str, Tensor]]  # makes the tensors of one file, a row each of so many pictures
Coders = Callable[[argparse.Namespace], dict[Path, Coder]]


def write_coded(coders: Coders, options: argparse.Namespace, keep: bool | None = None) -> None:
    """Write the files that `coders` makes of the options, in `options.workers` processes, in this one if there is one.
    keep: files that are there; default where the options say `resume`.
    """
    keep = options.resume if keep is None else keep
    if options.workers == 1:
        _write(0, coders, options, keep)
    else:
        mp.spawn(_write, (coders, options, keep), nprocs=options.workers)


def _write(rank: int, coders: Coders, options: argparse.Namespace, keep: bool) -> None:
    keep_memory()
    torch.set_num_threads(1)
    for file, coder in list(coders(options).items())[rank :: options.workers]:
        begun = time.time()
        if keep and file.exists():
            continue
        with replacing(file) as draft, torch.no_grad():
            made = coder()
            torch.save(made, draft)
        line = {"file": file.name, "pairs": len(next(iter(made.values()))), "s": round(time.time() - begun)}
        print(json.dumps(line), flush=True)


def in_batches(make: Callable[[range], dict[str, Tensor]], numbers: range, batch: int) -> dict[str, Tensor]:
    """What `make` makes of the numbers, so many at a time."""
    return concatenate(make(numbers[first : first + batch]) for first in range(0, len(numbers), batch))


def shards(folder: Path, name: str, numbers: range, most: int) -> dict[Path, range]:
    """Files of pairs of these numbers, so many in each at the most, and the numbers in each."""
    parts = [numbers[first : first + most] for first in range(0, len(numbers), most)]
    return {folder / f"{name}-{part.start}-{part.stop}.pt": part for part in parts}


def read_coded(files: Iterable[Path]) -> dict[str, Tensor]:
    """All files in their order."""
    return concatenate(torch.load(file, weights_only=True) for file in files)


def concatenate(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Parts one after the other."""
    every = list(parts)
    return {name: torch.cat([part[name] for part in every]) for name in every[0]}


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
