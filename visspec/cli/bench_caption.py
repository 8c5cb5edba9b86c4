"""`visspec bench caption`: our loop with and without drafters against transformers' generate and its assisted modes.

All arms run in one process with the same prompts, pixels, dtype, attention, threads, stop rule and limit, interleaved
per prompt. Every arm calls `model.generate`, so preparation and the vision tower are included in every time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from rich.table import Table
from transformers import PreTrainedModel

from visspec.api import loading, sources
from visspec.api.captions import default_prompt, tokenizer_of
from visspec.api.sources import Record
from visspec.api.text.accelerate import accelerate, default_drafter
from visspec.cli import bench, bench_data
from visspec.cli.arguments import SamplingOptions, TargetOptions
from visspec.cli.bench import BenchOptions, CaptionArm, Cell, ScenesOptions, StockCaptionArm, groups_of, table
from visspec.eval.bench import paired as speed
from visspec.eval.report.images import small_png
from visspec.io import included
from visspec.io.images import open_image
from visspec.io.options import Positive, option
from visspec.loop.stats import text_pieces
from visspec.models.runner.compiled import stepwise
from visspec.types import Processor

LOOKUP_LENGTHS = (3, 5, 10)  # transformers' assisted modes get the best of these, chosen on the warm-up prompts
ASSISTANT_LENGTHS = (3, 5, 8)
WARMUP = 3  # number of images that are not measured, because drafters remember answers
SETTINGS = ("acceptance", "batch_size", "max_new_tokens", "temperature", "seed")  # fields that options and record share
TEXTS = 8  # number of captions whose text the record keeps
OTHER_TOKENS = "exact in distribution, with its own random numbers: by design not the tokens of plain decoding"


@dataclass(kw_only=True)
class DecodingOptions(BenchOptions, SamplingOptions):
    """Options of benches of captions and texts."""

    count: Positive = option("maximum number of images or prompts", 64)
    drafter: list[str] = option(
        "drafters: names with options, or folders; auto: the model's own, else context", ["auto"], metavar="DRAFTER"
    )
    acceptance: str = option("acceptance rule with options, e.g. typical:epsilon=0.1", "exact")
    batch_size: Positive = option("number of images or prompts decoded together", 1)
    compile: bool = option("compile our passes, and add an arm of transformers, compiled with a static cache", False)
    stream: bool = option("also measure the throughput of a stream with --batch-size slots", False)


@dataclass(kw_only=True)
class Options(DecodingOptions, ScenesOptions, TargetOptions):
    images: list[str] | None = option(
        "images as for `visspec caption` (default: held-out scenes)", None, metavar="PATH"
    )
    data: Path | None = option("JSON lines of MMSpec, SPEED-Bench or vLLM's custom_mm, instead of images", None)
    prompt: str | None = option("question about each image", None)


def run(arguments: Options) -> None:
    arguments.begin()
    if arguments.data and (arguments.batch_size > 1 or arguments.prompt or arguments.images):
        got = "--prompt" if arguments.prompt else "--images" if arguments.images else "--batch-size above 1"
        raise ValueError(f"data: {got} can't be combined with --data, whose prompts are run one by one.")
    model, remote = arguments.model, arguments.trust_remote_code
    if model and not (arguments.data or arguments.images or loading.is_text_model(model, remote)):
        arguments.check_scenes(model, "--images")
    count, size = arguments.count, arguments.batch_size
    most = count + WARMUP * size
    data = bench_data.read(arguments.data, count) if arguments.data else None
    records = sources.records(arguments.images) if arguments.images and data is None else None
    model, processor = loading.load(arguments.model, needs_pictures=True, **arguments.hardware)
    small = None if arguments.model else included.made_for("assistant", model)
    assistant = loading.load(str(included.folder(small)))[0] if small and included.present(small) else None
    request = arguments.prompt or default_prompt(arguments.model or included.text_model())
    if data is not None:
        prompts = [replace(record, image=[*map(open_image, record.image)]) for record in data]
    elif records is not None:
        readable = islice(bench.readable(records), most)
        prompts = [replace(record, prompt=record.prompt or request) for record in readable]
    else:
        scenes = arguments.scenes(processor)
        images = scenes.images(max(min(most, len(scenes.rows)), count))
        prompts = [Record(str(number), image, request) for number, image in enumerate(images)]
    if not prompts:
        raise ValueError(f"images: No image of {', '.join(arguments.images or [])} can be read.")
    grey = [Image.new("RGB", (256, 256), (shade, shade, shade)) for shade in range(64, 256, 64)]
    warm = prompts[count:] or [Record("grey", image, request) for image in size * grey]
    record = bench_prompts("caption", model, processor, prompts[:count], warm, arguments, assistant)
    arguments.end(record, *views(record))


def bench_prompts(
    kind: str,
    model: PreTrainedModel,
    processor: Processor,
    prompts: Sequence[Record],
    warm: Sequence[Record],
    arguments: DecodingOptions,
    assistant: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Run all arms on all prompts, whose images are open.

    Args:
        kind: Name of the bench, for the record.
        warm: Prompts for the warm-up, which are not measured.
        assistant: A smaller model for transformers' assisted generation (batch 1 only, greedy or sampling), or None.

    Returns:
        The JSON object of docs/results.md for the first drafter. With several, `rows` has one for each.
    """
    size, seed, base = arguments.batch_size, arguments.seed, arguments.generation
    inputs = bench.in_groups(processor, prompts, size, model)
    others = bench.in_groups(processor, warm, size, model, len(inputs))
    build = partial(accelerate, model, acceptance=arguments.acceptance, compile=arguments.compile)
    ours = {spec: build(spec) for spec in arguments.drafter}
    names = dict(zip(ours, ["ours", *(f"ours, {spec}" for spec in list(ours)[1:])]))
    arms = stock_arms(model, others, arguments, assistant)
    arms |= {names[spec]: CaptionArm(fast, base, seed) for spec, fast in ours.items()}
    runs, failures = speed.interleave(arms, inputs, others, f"bench {kind}")
    categories = bench.by_category(prompts) if size == 1 and any(one.category for one in prompts) else {}
    rows = []
    for spec, fast in ours.items():
        row: dict[str, Any] = {"bench": kind, "drafter": spec, "failures": failures}
        row |= summarise(runs, arms, arguments.temperature, names[spec])
        if arguments.compile:
            row["speedup_over_compiled"] = row["baselines"]["transformers_compiled"]["ours_is_faster_by"]
            row |= bench.compilations(fast.setup)
        if categories:
            row["categories"] = by_category(runs, names[spec], categories, arguments.temperature > 0)
        rows.append(row)
    record: dict[str, Any] = rows[0] | ({"rows": rows} if len(rows) > 1 else {})
    if "auto" in ours:
        record |= {"auto": ours["auto"].name, "why": default_drafter(model)[1]}
    record |= {"texts": texts(runs["ours"], tokenizer_of(processor))}
    record |= {"thumbnails": thumbnails(runs["ours"], groups_of(prompts, size))}
    if arguments.stream:
        single = [each for _, each in bench.in_groups(processor, prompts, 1, model)]
        fast = build(arguments.drafter[0])
        record |= bench.throughput(fast, groups_of(single, size), inputs, others, base)
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    return record | bench.measured_on(model, seed=seed) | {"n_prompts": len(prompts)} | settings


