"""Stage `finish` of the distilled drafter's recipe: the finished folder, its figures, and its card."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from visspec.accept.exact import Exact
from visspec.accept.rejection import Rejection
from visspec.io.provenance import provenance
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.safe_drafter import SafeDrafter
from visspec.loop.stats import acceptance_by_depth
from visspec.models.distilled.drafter import DistilledDrafter
from visspec.models.drafting.checkpoint import PROVENANCE
from visspec.models.image_codes.target import ImageAR
from visspec.models.janus.target import Janus
from visspec.toys.recipes import cards
from visspec.toys.recipes.distilled_data import FIRST_SEED, painter
from visspec.toys.recipes.distilled_draw import LAYERS, begun
from visspec.toys.recipes.painter_drafter import held_out, request_of, temperature_of
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.worlds import world
from visspec.types import Acceptance, State

NAME = "painter-distilled"
SEED = HELD_OUT_SEED + 1000  # noise of the measured pictures, of no other stage
BATCH = 16
SHAPES = ((24, 1), (24, 2), (24, 4), (12, 6), (16, 6), (32, 6))  # levels, refine
FEW = 16  # pictures that these, and `rejection`, are measured on

CARD = """---
license: apache-2.0
library_name: visspec
---

# The painter's distilled drafter

Distilled Decoding (arXiv 2412.17153) turned into a drafter for `models/zoo/painter`: a causal decoder of {layers}
layers of width {hidden}, begun as the painter's layers {first}, that reads codes and guesses and gives the painter's
law *after* guidance {guidance} from one stream. The argmax of that law and a place's Gumbel numbers is the place's next
guess; a draft of {levels} places takes at most {refine} passes of it. {parameters:.2f} million parameters,
{megabytes:.1f} MB in half precision; embeddings of words and codes are the painter's.

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("painter", drafter="painter-distilled")   # acceptance="exact"
pipe("a photo of a red circle", seed=0).images[0]   # the image of plain decoding for that seed, always
```

Any other model is refused by its configuration; another guidance scale is drafted for, less well, and warned of.

## Measured

Passes = passes of the painter for a picture of {positions} codes, the prompt's included (plain decoding:
{positions}). Prompts spread over the suite, noise never trained on, guidance {guidance}, temperature {temperature},
weights as stored here, {levels} places of at most {refine} passes.

| rule | pictures | passes | passes a token | drafter's passes a round | pictures of plain decoding for the seed |
|---|---|---|---|---|---|
{rules}

Accepted / reached by depth, `exact`: {depths}.

Other drafts, `exact`, {few} pictures (`drafter="painter-distilled:levels=16,refine=4"`):

| places | at most | passes | drafter's passes a round |
|---|---|---|---|
{shapes}

The clock was not measured here.

## Training

`python -m visspec.toys.recipes.painter_distilled --out RUN --export models/zoo/painter-distilled`: the painter drew
{pictures:,} pictures of prompts of its grammar at its own settings; {steps:,} steps of {rows} of them, cross-entropy
with its laws for the first {opening:.0%} and total variation after it, {minutes:.0f} minutes on one of two cores shared
with other work. {note}
`provenance.json` has seeds and digests. The paper's student learns an ODE's noise and draws by itself; here the noise
is Gumbel numbers, of which the painter's picture is a function without error, and every draft is verified.

Limits: it knows this painter at this size, at its own guidance, and its own temperature without cuts best.
"""


def prompts(count: int) -> list[str]:
    """Prompts of the suite, of which the first `FEW` are spread over it as all are."""
    texts, stride = held_out(world("shapes"), count), max(1, count // FEW)
    return [text for first in range(stride) for text in texts[first::stride]]


def drawn(family: Janus, drafter: DistilledDrafter | None, rule: Acceptance, texts: list[str]) -> list[State]:
    """Held-out pictures in batches, at a fixed depth of drafts."""
    target, states = ImageAR(family), []
    levels = 1 if drafter is None else drafter.traits.levels
    for start in range(0, len(texts), BATCH):
        request = request_of(family, texts[start : start + BATCH], SEED + start, family.default_guidance)
        guarded = None if drafter is None else SafeDrafter(drafter, target.capabilities)
        states.append(decode(target, guarded, rule, request, FixedLength(levels)))
    return states


def figures(states: list[State], plain: list[State], positions: int) -> dict[str, Any]:
    """Passes, and how many pictures are those of plain decoding."""
    rounds = [r for state in states for r in state.trace.rounds]
    pairs = [pair for one, two in zip(states, plain) for pair in zip(one.tokens, two.tokens)]
    passes = 1 + sum(len(r.committed) for r in rounds) / len(pairs)
    calls = sum(state.trace.calls["draft_pass"] for state in states) / max(len(rounds), 1)
    return {
        "pictures": len(pairs), "passes": round(passes, 2), "passes_a_token": round(passes / positions, 4),
        "draft_passes_a_round": round(calls, 2), "identical": sum(one == two for one, two in pairs),
        "faults": sum(state.trace.faults for state in states),
    }  # fmt: skip


def measured(family: Janus, folder: Path, count: int) -> dict[str, Any]:
    """Figures of a finished folder."""
    positions, texts = family.layout().positions, prompts(count)
    few, plain = texts[:FEW], drawn(family, None, Exact(), texts)
    drafter = DistilledDrafter.from_pretrained(folder, family)
    rules: dict[str, Any] = {}
    shapes = []
    for name, rule in (("exact", Exact()), ("rejection", Rejection())):
        states = drawn(family, drafter, rule, texts if name == "exact" else few)
        rules[name] = figures(states, plain, positions)
        if name == "exact":
            rounds = [r for state in states for r in state.trace.rounds]
            rules[name]["by_depth"] = [round(share, 3) for share in acceptance_by_depth(rounds)]
    for levels, refine in SHAPES:
        other = DistilledDrafter.from_pretrained(folder, family, levels=levels, refine=refine)
        shapes.append(
            {"levels": levels, "refine": refine, **figures(drawn(family, other, Exact(), few), plain, positions)}
        )
    return {"rules": rules, "shapes": shapes, "levels": drafter.traits.levels, "refine": drafter.refine}


def finish(options: argparse.Namespace) -> None:
    """Write the folder from the last checkpoint in half precision, read it back, measure it and describe it."""
    saved = torch.load(options.out / "distilled.pt", weights_only=True)
    family = painter(options.target)
    head = begun(family, LAYERS)
    head.load_state_dict(saved["head"])
    folder = options.export or options.out / NAME
    stage = {name: saved[name] for name in ("step", "seconds", "loss")}
    seeds = {"pictures": FIRST_SEED, "draw": 7, "measured": SEED}
    plan = {name: getattr(options, name) for name in ("pictures", "steps", "rows", "rate", "opening")}
    record = provenance(
        family.model, recipe="visspec.toys.recipes.painter_distilled", target=Path(options.target).name,
        stored_as="float16",
        draw=stage, seeds=seeds, plan=plan, note=options.note,
    )  # fmt: skip
    DistilledDrafter(head, family).save_pretrained(folder, record, torch.float16)
    found = measured(family, folder, options.measured)
    record |= {"weights": cards.identity(folder / "model.safetensors"), "measured": found}
    (folder / PROVENANCE).write_text(json.dumps(record, indent=2, default=str) + "\n")
    cards.publish(folder, card(head, family, found, record))
    print(json.dumps({"folder": str(folder), **found["rules"]}), flush=True)


def card(head: Any, family: Janus, found: dict[str, Any], record: dict[str, Any]) -> str:
    """The model card's text."""
    config, plan = head.config, record["plan"]
    rules = [
        f"| `{name}` | {e['pictures']} | {e['passes']} | {e['passes_a_token']} | {e['draft_passes_a_round']} |"
        f" {e['identical']} of {e['pictures']}{'' if name == 'exact' else ', of its law'} |"
        for name, e in found["rules"].items()
    ]
    shapes = [
        f"| {e['levels']} | {e['refine']} | {e['passes']} | {e['draft_passes_a_round']} |" for e in found["shapes"]
    ]
    return CARD.format(
        layers=config.layers, hidden=config.hidden, first=", ".join(map(str, LAYERS)), guidance=config.guidance,
        temperature=temperature_of(family), positions=family.layout().positions,
        levels=found["levels"], refine=found["refine"],
        parameters=sum(p.numel() for p in head.parameters()) / 1e6, megabytes=record["weights"]["bytes"] / 1e6,
        rules="\n".join(rules), shapes="\n".join(shapes), few=found["shapes"][0]["pictures"],
        depths=" ".join(f"{x:.2f}" for x in found["rules"]["exact"]["by_depth"]),
        pictures=plan["pictures"], steps=plan["steps"], rows=plan["rows"], opening=plan["opening"],
        minutes=record["draw"]["seconds"] / 60, note=record["note"],
    )  # fmt: skip
