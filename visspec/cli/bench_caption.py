"""`visspec bench caption`: our loop with and without a drafter against transformers' generate and its assisted modes.

One process, one set of prompts and pixels, same dtype, attention, threads, stop rule and cap; arms interleaved per
prompt. Every arm goes through the same `model.generate` entry, so preparation and the vision tower are in every time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.table import Table

from visspec import tree as trees
from visspec.api import loading, requests
from visspec.api.accelerate import Accelerated, accelerate
from visspec.api.captions import PROMPT, prepare
from visspec.cli import bench, bench_data
from visspec.cli.arguments import CaptioningOptions, Positive, load
from visspec.cli.bench import CaptionArm, Cell, ScenesOptions, StockCaptionArm, groups_of, measured_on, table
from visspec.cli.bench_data import Prompt
from visspec.eval.bench import equality
from visspec.eval.bench import paired as speed
from visspec.eval.report.images import small_png
from visspec.io import included
from visspec.io.images import open_image
from visspec.io.options import option
from visspec.loop.stats import text_pieces
from visspec.models.runner.compiled import stepwise

LOOKUP_LENGTHS = (3, 5, 10)  # transformers' assisted modes get the best of these, chosen on the warm-up prompts
ASSISTANT_LENGTHS = (3, 5, 8)
SETTINGS = ("acceptance", "batch_size", "max_new_tokens", "temperature", "seed")  # fields of options and record
TEXTS = 8  # captions kept word by word in the record
OTHER_TOKENS = "exact in law, with random numbers of its own: other tokens than plain decoding by design"
FORCED = 16  # prompts fed again token by token where the dtype rounds; beyond, those whose outputs differ


@dataclass(kw_only=True)
class Options(ScenesOptions, CaptioningOptions):
    images: Positive = option("how many held-out scenes, or prompts of --data", 64)
    data: Path | None = option("JSON lines of MMSpec, SPEED-Bench or vLLM's custom_mm, in place of scenes", None)
    compile: bool = option("ours compiled, and transformers compiled beside it", False)


def run(arguments: Options) -> None:
    arguments.begin()
    if arguments.data and (arguments.batch_size > 1 or arguments.prompt):
        got = "--prompt" if arguments.prompt else f"--batch-size {arguments.batch_size}"
        raise ValueError(f"data: got {got} beside it, expected prompts of the file, one by one")
    data = bench_data.read(arguments.data, arguments.images) if arguments.data else None
    model, processor, drafter = load(arguments)
    small = None if arguments.model else included.made_for("assistant", model)
    assistant = loading.load(str(included.folder(small)))[0] if small and included.present(small) else None
    images: Sequence[Any]
    if data is None:
        images = arguments.scenes(processor).images(arguments.images)
    else:
        images = [[*map(open_image, prompt.images)] for prompt in data]
    record = bench_caption(model, processor, images, arguments, drafter, assistant, data=data)
    arguments.end(record, view(record), *([category_view(record)] if data else []))


def bench_caption(
    model,
    processor,
    images: Sequence,
    arguments: Options,
    drafter: str,
    assistant=None,
    warmup: int = 3,
    data: Sequence[Prompt] | None = None,
) -> dict[str, Any]:
    """Run all arms on all images; returns the JSON object of docs/evaluate.md.

    data: a prompt for each, of which an image is a list of images; the record has its categories then.
    assistant: a smaller model for transformers' assisted generation (batch 1 only, greedy or sampling), or None.
    With `compile` ours runs compiled; a further arm is transformers' generate with a static cache and compiled steps.
    """
    groups, request = groups_of(images, arguments.batch_size), arguments.prompt or PROMPT
    asked = [request] * len(groups) if data is None else [prompt.text for prompt in data]
    prompts = [(i, prepare(processor, group, text, model)) for i, (group, text) in enumerate(zip(groups, asked))]
    base, seed = arguments.generation, arguments.seed
    ours = accelerate(model, drafter, acceptance=arguments.acceptance, compile=arguments.compile)
    arms: dict[str, Any] = {
        "transformers_generate": StockCaptionArm(model, base, seed),
        "plain": CaptionArm(accelerate(model, None), base, seed),
        "ours": CaptionArm(ours, base, seed),
    }
    if arguments.compile:
        steps = stepwise(model, model.get_decoder())
        arms["transformers_compiled"] = StockCaptionArm(steps, base | {"cache_implementation": "static"}, seed)
    if arguments.batch_size == 1:
        warm = prompts[: max(warmup, 1)]
        # transformers' lookup drafts image placeholders and then fails on them; suppressed, it runs
        never = {"suppress_tokens": sorted(arms["plain"].fast.target.capabilities.never_drafted)}
        lookup = [base | never | {"prompt_lookup_num_tokens": n} for n in LOOKUP_LENGTHS]
        arms["transformers_prompt_lookup"] = speed.fastest([StockCaptionArm(model, o, seed) for o in lookup], warm)
        if assistant is not None:
            assisted = [base | {"assistant_model": assistant, "num_assistant_tokens": n} for n in ASSISTANT_LENGTHS]
            arms["transformers_assisted"] = speed.fastest([StockCaptionArm(model, o, seed) for o in assisted], warm)
    runs, failures = speed.interleave(arms, prompts, warmup, "bench caption")
    record = summarise(runs, failures, arms, arguments.temperature)
    if arguments.compile:
        record["speedup_over_compiled"] = record["baselines"]["transformers_compiled"]["ours_is_faster_by"]
        record |= bench.compilations(ours.setup)
    record["equality"] = equality_tiers(ours, prompts, runs, base, model.dtype)
    record |= {"texts": texts(runs["ours"], processor.tokenizer), "thumbnails": thumbnails(runs["ours"], groups)}
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    if data is not None:
        record["categories"] = categories(runs, data, arguments.temperature > 0)
        record["turns_left_out"] = sum(prompt.later for prompt in data)
    return record | measured_on(model, seed=seed) | {"drafter": str(drafter), "n_prompts": len(images)} | settings


def categories(runs: dict[str, list[speed.ArmRun]], data: Sequence[Prompt], sampled: bool) -> dict[str, dict[str, Any]]:
    """Speed-up over transformers' generate and tau of every category of the prompts."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(prompt.category for prompt in data):
        stock, ours = (
            [run for run in runs[arm] if data[run.prompt].category == name] for arm in ("transformers_generate", "ours")
        )
        if ours:
            ratio = speed.compare(stock, ours, per_token=sampled)
            found[name] = {key: ratio[key] for key in ("speedup", "speedup_ci95", "identical", "compared")}
            found[name] |= {"tau": speed.tau(ours)["tau"]}
    return found