def stock_arms(model, warm: Sequence, arguments: DecodingOptions, assistant) -> dict[str, Any]:
    """Return the arms that drafters are compared with: the fastest of transformers' own, and our loop without
    a drafter.
    """
    base, seed = arguments.generation, arguments.seed
    plain = accelerate(model, None)
    static = base | {"cache_implementation": "static", "disable_compile": True}
    generate = speed.fastest([StockCaptionArm(model, options, seed) for options in (base, static)], warm)
    arms = {"transformers_generate": generate, "plain": CaptionArm(plain, base, seed)}
    if arguments.compile:
        steps = stepwise(model, model.get_decoder())
        arms["transformers_compiled"] = StockCaptionArm(steps, base | {"cache_implementation": "static"}, seed)
    if arguments.batch_size == 1:
        # transformers' lookup would draft image placeholders and fail on them
        never = sorted(plain.target.capabilities.never_drafted)
        suppressed = {"suppress_tokens": never} if never else {}
        lookup = [base | suppressed | {"prompt_lookup_num_tokens": n} for n in LOOKUP_LENGTHS]
        arms["transformers_prompt_lookup"] = speed.fastest([StockCaptionArm(model, o, seed) for o in lookup], warm)
        if assistant is not None:
            assisted = [base | {"assistant_model": assistant, "num_assistant_tokens": n} for n in ASSISTANT_LENGTHS]
            arms["transformers_assisted"] = speed.fastest([StockCaptionArm(model, o, seed) for o in assisted], warm)
    return arms


