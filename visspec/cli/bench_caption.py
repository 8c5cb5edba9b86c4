"""`visspec bench caption`: our loop with and without drafters against transformers' generate and its assisted modes.

All arms run in one process with the same prompts, pixels, dtype, attention, threads, stop rule and limit, interleaved
per prompt. Every arm calls `model.generate`, so preparation and the vision tower are included in every time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from rich.table import Table

from visspec.api import loading, sources
from visspec.api.captions import PROMPT, default_prompt
from visspec.api.text.accelerate import accelerate
from visspec.cli import bench, bench_data
from visspec.cli.arguments import SamplingOptions, TargetOptions
from visspec.cli.bench import CaptionArm, Cell, ScenesOptions, StockCaptionArm, groups_of, table
from visspec.cli.bench_data import Prompt
from visspec.eval.bench import paired as speed
from visspec.eval.report.images import small_png
from visspec.io import included
from visspec.io.images import open_image
from visspec.io.options import Positive, option
from visspec.loop.stats import text_pieces
from visspec.models.runner.compiled import stepwise

LOOKUP_LENGTHS = (3, 5, 10)  # transformers' assisted modes get the best of these, chosen on the warm-up prompts
ASSISTANT_LENGTHS = (3, 5, 8)
WARMUP = 3  # number of images that are not measured, because drafters remember answers
SETTINGS = ("acceptance", "batch_size", "max_new_tokens", "temperature", "seed")  # fields that options and record share
TEXTS = 8  # number of captions whose text the record keeps
OTHER_TOKENS = "exact in distribution, with its own random numbers: by design not the tokens of plain decoding"


@dataclass(kw_only=True)
class Options(ScenesOptions, SamplingOptions, TargetOptions):
    images: list[str] | None = option(
        "images as for `visspec caption` (default: held-out scenes)", None, metavar="PATH"
    )
    data: Path | None = option("JSON lines of MMSpec, SPEED-Bench or vLLM's custom_mm, instead of images", None)
    count: Positive = option("maximum number of images, or of prompts in --data", 64)
    drafter: list[str] | None = option(
        "drafters: names with options, or folders (default: the model's own, else context)", None, metavar="DRAFTER"
    )
    acceptance: str = option("acceptance rule with options, e.g. typical:epsilon=0.1", "exact")
    batch_size: Positive = option("number of images captioned together", 1)
    prompt: str | None = option("question about each image", None)
    compile: bool = option("compile our passes, and add a compiled transformers arm", False)
    stream: bool = option("also measure the throughput of a stream with --batch-size slots", False)


def run(arguments: Options) -> None:
    arguments.begin()
    if arguments.data and (arguments.batch_size > 1 or arguments.prompt or arguments.images):
        got = "--prompt" if arguments.prompt else "--images" if arguments.images else "--batch-size above 1"
        raise ValueError(f"data: {got} can't be combined with --data, whose prompts are run one by one.")
    model, remote = arguments.model, arguments.trust_remote_code
    if model and not (arguments.data or arguments.images or loading.is_text_model(model, remote)):
        arguments.check_scenes(model, "--images")
    most = arguments.count + WARMUP * arguments.batch_size
    data = bench_data.read(arguments.data, arguments.count) if arguments.data else None
    records = sources.records(arguments.images) if arguments.images and data is None else None
    model, processor = loading.load(arguments.model, needs_pictures=True, **arguments.hardware)
    small = None if arguments.model else included.made_for("assistant", model)
    assistant = loading.load(str(included.folder(small)))[0] if small and included.present(small) else None
    images: Sequence[Any]
    if data is not None:
        images = [[*map(open_image, prompt.images)] for prompt in data]
    elif records is not None:
        items = list(islice(bench.readable(records), most))
        images = [image for image, _ in items]
        request = arguments.prompt or default_prompt(arguments.model or included.text_model())
        data = [Prompt(record.category, record.prompt or request, []) for _, record in items[: arguments.count]]
    else:
        scenes = arguments.scenes(processor)
        images = scenes.images(max(min(most, len(scenes.rows)), arguments.count))
    if not images:
        raise ValueError(f"images: No image of {', '.join(arguments.images or [])} can be read.")
    drafters = arguments.drafter or ["auto"]
    images, warm = images[: arguments.count], images[arguments.count :]
    record = bench_caption(model, processor, images, arguments, drafters, assistant, warm, data)
    arguments.end(record, *views(record))


def bench_caption(
    model,
    processor,
    images: Sequence,
    arguments: Options,
    drafters: Sequence,
    assistant=None,
    warmup: Sequence = (),
    data: Sequence[Prompt] | None = None,
) -> dict[str, Any]:
    """Run all arms on all images. With `compile` our passes are compiled, and another arm is transformers' generate
    with a static cache and compiled steps.

    Args:
        assistant: A smaller model for transformers' assisted generation (batch 1 only, greedy or sampling), or None.
        warmup: Images for the warm-up, which are not measured. By default, grey images.
        data: A prompt for each image or list of images; the record then has categories.

    Returns:
        The JSON object of docs/results.md for the first drafter. With several, `rows` has one for each.
    """
    request = arguments.prompt or (default_prompt(arguments.model) if arguments.model else PROMPT)
    asked = [request] * len(images) if data is None else [prompt.text for prompt in data]
    size, seed, base = arguments.batch_size, arguments.seed, arguments.generation
    prompts = bench.in_groups(processor, images, asked, size, model)
    grey = [Image.new("RGB", (256, 256), (shade, shade, shade)) for shade in range(64, 256, 64)]
    warmup = warmup or size * grey
    warm = bench.in_groups(processor, warmup, [request] * len(warmup), size, model, len(prompts))
    rule, compiled = arguments.acceptance, arguments.compile
    ours = {str(one): accelerate(model, one, acceptance=rule, compile=compiled) for one in drafters}
    names = dict(zip(ours, ["ours", *(f"ours, {spec}" for spec in list(ours)[1:])]))
    arms = stock_arms(model, warm, arguments, assistant)
    arms |= {names[spec]: CaptionArm(fast, base, seed) for spec, fast in ours.items()}
    runs, failures = speed.interleave(arms, prompts, warm, "bench caption")
    rows = []
    for spec, fast in ours.items():
        row = {"drafter": spec} | summarise(runs, failures, arms, arguments.temperature, names[spec])
        if compiled:
            row["speedup_over_compiled"] = row["baselines"]["transformers_compiled"]["ours_is_faster_by"]
            row |= bench.compilations(fast.setup)
        if data is not None and size == 1 and any(prompt.category for prompt in data):
            found = {
                name: bench.against(runs, "transformers_generate", names[spec], arguments.temperature > 0, numbers)
                for name, numbers in bench.by_category(data).items()
            }
            row["categories"] = {name: figures for name, figures in found.items() if figures["compared"]}
        rows.append(row)
    record = rows[0] | ({"rows": rows} if len(rows) > 1 else {})
    record |= bench.choice_of(ours["auto"]) if "auto" in ours else {}
    record |= {
        "texts": texts(runs["ours"], processor.tokenizer),
        "thumbnails": thumbnails(runs["ours"], groups_of(images, size)),
    }
    if data is not None and "categories" in record:
        record["turns_left_out"] = sum(prompt.later for prompt in data)
    if arguments.stream:
        fast = accelerate(model, drafters[0], acceptance=rule, compile=compiled)
        single = [each for _, each in bench.in_groups(processor, images, asked, 1, model)]
        record |= bench.throughput(fast, groups_of(single, size), prompts, warm, base)
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    return record | bench.measured_on(model, seed=seed) | {"n_prompts": len(images)} | settings


def stock_arms(model, warm: Sequence, arguments: Options, assistant) -> dict[str, Any]:
    """Return the arms that drafters are compared with: transformers' own, and our loop without a drafter."""
    base, seed = arguments.generation, arguments.seed
    plain = accelerate(model, None)
    arms = {"transformers_generate": StockCaptionArm(model, base, seed), "plain": CaptionArm(plain, base, seed)}
    if arguments.compile:
        steps = stepwise(model, model.get_decoder())
        arms["transformers_compiled"] = StockCaptionArm(steps, base | {"cache_implementation": "static"}, seed)
    if arguments.batch_size == 1:
        # transformers' lookup would draft image placeholders and fail on them
        never = {"suppress_tokens": sorted(plain.target.capabilities.never_drafted)}
        lookup = [base | never | {"prompt_lookup_num_tokens": n} for n in LOOKUP_LENGTHS]
        arms["transformers_prompt_lookup"] = speed.fastest([StockCaptionArm(model, o, seed) for o in lookup], warm)
        if assistant is not None:
            assisted = [base | {"assistant_model": assistant, "num_assistant_tokens": n} for n in ASSISTANT_LENGTHS]
            arms["transformers_assisted"] = speed.fastest([StockCaptionArm(model, o, seed) for o in assisted], warm)
    return arms


