"""`visspec bench captions`: throughput of many captions of very different lengths: our stream against fixed batches.

All arms read the same prompts and pixels, prepared before the clock, with the same cap, dtype, attention and threads:
ours as a stream of so many slots, our own `generate` in batches of that many, and transformers' `generate` in batches
sorted by the length of their answers, which is its best and which nobody knows before. A pass runs every arm over all
prompts; passes alternate in order, and ratios are medians over passes.
"""

import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from visspec.api.accelerate import accelerate
from visspec.api.captions import PROMPT, prepare
from visspec.cli.arguments import CaptioningOptions, Fraction, Positive, load
from visspec.cli.bench import BenchOptions, Cell, groups_of, measured_on, table, trim_rows
from visspec.eval.bench.paired import ratio, time_arms
from visspec.io import included
from visspec.io.options import option

SHARE = 0.25  # of prompts that ask for a description; the others ask for a word or two


@dataclass(kw_only=True)
class Options(BenchOptions, CaptioningOptions):
    images: Positive = option("how many held-out scenes", 512)
    slots: Positive = option("of the stream, and rows of fixed batches", 8)
    share: Fraction = option("of prompts that ask for a description, 0 to 1", SHARE)
    passes: Positive = option("over all prompts, of every arm", 3)
    skip_alone: bool = option("do not compare rows with what they are alone", False)


def run(arguments: Options) -> None:
    arguments.begin()
    record = bench_captions(arguments)
    arguments.end(record, view(record))


def scene_questions(questions: Sequence[Sequence[str]], request: str, share: float = SHARE) -> list[str]:
    """What is asked of each scene: a description, or one of its questions. The same for the same number of scenes."""
    lot = random.Random(0)
    return [request if lot.random() < share else lot.choice(some) for some in questions]


def bench_captions(arguments: Options) -> dict[str, Any]:
    """Run all arms. Returns the JSON object of docs/evaluate.md. Greedy."""
    model, processor, drafter = load(arguments)
    images, slots, scenes = arguments.images, arguments.slots, included.scenes(None, processor)
    pixels = scenes.images(images)
    texts = scene_questions(scenes.questions(images), arguments.prompt or PROMPT, arguments.share)
    base = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    fast = accelerate(model, drafter, acceptance=arguments.acceptance)
    single = [prepare(processor, [image], text, model) for image, text in zip(pixels, texts)]

    def batches(order: Sequence[int]) -> list[tuple[list[int], dict[str, Any]]]:
        groups = groups_of(list(order), slots)
        return [(g, prepare(processor, [pixels[i] for i in g], [texts[i] for i in g], model)) for g in groups]

    def streamed() -> dict[int, list[int]]:
        return {answer.id: answer.tokens for answer in fast.stream(single, slots=slots, **base)}

    first = streamed()  # warms up, and tells the lengths
    lengths = [len(first[i]) for i in range(images)]
    in_order, by_length = batches(range(images)), batches(sorted(range(images), key=lengths.__getitem__))

    def fixed() -> dict[int, list[int]]:
        return dict(row for group, inputs in in_order for row in zip(group, fast.run(**inputs, **base).state.tokens))

    def stock() -> dict[int, list[int]]:
        found: dict[Any, Any] = {}
        for group, inputs in by_length:
            out = model.generate(**inputs, **base)[:, inputs["input_ids"].shape[1] :]
            found.update(zip(group, trim_rows(out, model.generation_config)))
        return found

    for _, inputs in in_order[:1] + by_length[:1]:
        fast.run(**inputs, **base), model.generate(**inputs, **base)
    arms = {"stream": streamed, "fixed_batches": fixed, "transformers_sorted": stock}
    measured = time_arms(arms, arguments.passes)
    expected = [fast.run(**one, **base).state.tokens[0] for one in single if not arguments.skip_alone]
    rows = []
    for name, own in measured.items():
        row = {"name": name, "images_per_second": images / statistics.median(own.seconds), "seconds": own.seconds}
        for other, arm in (("fixed_batches", "fixed_batches"), ("transformers", "transformers_sorted")):
            row[f"over_{other}"] = ratio(measured[arm].seconds, own.seconds)
            row[f"cpu_over_{other}"] = ratio(measured[arm].cpu, own.cpu)
        same = sum(own.tokens[i] == measured["stream"].tokens[i] for i in range(images))
        rows.append(row | {"cpu_seconds": own.cpu, "peak_rss_mb": own.peak, "identical_to_stream": same})
    record = measured_on(model) | {"bench": "captions", "guarantee": fast.rule.traits.guarantee, "drafter": drafter}
    record |= {name: getattr(arguments, name) for name in ("acceptance", "max_new_tokens", "passes", "share")}
    record |= {"n_prompts": images, "batch_size": slots, "rows": rows, "load": os.getloadavg()[0]}
    record |= {"tokens": sum(lengths), "lengths": [min(lengths), statistics.median(lengths), max(lengths)]}
    same = sum(measured["stream"].tokens[i] == tokens for i, tokens in enumerate(expected))
    return record | {"identical": same, "compared": len(expected)}


COLUMNS: dict[str, Cell] = {
    "arm": "{name}",
    "images / s": "{images_per_second:.2f}",
    "over fixed batches": "{over_fixed_batches:.2f}",
    "over transformers, sorted": "{over_transformers:.2f}",
}


def view(record: dict[str, Any]) -> Table:
    low, middle, high = record["lengths"]
    title = f"{record['n_prompts']} captions of {low} to {high} tokens (median {middle:g})"
    caption = f"{record['batch_size']} slots; identical to alone: {record['identical']}/{record['compared']};"
    return table(title, record["rows"], COLUMNS, f"{caption} load {record['load']:.1f}", whole=COLUMNS)
