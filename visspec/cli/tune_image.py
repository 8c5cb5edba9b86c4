"""`visspec tune --model IMAGE_MODEL --prompts FILE`: finds the fastest exact method of an image model, or of one rule.

All methods draw half of the prompts in turns; the fastest few draw the other half, which decides between them and plain
decoding. The choice is a fixed one, because adaptive lengths would make samples depend on timing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from visspec import registry
from visspec.api import sources
from visspec.api.images.pipeline import ImagePipeline
from visspec.cli.bench import Cell, table
from visspec.cli.bench_image import as_arguments, bench, fitting
from visspec.cli.tune import FIGURES, FINALISTS, PAYS

if TYPE_CHECKING:
    from visspec.cli.tune import Options

PLAIN = "none/exact"
DRAFTS = [f"image-eagle:{shape}" for shape in ("levels=2", "levels=4", "levels=8", "tree=dynamic", "tree=static")]
WINDOWS = [f"jacobi:redraw=maximal,window={n}" for n in (8, 16, 24)]
EXACT = [f"jacobi:window={n}/exact" for n in (4, 8, 16, 24)] + [f"{drafter}/rejection" for drafter in WINDOWS]
EXACT += [f"{DRAFTS[n]}/{rule}" for n in range(3) for rule in ("exact", "block")]
EXACT += [f"{DRAFTS[n]}/rejection" for n in (3, 4)] + ["distilled/exact"]
COLUMNS: dict[str, Cell] = {
    "way": "{name}",
    "passes over plain": "{nfe_reduction:.2f}",
    "predicted": "{predicted_speedup:.2f}",
    "95 %": "{predicted_ci95[0]:.2f}..{predicted_ci95[1]:.2f}",
    "measured": "{measured_speedup:.2f}",
    "drift": "{drift_per_token:.3f}",
}


def run(arguments: Options) -> None:
    """Print and write the record, and the choice for `ImagePipeline(..., preset=FILE)`."""
    pipe = ImagePipeline.from_pretrained(arguments.model, **arguments.hardware)
    pipe.set_progress_bar_config(disable=True)
    wanted, file = 2 * arguments.count, Path(arguments.prompts or "")
    texts = sources.texts(file)[:wanted]
    if len(texts) < wanted:
        raise ValueError(f"--prompts: got {len(texts)} in {file}, expected {wanted} or more (--count).")
    record = tune(pipe, texts, fitting(pipe, ways(pipe, arguments.acceptance)), arguments.seed)
    title = f"{record['n_prompts']} prompts measured, {record['n_checked']} checked"
    rows = sorted(record["rows"], key=lambda row: -row["predicted_speedup"])
    arguments.keep(pipe.model, record, table(title, rows, COLUMNS))


def ways(pipe: ImagePipeline, rule: str) -> dict[str, str]:
    """Return drafters with an exact or the given rule, as "drafter/rule"; other than raster codes: presets."""
    draws = pipe.family.draws
    if draws == "codes":
        return {way: way for way in (EXACT if rule == "exact" else [f"{one}/{rule}" for one in WINDOWS + DRAFTS])}
    return {str(preset): str(preset) for preset in registry.presets(draws).values() if not preset.parts}


def tune(pipe: ImagePipeline, texts: list[str], found: dict[str, str], seed: int) -> dict[str, Any]:
    """Return the record: `rows` of all methods on the first half of the prompts, and the choice."""
    half = len(texts) // 2
    record = bench(pipe, texts[:half], found, {}, seed)
    rows = {row["name"]: row for row in record["rows"]}
    for row in rows.values():
        row |= {"predicted_speedup": row["over_plain"], "predicted_ci95": row["over_plain_ci95"]}
    drafting = [row for name, row in rows.items() if name != "plain"]
    best = [row["name"] for row in sorted(drafting, key=lambda row: -row["over_plain"])][:FINALISTS]
    for row in bench(pipe, texts[half:], {name: found[name] for name in best}, {}, seed + half)["rows"] if best else ():
        rows[row["name"]] |= {"measured_speedup": row["over_plain"], "measured_ci95": row["over_plain_ci95"]}
    chosen: dict[str, Any] = max((rows[name] for name in best), key=lambda row: row["measured_speedup"], default={})
    pays = chosen.get("measured_speedup", 0.0) >= PAYS
    ones = {name: [1.0, 1.0] if name.endswith("ci95") else 1.0 for name in FIGURES}
    choice = chosen if pays else ones | {"guarantee": "exact", **as_arguments(PLAIN)}
    record |= {"bench": "tune", "pays": pays, "n_checked": len(texts) - half}
    record["best_predicted"] = max((rows[name]["over_plain"] for name in best), default=1.0)
    record["choice"] = {name: choice[name] for name in ("drafter", "acceptance", "order")}
    return record | {name: choice[name] for name in (*FIGURES, "guarantee")}
