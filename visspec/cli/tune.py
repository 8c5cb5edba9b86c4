"""`visspec tune`: chooses drafter, draft length and batch size for a model and images or prompts, by measurement.

Every choice runs on half of the inputs next to plain decoding, which predicts its speed-up. The best few run on the
other half, which decides between them. For a model that draws, the choice is the fastest exact method, or of one rule;
it is a fixed one, because adaptive lengths would make samples depend on timing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from visspec import presets, registry
from visspec.api import loading, sources
from visspec.api.captions import default_prompt
from visspec.api.images.pipeline import ImagePipeline
from visspec.api.sources import Record
from visspec.api.text.accelerate import accelerate, default_drafter
from visspec.cli.arguments import SamplingOptions, TargetOptions
from visspec.cli.bench import BenchOptions, CaptionArm, Cell, Prompt, in_groups, measured_on, readable, table
from visspec.cli.bench_image import bench, fitting
from visspec.cli.bench_text import read_prompts
from visspec.eval.bench import paired
from visspec.io.options import Positive, option

PAYS = 1.02  # minimum speed-up of a choice with drafts, as in `loop.draft_length`
FINALISTS = 3  # number of best predictions that are measured on the other inputs
PLAIN = "none"
TREE = "width=4"  # compared with chains, for drafters that grow trees
FIGURES = [f"{what}_{figure}" for what in ("predicted", "measured") for figure in ("speedup", "ci95")]  # of the choice
DRAFTS = [f"image-eagle:{shape}" for shape in ("levels=2", "levels=4", "levels=8", "tree=dynamic", "tree=static")]
WINDOWS = [f"jacobi:redraw=maximal,window={n}" for n in (8, 16, 24)]
EXACT = [f"jacobi:window={n}/exact" for n in (4, 8, 16, 24)] + [f"{drafter}/rejection" for drafter in WINDOWS]
EXACT += [f"{DRAFTS[n]}/{rule}" for n in range(3) for rule in ("exact", "block")]
EXACT += [f"{DRAFTS[n]}/rejection" for n in (3, 4)] + ["distilled/exact"]
PREDICTED: dict[str, Cell] = {
    "predicted": "{predicted_speedup:.2f}",
    "95 %": "{predicted_ci95[0]:.2f}..{predicted_ci95[1]:.2f}",
}
COLUMNS: dict[str, Cell] = {"drafter": "{drafter}", "d": "{levels}", "rows": "{batch_size}", "tau": "{tau:.2f}"}
COLUMNS |= PREDICTED | {"img/s": "{predicted_images_per_second:.2f}", "measured": "{measured_speedup:.2f}"}
IMAGE_COLUMNS: dict[str, Cell] = {"way": "{name}", "passes over plain": "{nfe_reduction:.2f}", **PREDICTED}
IMAGE_COLUMNS |= {"measured": "{measured_speedup:.2f}", "drift": "{drift_per_token:.3f}"}


@dataclass(kw_only=True)
class Options(BenchOptions, SamplingOptions, TargetOptions):
    images: list[str] | None = option("for a model that captions: images as for `visspec caption`", None)
    prompts: Path | None = option(
        "for a text or image model: file of prompts, as lines or JSON lines with `prompt`", None
    )
    drafters: list[str] | None = option("drafters: names or folders (default: ngram, and the model's own)", None)
    lengths: list[Positive] = option("draft lengths in levels", [2, 4, 8])
    batches: list[Positive] = option("batch sizes", [1, 4])
    count: Positive = option("number of images or prompts for prediction, and again for measurement", 16)
    acceptance: str = option("acceptance rule with options, e.g. typical:epsilon=0.1", "exact")
    prompt: str | None = option("question about each image", None)
    out: Path | None = option("file for the choice, for accelerate(model, preset=FILE)", None, writes="file")


def run(arguments: Options) -> None:
    if arguments.model is None or (arguments.images is None) == (arguments.prompts is None):
        raise ValueError("tune: Pass --model, and --images (for captions) or --prompts (for text or pictures).")
    arguments.begin()
    if arguments.prompts is None or loading.is_text_model(arguments.model, arguments.trust_remote_code):
        model, record = tune_captions(arguments)
        caption = "d: levels of a draft; rows: of a batch; speed-up over plain decoding in batches of the same size"
        view = partial(table, rows=record["rows"], columns=COLUMNS, caption=caption, whole=[*COLUMNS][1:])
    else:
        model, record = tune_images(arguments, arguments.prompts)
        rows = sorted(record["rows"], key=lambda row: -row["predicted_speedup"])
        view = partial(table, rows=rows, columns=IMAGE_COLUMNS)
    arguments.end(record, view(f"{record['n_prompts']} inputs measured, {record['n_checked']} checked"))
    print(verdict(record))
    if arguments.out is not None:
        about = {"measured_speedup": record["measured_speedup"], "provenance": record["provenance"]}
        presets.write_preset(arguments.out, model, record["choice"], **about)


# --- captions and texts -----------------------------------------------------------------------------------------------


def tune_captions(arguments: Options) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Tune a model that captions images or answers prompts. Returns it with the record."""
    texts = arguments.images is None
    records = None if texts else sources.records(arguments.images or ())
    model, processor = loading.load(arguments.model, needs_pictures=not texts, **arguments.hardware)
    own = default_drafter(model)[0]
    drafters = arguments.drafters or list(dict.fromkeys(["ngram", *([str(own)] if own else [])]))
    what, where = ("prompts", arguments.prompts) if texts else ("images", ", ".join(arguments.images or ()))
    request = arguments.prompt or default_prompt(str(model.name_or_path))
    prompts = read_prompts(arguments.prompts) if records is None else readable(records)
    items = [replace(one, prompt=one.prompt or request) for one in islice(prompts, 2 * arguments.count)]
    if len(items) < (least := 2 * max(arguments.batches)):
        raise ValueError(f"{what}: got {len(items)} that can be read, expected {least} or more in {where}.")
    return model, tune(model, processor, items, drafters, arguments)


