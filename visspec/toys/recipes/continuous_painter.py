"""Train the embedded continuous painter and its drafter from zero: continuous tokens, drawn by a diffusion head.

python -m visspec.toys.recipes.continuous_painter --out runs/continuous [--stage STAGE ...] [--resume]

Stage `autoencoder` teaches a small `AutoencoderKL` with a broad posterior, `decoder` goes on with its decoder alone,
`tokens` codes pictures with it, `draw` trains the painter on tokens drawn from that posterior, `draft` a smaller model
of the same form on the painter's head, and `finish` writes both folders with model cards and provenance. Every stage is
resumable.

Data: scenes of one or two shapes on plain ground, 64 pixels a side, after prompts of GenEval's tasks for one object,
colours and two objects; seeds from 2^30 on are never trained on. Seeds: 0 (autoencoder), 1 (draw), 2 (draft), 3
(decoder). One CPU core, about an hour.
"""

import argparse
from functools import partial
from pathlib import Path

from visspec.toys.recipes.continuous_autoencoder import AutoencoderDecoderStage, AutoencoderStage, load_autoencoder
from visspec.toys.recipes.continuous_card import finish
from visspec.toys.recipes.continuous_data import write_tokens
from visspec.toys.recipes.continuous_draw import ContinuousDraftStage, ContinuousStage
from visspec.train.stages import Stages, in_workers, run_stages

STAGES: Stages = {
    "autoencoder": partial(in_workers, AutoencoderStage),
    "decoder": partial(in_workers, AutoencoderDecoderStage),
    "tokens": lambda options: write_tokens(options, load_autoencoder(options.out)),
    "draw": partial(in_workers, ContinuousStage),
    "draft": partial(in_workers, ContinuousDraftStage),
    "finish": finish,
}


def parser(stages: tuple[str, ...] = tuple(STAGES)) -> argparse.ArgumentParser:
    """Options of the command line of a recipe with these stages."""
    parser = argparse.ArgumentParser(description="Train the continuous painter and its drafter on a CPU core.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the finished models")
    parser.add_argument("--stage", nargs="+", choices=(*stages, "all"), default=["all"])
    parser.add_argument("--resume", action="store_true", help="take up the checkpoints in --out")
    parser.add_argument("--autoencoder-steps", type=int, default=800)
    parser.add_argument("--decoder-steps", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=18_000, help="pairs of prompt and picture")
    parser.add_argument("--steps", type=int, default=3800, help="painter steps")
    parser.add_argument("--drafter-steps", type=int, default=1800)
    parser.add_argument("--rows", type=int, default=16, help="pictures in a batch of one worker")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate of painter and drafter")
    parser.add_argument("--every", type=int, default=1000, help="steps between reports and checkpoints")
    parser.add_argument("--workers", type=int, default=1, help="processes of a stage, one thread each")
    parser.add_argument("--every-prompt", type=int, default=1, help="measure the finished painter on every such prompt")
    parser.add_argument("--note", default="", help="sentences for the cards, say on the machine's load")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    run_stages(parser().parse_args(arguments), STAGES)


if __name__ == "__main__":
    main()
