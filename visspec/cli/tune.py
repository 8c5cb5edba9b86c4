"""`visspec tune`: chooses drafter, draft length and batch size for a model and images or prompts, by measurement.

Every choice runs on half of the inputs next to plain decoding, which predicts its speed-up. The best few run on the
other half, which decides between them. `tune_image` handles models that draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table
from transformers import PreTrainedModel, ProcessorMixin

from visspec import presets, registry
from visspec.api import loading, sources
from visspec.api.captions import default_prompt, prepare
from visspec.api.text.accelerate import accelerate, default_drafter
from visspec.cli.arguments import SamplingOptions, TargetOptions
from visspec.cli.bench import BenchOptions, CaptionArm, groups_of, measured_on, readable, table
from visspec.cli.bench_text import read_prompts
from visspec.eval.bench import paired
from visspec.io.options import Positive, option
from visspec.types import ConfiguredModel

PAYS = 1.02  # minimum speed-up of a choice with drafts, as in `loop.draft_length`
FINALISTS = 3  # number of best predictions that are measured on the other inputs
PLAIN = "none"
TREE = "width=4"  # compared with chains, for drafters that grow trees
FIGURES = (
    "predicted_speedup",
    "predicted_ci95",
    "measured_speedup",
    "measured_ci95",
)  # figures of the choice in the record


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

    def keep(self, model: ConfiguredModel, record: dict[str, Any], view: Table) -> None:
        """Print a record with a sentence on the choice, and write both."""
        self.end(record, view)
        print(verdict(record))
        if self.out is not None:
            about = {"measured_speedup": record["measured_speedup"], "provenance": record["provenance"]}
            presets.write_preset(self.out, model, record["choice"], **about)


def run(arguments: Options) -> None:
    if arguments.model is None or (arguments.images is None) == (arguments.prompts is None):
        raise ValueError("tune: Pass --model, and --images (for captions) or --prompts (for text or pictures).")
    arguments.begin()
    texts = arguments.prompts is not None and loading.is_text_model(arguments.model, arguments.trust_remote_code)
    if arguments.prompts is not None and not texts:
        from visspec.cli import tune_image

        tune_image.run(arguments)
        return
    records = None if texts else sources.records(arguments.images or ())
    model, processor = loading.load(arguments.model, needs_pictures=not texts, **arguments.hardware)
    own = default_drafter(model)[0]
    drafters = arguments.drafters or list(dict.fromkeys(["ngram", *([str(own)] if own else [])]))
    what, where = ("prompts", arguments.prompts) if texts else ("images", ", ".join(arguments.images or ()))
    given = (
        ((image, record.prompt) for image, record in readable(records))
        if records
        else (([], prompt.text) for prompt in read_prompts(arguments.prompts))
    )
    items = list(islice(given, 2 * arguments.count))  # pairs of an image, or an empty list, and its prompt
    if len(items) < (wanted := 2 * max(arguments.batches)):
        raise ValueError(f"{what}: got {len(items)} that can be read, expected {wanted} or more in {where}.")
    record = tune(model, processor, items, drafters, arguments)
    title = f"{record['n_prompts']} {what} measured, {record['n_checked']} checked"
    caption = "d: levels of a draft; rows: of a batch; speed-up over plain decoding in batches of the same size"
    whole = [head for head in COLUMNS if head != "drafter"]
    arguments.keep(model, record, table(title, record["rows"], COLUMNS, caption, whole=whole))


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
    model: PreTrainedModel, processor: ProcessorMixin, images: Sequence[tuple], drafters: list[str], arguments: Options
) -> dict[str, Any]:
    """Measure all rows on the first half of the pairs and the best on the second. Returns the record."""
    half, rule = len(images) // 2, arguments.acceptance
    request = arguments.prompt or default_prompt(str(model.name_or_path))
    specs, lengths = candidates(drafters, model), sorted(set(arguments.lengths))

    def batches(some: Sequence[tuple], size: int) -> list[dict[str, Any]]:
        whole = [zip(*group) for group in groups_of(some, size) if len(group) == size]
        return [prepare(processor, list(i), [p or request for p in asked], model) for i, asked in whole]

    firsts, others = ({n: batches(some, n) for n in arguments.batches} for some in (images[:half], images[half:]))
    rows: dict[int, list[dict[str, Any]]] = {}
    for size in arguments.batches:
        common = {"acceptance": rule, "batch_size": size}
        rows[size] = [{"drafter": PLAIN, "levels": 0, **common}]
        rows[size] += [{"drafter": spec, "levels": n, **common} for spec in specs for n in lengths]
        measure("predicted", model, rows[size], firsts[size], others[size][0], arguments)
    found = [row for some in rows.values() for row in some]
    worth = [row for row in found if row["levels"] == 0 or row["predicted_speedup"] >= PAYS]
    best = sorted(worth, key=lambda row: -row["predicted_images_per_second"])[:FINALISTS]
    checked = []
    for size in {row["batch_size"] for row in best}:
        same = [rows[size][0], *(row for row in rows[size][1:] if row in best)]
        measure("measured", model, same, others[size], firsts[size][0], arguments)
        checked += [row for row in same if row["levels"] == 0 or row["measured_speedup"] >= PAYS]
    choice = max(checked, key=lambda row: row["measured_images_per_second"])
    record = measured_on(model, seed=arguments.seed) | {"bench": "tune", "pays": choice["levels"] > 0, "rows": found}
    record["choice"] = {name: choice[name] for name in ("drafter", "acceptance", "levels", "batch_size")}
    record |= {name: choice[name] for name in FIGURES}
    record["best_predicted"] = max((row["predicted_speedup"] for row in found if row["levels"]), default=1.0)
    record["guarantee"] = "exact" if choice["levels"] == 0 else registry.rule(rule).traits.guarantee
    record |= {"n_prompts": half, "n_checked": len(images) - half, "seed": arguments.seed}
    return record | arguments.generation


def measure(what: str, model: PreTrainedModel, rows: list[dict], inputs: list, warm: dict, arguments: Options) -> None:
    """Measure rows of one batch size, the first being plain decoding, and store fields with the prefix `what` in them.
    Every row has its own drafter and is warmed up on a batch of other images, `warm`, so that drafters that remember
    earlier requests (`shared=true`) have not seen any image.
    """
    options, arms = arguments.generation, {}
    for number, row in enumerate(rows):
        levels = {"acceptance": row["acceptance"], "levels": row["levels"], "adaptive": False}
        fast = accelerate(model, row["drafter"], **levels) if row["levels"] else accelerate(model, None)
        arms[str(number)] = CaptionArm(fast, options, arguments.seed)
    runs, failures = paired.interleave(arms, list(enumerate(inputs)), [(len(inputs), warm)])
    if failures:
        raise ValueError(f"images: Captioning failed: {failures[0]}")
    for row, found in zip(rows, runs.values()):
        ratio = paired.compare(runs["0"], found, per_token=options["do_sample"])
        row |= {f"{what}_speedup": ratio["speedup"], f"{what}_ci95": ratio["speedup_ci95"]}
        images = sum(len(one.tokens) for one in found)
        row[f"{what}_images_per_second"] = images / sum(one.seconds for one in found)
        row |= {"tau": paired.tau(found)["tau"], "identical": ratio["identical"], "compared": ratio["compared"]}


def verdict(record: dict[str, Any]) -> str:
    """Return a sentence on the choice."""
    choice, (low, high) = record["choice"], record["predicted_ci95"]
    if not record["pays"]:
        best = paired.in_words(record["best_predicted"])
        return f"plain decoding is the fastest; the best drafter would be {best}"
    what = f"drafts of {choice['levels']} levels, batches of {choice['batch_size']}" if "levels" in choice else ""
    chosen = ", ".join(filter(None, (choice["drafter"], what or choice["acceptance"])))
    return (
        f"choice: {chosen}; predicted {record['predicted_speedup']:.2f} ({low:.2f}..{high:.2f}) times plain decoding,"
        f" measured {record['measured_speedup']:.2f} on {record['n_checked']} others; {record['guarantee']}"
    )


COLUMNS = {
    "drafter": "{drafter}",
    "d": "{levels}",
    "rows": "{batch_size}",
    "tau": "{tau:.2f}",
    "predicted": "{predicted_speedup:.2f}",
    "95 %": "{predicted_ci95[0]:.2f}..{predicted_ci95[1]:.2f}",
    "img/s": "{predicted_images_per_second:.2f}",
    "measured": "{measured_speedup:.2f}",
}
