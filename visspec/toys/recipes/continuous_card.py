"""The last stage of the continuous painter's recipe: both folders, measured after they were written and read back."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, JanusImageProcessor, JanusProcessor

from visspec.io.files import write_json
from visspec.models.continuous.model import ContinuousImageModel, load
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save, special_ids
from visspec.toys.recipes.continuous_autoencoder import measure, rows_of_tasks
from visspec.toys.recipes.continuous_data import GRID, SIDE, TASKS
from visspec.toys.recipes.continuous_draw import SIZES, TIMES, assembled, build, score
from visspec.toys.recipes.painter_build import BOI, MEAN, STD, build_tokenizer
from visspec.toys.recipes.painter_card import TITLES
from visspec.toys.recipes.painter_tokens import PROMPT
from visspec.toys.world.suite import TASKS as EVERY_TASK

NAMES = {"painter": "painter-continuous", "drafter": "painter-continuous-drafter"}
GUIDANCES = (1.0, 1.5, 2.0, 3.0)
SEED = 0

CARD = """
A causal model of *continuous* tokens, {parameters:.1f} million parameters, trained from zero: a stock Llama reads a
prompt and the tokens so far, a diffusion head of {steps} steps draws the next, {token} numbers each, and diffusers'
`AutoencoderKL` turns {tokens} of them into a picture of visspec's *shape world*, {side} x {side} pixels. It is the
target of visspec's demonstrations and tests of acceptance between diffusion heads.

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("painter-continuous", drafter="painter-continuous-drafter")
picture = pipe("a photo of a red ring").images[0]
```

## Measured

GenEval on {prompts} prompts of the suite (`visspec.toys.world.suite`), of {tasks}, one picture a prompt,
sampled by the plain loop (`visspec.models.continuous.model.Sampler`) at temperature 1, seed {seed}; judged by
visspec's shape detector, which sees them enlarged to 96 pixels. The score is the mean of these tasks.

| pictures | GenEval | share of prompts | {heads} |
|---|---|---|{rules}
{rows}

Guidance {guidance} was the best on {swept} of the prompts with another seed (share of prompts: {sweep}). "Decoded
tokens" are tokens drawn from the posterior of rendered scenes of the same prompts, after the decoder: the ceiling.
Over them, pixels are off by {decoded[grey_levels]} grey levels on average ({decoded[psnr]} dB). Last loss {loss} (mean
squared error of the velocity, tokens of deviation 1).

## Architecture

Llama, {text}, {vocabulary} words, one input a word or token; to a token's projection the place of the token after it is
added. Head: {depth} residual blocks of width {width} with adaptive normalisation; it predicts the velocity
signal eps - noise value of the forward process, cosine schedule, fixed deviations. Autoencoder: three halvings, 8
latents for 8 x 8 pixels, scaled so that tokens have deviation 1; the posterior's deviation is fixed, {low} to {high} of
the tokens' own. Tokens in training are drawn from it: sharper laws would leave nothing for a drafter to share.

## Training

Recipe: `python -m visspec.toys.recipes.continuous_painter --out FOLDER`; {minutes} minutes of training where these
weights
were made ({ae_minutes} for the autoencoder, {draw_minutes} for the painter), on one CPU core. It saw {seen:,} pictures
of {pairs:,} rendered pairs, a tenth of them without the prompt's words. Shapes stand on a grid of 4 pixels, have one of
two radii, and the ground is plain. Versions, seeds and digests: `provenance.json`.

## Limits

It knows the words of the suite's grammar but only the tasks above; of others it draws some shapes. It is a small model
after a short training: what it is for is that its laws are real, not that its pictures are good. The last denoising
step is sampled *with* noise, as exact acceptance needs.
{note}
"""
DRAFTER_CARD = """---
license: apache-2.0
---

# visspec painter-continuous-drafter

The drafter of `painter-continuous`: the same form, {parameters:.2f} million parameters ({text}), with a copy of the
painter's head and without an autoencoder. It reads tokens, and the painter's conditions that they were drawn from where
those are known; in drafts its own. Trained for the painter's velocity at the same points of the forward process after
the same tokens; last loss {loss}: squared distance of the velocities (tokens of deviation 1) and a tenth of that of the
conditions. The painter's own loss is {painter_loss}.

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("painter-continuous", drafter="painter-continuous-drafter")
```

