"""The compiled stock class as an arm of `visspec bench image`, and what a record holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visspec.eval.speed import paired as speed
from visspec.eval.speed.paired import Run
from visspec.models.targets.compiled import stepwise
from visspec.models.targets.families import family_of
from visspec.models.targets.image_ar import Family


def compiled_family(pipe: Any) -> Family:
    """The family of the stock model with compiled passes. Raises ValueError for one that can't be compiled."""
    model = stepwise(pipe.model, pipe.family.decoder)
    return family_of(model, pipe.processor, **pipe.parts)


def compiled_record(
    rows: Sequence[dict[str, Any]], ours: dict[str, Any], runs: dict[str, list[Run]], prompts: int
) -> dict[str, Any]:
    """What a record holds of the compiled stock class; its rows get the ratio over that, and what was compiled late."""
    stock = runs["stock_compiled"]
    for line in rows:
        passes = ours[line["name"]].passes
        against = speed.compare(stock, runs[line["name"]])
        line["speedup_over_compiled"] = against["speedup"]
        line["speedup_over_compiled_ci95"] = against["speedup_ci95"]
        line["compiled"] = passes is not None and not passes.refused
        line["recompilations"] = passes.late if passes else 0
    return {"baselines": {"transformers_compiled": {"seconds_per_image": sum(r.seconds for r in stock) / prompts}}}
