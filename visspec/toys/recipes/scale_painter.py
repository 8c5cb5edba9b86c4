"""Train the embedded next-scale painters: a VAR on codes of several scales, a smaller one, and CoDe's distillation.

python -m visspec.toys.recipes.scale_painter --out runs/scales [--stage STAGE ...] [--resume]

Stage `features` reads pictures with the encoder of `painter`'s VQ model, `vq` teaches a quantiser of several scales on
them, `codes` codes them, `draw` trains the large painter, `small` the small one, `refine` teaches that the large one's
distributions, and `finish` writes both folders with model cards and provenance. Every stage is resumable.

Data: scenes of one shape on plain ground after prompts of GenEval's tasks for one object and colours, the classes;
seeds from 2^30 on are never trained on. Seeds: 7 (vq), 8 (draw), 9 (small), 10 (refine). One CPU core, less than an
hour.
"""

import argparse
from functools import partial
from pathlib import Path

from visspec.toys.recipes.scale_card import finish
from visspec.toys.recipes.scale_draw import RefineStage, ScaleStage, SmallStage
from visspec.toys.recipes.scale_vq import QuantiserStage, write_codes, write_features
from visspec.train.stages import Stages, in_workers, run_stages

STAGES: Stages = {
    "features": write_features,
    "vq": partial(in_workers, QuantiserStage),
    "codes": write_codes,
    "draw": partial(in_workers, ScaleStage),
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
    parser.add_argument("--vq-steps", type=int, default=600)
    parser.add_argument("--vq-rows", type=int, default=32, help="pictures in a batch of the quantiser's training")
    parser.add_argument("--pairs", type=int, default=10_000, help="pairs of class and picture that both are taught")
    parser.add_argument("--steps", type=int, default=1600, help="steps of the large painter")
    parser.add_argument("--small-steps", type=int, default=600)
    parser.add_argument("--refine-steps", type=int, default=300)
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
