"""Other targets beside the methods of `visspec bench image`: pipelines of the same model that draw from another
distribution, each a row of the table, drawn plainly; and the stock class compiled. And which of the prompts a model is
taught.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from visspec.api import presets, zoo
from visspec.api.images import ImagePipeline
from visspec.cli.bench import compilations
from visspec.eval.bench import paired as speed
from visspec.models.image_codes.families import family_of
from visspec.models.image_codes.target import Family
from visspec.models.runner.compiled import stepwise


def taught(family: Family, rows: Sequence[dict]) -> list[str] | None:
    """The tasks of prompts that are all classes of a family that has classes with names; None for any other."""
    known = set(family.labels)
    tasks = list(dict.fromkeys(row["tag"] for row in rows))
    found = [tag for tag in tasks if all(row["prompt"] in known for row in rows if row["tag"] == tag)]
    return found or None


def fewer_steps(pipe: ImagePipeline, counts: Sequence[int]) -> dict[str, ImagePipeline]:
    """Pipelines of the same model whose head takes other numbers of steps, by the names of their rows: what faster
    sampling is to be compared with. Raises ValueError for a model of codes.
    """
    if counts and pipe.family.draws != "vectors":
        raise ValueError(f"--denoising-steps: got {counts[0]}, expected none: {pipe.family.name} draws codes")
    parts = {f"plain, {count} steps": pipe.parts | {"denoising_steps": count} for count in counts}
    return {name: ImagePipeline(pipe.model, pipe.processor, parts=some) for name, some in parts.items()}


def fewer_passes(pipe: ImagePipeline, counts: Sequence[int]) -> dict[str, ImagePipeline]:
    """Pipelines of the same model that draw several tokens in a pass, as published MAR, by the names of their rows.

    Raises ValueError for a model that can't.
    """
    if counts and not pipe.family.parallel:
        raise ValueError(f"--iterations: got {counts[0]}, expected none: {pipe.family.name} draws a token at a time")
    found = {}
    for count in counts:
        order = zoo.load("visspec.models.mar.parallel:ParallelMAR")(count)
        found[f"plain, {count} iterations"] = ImagePipeline(pipe.model, pipe.processor, parts=pipe.parts, order=order)
    return found


def composed(
    pipe: ImagePipeline, named: Iterable[str], handovers: Sequence[int], shares: Sequence[float]
) -> dict[str, ImagePipeline]:
    """Pipelines of the same model that are other targets, by the names of their rows: those presets that have parts,
    CoDe with other numbers of scales and ScaleKV with other shares of the cache. Raises ValueError for a model that
    draws no scales, and for what its family refuses.
    """
    table = presets.IMAGES[pipe.family.draws]
    if pipe.family.draws != "maps":
        for option, values in (("handover", handovers), ("share", shares)):
            if values:
                raise ValueError(f"--{option}: got {values[0]}, expected none: {pipe.family.name} draws no scales")
    wanted = {name: table[name].parts for name in named if name in table and table[name].parts}
    if pipe.family.draws == "maps":
        code = presets.MAPS["code"].parts
        wanted |= {f"code, {n} scales": code | {"handover": n} for n in handovers}
        wanted |= {f"scalekv, {share:g}": {"budget": share} for share in shares}
    return {name: pipe.parted(parts) for name, parts in wanted.items()}


def compiled_family(pipe: ImagePipeline) -> Family:
    """The family of the stock model with compiled passes. Raises ValueError for one that can't be compiled."""
    return family_of(stepwise(pipe.model, pipe.family.decoder), pipe.processor, **pipe.parts)


def compiled_record(
    rows: Sequence[dict[str, Any]], ours: dict[str, Any], runs: dict[str, list[speed.ArmRun]], prompts: int
) -> dict[str, Any]:
    """What a record holds of the compiled stock class; its rows get the ratio over that, and what was compiled late."""
    stock = runs["stock_compiled"]
    for line in rows:
        line |= speed.over("speedup_over_compiled", stock, runs[line["name"]])
        line |= compilations(ours[line["name"]].setup)
    return {"baselines": {"transformers_compiled": {"seconds_per_image": sum(r.seconds for r in stock) / prompts}}}


def undrafted(pipe: ImagePipeline) -> str:
    """The "drafter/rule" of plain decoding."""
    return str(zoo.preset("plain", pipe.family.draws))
