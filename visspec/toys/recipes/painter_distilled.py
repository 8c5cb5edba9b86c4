"""Train the distilled drafter that ships for the embedded painter, on pictures that the painter draws itself.

python -m visspec.toys.recipes.painter_distilled --out runs/distilled [--stage STAGE ...] [--resume] [--export FOLDER]

Stage `pictures` lets the painter draw at its own guidance and temperature and records what is learnt from, `draw`
teaches the drafter, `finish` measures it and writes the finished folder. Every stage is resumable. On one thread 64
pictures take about 12 seconds and a step of 16 about half a second, so all of it 20 minutes of a core.

Seeds: 7 (draw); those of the pictures are in `visspec.toys.recipes.distilled_data`.
"""

import argparse
from functools import partial
from pathlib import Path

from visspec.toys.recipes.distilled_card import finish
from visspec.toys.recipes.distilled_data import write_pictures
from visspec.toys.recipes.distilled_draw import DistilStage
from visspec.train.stages import Stages, in_workers, run_stages

STAGES: Stages = {"pictures": write_pictures, "draw": partial(in_workers, DistilStage), "finish": finish}


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Train the embedded painter's distilled drafter on two CPU cores.")
    parser.add_argument("--out", type=Path, required=True, help="folder for pictures, checkpoints and the finished one")
    parser.add_argument("--stage", nargs="+", choices=(*STAGES, "all"), default=["all"])
    parser.add_argument("--resume", action="store_true", help="take up the checkpoints in --out")
    parser.add_argument("--target", default="painter", help="the painter that draws: an included one, or a folder")
    parser.add_argument("--pictures", type=int, default=1664, help="pictures to learn from")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=16, help="pictures in a batch of one worker")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument(
        "--opening", type=float, default=0.5, help="share of the steps that learn by cross-entropy alone"
    )
    parser.add_argument("--every", type=int, default=150, help="steps between reports and checkpoints")
    parser.add_argument("--workers", type=int, default=1, help="processes of a stage, one thread each")
    parser.add_argument("--watched", type=int, default=8, help="held-out pictures of a report during training")
    parser.add_argument(
        "--measured", type=int, default=64, help="held-out pictures that the finished one is measured on"
    )
    parser.add_argument("--export", type=Path, help="folder to write the finished drafter to (default: inside --out)")
    parser.add_argument("--note", default="", help="sentences for the card, say on the machine's load")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    run_stages(parser().parse_args(arguments), STAGES)


if __name__ == "__main__":
    main()
