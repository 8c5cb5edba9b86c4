"""Other targets beside the methods of `visspec bench image`: pipelines of the same model that draw from another
distribution, each a row of the table, drawn plainly; and the stock class compiled. And which of the prompts a model is
taught.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
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


def other_targets(
    pipe: ImagePipeline, named: Iterable[str], given: Mapping[str, Sequence[float]]
) -> dict[str, ImagePipeline]:
    """Pipelines of the same model that are other targets, by the names of their rows: those of the presets `named` that
    have parts, and one for each value of the options `given`: what faster sampling is to be compared with. Raises
    ValueError for a model that an option is not for, and for what its family refuses.
    """
    family, make = pipe.family, partial(ImagePipeline, pipe.model, pipe.processor)
    scales, code = family.draws == "maps", presets.MAPS["code"].parts

    def several_at_once(count: float) -> ImagePipeline:  # as published MAR
        return make(parts=pipe.parts, order=zoo.load("visspec.models.mar.parallel:ParallelMAR")(count))

    steps = "denoising_steps"
    options = (  # its name, whether it fits, what a family that it doesn't fit draws, the name of a row, its pipeline
        (steps, family.draws == "vectors", "codes", "plain, {} steps", lambda n: make(parts=pipe.parts | {steps: n})),
        ("iterations", family.parallel, "a token at a time", "plain, {} iterations", several_at_once),
        ("handover", scales, "no scales", "code, {} scales", lambda n: pipe.with_parts(code | {"handover": n})),
        ("share", scales, "no scales", "scalekv, {:g}", lambda share: pipe.with_parts({"budget": share})),
    )
    table = presets.IMAGES[family.draws]
    found = {name: pipe.with_parts(table[name].parts) for name in named if name in table and table[name].parts}
    for option, fits, what, row, pipeline in options:
        for value in given.get(option, ()):
            if not fits:
                shown = option.replace("_", "-")
                raise ValueError(f"--{shown}: got {value}, expected none: {family.name} draws {what}")
            found[row.format(value)] = pipeline(value)
    return found


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


def plain_setup(pipe: ImagePipeline) -> str:
    """The "drafter/rule" of plain decoding."""
    return str(zoo.preset("plain", pipe.family.draws))