def equality_tiers(
    fast: Accelerated, prompts: Sequence, runs: dict[str, list[speed.ArmRun]], options, dtype
) -> dict[str, Any]:
    """What ours and plain decoding being equal, or not, proves (`visspec.eval.bench.equality`), outside the clocks.

    prompts: (index, inputs). The passes compared have the two commonest depths of this bench's drafts.
    """
    tiers = equality.Tiers(dtype, greedy=not options["do_sample"])
    depths = Counter(levels for run in runs["ours"] for levels, *_ in run.rounds if levels)
    shapes = [trees.chain(levels, str(fast.model.device)) for levels, _ in depths.most_common(2)]
    for plain, ours in zip(runs["plain"], runs["ours"]):
        differ = tiers.add(plain.tokens, ours.tokens)
        if differ or (tiers.low and tiers.forced < FORCED):
            index, inputs = prompts[ours.prompt]
            request = requests.of_generate(fast.model, inputs, **options)
            tiers.force(fast.target, request, plain.tokens, ours.tokens, shapes, index)
    return tiers.record()


def summarise(runs: dict[str, list[speed.ArmRun]], failures: list[str], arms, temperature: float) -> dict[str, Any]:
    """Ratios of every arm to ours, tau, the gap to ideal, times by stage."""
    ours, plain, sampled = runs["ours"], runs["plain"], temperature > 0
    against = speed.compare(runs["transformers_generate"], ours, per_token=sampled)
    fast, count = arms["ours"].fast, max(len(ours), 1)
    baselines = {}
    for name, found in runs.items():
        if name == "ours":
            continue
        ratio = speed.compare(found, ours, per_token=sampled and name != "plain")
        each = {"seconds": [r.seconds for r in found], "tokens": [float(r.count) for r in found]}
        row: dict[str, Any] = {f"{what}_per_prompt": sum(value) / count for what, value in each.items()}
        row |= {"ours_is_faster_by": ratio["speedup"], "ci95": ratio["speedup_ci95"], "identical": ratio["identical"]}
        given = {k: v for k, v in arms[name].options.items() if isinstance(v, (int, float))}
        baselines[name] = row | {"options": given}
    over = speed.compare(plain, ours)  # ideal and tau count in passes of our own plain loop
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
    """The first captions in pieces of (text, origin), for the report. Decoded here, outside the clocks."""
    rows = [(tokens, origin) for run in runs[:TEXTS] for tokens, origin in zip(run.tokens, run.origin)]
    return [text_pieces(tokenizer, tokens, origin) for tokens, origin in rows[:TEXTS]]


