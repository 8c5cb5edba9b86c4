"""Train the embedded painter from zero: a small Janus that draws the shape world from GenEval's sentences.

python -m visspec.toys.recipes.painter --out runs/painter [--stage vq|decoder|tokens|draw|finish|all] [--lowres]
[--resume]

Stage `vq` teaches a narrow JanusVQVAE (painter_vq.py), `composed` goes on with scenes coded piece by piece, and
`decoder` with its decoder alone (painter_composed.py). `tokens` codes pictures, `draw` trains the text model to write
codes after a prompt, `finish` writes a complete folder with float16 weights, a model card, its provenance and a sheet
of samples. Every stage is resumable. With --lowres the stages from `tokens` on make the low-resolution sibling, 48
pixels a side, on the same VQ model; run it after the full one.

Data: the free tier of `visspec.toys.world.suite`: prompts of the whole grammar, so also the suite's own sentences and
the colour and class pairs other recipes hold out; scenes are drawn afresh, seeds from 2^30 on are never trained on.
Seeds: 0 (vq), 1 (draw). Two CPU cores, no accelerator.

The shipped weights were not made by one run of these defaults: the recipe changed on the way, and each part started
from the last one's weights (--start). Text model: 4,750 steps on the whole encoder's codes, 2,400 on codes of pieces,
5,000 on settled scenes with plain grounds for most of them, 1,500 with the eight textures, 5,500 on twice the pairs,
4,200 with heads for the shape that begins next, 2,900 with heads for the one begun last, 900 of telling prompts with
exchanged colours apart on the same pairs and 4,500 on new ones, with all that `painter_reading` has now, and 8,600 on
96,000 new pairs for their codes alone (--first 64000 --fade 0 0); seven hours in all with the VQ model, runs that were
given up not counted. The default steps are an estimate of what fits two hours, at 0.7 s a VQ step and 0.9 s a
text-model step; they have not been run.
"""

import argparse
from pathlib import Path

from visspec.toys.recipes.painter_card import finish, remeasure
from visspec.toys.recipes.painter_composed import ComposedStage, VQDecoderStage
from visspec.toys.recipes.painter_draw import PainterStage
from visspec.toys.recipes.painter_tokens import write_tokens
from visspec.toys.recipes.painter_vq import PainterVQStage
from visspec.train.stages import begin, in_workers

STAGES = ("vq", "composed", "decoder", "tokens", "draw", "finish")
REMEASURE = "remeasure"  # a finished folder, on more prompts
STEPS = {False: 5000, True: 12_000}
PAIRS = {False: 64_000, True: 64_000}


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Train the embedded painter from zero on two CPU cores.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the finished model")
    parser.add_argument("--stage", choices=(*STAGES, REMEASURE, "all"), default="all")
    parser.add_argument("--lowres", action="store_true", help="the 48-pixel sibling, on the VQ model in --out")
    parser.add_argument("--resume", action="store_true", help="take up the checkpoints in --out")
    parser.add_argument("--vq-steps", type=int, default=1700)
    parser.add_argument("--composed-steps", type=int, default=500)
    parser.add_argument("--decoder-steps", type=int, default=700)
    parser.add_argument("--vq-rows", type=int, default=8, help="whole pictures in a VQ batch of one worker")
    parser.add_argument("--vq-rate", type=float, default=2e-3, help="peak learning rate of the VQ model")
    parser.add_argument("--pairs", type=int, help="pairs of prompt and picture, and half as many of the hardest task")
    parser.add_argument("--first", type=int, default=0, help="number of the first pair; others than --start has seen")
    parser.add_argument("--steps", type=int, help="text-model steps")
    parser.add_argument("--start", type=Path, help="checkpoint of the draw stage to take the first weights from")
    parser.add_argument("--earlier", type=int, nargs=2, default=(0, 0), metavar=("STEPS", "SECONDS"),
                        help="what --start's checkpoint had behind it, for the card")  # fmt: skip
    parser.add_argument("--earlier-vq", type=int, nargs=2, default=(0, 0), metavar=("STEPS", "SECONDS"),
                        help="what the VQ checkpoints had behind them, for the card")  # fmt: skip
    parser.add_argument("--note", default="", help="sentences for the card's limits, say on how --start was trained")
    parser.add_argument("--rows", type=int, default=8, help="pictures in a batch of one worker of the draw stage")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate of the text model")
    parser.add_argument("--plain-until", type=float, default=0.0, help="share of the draw steps on plain grounds alone")
    parser.add_argument("--fade", type=float, nargs=2, default=(0.6, 0.85), metavar=("FROM", "TO"),
                        help="shares of the draw steps between which the heads' weight falls to 0")  # fmt: skip
    parser.add_argument("--every", type=int, default=500, help="steps between reports and checkpoints")
    parser.add_argument("--sweep", action="store_true", help="reports of the draw stage try four guidances, not one")
    parser.add_argument("--workers", type=int, default=2, help="processes of a stage, one thread each")
    parser.add_argument("--threads", type=int, default=2, help="threads of the finish stage")
    parser.add_argument("--every-prompt", type=int, default=1, help="measure the finished model on suite()[::this]")
    parser.add_argument("--sheet", type=Path, help="picture file for a sheet of samples, beside that in the folder")
    parser.add_argument("--early", type=Path, help="folder to refresh with a loadable model at each report")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    options = parser().parse_args(arguments)
    options.steps, options.pairs = options.steps or STEPS[options.lowres], options.pairs or PAIRS[options.lowres]
    begin(options, options.threads)
    wanted: tuple[str, ...] = STAGES if options.stage == "all" else (options.stage,)
    if options.stage == "all" and options.lowres:
        wanted = STAGES[3:]  # on the VQ model that is there
    if "vq" in wanted:
        in_workers(PainterVQStage, options)
    if "composed" in wanted:
        in_workers(ComposedStage, options)
    if "decoder" in wanted:
        in_workers(VQDecoderStage, options)
    if "tokens" in wanted:
        write_tokens(options)
    if "draw" in wanted:
        in_workers(PainterStage, options)
    if "finish" in wanted:
        finish(options)
    if REMEASURE in wanted:
        remeasure(options)


if __name__ == "__main__":
    main()