def candidates(drafters: Sequence[str], model: PreTrainedModel) -> list[str]:
    """Return the drafters, each also with trees if it can grow them and names no structure."""
    specs = []
    for spec in drafters:
        drafter, _ = registry.drafter(spec, model)
        shaped = any(f"{name}=" in spec for name in ("width", "tree", "confidence"))
        grows = hasattr(type(drafter), "for_model") and not drafter.traits.samples and not shaped
        specs += [spec, *([f"{spec}{',' if ':' in spec else ':'}{TREE}"] if grows else [])]
    return specs


def tune(
    model: PreTrainedModel, processor: ProcessorMixin, items: Sequence[Record], drafters: list[str], arguments: Options
) -> dict[str, Any]:
    """Measure all rows on the first half of the records and the best on the second. Returns the record."""
    half, rule = len(items) // 2, arguments.acceptance
    specs, lengths = candidates(drafters, model), sorted(set(arguments.lengths))

    def batches(some: Sequence[Record], size: int) -> list[Prompt]:
        return in_groups(processor, some[: len(some) // size * size], size, model)

    firsts, others = ({n: batches(some, n) for n in arguments.batches} for some in (items[:half], items[half:]))
    rows: dict[int, list[dict[str, Any]]] = {}
    for size in arguments.batches:
        common = {"acceptance": rule, "batch_size": size}
        rows[size] = [{"drafter": PLAIN, "levels": 0, **common}]
        rows[size] += [{"drafter": spec, "levels": n, **common} for spec in specs for n in lengths]
        measure("predicted", model, rows[size], firsts[size], others[size][0], arguments)
    measured = [row for some in rows.values() for row in some]
    worth = [row for row in measured if row["levels"] == 0 or row["predicted_speedup"] >= PAYS]
    best = sorted(worth, key=lambda row: -row["predicted_images_per_second"])[:FINALISTS]
    checked = []
    for size in {row["batch_size"] for row in best}:
        same = [rows[size][0], *(row for row in rows[size][1:] if row in best)]
        measure("measured", model, same, others[size], firsts[size][0], arguments)
        checked += [row for row in same if row["levels"] == 0 or row["measured_speedup"] >= PAYS]
    choice = max(checked, key=lambda row: row["measured_images_per_second"])
    record = measured_on(model, seed=arguments.seed) | {"bench": "tune", "pays": choice["levels"] > 0, "rows": measured}
    record["choice"] = {name: choice[name] for name in ("drafter", "acceptance", "levels", "batch_size")}
    record |= {name: choice[name] for name in FIGURES}
    record["best_predicted"] = max((row["predicted_speedup"] for row in measured if row["levels"]), default=1.0)
    record["guarantee"] = "exact" if choice["levels"] == 0 else registry.rule(rule).traits.guarantee
    record |= {"n_prompts": half, "n_checked": len(items) - half, "seed": arguments.seed}
    return record | arguments.generation


def measure(
    what: str, model: PreTrainedModel, rows: list[dict], prompts: list[Prompt], warm: Prompt, arguments: Options
) -> None:
    """Measure rows of one batch size, the first being plain decoding, and store fields with the prefix `what` in them.
    Every row has its own drafter and is warmed up on a batch of other images, `warm`, so that drafters that remember
    earlier requests (`shared=true`) have not seen any image.
    """
    options, arms = arguments.generation, {}
    for number, row in enumerate(rows):
        levels = {"acceptance": row["acceptance"], "levels": row["levels"], "adaptive": False}
        fast = accelerate(model, row["drafter"], **levels) if row["levels"] else accelerate(model, None)
        arms[str(number)] = CaptionArm(fast, options, arguments.seed)
    runs, failures = paired.interleave(arms, prompts, [warm])
    if failures:
        raise ValueError(f"images: Captioning failed: {failures[0]}")
    for row, arm_runs in zip(rows, runs.values()):
        ratio = paired.compare(runs["0"], arm_runs, per_token=options["do_sample"])
        row |= {f"{what}_speedup": ratio["speedup"], f"{what}_ci95": ratio["speedup_ci95"]}
        images = sum(len(one.tokens) for one in arm_runs)
        row[f"{what}_images_per_second"] = images / sum(one.seconds for one in arm_runs)
        row |= {"tau": paired.tau(arm_runs)["tau"], "identical": ratio["identical"], "compared": ratio["compared"]}


# --- pictures ---------------------------------------------------------------------------------------------------------


def tune_images(arguments: Options, file: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Tune a model that draws. Returns it with the record."""
    pipe = ImagePipeline.from_pretrained(arguments.model, **arguments.hardware)
    pipe.set_progress_bar_config(disable=True)
    count = 2 * arguments.count
    texts = sources.texts(file)[:count]
    if len(texts) < count:
        raise ValueError(f"--prompts: got {len(texts)} in {file}, expected {count} or more (--count).")
    return pipe.model, measure_ways(pipe, texts, fitting(pipe, ways(pipe, arguments.acceptance)), arguments.seed)


def ways(pipe: ImagePipeline, rule: str) -> dict[str, str]:
    """Return drafters with an exact or the given rule, as "drafter/rule"; other than raster codes: presets."""
    draws = pipe.family.draws
    if draws == "codes":
        return {way: way for way in (EXACT if rule == "exact" else [f"{one}/{rule}" for one in WINDOWS + DRAFTS])}
    return {str(preset): str(preset) for preset in registry.presets(draws).values() if not preset.parts}


def measure_ways(pipe: ImagePipeline, texts: list[str], arms: dict[str, str], seed: int) -> dict[str, Any]:
    """Return the record: `rows` of all methods on the first half of the prompts, and the choice."""
    half = len(texts) // 2
    record = bench(pipe, texts[:half], arms, {}, seed)
    rows = {row["name"]: row for row in record["rows"]}
    for row in rows.values():
        row |= {"predicted_speedup": row["over_plain"], "predicted_ci95": row["over_plain_ci95"]}
    plain = rows["plain"] | {"measured_speedup": 1.0, "measured_ci95": [1.0, 1.0]}
    drafting = [row for name, row in rows.items() if name != "plain"]
    best = [row["name"] for row in sorted(drafting, key=lambda row: -row["over_plain"])][:FINALISTS]
    for row in bench(pipe, texts[half:], {name: arms[name] for name in best}, {}, seed + half)["rows"] if best else ():
        rows[row["name"]] |= {"measured_speedup": row["over_plain"], "measured_ci95": row["over_plain_ci95"]}
    winner = max((rows[name] for name in best), key=lambda row: row["measured_speedup"], default=plain)
    pays = winner["measured_speedup"] >= PAYS
    choice = winner if pays else plain
    record |= {"bench": "tune", "pays": pays, "n_checked": len(texts) - half}
    record["best_predicted"] = max((rows[name]["over_plain"] for name in best), default=1.0)
    record["choice"] = {name: choice[name] for name in ("drafter", "acceptance", "order")}
    return record | {name: choice[name] for name in (*FIGURES, "guarantee")}


def verdict(record: dict[str, Any]) -> str:
    """Return a sentence on the choice."""
    choice, (low, high) = record["choice"], record["predicted_ci95"]
    if not record["pays"]:
        best = paired.in_words(record["best_predicted"])
        return f"plain decoding is the fastest; the best drafter would be {best}"
    what = f"drafts of {choice['levels']} levels, batches of {choice['batch_size']}" if "levels" in choice else ""
    settings = ", ".join(filter(None, (choice["drafter"], what or choice["acceptance"])))
    return (
        f"choice: {settings}; predicted {record['predicted_speedup']:.2f} ({low:.2f}..{high:.2f}) times plain decoding,"
        f" measured {record['measured_speedup']:.2f} on {record['n_checked']} others; {record['guarantee']}"
    )
