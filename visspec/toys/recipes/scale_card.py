"""The last stage of the next-scale painters' recipe: both folders, measured after they were written and read back."""

import argparse
import json
from typing import Any

import torch
from transformers import GenerationConfig

from visspec.io.files import write_json
from visspec.models.var.images import calibrated
from visspec.models.var.model import VARImageModel, load
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.scale_data import LABELS, RADII, SCALES, SIDE, STEP, rows_of_labels
from visspec.toys.recipes.scale_draw import FIRST, FIRST_SHARE, LATE, SharedClassEmbedding, build, score, taken
from visspec.toys.recipes.scale_measure import PainterScores, apart, likeness, row
from visspec.toys.recipes.scale_vq import load_vq, measure

NAMES = {"painter": "painter-var", "small": "painter-var-small"}
FILES = {"vq": "quantiser.pt", "draw": "painter.pt", "small": "small.pt", "refine": "refined.pt"}
GUIDANCES = (1.5, 2.5, 4.0)
HANDOVERS = (4, 5, 6)
SHARES = (0.1,)
DEPTHS = (1, 2)
SEED = 0

CARD = """
A VAR (Tian et al., arXiv 2404.02905) of {parameters:.2f} million parameters, trained from zero, and a multi-scale VQ
autoencoder of {codec:.2f} million, the VQ model of `painter` with a quantiser of its own: {maps} maps of {sides} codes
a side, {total} of {codes} codes together, {side} x {side} pixels. It is the next-scale painter of visspec's
demonstrations and tests; `painter-var-small` is its refiner and its drafter.

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("painter-var")
picture = pipe("a photo of a red ring").images[0]
parts = {{"refiner": "painter-var-small", "handover": 5}}                         # CoDe
pipe = visspec.ImagePipeline.from_pretrained("painter-var", parts=parts)
pipe = visspec.ImagePipeline.from_pretrained("painter-var", parts={{"budget": 0.1}})   # ScaleKV
```

Its {classes} classes are the prompts of one object, with and without a colour; a class may also be given by its number.

## Measured

{pictures} pictures, {copies} of each prompt of the suite (`visspec.toys.world.suite`) that is a class, guidance
{guidance}, temperature 1, seed {seed}, judged by visspec's shape detector; FD of random features against renders (noise
floor {floor:.2f}); bytes of keys and values for {batch} pictures at a time, float32, between passes and in the largest
one. No times: they want an idle machine.

| way to draw | passes | GenEval | FD | over plain's | cache, kB | in a pass, kB |
|---|---|---|---|---|---|---|
{rows}

Held-out pictures, coded and decoded: GenEval {decoded:.3f}, {psnr:.1f} dB; without quantisation {bare:.1f} dB.
Guidance {guidance} was the best on {swept} of the prompts with another seed (share of prompts: {sweep}).

By map, of a mean code along the model's own pictures, without guidance: entropy of the law in nats, KL to the law of
the small model and total variation, and KL to the law under a budget of a tenth.

| codes of the map | {sizes} |
|---|{rules}
| entropy | {entropy} |
| KL to the small model | {small_kl} |
| total variation to it | {small_tv} |
| KL, a tenth of the cache | {kept_kl} |
| total variation | {kept_tv} |

Drafted scales are exact, so pictures are plain decoding's (with `scales`, code for code: {equal} of {pictures}).
Accepted of those reached, by depth: {accepted}.

## Architecture

Parameters and their names are VAR's, with one modulation for all blocks (as its models of 512 pixels): {depth} blocks
of width {width}, {heads} heads. The autoencoder is VAR's, with encoder and decoder of `painter`'s VQ model, which has
no blocks in the encoder's levels and one in each of the decoder's; its 1 x 1 convolutions are folded into their
neighbours. Weights are stored in float16.

## Training

Recipe: `python -m visspec.toys.recipes.scale_painter --out FOLDER`; one CPU core, {minutes}; of the autoencoder
codebook and convolutions of the quantiser alone are taught. {pairs:,} rendered pairs of a
class and a picture, one shape on plain ground on a grid of {step:.3f} of the side with one of {radii} radii, a tenth of
them without the class. Embeddings of classes are taught as sums of those of a kind and a colour. Half of the batches
({short:.0%}) have the first {first} maps alone, which CoDe asks of this model. Versions, seeds and digests:
`provenance.json`.

## Limits

A small model after a short training: its laws are real, its pictures are what the table says.
{note}
"""
SMALL_CARD = """
The smaller of the next-scale painters: a VAR of {parameters:.2f} million parameters, {depth} blocks of width {width},
with the autoencoder of `painter-var`. It draws by itself, draws the last maps for it (CoDe), and drafts for it.

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("painter-var", drafter="painter-var-small")
```

GenEval by itself, as in the card of `painter-var`: {geneval:.3f}, FD {fd:.2f}. Taught codes for {small_steps:,} steps,
then the laws of `painter-var` given the same maps for {refine_steps:,} (CoDe's distillation; maps behind the first
{first} count {late:g} times; last mean KL {kl}). {minutes}. Versions, seeds and digests: `provenance.json`.
{note}
"""


