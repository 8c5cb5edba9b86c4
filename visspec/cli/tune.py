"""`visspec tune`: choose drafter, tree, draft length and batch for a model and images, by measurement.

Half of the images are decoded with drafts of mixed lengths, from which the speed-up of every choice is predicted
(`visspec.api.tuning`). The best few are measured against plain decoding on the other half, which decides between them;
with --sweep every row is measured.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from rich.table import Table
from transformers import PreTrainedModel, ProcessorMixin

from visspec.api import loading, ranks, sources, tuned_preset, tuning, zoo
from visspec.api.accelerate import Accelerated, accelerate, default_drafter
from visspec.api.captions import PROMPT, move_inputs, process_batch
from visspec.cli import tune_image
from visspec.cli.arguments import Positive, SamplingOptions, TargetOptions
from visspec.cli.bench import BenchOptions, CaptionArm, table
from visspec.cli.tune_image import FINALISTS, PAYS
from visspec.eval.bench import paired
from visspec.io.images import MAX_PIXELS, open_image, read_image
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.types import ConfiguredModel

WIDTHS = (4,)  # of trees that are tried beside chains, for drafters that grow them
PLAIN = "none"
HOW = ("predicted", "measured")


@dataclass(kw_only=True)
class Options(BenchOptions, SamplingOptions, TargetOptions):
    images: list[str] | None = option(
        "images, as `visspec caption` reads them; none: a model that draws is tuned", None
    )
    prompts: Path | None = option("of a model that draws: lines, or JSON lines (default: included ones)", None)
    drafters: list[str] | None = option("names or folders (default: ngram, and the model's own)", None)
    lengths: list[Positive] = option("of drafts, in levels", [1, 2, 3, 4, 6, 8])
    batches: list[Positive] = option("sizes of batches", [1, 4])
    count: Positive = option("images to measure on, and as many to check on", 16)
    acceptance: str = option("rule and options, e.g. typical:epsilon=0.1", "exact")
    passes: Positive = option("over the images that are measured on", 2)
    prompt: str | None = option("what to ask of each image", None)
    sweep: bool = option("measure every row, to see how good the prediction is", False)
    out: Path | None = option("write the choice to this file, for accelerate(model, FILE)", None, writes="file")
    trees: Path | None = option("measure acceptance by rank, write it to this file and try its tree", None)

    def keep(self, model: ConfiguredModel, record: dict[str, Any], view: Table, verdict: str) -> None:
        """Print a record, and write it and its choice."""
        self.end(record, view)
        print(verdict)
        if self.out is not None:
            about = {"measured_speedup": record["measured_speedup"], "provenance": record["provenance"]}
            tuned_preset.write_preset(self.out, model, record["choice"], **about)


def run(arguments: Options) -> None:
    arguments.begin()
    if arguments.images is None:
        tune_image.run(arguments)
        return
    found = sources.records(arguments.images)
    model, processor = loading.load(arguments.model, **arguments.hardware)
    own = default_drafter(model)[0]
    drafters = arguments.drafters or list(dict.fromkeys(["ngram", *([str(own)] if own else [])]))
    images = list(islice(readable(found), 2 * arguments.count))
    if len(images) < 2 * max(arguments.batches):
        wanted, where = 2 * max(arguments.batches), ", ".join(map(str, arguments.images))
        raise ValueError(f"images: got {len(images)} that can be read, expected {wanted} or more in {where}")
    record = tune(model, processor, images, drafters, arguments)
    arguments.keep(model, record, view(record), verdict(record))


def readable(records: Iterator[sources.Record]) -> Iterator[tuple[Any, str | None]]:
    """Images and prompts; what can't be read is named and passed by."""
    for record in records:
        try:
            if record.error is not None:
                raise ValueError(record.error)
            read = read_image(record.image, record.id, MAX_PIXELS) if isinstance(record.image, bytes) else None
            yield read or open_image(record.image, MAX_PIXELS), record.prompt
        except (ValueError, OSError) as error:
            print(f"visspec: {error}", file=sys.stderr)


def candidates(drafters: Sequence[str], model: PreTrainedModel, trees: Path | None = None) -> list[str]:
    """The drafters, and those of them that grow trees as trees too; with `trees`, also as that file's static tree.
    Raises ValueError as `zoo.drafter`.
    """
    found = []
    for spec in drafters:
        found.append(spec)
        if grows(spec, model):
            shapes = [f"width={width}" for width in WIDTHS] + ([] if trees is None else [f"tree={trees}"])
            found += [f"{spec}{',' if ':' in spec else ':'}{shape}" for shape in shapes]
    return found