def summarise(
    runs: dict[str, list[speed.ArmRun]], failures: list[str], arms, temperature: float, own: str = "ours"
) -> dict[str, Any]:
    """Return ratios of every arm to that of a drafter, tau, the gap to the ideal, and times by stage."""
    ours, plain, sampled = runs[own], runs["plain"], temperature > 0
    against = speed.compare(runs["transformers_generate"], ours, per_token=sampled)
    fast, count = arms[own].fast, max(len(ours), 1)
    baselines = {}
    for name, found in runs.items():
        if name.startswith("ours"):
            continue
        ratio = speed.compare(found, ours, per_token=sampled and name != "plain")
        each = {"seconds": [r.seconds for r in found], "tokens": [float(r.count) for r in found]}
        row: dict[str, Any] = {f"{what}_per_prompt": sum(value) / count for what, value in each.items()}
        row |= {"ours_is_faster_by": ratio["speedup"], "ci95": ratio["speedup_ci95"], "identical": ratio["identical"]}
        given = {k: v for k, v in arms[name].options.items() if isinstance(v, (int, float))}
        baselines[name] = row | {"options": given}
    over = speed.compare(plain, ours)  # ideal and tau are in units of passes of our own plain loop
    record = {"bench": "caption", "guarantee": fast.setup.guarantee, "drafter_name": fast.name, "failures": failures}
    record |= {"promises_tokens": fast.setup.promises_tokens(not sampled), "identical_to": "transformers_generate"}
    record |= against | speed.tau(ours) | speed.acceptance(ours) | speed.ideal(plain, ours)
    record |= {"nfe_plain": speed.tau(plain)["nfe"], **speed.over("over_plain", plain, ours)}
    record |= speed.over("plain_over_transformers", runs["transformers_generate"], plain, per_token=sampled)
    record |= {"drift_per_token": speed.drift(ours), "time_s": speed.time_by_stage(ours), "baselines": baselines}
    record["tokens_per_prompt"] = sum(r.count for r in ours) / count
    record["measured_over_ideal"] = over["speedup_decode_only"] / record["ideal_speedup"]
    doubt = speed.suspicion(over["speedup"], over["speedup_ci95"], record["tau"])
    record["in_words"] = "; ".join(filter(None, (speed.in_words(record["speedup"]), doubt)))
    if sampled:
        record["identical"], record["compared"] = baselines["plain"]["identical"], len(ours)
        record["identical_to"] = "plain (same seeds)"
    return record


