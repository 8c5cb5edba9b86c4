"""`visspec train vq`: a multi-scale VQ autoencoder (VAR's) of a folder of images."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from visspec.cli.arguments import Positive
from visspec.io.options import option

SIDES = "1,2,3,4,6,8"


def read_sides(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    try:
        found = tuple(int(side) for side in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or sorted(found) != list(found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected rising whole numbers as {SIDES}")
    return found


@dataclass(kw_only=True)
class Options:
    data: Path = option("images, as `visspec caption` reads them")
    out: Path = option("folder for the autoencoder and its checkpoint", writes="folder")
    sides: Annotated[tuple[int, ...], read_sides] = option(f"rows of each map ({SIDES})", read_sides(SIDES))
    levels: Positive = option("levels of the encoder; pixels a code: 2^(levels - 1)", 4)
    codes: Positive = option("size of the codebook (512)", 512)
    size: Positive = option("numbers of a code (16)", 16)
    channels: Positive = option("of the finest level, a multiple of 32 (32)", 32)
    blocks: Positive = option("residual blocks of a level (1)", 1)
    steps: Positive = option(default=2000)
    rows: Positive = option("images in a step of a process (8)", 8)
    rate: float = option("peak learning rate (0.001)", 1e-3)
    seed: int = option(default=0)
    every: Positive = option("steps between validations and checkpoints (500)", 500)
    workers: Positive = option("processes of one thread each, on the CPU (1)", 1)
    device: str = option(default="cpu")
    resume: bool = option("take up the checkpoint in --out", False)


def run(arguments: Options) -> None:
    from visspec.api import train_vq

    train_vq.run(argparse.Namespace(**vars(arguments)))
