"""Train the embedded MAR painter and its drafter from zero: continuous tokens in random orders.

python -m visspec.toys.recipes.mar_painter --out runs/mar [--stage STAGE ...] [--resume]

Stage `tokens` codes pictures with the autoencoder of `painter-continuous`, `draw` trains the painter on tokens drawn
from its posterior, `draft` a smaller MAR on the painter's head, and `finish` writes both folders with model cards and
provenance. Every stage is resumable.

Data: the one-object scenes among those of the continuous painter's recipe. Seeds: 4 (draw), 5 (draft). One CPU core,
about 40 minutes.
"""

import argparse
from functools import partial

from visspec.toys.recipes import continuous_painter
from visspec.toys.recipes.continuous_data import write_tokens
from visspec.toys.recipes.mar_card import finish
from visspec.toys.recipes.mar_draw import MARDraftStage, MARStage, included_autoencoder
from visspec.train.stages import Stages, in_workers, run_stages

STAGES: Stages = {
    "tokens": lambda options: write_tokens(options, included_autoencoder()),
    "draw": partial(in_workers, MARStage),
    "draft": partial(in_workers, MARDraftStage),
    "finish": finish,
}


def parser() -> argparse.ArgumentParser:
    """Options of the command line: those of the continuous painter's recipe, with defaults of its own."""
    parser = continuous_painter.parser(tuple(STAGES))
    parser.description = "Train the MAR painter and its drafter on a CPU core."
    parser.set_defaults(steps=4000, drafter_steps=1000, rows=16, rate=1e-3, every=500)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    run_stages(parser().parse_args(arguments), STAGES)


if __name__ == "__main__":
    main()
