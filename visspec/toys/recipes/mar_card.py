"""The last stage of the MAR painter's recipe: both folders, measured after they were written and read back."""

import argparse
import json
from typing import Any

import torch
from transformers import GenerationConfig

from visspec.io.files import write_json
from visspec.models.mar.model import load
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.continuous_autoencoder import measure
from visspec.toys.recipes.continuous_data import SIDE
from visspec.toys.recipes.mar_draw import (
    LABELS,
    SIZES,
    TIMES,
    assembled,
    build,
    included_autoencoder,
    rows_of_labels,
    score,
)

NAMES = {"painter": "painter-mar", "drafter": "painter-mar-drafter"}
GUIDANCES = (1.0, 2.0, 4.0)
ITERATIONS = (16, 8)  # of published parallel decoding, measured beside one token at a time
SEED = 0

CARD = """
A MAR (Li et al., arXiv 2406.11838) of {parameters:.1f} million parameters, trained from zero: a masked autoencoder over
{tokens} tokens of {token} numbers, a diffusion head of {steps} steps with learned deviations for each of them, and the
autoencoder of `painter-continuous`, {side} x {side} pixels. Tokens are drawn one after another in an order of the row's
own. It is the small MAR of visspec's demonstrations and tests.

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("painter-mar", drafter="painter-mar-drafter")
picture = pipe("a photo of a red ring").images[0]
```

Its {classes} classes are the prompts of one object, with and without a colour; a class may also be given by its
number.

## Measured

GenEval on {prompts} prompts of the suite (`visspec.toys.world.suite`) that are classes, one picture a prompt, one
token an iteration unless said otherwise, seed {seed}; judged by visspec's shape detector, which sees them enlarged
to 96 pixels.

| pictures | GenEval | share of prompts |
|---|---|---|
{rows}

Guidance {guidance} was the best on {swept} of the prompts with another seed (share of prompts: {sweep}). Last loss
{loss}: mean squared error of the velocity (tokens of deviation 1) and the divergence of a step's Gaussian, in bits.

## Architecture

Parameters and their names are MAR's: encoder and decoder of {depth} blocks each, width {width}, {heads} heads,
{buffer} slots of the class; head of {head_depth} blocks of width {head_width}. Initial weights are the published
ones. Other than published: the head predicts the velocity (published: the noise, whose first steps a small head does
not learn), in training any number of tokens is known (published: at most 30 %), each is shown at {times} levels of
noise a step (4), and weights are not averaged.

## Training

Recipe: `python -m visspec.toys.recipes.mar_painter --out FOLDER`; {minutes} minutes on one CPU core, {seen:,}
pictures of the one-object scenes among {pairs:,} rendered pairs, a tenth of them without the class. Versions, seeds
and digests: `provenance.json`.

## Limits

A small model after a short training: its laws are real, its pictures are what the table says. The last denoising
step is sampled *with* noise, which published MAR leaves out.
{note}
"""
DRAFTER_CARD = """---
license: apache-2.0
---

# visspec painter-mar-drafter

The drafter of `painter-mar`: a MAR with encoder and decoder of {depth} block each, {parameters:.2f} million
parameters, a copy of the painter's head and no autoencoder. Trained for what the painter's head says at the same
points of the forward process after the same tokens; last loss {loss}: squared distance of the head's outputs (tokens
of deviation 1) and a tenth of that of the conditions. The painter's own loss is {painter_loss}.

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("painter-mar", drafter="painter-mar-drafter")
```

Recipe: `python -m visspec.toys.recipes.mar_painter --out FOLDER`; {steps:,} steps of {rows} pictures, {minutes}
minutes on one CPU core. Versions, seeds and digests: `provenance.json`.
{note}
"""


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read the painter back, measure it and describe them."""
    files = {"draw": "mar.pt", "drafter": "mar-drafter.pt"}
    saved = {part: torch.load(options.out / file, weights_only=True) for part, file in files.items()}
    stages = {
        part: {"steps": state["step"], "seconds": round(state["seconds"]), "loss": state["loss"]}
        for part, state in saved.items()
    }
    trained, drafter = build("painter"), build("drafter")
    trained.load_state_dict(saved["draw"]["model"])
    drafter.load_state_dict(saved["drafter"]["model"])
    folder = options.out / NAMES["painter"]
    save(assembled(trained, included_autoencoder()), None, folder, torch.float16)
    model, rows = load(folder), rows_of_labels(options.every_prompt)
    sweep = [score(model, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = max(sweep, key=lambda record: record["images"])["guidance"]
    GenerationConfig(do_sample=True, temperature=1.0, guidance_scale=guidance).save_pretrained(folder)
    counts = (model.config.network["tokens"], *ITERATIONS)
    measured = {
        "sweep": sweep, "swept": len(rows[::2]), "pictures": [score(model, rows, guidance, SEED, n) for n in counts],
        "decoded": measure(model.autoencoder, options.every_prompt),
    }  # fmt: skip
    data = {"rows": options.rows * options.workers, "times": TIMES, "pairs": options.pairs}
    origin = {"recipe": "visspec.toys.recipes.mar_painter", "compute_dtype": "float32", **stages, **data}
    seeds = {"draw": 4, "measured": SEED}
    write_json(folder / "provenance.json", cards.origin(model, folder=folder, measured=measured, seeds=seeds, **origin))
    cards.publish(folder, painter_card(model, options, measured, stages, len(rows)))
    folder = options.out / NAMES["drafter"]
    save(drafter, None, folder, torch.float16)
    measured = {"distance": stages["drafter"]["loss"]}
    record = cards.origin(load(folder), folder=folder, measured=measured, seeds={"draft": 5}, **origin)
    write_json(folder / "provenance.json", record)
    card = DRAFTER_CARD.format(
        depth=SIZES["drafter"]["depth"], parameters=sum(p.numel() for p in drafter.parameters()) / 1e6,
        loss=stages["drafter"]["loss"], painter_loss=stages["draw"]["loss"], steps=stages["drafter"]["steps"],
        rows=data["rows"], minutes=round(stages["drafter"]["seconds"] / 60), note=options.note,
    )  # fmt: skip
    cards.publish(folder, card)
    print(json.dumps({"folder": str(options.out), "stages": stages}), flush=True)


def painter_card(model: Any, options: argparse.Namespace, measured: dict, stages: dict, prompts: int) -> str:
    """The painter's card, from what its provenance says."""
    network, drawn = model.config.network, stages["draw"]
    head = cards.HEAD.format(task="text-to-image", name=NAMES["painter"]).replace("library_name: transformers\n", "")
    one, *fewer = measured["pictures"]
    named = [
        (f"drawn, guidance {one['guidance']}", one),
        *[(f"the same in {r['iterations']} iterations, several tokens at a time", r) for r in fewer],
        ("decoded tokens of all the continuous painter's tasks", measured["decoded"]),
    ]
    return head + CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6, tokens=network["tokens"], token=network["size"],
        steps=model.config.denoising_steps, side=SIDE, classes=len(LABELS), prompts=prompts, seed=SEED,
        rows="\n".join(f"| {name} | **{r['geneval']:.3f}** | {r['images']:.3f} |" for name, r in named),
        guidance=one["guidance"], swept=measured["swept"],
        sweep=", ".join(f"{r['guidance']} {r['images']:.3f}" for r in measured["sweep"]), loss=drawn["loss"],
        **{name: network[name] for name in ("depth", "width", "heads", "buffer", "head_depth", "head_width")},
        times=TIMES, minutes=round(drawn["seconds"] / 60), seen=drawn["steps"] * options.rows * options.workers,
        pairs=options.pairs, note=options.note,
    )  # fmt: skip