def thumbnails(runs: Sequence[speed.ArmRun], groups: Sequence[Sequence]) -> list[str | None]:
    """The pictures of `texts`, in its order, as small PNGs in base64; None for what is no PIL image."""
    shown = [image for run in runs[:TEXTS] for image, _ in zip(groups[run.prompt], run.tokens)]
    shown = [(image or [None])[0] if isinstance(image, list) else image for image in shown]
    return [small_png(image) if isinstance(image, Image.Image) else None for image in shown[:TEXTS]]


CATEGORY_COLUMNS: dict[str, Cell] = {
    "category": "{name}",
    "n": "{compared}",
    "faster than transformers by": "{speedup:.2f}",
    "95 %": "{speedup_ci95[0]:.2f}..{speedup_ci95[1]:.2f}",
    "tau": "{tau:.2f}",
    "identical": "{identical}/{compared}",
}


def category_view(record: dict[str, Any]) -> Table:
    left = f"; {n} later turns are not asked" if (n := record["turns_left_out"]) else ""
    rows = [{"name": name, **row} for name, row in record["categories"].items()]
    return table(f"{record['n_prompts']} prompts by category{left}", rows, CATEGORY_COLUMNS)


COLUMNS: dict[str, Cell] = {
    "against": "{name}",
    "ms / prompt": lambda row: f"{1e3 * row['seconds_per_prompt']:.1f}",
    "ours is faster by": "{ours_is_faster_by:.2f}",
    "95 %": "{ci95[0]:.2f}..{ci95[1]:.2f}",
    "identical": "{identical}/{compared}",
}


def view(record: dict[str, Any]) -> Table:
    by_law = record["guarantee"] != "approximate" and not record["promises_tokens"]
    return table(
        f"{record['n_prompts']} images, batch {record['batch_size']}, temperature {record['temperature']}",
        [{"name": name, "compared": record["compared"], **row} for name, row in record["baselines"].items()],
        COLUMNS,
        f"ours: {record['in_words']}; tau {record['tau']:.2f} (without bonus {record['tau_without_bonus']:.2f}); "
        f"decode only {record['speedup_decode_only']:.2f}, ideal {record['ideal_speedup']:.2f}; "
        f"our loop without a drafter over transformers {record['plain_over_transformers']:.2f}; {record['guarantee']}"
        f"\nequality: {OTHER_TOKENS if by_law else equality.in_words(record['equality'])}",
    )
