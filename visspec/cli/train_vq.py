"""`visspec train vq`: a multi-scale VQ autoencoder (VAR's) of a folder of images."""

from __future__ import annotations

import argparse
from pathlib import Path

from visspec.cli.arguments import positive

SIDES = "1,2,3,4,6,8"


def sides(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    try:
        found = tuple(int(side) for side in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or sorted(found) != list(found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected rising whole numbers as {SIDES}")
    return found


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, type=Path, help="images, as `visspec caption` reads them")
    parser.add_argument("--out", required=True, type=Path, help="folder for the autoencoder and its checkpoint")
    parser.add_argument("--sides", type=sides, default=sides(SIDES), help=f"rows of each map ({SIDES})")
    parser.add_argument(
        "--levels", type=positive, default=4, help="levels of the encoder; pixels a code: 2^(levels - 1)"
    )
    parser.add_argument("--codes", type=positive, default=512, help="size of the codebook (512)")
    parser.add_argument("--size", type=positive, default=16, help="numbers of a code (16)")
    parser.add_argument("--channels", type=positive, default=32, help="of the finest level, a multiple of 32 (32)")
    parser.add_argument("--blocks", type=positive, default=1, help="residual blocks of a level (1)")
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--rows", type=positive, default=8, help="images in a step of a process (8)")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (0.001)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=positive, default=500, help="steps between validations and checkpoints (500)")
    parser.add_argument("--workers", type=positive, default=1, help="processes of one thread each, on the CPU (1)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume", action="store_true", help="take up the checkpoint in --out")


def run(arguments: argparse.Namespace) -> None:
    from visspec.api import train_vq

    train_vq.run(arguments)
