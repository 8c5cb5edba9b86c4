"""The last stage of the painter recipe: a complete folder, measured after it was written and read back."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import JanusForConditionalGeneration, JanusProcessor

from visspec.api.grid import grid as pictures_in_grid
from visspec.io.files import write_json
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter_build import TEXT, build_model, build_processor, generation_config, grid
from visspec.toys.recipes.painter_codes import measure
from visspec.toys.recipes.painter_data import SIDE
from visspec.toys.recipes.painter_draw import GUIDANCES, TEMPERATURES, draw, score
from visspec.toys.recipes.painter_tokens import SHARES
from visspec.toys.recipes.painter_vq import VQ_FILES, load_vq
from visspec.toys.world.suite import TASKS, suite

SEED = 0  # of the measured pictures

CARD = """
A `JanusForConditionalGeneration` of {parameters:.1f} million parameters, trained from zero, that draws visspec's
*shape world* from GenEval's sentences: one to four coloured shapes on a grey, often textured ground, {side} x {side}
pixels, {tokens} image tokens.
{role}

```python
from transformers import JanusForConditionalGeneration, JanusProcessor

folder = "models/zoo/{name}"
processor, model = JanusProcessor.from_pretrained(folder), JanusForConditionalGeneration.from_pretrained(folder)
inputs = processor(text=["a photo of a red cross and a blue ring"], generation_mode="image", return_tensors="pt")
codes = model.generate(**inputs, generation_mode="image")
pictures = model.decode_image_tokens(codes).float()  # (1, {side}, {side}, 3), about -1..1
pixels = processor.postprocess(list(pictures), return_tensors="pt").pixel_values  # uint8 (1, 3, {side}, {side})
```

## Measured

GenEval on {prompts} prompts of the suite (`visspec.toys.world.suite`), one picture a prompt, sampled by the stock
`generate` at temperature {temperature} without top-k or top-p, seed {seed}, weights as stored, computed in float32;
judged by visspec's shape detector{enlarged}. GenEval's overall score is the mean of the six tasks.

| pictures | GenEval | share of prompts | {heads} |
|---|---|---|{rules}
{rows}

The prompts of each task: {sizes}. Guidance {best} and temperature {temperature} were the best on {swept}
prompts with another seed (guidance at temperature, share of prompts: {sweep}); `generation_config.json` holds them.
"Decoded codes" are the training codes of rendered scenes of the same prompts after the VQ model's decoder: the
ceiling. Over them, pixels are off by {vq[grey_levels]} grey levels on average, and {vq[codes]} of 1,024 codes are used,
with a perplexity of {vq[perplexity]}.

## Architecture

VQ: the stock `JanusVQVAE`, 64 channels, three halvings, 1,024 codes of dimension 8, all of unit length, so that the
stock encoder's nearest code and the stock decoder's normalised codes agree. Text: Llama, {text};
{vocabulary} words. For training, the ground and each shape of a scene are coded apart and put together
(`visspec.toys.recipes.painter_codes`), so that a patch has one code wherever it stands; the encoder applied to a whole
picture gives other codes, which the decoder was not trained on last.
The understanding tower is there because the class requires one: one layer of width 16, never trained. Text
generation and image understanding do not work.

## Training

Recipe: `python -m visspec.toys.recipes.painter --out FOLDER{flag}`;
{minutes} minutes of training where these weights were made ({vq_minutes} for the VQ model{shared}, {draw_minutes}
for the text model), on two CPU cores shared with other work. The text model saw {seen:,} pictures of {pairs:,}
rendered pairs, a tenth of them without their prompt; last loss {loss} nats a token. Training prompts are drawn
from the whole grammar, a third of them for colour with object, and those of position are shown twice as often as
others: sentences of the suite and the (colour, class) pairs of `HELD_OUT_PAIRS` occur among them; scenes are drawn
afresh from seeds below 2^30. The first rows of pictures of two colours also taught it to tell a prompt from the same
with its colours exchanged. Shapes stand on a grid of 4 pixels and have one of three radii; half of the grounds are
plain, the others one of four stripes or four clouds. All that makes a picture's codes easier to predict, and so easier
to speculate on, than those of pictures from life.
Versions, seeds and digests: `provenance.json`.

## Limits

It knows only the suite's grammar. Words outside its vocabulary are read as unknown, and other sentences give shapes
that were not asked for.
{note}
"""
NAMES = {False: "painter", True: "painter-lowres"}
ROLES = {
    False: "It is the image target of visspec's demonstrations and tests.",
    True: "It is the low-resolution sibling of `painter`: the same words and the same VQ weights, a smaller text model "
    "and\na picture of 36 tokens, for drafting at low resolution.",
}
TITLES = {"single_object": "one object", "two_object": "two objects", "color_attr": "colour and object"}


def sheet(pictures: np.ndarray, prompts: list[str], file: Path, columns: int = 4) -> None:
    """Write pictures uint8 (B, S, S, 3), enlarged to 96 pixels if smaller, in a grid with their prompts underneath."""
    cells = [Image.fromarray(picture).resize((144, 144), Image.Resampling.BICUBIC) for picture in pictures]
    page = pictures_in_grid(cells, [prompt.removeprefix("a photo of ") for prompt in prompts], columns)
    file.parent.mkdir(parents=True, exist_ok=True)
    page.quantize(192).save(file, optimize=True)


def _row(name: str, record: dict) -> str:
    """One line of the card's table."""
    return f"| {name} | **{record['geneval']:.3f}** | {record['images']:.3f} | " + " | ".join(
        f"{record['tasks'].get(tag, float('nan')):.2f}" for tag in TASKS
    ) + " |"  # fmt: skip


