"""The compiled stock class as an arm of benches, and what a record holds of it and of ours compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visspec.eval.bench import paired as speed
from visspec.eval.bench.paired import ArmRun
from visspec.loop.setup import DecodingSetup
from visspec.models.image_codes.families import family_of
from visspec.models.image_codes.target import Family
from visspec.models.runner.compiled import stepwise


def compiled_family(pipe: Any) -> Family:
    """The family of the stock model with compiled passes. Raises ValueError for one that can't be compiled."""
    model = stepwise(pipe.model, pipe.family.decoder)
    return family_of(model, pipe.processor, **pipe.parts)


def compilations(setup: DecodingSetup) -> dict[str, Any]:
    """Whether passes ran compiled, and how many graphs were made after a warm-up, the drafter's included."""
    target, found = setup.target.passes, setup.passes
    return {
        "compiled": target is not None and not target.refused,
        "graphs": sum(p.graphs for p in found), "recompilations": sum(p.late for p in found),
    }  # fmt: skip


def compiled_record(
    rows: Sequence[dict[str, Any]], ours: dict[str, Any], runs: dict[str, list[ArmRun]], prompts: int
) -> dict[str, Any]:
    """What a record holds of the compiled stock class; its rows get the ratio over that, and what was compiled late."""
    stock = runs["stock_compiled"]
    for line in rows:
        line |= speed.over("speedup_over_compiled", stock, runs[line["name"]])
        line |= compilations(ours[line["name"]].setup)
    return {"baselines": {"transformers_compiled": {"seconds_per_image": sum(r.seconds for r in stock) / prompts}}}