def finish(options: argparse.Namespace) -> None:
    """Write both folders from the last checkpoints, read them back, measure and describe them."""
    codec = load_vq(options.out)
    stages = {}
    for part, file in FILES.items():
        state = torch.load(options.out / file, weights_only=True)
        stages[part] = {"steps": state["step"], "seconds": round(state["seconds"]), "loss": state["loss"]}
    models = {}
    for part, name in (("draw", "painter"), ("refine", "small")):
        taught = SharedClassEmbedding(build(name, codec))
        taken(taught, options.out / FILES[part])
        save(taught.settled(), None, options.out / NAMES[name], torch.float16)
        models[name] = load(options.out / NAMES[name])
    sweep = [
        score(models["painter"], rows_of_labels(2 * options.every_prompt), guidance, SEED + 1) for guidance in GUIDANCES
    ]
    guidance = max(sweep, key=lambda record: record["images"])["guidance"]
    for name, model in models.items():
        model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, guidance_scale=guidance)
        model.generation_config.save_pretrained(options.out / NAMES[name])
    judge = PainterScores(rows_of_labels(options.every_prompt), options.copies)
    measured = figures(models["painter"], models["small"], guidance, judge)
    measured |= {"sweep": sweep, "decoded": measure(codec)}
    origin: dict[str, Any] = {
        "recipe": "visspec.toys.recipes.scale_painter", "pairs": options.pairs, "rows": options.rows, **stages,
        "seeds": {"vq": 7, "draw": 8, "small": 9, "refine": 10, "measured": SEED},
    }  # fmt: skip
    for name, text in (("painter", painter_card), ("small", small_card)):
        folder = options.out / NAMES[name]
        record = cards.origin(models[name], folder=folder, measured=measured, **origin)
        write_json(folder / "provenance.json", record)
        head = cards.HEAD.format(task="text-to-image", name=NAMES[name]).replace("library_name: transformers\n", "")
        cards.publish(folder, head + text(models[name], options, measured, stages))
    print(json.dumps({"folder": str(options.out), "stages": stages}), flush=True)


def figures(model: VARImageModel, small: VARImageModel, guidance: float, judge: PainterScores) -> dict[str, Any]:
    """Every way to draw, by name, with the distributions' distances by scale."""
    rows: dict[str, Any] = {}
    rows["plain"], plain = row(judge, model, guidance, SEED)
    rows["small alone"], _ = row(judge, small, guidance, SEED)
    for handover in HANDOVERS:
        rows[f"code, {handover}"], _ = row(judge, model, guidance, SEED, refiner=small, handover=handover)
    kept = {}
    for share in SHARES:
        budget = calibrated(model, share)
        rows[f"scalekv, {share}"], out = row(judge, model, guidance, SEED, budget=budget)
        rows[f"scalekv, {share}"] |= likeness(plain, out) | {"window": budget.window, "tokens": budget.tokens}
        rows[f"scalekv, {share}"]["budget_bytes"] = max(budget.bytes(model.var, 2 * rows["plain"]["batch"]))
        kept[share] = apart(model, model, plain, budget)
    for rule in ("scales", "repaired"):
        for depth in DEPTHS:
            name = f"{rule}, {depth} drafted"
            rows[name], out = row(judge, model, guidance, SEED, rule, depth, small)
            rows[name] |= likeness(plain, out)
    for found in rows.values():
        found["fd_ratio"] = round(found["fd"] / rows["plain"]["fd"], 3)
    return {"guidance": guidance, "rows": rows, "small": apart(model, small, plain), "kept": kept}