def card(low: bool, every_prompt: int, note: str, model: JanusForConditionalGeneration, record: dict) -> str:
    """The model card's text, from the provenance of the weights."""
    measured, rows = record["measured"], suite()[::every_prompt]
    vq, drawn, best = measured["decoded"], record["draw"], measured["pictures"]
    minutes = [round(record[part]["seconds"] / 60) for part in ("vq", "draw")]
    head = cards.HEAD.format(task="text-to-image", name=NAMES[low])
    return head + CARD.format(
        name=NAMES[low],
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        role=ROLES[low],
        side=SIDE[low],
        tokens=grid(low) ** 2,
        prompts=len(rows),
        seed=SEED,
        enlarged=", which sees them enlarged to 96 pixels" if low else "",
        heads=" | ".join(TITLES.get(tag, tag) for tag in TASKS),
        rules="---|" * len(TASKS),
        rows="\n".join([_row(f"drawn, guidance {best['guidance']}", best), _row("decoded codes", vq)]),
        swept=measured["swept"],
        sweep=", ".join(f"{r['guidance']} at {r['temperature']} {r['images']:.3f}" for r in measured["sweep"]),
        best=best["guidance"],
        temperature=best["temperature"],
        sizes=", ".join(str(sum(row["tag"] == tag for row in rows)) for tag in TASKS),
        vq=vq,
        text=cards.layers(TEXT[low]),
        vocabulary=model.config.get_text_config().vocab_size,
        flag=" --lowres` after the same without `--lowres" if low else "",
        minutes=sum(minutes),
        vq_minutes=minutes[0],
        shared=", the same weights as `painter`'s" if low else "",
        draw_minutes=minutes[1],
        seen=drawn["steps"] * drawn["rows"],
        pairs=drawn["pairs"],
        loss=drawn["loss"],
        note=note,
    )


def finish(options: argparse.Namespace) -> Path:
    """Write `out`/painter(-lowres) from the last checkpoints, read it back, measure it and describe it; its path."""
    low = options.lowres
    folder = options.out / NAMES[low]
    text = torch.load(options.out / ("draw-lowres.pt" if low else "draw.pt"), weights_only=True)
    model = build_model(load_vq(options.out, low).state_dict(), low)
    model.load_state_dict(text["model"])
    model.model.vqmodel.load_state_dict(load_vq(options.out, low).state_dict())  # its decoder may be newer
    save(model, build_processor(low), folder, torch.float16)
    model = JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = JanusProcessor.from_pretrained(folder)
    rows = suite()[:: options.every_prompt]
    sweep = [score(model, processor, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    print(json.dumps(sweep), flush=True)
    best = max(sweep, key=lambda record: record["images"])
    guidance = best["guidance"]
    cooler = [score(model, processor, rows[::2], guidance, SEED + 1, t) for t in TEMPERATURES[1:]]
    temperature = max([best, *cooler], key=lambda record: record["images"])["temperature"]
    print(json.dumps(cooler), flush=True)
    measured = {"sweep": sweep + cooler, "swept": len(rows[::2])}
    generation_config(low, guidance, temperature).save_pretrained(folder)
    shown = [rows[int(i)]["prompt"] for i in np.linspace(0, len(rows) - 1, 16)]
    drawn = draw(model, processor, shown, guidance, SEED + 2, temperature)
    for file in filter(None, (options.out / f"{folder.name}.png", options.sheet)):
        sheet(drawn, shown, file)
    files = [file for name in VQ_FILES if (file := options.out / name).exists()]
    vq = {file.name: torch.load(file, weights_only=True) for file in files}
    record = cards.origin(
        model, "visspec.toys.recipes.painter", folder, measured, seeds={"vq": 0, "draw": 1, "measured": SEED},
        vq={
            "steps": vq["vq.pt"]["step"],
            "later": {name: part["step"] for name, part in vq.items() if name != "vq.pt"},
            "earlier": options.earlier_vq[0],
            "seconds": round(sum(part["seconds"] for part in vq.values())) + options.earlier_vq[1],
            "rows": options.vq_rows * options.workers,
        },
        draw={
            "steps": text["step"] + options.earlier[0],
            "seconds": round(text["seconds"]) + options.earlier[1],
            "rows": options.rows * options.workers,
            "pairs": int((options.first + options.pairs) * sum(SHARES.values())),
            "loss": text["loss"],
        },
    )  # fmt: skip
    write_json(folder / "provenance.json", record)
    return remeasure(options)


def remeasure(options: argparse.Namespace) -> Path:
    """Measure a finished folder at its own guidance and temperature on `options.every_prompt`, and write its card."""
    low = options.lowres
    folder = options.out / NAMES[low]
    model = JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    own, record = model.generation_config, json.loads((folder / "provenance.json").read_text())
    rows, processor = suite()[:: options.every_prompt], JanusProcessor.from_pretrained(folder)
    measured = record["measured"]
    measured["pictures"] = score(model, processor, rows, own.guidance_scale, SEED, own.temperature)
    measured["decoded"] = measure(model.model.vqmodel, low, options.every_prompt)
    write_json(folder / "provenance.json", record)
    cards.publish(folder, card(low, options.every_prompt, options.note, model, record))
    print(json.dumps({"folder": str(folder), **measured}), flush=True)
    return folder
