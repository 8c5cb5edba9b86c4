"""`visspec bench caption`: our loop with and without a drafter against transformers' generate and its assisted modes.

One process, one set of prompts and pixels, same dtype, attention, threads, stop rule and cap; arms interleaved per
prompt. Every arm goes through the same `model.generate` entry, so preparation and the vision tower are in every time.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from visspec import tree as trees
from visspec.api import loading, requests, zoo
from visspec.api.accelerate import Accelerated, accelerate
from visspec.api.captions import PROMPT, prepare
from visspec.cli.arguments import add_captioning, load, positive
from visspec.cli.bench_compiled import compilations
from visspec.eval.bench import equality
from visspec.eval.bench import paired as speed
from visspec.eval.bench.paired import ArmRun
from visspec.eval.report.images import small_png
from visspec.io.files import write_json
from visspec.io.provenance import provenance
from visspec.loop.stats import acceptance_by_depth, by_depth, text_pieces
from visspec.models.runner.compiled import stepwise
from visspec.toys.world.worlds import WORLDS, known_to, world

LOOKUP_LENGTHS = (3, 5, 10)  # transformers' assisted modes get the best of these, chosen on the warm-up prompts
ASSISTANT_LENGTHS = (3, 5, 8)
TEXTS = 8  # captions kept word by word in the record
OTHER_TOKENS = "exact in law, with random numbers of its own: other tokens than plain decoding by design"
FORCED = 16  # prompts fed again token by token where the dtype rounds; beyond, those whose outputs differ


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=positive, default=64, help="how many held-out scenes")
    parser.add_argument("--world", choices=WORLDS, help="of the scenes; default: the one whose words the model knows")
    parser.add_argument("--threads", type=positive, help="torch threads")
    parser.add_argument("--compile", action="store_true", help="ours compiled, and transformers compiled beside it")
    add_captioning(parser)


def run(arguments: argparse.Namespace) -> None:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, processor, drafter = load(arguments)
    small = zoo.CHECKPOINTS / "captioner-small"
    assistant = loading.load(str(small))[0] if not arguments.model and small.is_dir() else None
    place = world(arguments.world) if arguments.world else known_to(processor, lambda w: w.captions.vocabulary())
    record = bench_caption(
        model, processor, [place.to_image(scene) for scene in place.scenes(arguments.images)], drafter=drafter,
        assistant=assistant, acceptance=arguments.acceptance, batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, seed=arguments.seed,
        request=arguments.prompt or PROMPT, compile=arguments.compile,
    )  # fmt: skip
    Console().print(table(record))
    write_json(arguments.json, record)


def bench_caption(
    model, processor, images: Sequence, *, drafter="vispec", assistant=None, acceptance: str = "exact",
    batch_size: int = 1, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0, request: str = PROMPT,
    warmup: int = 3, compile: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run all arms on all images; returns the JSON object of docs/evaluate.md.

    assistant: a smaller model for transformers' assisted generation (batch 1 only, greedy or sampling), or None.
    compile: ours runs compiled; a further arm is transformers' generate with a static cache and compiled steps.
    """
    groups = [images[i : i + batch_size] for i in range(0, len(images), batch_size)]
    prompts = [(i, prepare(processor, group, request, model)) for i, group in enumerate(groups)]
    base: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        base |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    arms: dict[str, Any] = {
        "transformers_generate": StockCaptionArm(model, base, seed),
        "plain": CaptionArm(accelerate(model, None), base, seed),
        "ours": CaptionArm(accelerate(model, drafter, acceptance=acceptance, compile=compile), base, seed),
    }
    if compile:
        steps = stepwise(model, model.get_decoder())
        arms["transformers_compiled"] = StockCaptionArm(steps, base | {"cache_implementation": "static"}, seed)
    if batch_size == 1:
        warm = prompts[: max(warmup, 1)]
        # transformers' lookup drafts image placeholders and then fails on them; suppressed, it runs
        never = {"suppress_tokens": sorted(arms["plain"].fast.target.capabilities.never_drafted)}
        lookup = [base | never | {"prompt_lookup_num_tokens": n} for n in LOOKUP_LENGTHS]
        arms["transformers_prompt_lookup"] = speed.fastest([StockCaptionArm(model, o, seed) for o in lookup], warm)
        if assistant is not None:
            assisted = [base | {"assistant_model": assistant, "num_assistant_tokens": n} for n in ASSISTANT_LENGTHS]
            arms["transformers_assisted"] = speed.fastest([StockCaptionArm(model, o, seed) for o in assisted], warm)
    runs, failures = speed.interleave(arms, prompts, warmup, lambda p: tqdm(p, desc="bench caption", leave=False))
    record = summarise(runs, failures, arms, temperature)
    if compile:
        record["speedup_over_compiled"] = record["baselines"]["transformers_compiled"]["ours_is_faster_by"]
        record |= compilations(arms["ours"].fast.setup)
    record["equality"] = equality_tiers(arms["ours"].fast, prompts, runs, base, model.dtype)
    return record | {
        "target": getattr(model.config, "_name_or_path", ""), "drafter": str(drafter), "acceptance": acceptance,
        "n_prompts": len(images), "batch_size": batch_size, "max_new_tokens": max_new_tokens,
        "temperature": temperature, "seed": seed, "provenance": provenance(model, seed=seed),
        "texts": texts(runs["ours"], processor.tokenizer), "thumbnails": thumbnails(runs["ours"], groups),
    }  # fmt: skip


