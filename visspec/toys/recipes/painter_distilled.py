"""`painter-distilled`: the distilled drafter of the included painter, on pictures that the painter draws itself.

Stage `pictures` lets the painter draw at its own guidance and temperature and records what is learnt from, `draw`
teaches the drafter, `finish` measures it and writes the finished folder. On one thread 64 pictures take about 12
seconds and a step of 16 about half a second, so all of it 20 minutes of a core.

Seeds: 7 (draw); those of the pictures are in `visspec.toys.recipes.distilled_data`.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visspec.accept.exact import Exact
from visspec.accept.rejection import Rejection
from visspec.io.files import write_json
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.safe_drafter import SafeDrafter
from visspec.loop.stats import acceptance_by_depth
from visspec.models.distilled.drafter import DistilledDrafter
from visspec.models.image_codes.target import ImageAR
from visspec.models.janus.target import Janus
from visspec.toys.recipes import cards
from visspec.toys.recipes.distilled_data import FIRST_SEED, painter, write_pictures
from visspec.toys.recipes.distilled_draw import LAYERS, DistilStage, begun
from visspec.toys.recipes.painter_drafter import held_out, request_of, temperature_of
from visspec.toys.recipes.recipe import Options, Recipe, trained
from visspec.toys.world.scene import HELD_OUT_SEED
from visspec.toys.world.worlds import world
from visspec.types import Acceptance, State

NAME = "painter-distilled"
SEED = HELD_OUT_SEED + 1000  # noise of the measured pictures, of no other stage
BATCH = 16
SHAPES = ((24, 1), (24, 2), (24, 4), (12, 6), (16, 6), (32, 6))  # levels, refine
FEW = 16  # pictures that these, and `rejection`, are measured on


@dataclass
class DistilledOptions(Options):
    """Options of the recipe."""

    target: str = option("the painter that draws: an included one, or a folder", "painter")
    pictures: int = option("pictures to learn from", 1664)
    steps: int = option("steps of the draw stage", 600)
    rows: int = option("pictures in a batch of one worker", 16)
    rate: float = option("peak learning rate", 1e-3)
    opening: float = option("share of the steps that learn by cross-entropy alone", 0.5)
    every: int = option("steps between reports and checkpoints", 150)
    watched: int = option("held-out pictures of a report during training", 8)
    measured: int = option("held-out pictures that the finished one is measured on", 64)
    export: Path | None = option("folder to write the finished drafter to (default: inside --out)", None)


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
    record = provenance(
        family.model, recipe=f"visspec.toys {NAME}", target=Path(options.target).name, stored_as="float16",
        draw={name: saved[name] for name in ("step", "seconds", "loss")},
        seeds={"pictures": FIRST_SEED, "draw": 7, "measured": SEED},
        plan={name: getattr(options, name) for name in ("pictures", "steps", "rows", "rate", "opening")},
        note=options.note,
    )  # fmt: skip
    DistilledDrafter(head, family).save_pretrained(folder, record, torch.float16)
    found = measured(family, folder, options.measured)
    record |= {"weights": cards.identity(folder / "model.safetensors"), "measured": found}
    write_json(folder / cards.PROVENANCE, record)
    cards.publish(folder, card(head, family, record))
    cards.say(folder, **found["rules"])


def card(head: Any, family: Janus, record: dict[str, Any]) -> str:
    """The card, from the provenance of the weights."""
    found = record["measured"]
    columns = ("pictures", "passes", "passes_a_token", "draft_passes_a_round")
    rules = (
        [f"`{name}`", *(str(e[c]) for c in columns),
         f"{e['identical']} of {e['pictures']}{'' if name == 'exact' else ', of its law'}"]
        for name, e in found["rules"].items()
    )  # fmt: skip
    other = ("levels", "refine", "passes", "draft_passes_a_round")
    return cards.fill(
        NAME,
        record=record,
        config=head.config,
        first=LAYERS,
        temperature=temperature_of(family),
        positions=family.layout().positions,
        parameters=cards.millions(head),
        megabytes=record["weights"]["bytes"] / 1e6,
        rules=cards.table(rules),
        shapes=cards.table([str(e[c]) for c in other] for e in found["shapes"]),
        few=found["shapes"][0]["pictures"],
        depths=" ".join(f"{x:.2f}" for x in found["rules"]["exact"]["by_depth"]),
        minutes=record["draw"]["seconds"] / 60,
    )


DRAFTER = Recipe(
    NAME,
    "Train the distilled drafter of the included painter.",
    DistilledOptions,
    {"pictures": write_pictures, "draw": trained(DistilStage), "finish": finish},
)
