"""`painter-continuous` and its drafter from zero: continuous tokens, drawn by a diffusion head.

Stage `autoencoder` teaches a small `AutoencoderKL` with a broad posterior, `decoder` goes on with its decoder alone,
`tokens` codes pictures with it, `draw` trains the painter on tokens drawn from that posterior, `draft` a smaller model
of the same form on the painter's head, and `finish` writes both folders with model cards and provenance.

Data: scenes of one or two shapes on plain ground, 64 pixels a side, after prompts of GenEval's tasks for one object,
colours and two objects; seeds from 2^30 on are never trained on. Seeds: 0 (autoencoder), 1 (draw), 2 (draft), 3
(decoder). One CPU core, about an hour.
"""

import argparse
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, JanusImageProcessor, JanusProcessor

from visspec.io.options import option
from visspec.models.continuous.model import load
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save, special_ids
from visspec.toys.recipes.continuous_autoencoder import (
    AutoencoderDecoderStage,
    AutoencoderStage,
    load_autoencoder,
    measure,
    rows_of_tasks,
)
from visspec.toys.recipes.continuous_data import GRID, SIDE, TASKS, write_tokens
from visspec.toys.recipes.continuous_draw import (
    SIZES,
    TIMES,
    ContinuousDraftStage,
    ContinuousStage,
    assembled,
    build,
    score,
)
from visspec.toys.recipes.painter_build import BOI, MEAN, STD, build_tokenizer
from visspec.toys.recipes.painter_tokens import PROMPT
from visspec.toys.recipes.recipe import Options, Recipe, trained

NAMES = {"painter": "painter-continuous", "drafter": "painter-continuous-drafter"}
GUIDANCES = (1.0, 1.5, 2.0, 3.0)
SEED = 0


@dataclass
class VectorOptions(Options):
    """Options of the recipes of painters of vectors."""

    pairs: int = option("pairs of prompt and picture", 18_000)
    steps: int = option("painter steps", 3200)
    drafter_steps: int = option("drafter steps", 1800)
    rows: int = option("pictures in a batch of one worker", 16)
    rate: float = option("peak learning rate of painter and drafter", 1.5e-3)
    every: int = option("steps between reports and checkpoints", 1000)


@dataclass
class ContinuousOptions(VectorOptions):
    """Those of this one."""

    autoencoder_steps: int = option("steps of the autoencoder", 800)
    decoder_steps: int = option("steps of its decoder alone", 450)


def build_processor() -> JanusProcessor:
    """Tokenizer and image processor; with generation_mode="image" it ends a prompt with the image-start token."""
    size = {"height": SIDE, "width": SIDE}
    images = JanusImageProcessor(size=size, image_mean=list(MEAN), image_std=list(STD))
    return JanusProcessor(image_processor=images, tokenizer=build_tokenizer(), num_image_tokens=GRID**2)


def generation_config(guidance: float) -> GenerationConfig:
    """Sampling with classifier-free guidance."""
    tokenizer = build_tokenizer()
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        guidance_scale=guidance,
        max_length=PROMPT + GRID**2,
        **special_ids(tokenizer),
        generation_kwargs={"boi_token_id": tokenizer.convert_tokens_to_ids(BOI)},
    )


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read the painter back, measure it and describe them."""
    saved, stages = {}, {}
    for part in ("autoencoder", "decoder", "draw", "drafter"):
        saved[part], stages[part] = cards.read_stage(options.out / f"{part}.pt")
    own = {part: stages[part] for part in ("autoencoder", "decoder", "draw")}
    more = {
        "compute_dtype": "float32", "rows": options.rows * options.workers, "times": TIMES, "pairs": options.pairs,
    }  # fmt: skip
    made, drafter = build("painter"), build("drafter")
    made.load_state_dict(saved["draw"]["model"])
    drafter.load_state_dict(saved["drafter"]["model"])

    folder, command = options.out / NAMES["painter"], f"visspec.toys {NAMES['painter']}"
    save(assembled(options.out, made), build_processor(), folder, torch.float16)
    model, rows = load(folder), rows_of_tasks(options.every_prompt)
    sweep = [score(model, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = cards.best_guidance(sweep)
    generation_config(guidance).save_pretrained(folder)
    drawn, decoded = score(model, rows, guidance, SEED), measure(model.autoencoder, options.every_prompt)
    measured = {"sweep": sweep, "swept": len(rows[::2]), "pictures": drawn, "decoded": decoded}
    seeds = {"autoencoder": 0, "draw": 1, "decoder": 3, "measured": SEED}
    record = cards.origin(model, command, folder, measured, seeds=seeds, **own, **more)
    shown = {f"drawn, guidance {guidance}": drawn, "decoded tokens": decoded}
    coding = stages["autoencoder"]["seconds"] + stages["decoder"]["seconds"]
    text = cards.fill(
        NAMES["painter"],
        record=record,
        config=model.config,
        parameters=cards.millions(model),
        tokens=model.tokens,
        side=SIDE,
        prompts=len(rows),
        tasks=", ".join(cards.TITLES.get(tag, tag) for tag in TASKS),
        heads=" | ".join(cards.TITLES.get(tag, tag) for tag in TASKS),
        rules=cards.rule(len(TASKS)),
        rows=cards.table(cards.score_row(name, found, TASKS) for name, found in shown.items()),
        guidance=guidance,
        sweep=cards.swept(sweep),
        text=cards.layers(SIZES["painter"]["text"]),
        low=min(decoded["posterior_deviation"]),
        high=max(decoded["posterior_deviation"]),
        coding=coding,
        training=coding + stages["draw"]["seconds"],
        seen=stages["draw"]["steps"] * more["rows"],
        note=options.note,
    )
    cards.publish(folder, text)

    folder = options.out / NAMES["drafter"]
    save(drafter, None, folder, torch.float16)
    record = cards.origin(
        load(folder), command, folder, {"distance": stages["drafter"]["loss"]}, seeds={"draft": 2}, **stages, **more
    )
    sizes = cards.layers(SIZES["drafter"]["text"])
    card = cards.fill(
        NAMES["drafter"], record=record, parameters=cards.millions(drafter), text=sizes, note=options.note
    )
    cards.publish(folder, card)
    cards.say(options.out, **measured)


PAINTER = Recipe(
    NAMES["painter"],
    "Train the continuous painter and its drafter.",
    ContinuousOptions,
    {
        "autoencoder": trained(AutoencoderStage),
        "decoder": trained(AutoencoderDecoderStage),
        "tokens": lambda options: write_tokens(options, load_autoencoder(options.out)),
        "draw": trained(ContinuousStage),
        "draft": trained(ContinuousDraftStage),
        "finish": finish,
    },
)
