"""Train the embedded next-scale painters from zero: a VAR, a smaller one, and CoDe's training of both.

python -m visspec.recipes.scale_painter --out runs/scales [--stage STAGE ...] [--resume]
"""

import argparse
from functools import partial
from pathlib import Path

from visspec.recipes.scale_card import finish
from visspec.recipes.scale_data import write_codes
from visspec.recipes.scale_draw import DrawStage, RefineStage, SmallStage
from visspec.recipes.scale_vq import DecoderStage, ScenesVQStage, load_vq
from visspec.recipes.stages import Stages, in_workers, run_stages

STAGES: Stages = {
    "vq": partial(in_workers, ScenesVQStage),
    "decoder": partial(in_workers, DecoderStage),
    "codes": lambda options: write_codes(options, load_vq(options.out)),
    "draw": partial(in_workers, DrawStage),
    "small": partial(in_workers, SmallStage),
    "refine": partial(in_workers, RefineStage),
    "finish": finish,
}


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Train the next-scale painters on a CPU core.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the finished models")
    parser.add_argument("--stage", nargs="+", choices=(*STAGES, "all"), default=["all"])
    parser.add_argument("--resume", action="store_true", help="take up the checkpoints in --out")
    parser.add_argument("--vq-steps", type=int, default=800)
    parser.add_argument("--vq-rows", type=int, default=8, help="pictures in a batch of the autoencoder's training")
    parser.add_argument("--vq-rate", type=float, default=2e-3)
    parser.add_argument("--vq-pictures", type=int, default=12_000, help="pictures that the autoencoder is taught")
    parser.add_argument("--decoder-steps", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=4_000, help="pairs of class and picture that both are taught")
    parser.add_argument("--steps", type=int, default=500, help="steps of the large painter")
    parser.add_argument("--small-steps", type=int, default=300)
    parser.add_argument("--refine-steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=16, help="pictures in a batch of one worker")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of both painters")
    parser.add_argument("--every-prompt", type=int, default=1, help="measure on every such prompt")
    parser.add_argument("--every", type=int, default=400, help="steps between reports and checkpoints")
    parser.add_argument("--workers", type=int, default=1, help="processes of a stage, one thread each")
    parser.add_argument("--copies", type=int, default=1, help="pictures of each prompt that are measured")
    parser.add_argument("--note", default="", help="sentences for the cards, say on the machine's load")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    run_stages(parser().parse_args(arguments), STAGES)


if __name__ == "__main__":
    main()
