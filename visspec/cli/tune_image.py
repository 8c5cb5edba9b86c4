"""`visspec tune --model IMAGE_MODEL`: the fastest exact way of an image model, or of one rule, by measurement.

Presets, windows, lengths and trees draw some prompts beside each other; the fastest few draw as many others,
which decides between them and plain decoding. What is written is fixed: within a seed's promise nothing follows clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from visspec.api import sources, tuned_preset, zoo
from visspec.api.images import ImagePipeline
from visspec.api.presets import IMAGES
from visspec.cli.bench import Cell, table
from visspec.cli.bench_image import bench, fitting, spread
from visspec.eval.bench.paired import in_words
from visspec.io import included

if TYPE_CHECKING:
    from visspec.cli.tune import Options

PAYS = 1.02  # least speed-up of a choice that drafts, and as in `loop.draft_length`
FINALISTS = 3  # ways with the best predictions, which are measured on other prompts or images
PLAIN = "none/exact"
EXACT = [f"jacobi:window={n}/exact" for n in (4, 8, 12, 16, 24)]
EXACT += [f"jacobi:redraw=maximal,window={n}/rejection" for n in (8, 16, 24)]
EXACT += [f"image-eagle:levels={n}/{rule}" for n in (2, 4, 8) for rule in ("exact", "block")]
EXACT += [f"image-eagle:window={n}/{rule}" for n in (16, 24) for rule in ("exact", "rejection")]
EXACT += [f"image-eagle:tree={tree}/rejection" for tree in ("dynamic", "static")] + ["distilled/exact"]
JUDGED = [f"jacobi:redraw=maximal,window={n}" for n in (4, 8, 16, 24)]
JUDGED += ["image-eagle:levels=2", "image-eagle:levels=4", "image-eagle:levels=8"]
JUDGED += ["image-eagle:tree=dynamic", "image-eagle:tree=static", "image-eagle:window=24"]
VIEW: dict[str, Cell] = {
    "way": "{name}",
    "passes over plain": "{nfe_reduction:.2f}",
    "speed-up over plain": "{over_plain:.2f}",
    "95 %": "{over_plain_ci95[0]:.2f}..{over_plain_ci95[1]:.2f}",
    "on others": "{measured_speedup:.2f}",
    "drift": "{drift_per_token:.3f}",
}


def run(arguments: Options) -> None:
    """Print and write the record, and the choice for `ImagePipeline(..., tuned=FILE)`."""
    pipe = ImagePipeline.from_pretrained(arguments.model, **arguments.hardware)
    pipe.set_progress_bar_config(disable=True)
    texts = prompts(arguments, pipe)
    record = tune(pipe, texts, fitting(pipe, ways(pipe, arguments.acceptance)), arguments.seed)
    arguments.keep(pipe.model, record, view(record), verdict(record))


def prompts(arguments: Options, pipe: ImagePipeline) -> list[str]:
    """Twice `--count` of them, from a file or of the scenes whose words the model knows."""
    wanted = 2 * arguments.count
    if arguments.prompts is None:
        scenes = included.scenes(None, pipe.processor or pipe.model, "prompts")
        return [row["prompt"] for row in spread(scenes.prompts(), wanted)]
    found = [record.prompt for record in sources.prompts(arguments.prompts) if record.prompt][:wanted]
    if len(found) < wanted:
        raise ValueError(f"--prompts: got {len(found)} in {arguments.prompts}, expected {wanted} or more (--count)")
    return found


def ways(pipe: ImagePipeline, rule: str) -> dict[str, str]:
    """Drafters with an exact rule, or with the given one, as "drafter/rule/order"; of models that draw no codes in
    raster order the presets without another target.
    """
    draws = pipe.family.draws
    if draws == "codes":
        return {way: way for way in (EXACT if rule == "exact" else [f"{drafts}/{rule}" for drafts in JUDGED])}
    known = (zoo.preset(name, draws, pipe.model) for name in IMAGES[draws] if not IMAGES[draws][name].parts)
    return {str(preset): str(preset) for preset in known}


def tune(pipe: ImagePipeline, texts: list[str], found: dict[str, str], seed: int) -> dict[str, Any]:
    """The record: `rows` of all ways on the first half of the prompts, and the choice. Without a rule that was asked
    for, approximate ways are left out.
    """
    half = len(texts) // 2
    record = bench(pipe, texts[:half], found, {}, seed)
    rows = {row["name"]: row for row in record["rows"] if row["name"] != "plain"}
    best = sorted(rows, key=lambda name: -rows[name]["over_plain"])[:FINALISTS]
    again = bench(pipe, texts[half:], {name: found[name] for name in best}, {}, seed + half) if best else {"rows": []}
    for row in again["rows"]:
        if row["name"] in rows:
            rows[row["name"]] |= {"measured_speedup": row["over_plain"], "measured_ci95": row["over_plain_ci95"]}
    chosen = max(best, key=lambda name: rows[name]["measured_speedup"], default="")
    pays = bool(chosen) and rows[chosen]["measured_speedup"] >= PAYS
    plain = {"over_plain": 1.0, "over_plain_ci95": [1.0, 1.0], "measured_speedup": 1.0, "measured_ci95": [1.0, 1.0]}
    choice = rows[chosen] if pays else plain | zoo.method(PLAIN)
    record |= {"bench": "tune", "pays": pays, "best": chosen, "n_checked": len(texts) - half}
    record["choice"] = {name: choice[name] for name in tuned_preset.DRAWN}
    record |= {"predicted": choice["over_plain"], "predicted_ci95": choice["over_plain_ci95"]}
    return record | {name: choice[name] for name in ("measured_speedup", "measured_ci95")}


def verdict(record: dict[str, Any]) -> str:
    """The choice in a sentence."""
    rows = {row["name"]: row for row in record["rows"]}
    best = rows.get(record["best"], {})
    if not record["pays"]:
        other = f"; the best way, {best['name']}, would be {in_words(best['measured_speedup'])}" if best else ""
        return f"nothing pays: plain decoding is the fastest{other}"
    return (
        f"choice: {record['best']}; predicted {record['predicted']:.2f} times plain decoding, measured"
        f" {record['measured_speedup']:.2f} on {record['n_checked']} other prompts; {best['guarantee']}"
    )


def view(record: dict[str, Any]) -> Table:
    """The table of a record, the fastest first."""
    rows = sorted(record["rows"], key=lambda row: -row["over_plain"])
    return table(f"{record['n_prompts']} prompts measured, {record['n_checked']} checked", rows, VIEW)