def summarise(
    runs: dict[str, list[speed.ArmRun]], arms: dict[str, Any], temperature: float, own: str
) -> dict[str, Any]:
    """Return the figures of a drafter, and ratios of every other arm to it."""
    ours, plain, stock, sampled = runs[own], runs["plain"], runs["transformers_generate"], temperature > 0
    fast, count = arms[own].fast, max(len(ours), 1)
    record = {"guarantee": fast.setup.guarantee, "drafter_name": fast.name, "identical_to": "transformers_generate"}
    record |= {"promises_tokens": fast.setup.promises_tokens(not sampled)} | speed.figures(stock, plain, ours, sampled)
    record |= speed.over("plain_over_transformers", stock, plain, per_token=sampled)
    doubt = speed.suspicion(record["over_plain"], record["over_plain_ci95"], record["tau"])
    record["in_words"] = "; ".join(filter(None, (speed.in_words(record["speedup"]), doubt)))
    record["baselines"] = baselines = {}
    for name, arm_runs in runs.items():
        if name.startswith("ours"):
            continue
        ratio = speed.compare(arm_runs, ours, per_token=sampled and name != "plain")
        row = {"seconds_per_prompt": sum(run.seconds for run in arm_runs) / count}
        row |= {"ours_is_faster_by": ratio["speedup"], "ci95": ratio["speedup_ci95"], "identical": ratio["identical"]}
        settings = {k: v for k, v in arms[name].options.items() if isinstance(v, (int, float, str))}
        baselines[name] = row | {"options": settings}
    if sampled:
        record |= {"identical": baselines["plain"]["identical"], "identical_to": "plain (same seeds)"}
    return record


def by_category(
    runs: dict[str, list[speed.ArmRun]], own: str, categories: dict[str, list[int]], per_token: bool
) -> dict[str, Any]:
    """Return the speed-up of a drafter over transformers' generate, and tau, on the prompts of each category."""
    rows = {}
    for name, numbers in categories.items():
        stock, ours = ([run for run in runs[arm] if run.prompt in numbers] for arm in ("transformers_generate", own))
        if ours:
            row = speed.compare(stock, ours, per_token) | speed.tau(ours)
            rows[name] = {key: row[key] for key in ("speedup", "speedup_ci95", "tau", "identical", "compared")}
    return rows


def texts(runs: Sequence[speed.ArmRun], tokenizer) -> list[list[tuple[str, str]]]:
    """Return the first captions in pieces of (text, origin) for the report, decoded outside of the measured time."""
    rows = [(tokens, origin) for run in runs[:TEXTS] for tokens, origin in zip(run.tokens, run.origin)]
    return [text_pieces(tokenizer, tokens, origin) for tokens, origin in rows[:TEXTS]]


def thumbnails(runs: Sequence[speed.ArmRun], groups: Sequence[Sequence[Record]]) -> list[str | None]:
    """Return the pictures of `texts`, in order, as small PNGs in base64; None for anything but a PIL image."""
    pictures = [record.image for run in runs[:TEXTS] for record, _ in zip(groups[run.prompt], run.tokens)]
    pictures = [(image or [None])[0] if isinstance(image, list) else image for image in pictures]
    return [small_png(image) if isinstance(image, Image.Image) else None for image in pictures[:TEXTS]]


COLUMNS: dict[str, Cell] = {
    "against": "{name}",
    "ms / prompt": lambda row: f"{1e3 * row['seconds_per_prompt']:.1f}",
    "ours is faster by": "{ours_is_faster_by:.2f}",
    "95 %": "{ci95[0]:.2f}..{ci95[1]:.2f}",
    "identical": "{identical}/{compared}",
}
AGAINST_STOCK: dict[str, Cell] = {
    "n": "{compared}",
    "faster than transformers by": "{speedup:.2f}",
    "95 %": "{speedup_ci95[0]:.2f}..{speedup_ci95[1]:.2f}",
    "tau": "{tau:.2f}",
    "identical": "{identical}/{compared}",
}


def views(record: dict[str, Any]) -> list[Table]:
    """Return the tables of a record: baselines of the first drafter, all drafters, categories."""
    lines = [
        f"ours: {record['in_words']}; tau {record['tau']:.2f} (without bonus {record['tau_without_bonus']:.2f}); "
        f"decode only {record['speedup_decode_only']:.2f}, ideal {record['ideal_speedup']:.2f}; "
        f"our loop without a drafter over transformers {record['plain_over_transformers']:.2f}; {record['guarantee']}"
    ]
    if record["guarantee"] != "approximate" and not record["promises_tokens"]:
        lines.append(OTHER_TOKENS)
    if "auto" in record:
        lines.append(f"auto: drafter {record['auto']}, because {record['why']}")
    if "items_per_second" in record:
        ratio = speed.in_words(record["over_transformers"])
        lines.append(f"stream: {record['items_per_second']:.2f} prompts / s; against transformers in batches {ratio}")
    title = f"{record['n_prompts']} prompts, batch {record['batch_size']}, temperature {record['temperature']}"
    rows = [{"name": name, "compared": record["compared"], **row} for name, row in record["baselines"].items()]
    tables = [table(title, rows, COLUMNS, "\n".join(lines))]
    if "rows" in record:
        tables.append(table("drafters", record["rows"], {"drafter": "{drafter}", **AGAINST_STOCK}))
    if "categories" in record:
        rows = [{"name": name or "(none)", **row} for name, row in record["categories"].items()]
        tables.append(table("prompts by category", rows, {"category": "{name}", **AGAINST_STOCK}))
    return tables