def texts(runs: Sequence[speed.ArmRun], tokenizer) -> list[list[tuple[str, str]]]:
    """Return the first captions in pieces of (text, origin) for the report, decoded outside of the measured time."""
    rows = [(tokens, origin) for run in runs[:TEXTS] for tokens, origin in zip(run.tokens, run.origin)]
    return [text_pieces(tokenizer, tokens, origin) for tokens, origin in rows[:TEXTS]]


def thumbnails(runs: Sequence[speed.ArmRun], groups: Sequence[Sequence]) -> list[str | None]:
    """Return the pictures of `texts`, in order, as small PNGs in base64; None for anything but a PIL image."""
    pictures = [image for run in runs[:TEXTS] for image, _ in zip(groups[run.prompt], run.tokens)]
    pictures = [(image or [None])[0] if isinstance(image, list) else image for image in pictures]
    return [small_png(image) if isinstance(image, Image.Image) else None for image in pictures[:TEXTS]]


AGAINST_STOCK: dict[str, Cell] = {
    "n": "{compared}",
    "faster than transformers by": "{speedup:.2f}",
    "95 %": "{speedup_ci95[0]:.2f}..{speedup_ci95[1]:.2f}",
    "tau": "{tau:.2f}",
    "identical": "{identical}/{compared}",
}
COLUMNS: dict[str, Cell] = {
    "against": "{name}",
    "ms / prompt": lambda row: f"{1e3 * row['seconds_per_prompt']:.1f}",
    "ours is faster by": "{ours_is_faster_by:.2f}",
    "95 %": "{ci95[0]:.2f}..{ci95[1]:.2f}",
    "identical": "{identical}/{compared}",
}


def views(record: dict[str, Any]) -> list[Table]:
    """Return the tables of a record: baselines of the first drafter, all drafters, categories."""
    by_law = record["guarantee"] != "approximate" and not record["promises_tokens"]
    caption = (
        f"ours: {record['in_words']}; tau {record['tau']:.2f} (without bonus {record['tau_without_bonus']:.2f}); "
        f"decode only {record['speedup_decode_only']:.2f}, ideal {record['ideal_speedup']:.2f}; "
        f"our loop without a drafter over transformers {record['plain_over_transformers']:.2f}; {record['guarantee']}"
    )
    if by_law:
        caption += f"\n{OTHER_TOKENS}"
    for said in filter(None, (bench.choice_in_words(record), bench.stream_in_words(record, "images"))):
        caption += f"\n{said}"
    title = f"{record['n_prompts']} images, batch {record['batch_size']}, temperature {record['temperature']}"
    rows = [{"name": name, "compared": record["compared"], **row} for name, row in record["baselines"].items()]
    tables = [table(title, rows, COLUMNS, caption)]
    if "rows" in record:
        rows = [{"name": row["drafter"], **row} for row in record["rows"]]
        tables.append(table("drafters", rows, {"drafter": "{name}", **AGAINST_STOCK}))
    if "categories" in record:
        left = f"; {n} later turns are skipped" if (n := record["turns_left_out"]) else ""
        rows = [{"name": name or "(none)", **row} for name, row in record["categories"].items()]
        tables.append(table(f"prompts by category{left}", rows, {"category": "{name}", **AGAINST_STOCK}))
    return tables