Recipe: `python -m visspec.toys.recipes.continuous_painter --out FOLDER`; {steps:,} steps of {rows} pictures, {minutes}
minutes on one CPU core. Versions, seeds and digests: `provenance.json`.
{note}
"""


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


def _row(name: str, record: dict) -> str:
    tasks = " | ".join(f"{record['tasks'].get(tag, float('nan')):.2f}" for tag in EVERY_TASK if tag in TASKS)
    return f"| {name} | **{record['geneval']:.3f}** | {record['images']:.3f} | {tasks} |"


def write(
    name: str, model: ContinuousImageModel, options: argparse.Namespace, measured: dict, **more: Any
) -> tuple[Path, dict]:
    """Write a model's provenance beside its weights; folder and record."""
    folder = options.out / NAMES[name]
    record = cards.origin(
        model, "visspec.toys.recipes.continuous_painter", folder, measured, compute_dtype="float32", **more
    )
    write_json(folder / "provenance.json", record)
    return folder, record


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read the painter back, measure it and describe them."""
    parts = ("autoencoder", "decoder", "draw", "drafter")
    saved = {part: torch.load(options.out / f"{part}.pt", weights_only=True) for part in parts}
    trained = build("painter")
    trained.load_state_dict(saved["draw"]["model"])
    folder = options.out / NAMES["painter"]
    save(assembled(options.out, trained), build_processor(), folder, torch.float16)
    model, rows = load(folder), rows_of_tasks(options.every_prompt)
    sweep = [score(model, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = max(sweep, key=lambda record: record["images"])["guidance"]
    generation_config(guidance).save_pretrained(folder)
    measured = {
        "sweep": sweep, "swept": len(rows[::2]), "pictures": score(model, rows, guidance, SEED),
        "decoded": measure(model.autoencoder, options.every_prompt),
    }  # fmt: skip
    stages = {
        part: {"steps": state["step"], "seconds": round(state["seconds"]), "loss": state["loss"]}
        for part, state in saved.items()
    }
    data = {"rows": options.rows * options.workers, "times": TIMES, "pairs": options.pairs}
    own = {part: stages[part] for part in parts[:3]}
    seeds = {"autoencoder": 0, "draw": 1, "decoder": 3, "measured": SEED}
    write("painter", model, options, measured, seeds=seeds, **own, **data)
    cards.publish(folder, painter_card(model, options, measured, stages, len(rows)))
    drafter = build("drafter")
    drafter.load_state_dict(saved["drafter"]["model"])
    folder = options.out / NAMES["drafter"]
    save(drafter, None, folder, torch.float16)
    drafter = load(folder)
    write("drafter", drafter, options, {"distance": stages["drafter"]["loss"]}, seeds={"draft": 2}, **stages, **data)
    text, parameters = cards.layers(SIZES["drafter"]["text"]), sum(p.numel() for p in drafter.parameters()) / 1e6
    card = DRAFTER_CARD.format(
        parameters=parameters, text=text, loss=stages["drafter"]["loss"], painter_loss=stages["draw"]["loss"],
        steps=stages["drafter"]["steps"], rows=data["rows"], minutes=round(stages["drafter"]["seconds"] / 60),
        note=options.note,
    )  # fmt: skip
    cards.publish(folder, card)
    print(json.dumps({"folder": str(options.out), **measured}), flush=True)


def painter_card(
    model: ContinuousImageModel, options: argparse.Namespace, measured: dict, stages: dict, prompts: int
) -> str:
    """The painter's card, from what its provenance says."""
    best, decoded, config = measured["pictures"], measured["decoded"], model.config
    minutes = {part: round(stage["seconds"] / 60) for part, stage in stages.items()}
    head = cards.HEAD.format(task="text-to-image", name=NAMES["painter"]).replace("library_name: transformers\n", "")
    return head + CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        steps=config.denoising_steps, token=config.token, tokens=model.tokens, side=SIDE, prompts=prompts, seed=SEED,
        tasks=", ".join(TITLES.get(tag, tag) for tag in TASKS),
        heads=" | ".join(TITLES.get(tag, tag) for tag in EVERY_TASK if tag in TASKS), rules="---|" * len(TASKS),
        rows="\n".join([_row(f"drawn, guidance {best['guidance']}", best), _row("decoded tokens", decoded)]),
        guidance=best["guidance"], swept=measured["swept"],
        sweep=", ".join(f"{r['guidance']} {r['images']:.3f}" for r in measured["sweep"]),
        decoded=decoded, loss=stages["draw"]["loss"], text=cards.layers(SIZES["painter"]["text"]),
        vocabulary=config.text_config.vocab_size, depth=config.head_depth, width=config.head_width,
        low=min(decoded["posterior_deviation"]), high=max(decoded["posterior_deviation"]),
        minutes=minutes["autoencoder"] + minutes["decoder"] + minutes["draw"],
        ae_minutes=minutes["autoencoder"] + minutes["decoder"],
        draw_minutes=minutes["draw"], seen=stages["draw"]["steps"] * options.rows * options.workers,
        pairs=options.pairs, note=options.note,
    )  # fmt: skip