class StockCaptionArm:
    """transformers' own generate. `first` is a call of its own that stops after one token: nothing rides along."""

    def __init__(self, model, options: dict[str, Any], seed: int):
        self.model, self.options, self.seed = model, options, seed

    def __call__(self, prompt) -> ArmRun:
        index, inputs = prompt
        torch.manual_seed(self.seed + index)
        start = time.perf_counter()
        out = self.model.generate(**inputs, **self.options)
        seconds = time.perf_counter() - start
        self.model.generate(**inputs, **(self.options | {"max_new_tokens": 1}))
        first = time.perf_counter() - start - seconds
        return ArmRun(seconds, trimmed(out[:, inputs["input_ids"].shape[1] :], self.model.generation_config), first)


class CaptionArm:
    """The same through `fast.generate`; a row's seed is its own, so that arms with equal seeds can be compared."""

    def __init__(self, fast: Accelerated, options: dict[str, Any], seed: int):
        self.fast, self.options, self.seed = fast, options, seed

    def __call__(self, prompt) -> ArmRun:
        index, inputs = prompt
        row_seeds = [1000 * (self.seed + index) + row for row in range(inputs["input_ids"].shape[0])]
        start = time.perf_counter()
        result = self.fast.run(**inputs, **self.options, seed=row_seeds)
        seconds = time.perf_counter() - start
        state, trace = result.state, result.state.trace
        first = seconds - sum(v for k, v in trace.times.items() if k not in ("prefill", "draft_prefill"))
        stages = dict(trace.times) | {"other": seconds - sum(trace.times.values())}
        drift, origin = result.stats.drift_per_token, [list(o) for o in trace.origin]
        return ArmRun(seconds, [list(t) for t in state.tokens], first, stages, list(trace.rounds), drift, origin)


