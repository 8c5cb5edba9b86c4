"""`painter-mar` and its drafter from zero: continuous tokens in random orders.

Stage `tokens` codes pictures with the autoencoder of `painter-continuous`, `draw` trains the painter on tokens drawn
from its posterior, `draft` a smaller MAR on the painter's head, and `finish` writes both folders with model cards and
provenance.

Data: the one-object scenes among those of the continuous painter's recipe. Seeds: 4 (draw), 5 (draft). One CPU core,
about 40 minutes.
"""

import argparse

import torch
from transformers import GenerationConfig

from visspec.models.mar.model import load
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.continuous_autoencoder import measure
from visspec.toys.recipes.continuous_data import SIDE, write_tokens
from visspec.toys.recipes.continuous_painter import VectorOptions
from visspec.toys.recipes.mar_draw import (
    LABELS,
    SIZES,
    TIMES,
    MARDraftStage,
    MARStage,
    assembled,
    build,
    included_autoencoder,
    rows_of_labels,
    score,
)
from visspec.toys.recipes.recipe import Recipe, trained

NAMES = {"painter": "painter-mar", "drafter": "painter-mar-drafter"}
GUIDANCES = (1.0, 2.0, 4.0)
ITERATIONS = (16, 8)  # of published parallel decoding, measured beside one token at a time
SEED = 0


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read the painter back, measure it and describe them."""
    saved, stages = {}, {}
    for part, file in (("draw", "mar.pt"), ("drafter", "mar-drafter.pt")):
        saved[part], stages[part] = cards.read_stage(options.out / file)
    more = {
        "compute_dtype": "float32", **stages, "rows": options.rows * options.workers, "times": TIMES,
        "pairs": options.pairs,
    }  # fmt: skip
    made, drafter = build("painter"), build("drafter")
    made.load_state_dict(saved["draw"]["model"])
    drafter.load_state_dict(saved["drafter"]["model"])

    folder, command = options.out / NAMES["painter"], f"visspec.toys {NAMES['painter']}"
    save(assembled(made, included_autoencoder()), None, folder, torch.float16)
    model, rows = load(folder), rows_of_labels(options.every_prompt)
    sweep = [score(model, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance, network = cards.best_guidance(sweep), model.config.network
    GenerationConfig(do_sample=True, temperature=1.0, guidance_scale=guidance).save_pretrained(folder)
    one, *fewer = (score(model, rows, guidance, SEED, n) for n in (network["tokens"], *ITERATIONS))
    decoded = measure(model.autoencoder, options.every_prompt)
    measured = {"sweep": sweep, "swept": len(rows[::2]), "pictures": [one, *fewer], "decoded": decoded}
    record = cards.origin(model, command, folder, measured, seeds={"draw": 4, "measured": SEED}, **more)
    shown = {f"drawn, guidance {guidance}": one}
    shown |= {f"the same in {r['iterations']} iterations, several tokens at a time": r for r in fewer}
    shown["decoded tokens of all the continuous painter's tasks"] = decoded
    text = cards.fill(
        NAMES["painter"],
        record=record,
        network=network,
        parameters=cards.millions(model),
        steps=model.config.denoising_steps,
        side=SIDE,
        classes=len(LABELS),
        prompts=len(rows),
        rows=cards.table(cards.score_row(name, found) for name, found in shown.items()),
        guidance=guidance,
        sweep=cards.swept(sweep),
        seen=stages["draw"]["steps"] * more["rows"],
        note=options.note,
    )
    cards.publish(folder, text)

    folder = options.out / NAMES["drafter"]
    save(drafter, None, folder, torch.float16)
    measured = {"distance": stages["drafter"]["loss"]}
    record = cards.origin(load(folder), command, folder, measured, seeds={"draft": 5}, **more)
    depth, parameters = SIZES["drafter"]["depth"], cards.millions(drafter)
    cards.publish(
        folder, cards.fill(NAMES["drafter"], record=record, depth=depth, parameters=parameters, note=options.note)
    )
    cards.say(options.out, stages=stages)


PAINTER = Recipe(
    NAMES["painter"],
    "Train the MAR painter and its drafter.",
    VectorOptions,
    {
        "tokens": lambda options: write_tokens(options, included_autoencoder()),
        "draw": trained(MARStage),
        "draft": trained(MARDraftStage),
        "finish": finish,
    },
    {"steps": 4000, "drafter_steps": 1000, "rate": 1e-3, "every": 500},
)
