"""The last stage of the any-order painter's recipe: a complete folder, measured after it was written and read back."""

import argparse
import json
from typing import Any

import torch

from visspec.io.files import write_json
from visspec.models.randar.model import RandARImageModel, load
from visspec.toys.recipes import cards
from visspec.toys.recipes.any_order_data import included_vq
from visspec.toys.recipes.any_order_draw import NAMED, WHOLE, build, score
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter_build import build_processor
from visspec.toys.world.suite import suite

NAME, SEED = "painter-any-order", 0
GUIDANCES = (1.0, 2.0, 3.0)
ORDERS = ("halton", "spread", "raster")
DRAFTERS = ("none", "ahead:levels=4", "ahead:levels=8", "jacobi:window=8", "neighbours:levels=8")

CARD = """
A RandAR (Pang et al., arXiv 2412.01827) of {parameters:.1f} million parameters, trained from zero, that draws visspec's
*shape world* in any order of the {places} places of a picture, on the codes of `painter`'s VQ model. It is the
any-order target of visspec's demonstrations and tests, and paints parts of pictures.

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("{name}")
picture = pipe("a photo of a red ring", order="spread").images[0]
changed = pipe("a photo of a blue ring", image=picture, mask_image=mask).images[0]  # white where to draw
```

## Measured

GenEval on {prompts} prompts of the suite (`visspec.toys.world.suite`), one picture a prompt, guidance {guidance},
temperature 1, seed {seed}; judged by visspec's shape detector. Passes a code are those of the network for one picture,
the prompt's among them, on {few} of the prompts; the rule is `exact`, so a drafter changes no picture of an order.

| order | GenEval | {drafters} |
|---|---|{rules}
{rows}

Guidance {guidance} was the best on {swept} of the prompts with another seed (share of prompts: {sweep}). Last loss
{loss} nats a code.

## Architecture

LlamaGen's transformer with RandAR's queries, {layers} layers of width {hidden_size}, {heads} heads; words are embedded
and seen as the prefix of its caption-conditional form, whose keys are not set apart here. The VQ model is `painter`'s.

## Training

Recipe: `python -m visspec.toys.recipes.any_order_painter --out FOLDER`; {minutes} minutes of training on two CPU cores,
{seen:,} pictures of {pairs:,} rendered pairs, a tenth of them without their prompt, in random orders but for
{named:.0%} of them, in raster, Halton and spread orders. {whole:.0%} were coded whole, as a given picture is, and
taught the half that comes last. Versions, seeds and digests: `provenance.json`.

## Limits

A small model after a short training: its laws are real, its pictures are what the table says.
{note}
"""


def finish(options: argparse.Namespace) -> None:
    """Write the folder from the last checkpoint, read it back, measure it and describe it."""
    saved = torch.load(options.out / "any-order.pt", weights_only=True)
    trained, processor, folder = build(included_vq()), build_processor(), options.out / NAME
    trained.load_state_dict(saved["model"])
    save(trained, processor, folder, torch.float16)
    model, rows = load(folder), suite()[:: options.every_prompt]
    sweep = [score(model, processor, rows[::2], guidance, SEED + 1) for guidance in GUIDANCES]
    guidance = max(sweep, key=lambda record: record["images"])["guidance"]
    model.generation_config.guidance_scale = guidance
    model.generation_config.save_pretrained(folder)
    few = rows[::4]
    drawn = [score(model, processor, rows, guidance, SEED, order=order, drafter="none") for order in ORDERS]
    passes = {
        order: {
            drafter: score(model, processor, few, guidance, SEED, order=order, drafter=drafter)["passes"]
            for drafter in DRAFTERS
        }
        for order in ORDERS
    }
    measured = {
        "sweep": sweep,
        "swept": len(rows[::2]),
        "pictures": dict(zip(ORDERS, drawn)),
        "few": len(few),
        "passes": passes,
    }
    stage = {"steps": saved["step"], "seconds": round(saved["seconds"]), "loss": saved["loss"]}
    data = {"rows": options.rows * options.workers, "pairs": options.pairs}
    record = cards.origin(
        model, "visspec.toys.recipes.any_order_painter", folder, measured, draw=stage,
        seeds={"draw": 6, "measured": SEED}, **data,
    )  # fmt: skip
    write_json(folder / "provenance.json", record)
    cards.publish(folder, card(model, options, measured, stage, len(rows)))
    print(json.dumps({"folder": str(folder), "draw": stage, "guidance": guidance}), flush=True)


def card(
    model: RandARImageModel, options: argparse.Namespace, measured: dict, stage: dict[str, Any], prompts: int
) -> str:
    """The model card's text."""
    head = cards.HEAD.format(task="text-to-image", name=NAME).replace("library_name: transformers\n", "")
    sizes, pictures, passes = model.net.config, measured["pictures"], measured["passes"]
    shares = {order: " | ".join(f"{passes[order][drafter]:.3f}" for drafter in DRAFTERS) for order in ORDERS}
    return head + CARD.format(
        name=NAME, parameters=sum(p.numel() for p in model.parameters()) / 1e6, places=sizes.grid**2, prompts=prompts,
        rows="\n".join(f"| {order} | {pictures[order]['geneval']:.3f} | {shares[order]} |" for order in ORDERS),
        drafters=" | ".join(f"`{drafter}`" for drafter in DRAFTERS), rules="---|" * len(DRAFTERS), few=measured["few"],
        guidance=pictures[ORDERS[0]]["guidance"], swept=measured["swept"], seed=SEED, loss=stage["loss"],
        layers=sizes.layers,
        sweep=", ".join(f"{r['guidance']} {r['images']:.3f}" for r in measured["sweep"]), heads=sizes.heads,
        hidden_size=sizes.hidden_size, minutes=round(stage["seconds"] / 60), pairs=options.pairs, named=NAMED,
        seen=stage["steps"] * options.rows * options.workers, whole=WHOLE, note=options.note,
    )  # fmt: skip
