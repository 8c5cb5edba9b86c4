"""`visspec train drafter`: distil a feature drafter for a target, in process."""

from __future__ import annotations

import argparse
from pathlib import Path

from visspec.cli.arguments import add_hardware, positive


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--data", required=True, type=Path, help="images, as `visspec caption` reads them")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--loss", default="tv", choices=["tv", "soft_ce", "kl"])
    parser.add_argument("--preset", help="a published drafter: eagle, eagle3, flash, ... (docs/drafters.md)")
    parser.add_argument("--image-latents", type=positive, help="vectors that stand for an image (1)")
    parser.add_argument("--draft-vocab", type=positive, help="of eagle3: ids that its own head predicts (32000)")
    parser.add_argument("--head-rank", type=positive, help="of eagle3: rank of that head (whole)")
    parser.add_argument("--block", type=positive, help="of flash (5), dflash, ddtree, dspark (16), deer (15): places")
    parser.add_argument("--layers", type=positive, help="of dflash, ddtree, dspark, deer (a quarter of the target's)")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="of the target's own answers (256)")
    parser.add_argument("--seed", type=int, default=0)
    add_hardware(parser)
    parser.add_argument("--rows", type=positive, default=16, help="answers that the target makes together (16)")
    parser.add_argument("--save-every", type=positive, default=200, help="steps between checkpoints (200)")
    parser.add_argument(
        "--parallel", choices=["ddp", "fsdp"], help="under torchrun: whole weights in each process (ddp), or spread"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, if there is one")
    parser.add_argument("--overwrite", action="store_true", help="train anew where --out holds a drafter already")


def run(arguments: argparse.Namespace) -> None:
    from visspec.api import train_drafter

    options = {k: v for k, v in vars(arguments).items() if k not in ("command", "what", "run")}
    train_drafter.run(**options)