def painter_card(model: VARImageModel, options: argparse.Namespace, measured: dict, stages: dict) -> str:
    """The painter's card, from what its provenance says."""
    rows, network, shape = measured["rows"], model.var.config, model.autoencoder.shape
    plain, kept, small = rows["plain"], measured["kept"][SHARES[0]], measured["small"]
    counted = (
        "| {} | {:.2f} | {:.3f} | {:.2f} | {:.2f} | {:.0f} | {:.0f} |".format(
            name,
            *(found[key] for key in ("passes", "geneval", "fd", "fd_ratio")),
            found["cache_bytes"] / 1e3,
            found["pass_bytes"] / 1e3,
        )
        for name, found in rows.items()
    )
    accepted = "; ".join(
        f"`{name}` {', '.join(map(str, found['acceptance_by_depth']))}"
        for name, found in rows.items() if "acceptance_by_depth" in found
    )  # fmt: skip

    def cells(values: list[float]) -> str:
        return " | ".join(f"{value:.3f}" for value in values)

    return CARD.format(
        parameters=_millions(model.var), codec=_millions(model.autoencoder), maps=len(SCALES), total=SCALES.total,
        sides=", ".join(str(rows_) for rows_, _ in SCALES.grids), codes=shape.codes, side=SIDE, classes=len(LABELS),
        pictures=plain["n"], copies=options.copies, guidance=measured["guidance"], seed=SEED, floor=plain["fd_floor"],
        batch=plain["batch"], rows="\n".join(counted), decoded=measured["decoded"]["decoded"],
        psnr=measured["decoded"]["decoded_psnr"], bare=measured["decoded"]["not_quantised_psnr"],
        swept=len(rows_of_labels(2 * options.every_prompt)),
        sweep=", ".join(f"{r['guidance']} {r['images']:.3f}" for r in measured["sweep"]),
        sizes=" | ".join(map(str, SCALES.sizes)), rules="---|" * len(SCALES), entropy=cells(small["entropy"]),
        small_kl=cells(small["kl"]), small_tv=cells(small["tv"]), kept_kl=cells(kept["kl"]), kept_tv=cells(kept["tv"]),
        equal=rows["scales, 1 drafted"]["equal"], accepted=accepted, depth=network.depth, width=network.width,
        heads=network.heads, minutes=_minutes(stages), pairs=options.pairs, step=STEP, radii=len(RADII),
        short=FIRST_SHARE, first=FIRST, note=options.note,
    )  # fmt: skip


def small_card(model: VARImageModel, options: argparse.Namespace, measured: dict, stages: dict) -> str:
    """The small painter's."""
    network, alone = model.var.config, measured["rows"]["small alone"]
    return SMALL_CARD.format(
        parameters=_millions(model.var), depth=network.depth, width=network.width, geneval=alone["geneval"],
        fd=alone["fd"], small_steps=stages["small"]["steps"], refine_steps=stages["refine"]["steps"], first=FIRST,
        late=LATE, kl=stages["refine"]["loss"], minutes=_minutes(stages), note=options.note,
    )  # fmt: skip


def _millions(part: torch.nn.Module) -> float:
    return sum(p.numel() for p in part.parameters()) / 1e6


def _minutes(stages: dict) -> str:
    """Of training, by stage, in words."""
    parts = ", ".join(f"{name} {found['seconds'] / 60:.0f}" for name, found in stages.items())
    return f"{sum(found['seconds'] for found in stages.values()) / 60:.0f} minutes of training ({parts})"