def grows(spec: str, model: PreTrainedModel) -> bool:
    """Whether a drafter builds trees whose structure its name does not say."""
    drafter, _ = zoo.drafter(spec, model)
    said = any(f"{option}=" in spec for option in ("width", "tree", "entropy", "confidence"))
    return hasattr(type(drafter), "for_model") and not said and not drafter.traits.samples


def tune(
    model: PreTrainedModel, processor: ProcessorMixin, images: Sequence[tuple], drafters: list[str], arguments: Options
) -> dict[str, Any]:
    """Measure, predict, choose and check (image, prompt) pairs. Returns the JSON object of docs/evaluate.md.

    Acceptance by rank, for `arguments.trees`, is of the first drafter that grows trees.
    """
    options, seed, request, trees = arguments.generation, arguments.seed, arguments.prompt or PROMPT, arguments.trees
    half, batches, lengths = len(images) // 2, arguments.batches, sorted(set(arguments.lengths))

    def grouped(some: Sequence, size: int) -> list[dict[str, Any]]:
        groups = [zip(*some[i : i + size]) for i in range(0, len(some) - size + 1, size)]
        return [
            move_inputs(process_batch(processor, list(i), [p or request for p in asked]), model) for i, asked in groups
        ]

    if trees is not None:
        growing = [spec for spec in drafters if grows(spec, model)][:1]
        if not growing:
            raise ValueError(f"trees: got drafters {', '.join(drafters)}, expected one that grows trees")
        watched = ranks.measure(model, growing[0], grouped(images[:half], 1), seed, **options)
        ranks.write(trees, model, growing[0], watched)
        drafters = [*growing, *(spec for spec in drafters if spec not in growing)]
    specs = candidates(drafters[:1], model, trees) + candidates(drafters[1:], model)

    def arms() -> dict[str, Accelerated]:
        common: dict[str, Any] = {"acceptance": arguments.acceptance, "levels": max(lengths), "adaptive": False}
        return {PLAIN: accelerate(model, None)} | {spec: accelerate(model, spec, **common) for spec in specs}

    rules = {name: arm.rule for name, arm in arms().items()}  # refuses before work
    rows: list[dict[str, Any]] = []
    firsts = {size: grouped(images[:half], size) for size in batches}
    checks = {size: grouped(images[half:], size) for size in batches}
    left = {size: half % size + (len(images) - half) % size for size in batches}
    for size in batches:
        seen = measured(arms, firsts[size], checks[size][0], size, arguments)
        rows += [row for one in seen.values() for row in tuning.predict_speed(one, seen[PLAIN], seed)]
    for row in rows:
        row["acceptance"] = arguments.acceptance
    finalists = tuning.best(rows, PAYS, FINALISTS)
    sizes = {row["batch_size"] for row in finalists}
    asked = finalists + [row for row in rows if row["levels"] == 0 and row["batch_size"] in sizes]
    asked = [row for row in rows if arguments.sweep or row in asked]
    check(model, asked, checks, {size: groups[0] for size, groups in firsts.items()}, options, seed)
    paying = [row for row in finalists if row["levels"] == 0 or row["measured_speedup"] >= PAYS]
    paying += [row for row in asked if row["levels"] == 0]
    choice = max(paying, key=lambda row: row["measured_images_per_second"])
    drafting = [row["predicted_speedup"] for row in rows if row["levels"]]
    kept = {name: choice[name] for name in (*tuned_preset.KEPT, "batch_size")}
    record: dict[str, Any] = {"bench": "tune", "choice": kept}
    record |= {"pays": choice["levels"] > 0, "best_predicted": max(drafting, default=1.0)}
    record["guarantee"] = rules[choice["drafter"]].traits.guarantee
    record |= {f"{how}_{what}": choice[f"{how}_{what}"] for how, what in product(HOW, ("speedup", "ci95"))}
    record |= {"rows": rows, "n_prompts": half, "n_checked": len(images) - half, "seed": seed, **options}
    record |= {"left_over": {str(size): n for size, n in left.items() if n}, "load": os.getloadavg()[0]}
    record["provenance"] = provenance(model, seed=seed)
    if arguments.sweep:
        best = max(row["measured_images_per_second"] for row in rows)
        record["choice_over_best"] = choice["measured_images_per_second"] / best
        errors = [abs(row["predicted_speedup"] / row["measured_speedup"] - 1) for row in rows if row["levels"]]
        record["prediction_error"] = {"choice": abs(choice["predicted_speedup"] / choice["measured_speedup"] - 1)}
        record["prediction_error"] |= {"median": sorted(errors)[len(errors) // 2], "largest": max(errors)}
    return record


def measured(
    make: Callable[[], dict[str, Accelerated]], inputs: Sequence[dict], warm: dict, size: int, arguments: Options
) -> dict[str, tuning.DrafterMeasurement]:
    """Every arm on every batch, in an order that alternates. Each pass has arms of its own, and a batch of other
    images warms them up: a drafter that remembers earlier requests (`shared=true`) has seen no image before.
    """
    seen: dict[str, tuning.DrafterMeasurement] = {}
    lengths = sorted(set(arguments.lengths))
    for done in range(0, arguments.passes * len(inputs), len(inputs)):
        arms = make()
        seen = seen or {n: tuning.DrafterMeasurement(n, size, [0] if n == PLAIN else lengths) for n in arms}
        for number, batch in enumerate([warm, *inputs]):
            for name in list(arms) if number % 2 else list(arms)[::-1]:
                asked = (0,) if name == PLAIN else tuple(lengths)
                seed = arguments.seed + size * (done + number)
                found = tuning.observe(arms[name], batch, asked, seed, **arguments.generation)
                if number:
                    seen[name].batches.append(found)
    return seen


def check(
    model: PreTrainedModel, rows: list[dict], inputs: dict[int, list], warm: dict[int, dict], options: dict, seed: int
) -> None:
    """Measure rows against plain decoding of the same batches, and note it in them. warm: batches of other images."""
    for size in {row["batch_size"]: None for row in rows}:
        own = [row for row in rows if row["batch_size"] == size]
        arms = {str(i): CaptionArm(made(model, row), options, seed) for i, row in enumerate(own)}
        paired.interleave(arms, [(len(inputs[size]), warm[size])], warmup=0)
        runs, failures = paired.interleave(arms, list(enumerate(inputs[size])), warmup=0)
        if failures:
            raise ValueError(f"images: got {failures[0]}, expected images that can be captioned")
        plain = runs[str(next(i for i, row in enumerate(own) if row["levels"] == 0))]
        for row, found in zip(own, runs.values()):
            ratio = paired.compare(plain, found, per_token=options["do_sample"])
            seconds = sum(one.seconds for one in found)
            row |= {"measured_speedup": ratio["speedup_total_time"], "measured_ci95": ratio["speedup_ci95"]}
            row["measured_images_per_second"] = sum(len(one.tokens) for one in found) / seconds
            row |= {key: ratio[key] for key in ("identical", "compared")}


def made(model: PreTrainedModel, row: dict[str, Any]) -> Accelerated:
    """What a row stands for."""
    if row["levels"] == 0:
        return accelerate(model, None)
    return accelerate(model, row["drafter"], acceptance=row["acceptance"], levels=row["levels"], adaptive=False)


def verdict(record: dict[str, Any]) -> str:
    """The choice in a sentence."""
    choice, (low, high) = record["choice"], record["predicted_ci95"]
    if not record["pays"]:
        best = record["best_predicted"]
        return f"nothing pays: plain decoding is the fastest; the best drafter would be {paired.in_words(best)}"
    return (
        f"choice: {choice['drafter']}, drafts of {choice['levels']} levels, batches of {choice['batch_size']};"
        f" predicted {record['predicted_speedup']:.2f} ({low:.2f}..{high:.2f}) times plain decoding, measured"
        f" {record['measured_speedup']:.2f} on {record['n_checked']} other images; {record['guarantee']}"
    )


COLUMNS = {
    "drafter": "{drafter}",
    "d": "{levels}",
    "rows": "{batch_size}",
    "tau": "{tau:.2f}",
    "predicted": "{predicted_speedup:.2f}",
    "95 %": "{predicted_ci95[0]:.2f}..{predicted_ci95[1]:.2f}",
    "img/s": "{images_per_second:.2f}",
    "measured": "{measured_speedup:.2f}",
}


def view(record: dict[str, Any]) -> Table:
    title = f"{record['n_prompts']} images measured, {record['n_checked']} checked; load {record['load']:.1f}"
    for size, count in record["left_over"].items():
        title += f"; batches of {size} leave out {count}"
    caption = "d: levels of a draft; rows: of a batch; speed-up over plain decoding in batches of the same size"
    return table(title, record["rows"], COLUMNS, caption, whole=[head for head in COLUMNS if head != "drafter"])
