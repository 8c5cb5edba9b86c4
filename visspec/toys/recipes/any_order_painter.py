"""Train an any-order painter on the codes of the included painter's VQ model.

python -m visspec.toys.recipes.any_order_painter --out runs/any-order [--stage STAGE ...] [--resume]

Stage `tokens` codes pictures with the VQ model of `painter`, `draw` trains a RandAR behind words on them, `finish`
writes a complete folder with a model card and its provenance. Every stage is resumable.

Data: the pairs of the painter's recipe. Seeds: 6 (draw). Two CPU cores; the defaults are an estimate of what fits an
hour, at 1.6 s a step and 55 ms a pair, and have not been run.
"""

import argparse
from functools import partial
from pathlib import Path

from visspec.toys.recipes.any_order_card import finish
from visspec.toys.recipes.any_order_data import write_tokens
from visspec.toys.recipes.any_order_draw import AnyOrderStage
from visspec.train.stages import Stages, in_workers, run_stages

STAGES: Stages = {"tokens": write_tokens, "draw": partial(in_workers, AnyOrderStage), "finish": finish}


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Train an any-order painter on two CPU cores.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the finished model")
    parser.add_argument("--stage", nargs="+", choices=(*STAGES, "all"), default=["all"])
    parser.add_argument("--resume", action="store_true", help="take up the checkpoints in --out")
    parser.add_argument("--pairs", type=int, default=12_000, help="pairs of prompt and picture")
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument("--rows", type=int, default=8, help="pictures in a batch of one worker")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--every", type=int, default=500, help="steps between reports and checkpoints")
    parser.add_argument("--workers", type=int, default=2, help="processes of a stage, one thread each")
    parser.add_argument("--every-prompt", type=int, default=8, help="measure the finished painter on every such prompt")
    parser.add_argument("--note", default="", help="sentences for the card, say on the machine's load")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    run_stages(parser().parse_args(arguments), STAGES)


if __name__ == "__main__":
    main()
