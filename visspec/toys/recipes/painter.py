"""`painter` and `painter-lowres` from zero: a small Janus that draws the shape world from GenEval's sentences.

Stage `vq` teaches a narrow JanusVQVAE (painter_vq.py), `composed` goes on with scenes coded piece by piece, and
`decoder` with its decoder alone. `tokens` codes pictures, `draw` trains the text model to write
codes after a prompt, `finish` writes a complete folder with float16 weights, a model card, its provenance and a sheet
of samples; `remeasure` measures a finished folder on more prompts. The low-resolution sibling, 48 pixels a side, has
the stages from `tokens` on, on the same VQ model; run it after the full one.

Data: the free tier of `visspec.toys.world.suite`: prompts of the whole grammar, so also the suite's own sentences and
the colour and class pairs other recipes hold out; scenes are drawn afresh, seeds from 2^30 on are never trained on.
Seeds: 0 (vq), 1 (draw). Two CPU cores, no accelerator.

The shipped weights were not made by one run of these defaults: the recipe changed on the way, and each part started
from the last one's weights (--start). Text model: 4,750 steps on the whole encoder's codes, 2,400 on codes of pieces,
5,000 on settled scenes with plain grounds for most of them, 1,500 with the eight textures, 5,500 on twice the pairs,
4,200 with heads for the shape that begins next, 2,900 with heads for the one begun last, 900 of telling prompts with
exchanged colours apart on the same pairs and 4,500 on new ones, with all that `painter_draw` has now, and 8,600 on
96,000 new pairs for their codes alone (--first 64000 --fade 0 0); seven hours in all with the VQ model, runs that were
given up not counted. The default steps are an estimate of what fits two hours, at 0.7 s a VQ step and 0.9 s a
text-model step; they have not been run.
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import JanusForConditionalGeneration, JanusProcessor

from visspec.api.grid import grid as pictures_in_grid
from visspec.io.checkpoint import read_json
from visspec.io.files import write_json
from visspec.io.options import option
from visspec.toys.recipes import cards, painter_vq
from visspec.toys.recipes.painter_build import TEXT, build_model, build_processor, generation_config, grid
from visspec.toys.recipes.painter_data import SIDE
from visspec.toys.recipes.painter_draw import GUIDANCES, TEMPERATURES, PainterStage, draw
from visspec.toys.recipes.painter_score import score
from visspec.toys.recipes.recipe import CodedOptions, Recipe, Stages, write_coded
from visspec.toys.world.suite import TASKS, suite

NAMES = {False: "painter", True: "painter-lowres"}
SEED = 0  # of the measured pictures
ROLES = {
    False: "It is the image target of visspec's demonstrations and tests.",
    True: "It is the low-resolution sibling of `painter`: the same words and the same VQ weights, a smaller text model "
    "and\na picture of 36 tokens, for drafting at low resolution.",
}


@dataclass
class PainterOptions(CodedOptions):
    lowres: bool = option("the 48-pixel sibling, on the VQ model in --out", False)
    composed_steps: int = option("steps of it on scenes coded piece by piece", 500)
    decoder_steps: int = option("steps of its decoder alone", 700)
    pairs: int = option("pairs of prompt and picture, and half as many of the hardest task", 64_000)
    first: int = option("number of the first pair; others than --start has seen", 0)
    start: Path | None = option("checkpoint of the draw stage to take the first weights from", None)
    earlier: tuple[int, int] = option("steps and seconds that --start's checkpoint had behind it, for the card", (0, 0))
    earlier_vq: tuple[int, int] = option("the same of the VQ checkpoints", (0, 0))
    fade: tuple[float, float] = option("shares of its steps between which the heads' weight falls to 0", (0.6, 0.85))


def sheet(pictures: np.ndarray, prompts: list[str], file: Path, columns: int = 4) -> None:
    """Write pictures uint8 (B, S, S, 3), enlarged to 96 pixels if smaller, in a grid with their prompts underneath."""
    cells = [Image.fromarray(picture).resize((144, 144), Image.Resampling.BICUBIC) for picture in pictures]
    page = pictures_in_grid(cells, [prompt.removeprefix("a photo of ") for prompt in prompts], columns)
    page.quantize(192).save(file, optimize=True)


def card(low: bool, every_prompt: int, note: str, model: JanusForConditionalGeneration, record: dict) -> str:
    """The model card's text, from the provenance of the weights."""
    measured, rows = record["measured"], suite()[::every_prompt]
    best = measured["pictures"]
    shown = {f"drawn, guidance {best['guidance']}": best, "decoded codes": measured["decoded"]}
    return cards.fill(
        "painter",
        record,
        model,
        {},
        name=NAMES[low],
        role=ROLES[low],
        side=SIDE[low],
        tokens=grid(low) ** 2,
        prompts=len(rows),
        enlarged=", which sees them enlarged to 96 pixels" if low else "",
        heads=[cards.TITLES.get(tag, tag) for tag in TASKS],
        rows=cards.table(cards.score_row(name, found, TASKS) for name, found in shown.items()),
        sweep=[f"{r['guidance']} at {r['temperature']} {r['images']:.3f}" for r in measured["sweep"]],
        sizes=[sum(row["tag"] == tag for row in rows) for tag in TASKS],
        text=TEXT[low],
        after=" after that of `painter` into the same folder" if low else "",
        minutes=sum(round(record[part]["seconds"] / 60) for part in ("vq", "draw")),
        shared=", the same weights as `painter`'s" if low else "",
        seen=record["draw"]["steps"] * record["draw"]["rows"],
        note=note,
    )