def equality_tiers(
    fast: Accelerated, prompts: Sequence, runs: dict[str, list[ArmRun]], options, dtype
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


def trimmed(new: torch.Tensor, config) -> list[list[int]]:
    """Rows of new ids up to and including their first end token."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    rows = []
    for row in new.tolist():
        stop = next((i for i, t in enumerate(row) if t in ends), len(row) - 1)
        rows.append(row[: stop + 1])
    return rows


def summarise(runs: dict[str, list[ArmRun]], failures: list[str], arms, temperature: float) -> dict[str, Any]:
    """Ratios of every arm to ours, tau, the gap to ideal, times by stage."""
    ours, plain, sampled = runs["ours"], runs["plain"], temperature > 0
    against = speed.compare(runs["transformers_generate"], ours, per_token=sampled)
    fast = arms["ours"].fast
    setup = fast.setup
    count = max(len(ours), 1)
    names = {stage for run in ours for stage in run.stages}
    baselines = {}
    for name, found in runs.items():
        if name == "ours":
            continue
        ratio = speed.compare(found, ours, per_token=sampled and name != "plain")
        baselines[name] = {
            "seconds_per_prompt": sum(r.seconds for r in found) / count,
            "tokens_per_prompt": sum(r.count for r in found) / count,
            "ours_is_faster_by": ratio["speedup"],  # end to end, geometric mean over prompts
            "ci95": ratio["speedup_ci95"],
            "identical": ratio["identical"],
            "options": {k: v for k, v in arms[name].options.items() if isinstance(v, (int, float))},
        }
    without = speed.compare(runs["transformers_generate"], plain, per_token=sampled)
    over = speed.compare(plain, ours)  # ideal and tau count in passes of our own plain loop
    record = {
        "bench": "caption",
        "guarantee": setup.guarantee,
        "promises_tokens": setup.promises_tokens(not sampled),
        **against,
        "identical_to": "transformers_generate",
        **speed.tau(ours),
        "acceptance_by_depth": acceptance(ours),
        "reached_by_depth": reached(ours),
        "nfe_plain": speed.tau(plain)["nfe"],
        **speed.ideal(plain, ours),
        "over_plain": over["speedup"],
        "over_plain_ci95": over["speedup_ci95"],
        "plain_over_transformers": without["speedup"],
        "plain_over_transformers_ci95": without["speedup_ci95"],
        "drift_per_token": speed.drift(ours),
        "time_s": {name: sum(r.stages.get(name, 0.0) for r in ours) for name in sorted(names)},
        "tokens_per_prompt": sum(r.count for r in ours) / count,
        "baselines": baselines,
        "failures": failures,
        "drafter_name": fast.name,
    }
    record["measured_over_ideal"] = over["speedup_decode_only"] / record["ideal_speedup"]
    doubt = speed.suspicion(over["speedup"], over["speedup_ci95"], record["tau"])
    record["in_words"] = "; ".join(filter(None, (speed.in_words(record["speedup"]), doubt)))
    if sampled:
        record["identical"], record["compared"] = baselines["plain"]["identical"], len(ours)
        record["identical_to"] = "plain (same seeds)"
    return record


def acceptance(runs: Sequence[ArmRun]) -> list[float]:
    """Accepted / reached at each depth, over all runs."""
    return acceptance_by_depth([entry for run in runs for entry in run.rounds])


def reached(runs: Sequence[ArmRun]) -> list[int]:
    """How many drafted nodes of each depth had all nodes above them accepted: the n of `acceptance_by_depth`."""
    return [n for n in by_depth(entry for run in runs for entry in run.rounds)[0] if n]


def texts(runs: Sequence[ArmRun], tokenizer) -> list[list[tuple[str, str]]]:
    """The first captions in pieces of (text, origin), for the report. Decoded here, outside the clocks."""
    rows = [(tokens, origin) for run in runs[:TEXTS] for tokens, origin in zip(run.tokens, run.origin)]
    return [text_pieces(tokenizer, tokens, origin) for tokens, origin in rows[:TEXTS]]


def thumbnails(runs: Sequence[ArmRun], groups: Sequence[Sequence]) -> list[str | None]:
    """The pictures of `texts`, in its order, as small PNGs in base64; None for what is no PIL image."""
    shown = [image for run in runs[:TEXTS] for image, _ in zip(groups[run.prompt], run.tokens)]
    return [small_png(image) if isinstance(image, Image.Image) else None for image in shown[:TEXTS]]


def table(record: dict[str, Any]) -> Table:
    """A rich table of a record, for the terminal."""
    view = Table(
        title=f"{record['n_prompts']} images, batch {record['batch_size']}, temperature {record['temperature']}"
    )
    for column in ("against", "ms / prompt", "ours is faster by", "95 %", "identical"):
        view.add_column(column, justify="left" if column == "against" else "right", no_wrap=column == "against")
    for name, row in record["baselines"].items():
        low, high = row["ci95"]
        view.add_row(
            name, f"{1e3 * row['seconds_per_prompt']:.1f}", f"{row['ours_is_faster_by']:.2f}",
            f"{low:.2f}..{high:.2f}", f"{row['identical']}/{record['compared']}",
        )  # fmt: skip
    by_law = record["guarantee"] != "approximate" and not record["promises_tokens"]
    view.caption = (
        f"ours: {record['in_words']}; tau {record['tau']:.2f} (without bonus {record['tau_without_bonus']:.2f}); "
        f"decode only {record['speedup_decode_only']:.2f}, ideal {record['ideal_speedup']:.2f}; "
        f"our loop without a drafter over transformers {record['plain_over_transformers']:.2f}; {record['guarantee']}"
        f"\nequality: {OTHER_TOKENS if by_law else equality.in_words(record['equality'])}"
    )
    return view