def finish(options: argparse.Namespace) -> None:
    """Write `out`/painter(-lowres) from the last checkpoints, read it back, measure it and describe it."""
    low = options.lowres
    folder = options.out / NAMES[low]
    text, stage = cards.read_stage(options.out / ("draw-lowres.pt" if low else "draw.pt"))
    model = build_model(painter_vq.load_vq(options.out, low).state_dict(), low)
    model.load_state_dict(text["model"])
    model.model.vqmodel.load_state_dict(painter_vq.load_vq(options.out, low).state_dict())  # its decoder may be newer
    model = cards.half_precision_copy(model, build_processor(low), folder)
    processor = JanusProcessor.from_pretrained(folder)
    rows = suite()[:: options.every_prompt]
    measure_half = partial(score, partial(draw, model, processor, seed=SEED + 1), rows[::2])
    sweep = [measure_half(guidance=guidance, temperature=1.0) for guidance in GUIDANCES]
    print(json.dumps(sweep), flush=True)
    best = max(sweep, key=lambda record: record["images"])
    guidance = best["guidance"]
    cooler = [measure_half(guidance=guidance, temperature=t) for t in TEMPERATURES[1:]]
    temperature = max([best, *cooler], key=lambda record: record["images"])["temperature"]
    print(json.dumps(cooler), flush=True)
    generation_config(low, guidance, temperature).save_pretrained(folder)
    shown = [rows[int(i)]["prompt"] for i in np.linspace(0, len(rows) - 1, 16)]
    drawn = draw(model, processor, shown, guidance, SEED + 2, temperature)
    sheet(drawn, shown, options.out / f"{folder.name}.png")
    vq = {name: cards.read_stage(file)[1] for name in painter_vq.VQ_FILES if (file := options.out / name).exists()}
    about = {
        "seeds": {"vq": 0, "draw": 1, "measured": SEED},
        "vq": {
            "steps": vq["vq.pt"]["steps"],
            "later": {name: part["steps"] for name, part in vq.items() if name != "vq.pt"},
            "earlier": options.earlier_vq[0],
            "seconds": sum(part["seconds"] for part in vq.values()) + options.earlier_vq[1],
            "rows": options.vq_rows * options.workers,
        },
        "draw": {
            "steps": stage["steps"] + options.earlier[0],
            "seconds": stage["seconds"] + options.earlier[1],
            "rows": options.rows * options.workers,
            "pairs": int((options.first + options.pairs) * sum(painter_vq.SHARES.values())),
            "loss": stage["loss"],
        },
    }
    measured = {"sweep": sweep + cooler, "swept": len(rows[::2])}
    cards.origin(model, f"visspec.toys {NAMES[low]}", folder, measured, **about)
    remeasure(options)


def remeasure(options: argparse.Namespace) -> None:
    """Measure a finished folder at its own guidance and temperature on `options.every_prompt`, and write its card."""
    low = options.lowres
    folder = options.out / NAMES[low]
    model = JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    own, record = model.generation_config, read_json(folder, cards.PROVENANCE)
    rows, processor = suite()[:: options.every_prompt], JanusProcessor.from_pretrained(folder)
    measured = record["measured"]
    drawing = partial(draw, model, processor, seed=SEED)
    measured["pictures"] = score(drawing, rows, guidance=own.guidance_scale, temperature=own.temperature)
    measured["decoded"] = painter_vq.measure(model.model.vqmodel, low, options.every_prompt)
    write_json(folder / cards.PROVENANCE, record)
    cards.publish(folder, card(low, options.every_prompt, options.note, model, record))
    cards.say(folder, **measured)


CODING: Stages = {
    "vq": painter_vq.PainterVQStage,
    "composed": painter_vq.ComposedStage,
    "decoder": painter_vq.VQDecoderStage,
}
DRAWING: Stages = {
    "tokens": partial(write_coded, painter_vq.coders),
    "draw": PainterStage,
    "finish": finish,
    "remeasure": remeasure,
}
DEFAULTS = {"vq_steps": 1700, "steps": 5000, "workers": 2}
PAINTER = Recipe(
    NAMES[False],
    "Train the painter of shapes.",
    PainterOptions,
    CODING | DRAWING,
    DEFAULTS,
    extra=("remeasure",),
    threads=2,
)
LOWRES = Recipe(
    NAMES[True],
    "Train the painter's low-resolution sibling.",
    PainterOptions,
    DRAWING,
    DEFAULTS | {"lowres": True, "steps": 12_000},
    extra=("remeasure",),
    threads=2,
)
