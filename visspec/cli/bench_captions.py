"""`visspec bench captions`: throughput of many captions of very different lengths: our stream against fixed batches.

All arms read the same prompts and pixels, prepared before the clock, with the same cap, dtype, attention and threads:
ours as a stream of so many slots, our own `generate` in batches of that many, and transformers' `generate` in batches
sorted by the length of their answers, which is its best and which nobody knows before. A pass runs every arm over all
prompts; passes alternate in order, and ratios are medians over passes.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from visspec.api.accelerate import accelerate
from visspec.api.captions import PROMPT, prepare
from visspec.cli.arguments import add_captioning, load, positive
from visspec.cli.bench_caption import trimmed
from visspec.io.files import write_json
from visspec.io.provenance import provenance
from visspec.toys.world.captions import questions
from visspec.toys.world.render import to_image
from visspec.toys.world.scene import held_out_scenes

SHARE = 0.25  # of prompts that ask for a description; the others ask for a word or two


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=positive, default=512, help="how many held-out scenes")
    parser.add_argument("--slots", type=positive, default=8, help="of the stream, and rows of fixed batches")
    parser.add_argument("--share", type=float, default=SHARE, help="of prompts that ask for a description, 0 to 1")
    parser.add_argument("--passes", type=positive, default=3, help="over all prompts, of every arm")
    parser.add_argument("--threads", type=positive, help="torch threads")
    parser.add_argument("--skip-alone", action="store_true", help="do not compare rows with what they are alone")
    add_captioning(parser)


def run(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.share <= 1:
        raise ValueError(f"--share: got {arguments.share:g}, expected a number from 0 to 1")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    record = bench_captions(
        *load(arguments), images=arguments.images, slots=arguments.slots, passes=arguments.passes,
        share=arguments.share,
        max_new_tokens=arguments.max_new_tokens, acceptance=arguments.acceptance, request=arguments.prompt or PROMPT,
        alone=not arguments.skip_alone,
    )  # fmt: skip
    Console().print(table(record))
    write_json(arguments.json, record)


def asked(scenes: Sequence, request: str, share: float = SHARE) -> list[str]:
    """What is asked of each scene: a description, or one of its questions. The same for the same number of scenes."""
    lot = random.Random(0)
    return [request if lot.random() < share else lot.choice(questions(scene))[0] for scene in scenes]


def bench_captions(
    model, processor, drafter: str, *, images: int, slots: int, passes: int, max_new_tokens: int, acceptance: str,
    request: str, share: float = SHARE, alone: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Run all arms. Returns the JSON object of docs/evaluate.md. Greedy."""
    scenes = held_out_scenes(images)
    pixels, texts = [to_image(scene) for scene in scenes], asked(scenes, request, share)
    base = {"max_new_tokens": max_new_tokens, "do_sample": False}
    fast = accelerate(model, drafter, acceptance=acceptance)
    single = [prepare(processor, [image], text, model) for image, text in zip(pixels, texts)]

    def batches(order: Sequence[int]) -> list[tuple[list[int], dict[str, Any]]]:
        groups = [list(order[i : i + slots]) for i in range(0, len(order), slots)]
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
            found.update(zip(group, trimmed(out, model.generation_config)))
        return found

    arms = {"stream": streamed, "fixed_batches": fixed, "transformers_sorted": stock}
    for _, inputs in in_order[:1] + by_length[:1]:
        fast.run(**inputs, **base), model.generate(**inputs, **base)
    seconds, cpu, outputs, peak = timed(arms, passes)
    expected = [fast.run(**one, **base).state.tokens[0] for one in single] if alone else []
    rows = [
        {
            "name": name, "images_per_second": images / statistics.median(spent), "seconds": spent,
            "over_fixed_batches": ratio(seconds["fixed_batches"], spent),
            "over_transformers": ratio(seconds["transformers_sorted"], spent), "peak_rss_mb": peak[name],
            "cpu_over_fixed_batches": ratio(cpu["fixed_batches"], cpu[name]), "cpu_seconds": cpu[name],
            "cpu_over_transformers": ratio(cpu["transformers_sorted"], cpu[name]),
            "identical_to_stream": sum(outputs[name][i] == outputs["stream"][i] for i in range(images)),
        }
        for name, spent in seconds.items()
    ]  # fmt: skip
    return {
        "bench": "captions", "guarantee": fast.rule.traits.guarantee, "drafter": drafter, "acceptance": acceptance,
        "target": getattr(model.config, "_name_or_path", ""), "n_prompts": images, "batch_size": slots,
        "max_new_tokens": max_new_tokens, "passes": passes, "share": share, "tokens": sum(lengths),
        "lengths": [min(lengths), statistics.median(lengths), max(lengths)], "rows": rows,
        "identical": sum(outputs["stream"][i] == tokens for i, tokens in enumerate(expected)),
        "compared": len(expected), "load": os.getloadavg()[0], "provenance": provenance(model),
    }  # fmt: skip


def timed(
    arms: dict[str, Callable[[], dict[int, list[int]]]], passes: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, dict[int, list[int]]], dict[str, float]]:
    """Seconds of every pass of each arm, by the clock and of the processor (which others on the machine hardly change),
    its tokens, and the process's peak memory (MB) after its first pass.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    outputs: dict[str, Any] = {}
    peak: dict[str, Any] = {}
    for number in range(passes):
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            start, worked = time.perf_counter(), time.process_time()
            outputs[name] = arms[name]()
            seconds[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - worked)
            peak.setdefault(name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return seconds, cpu, outputs, peak


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over passes of how much longer the one took than the other."""
    return statistics.median(s / f for s, f in zip(slow, fast))


def table(record: dict[str, Any]) -> Table:
    """A rich table of a record, for the terminal."""
    low, middle, high = record["lengths"]
    view = Table(title=f"{record['n_prompts']} captions of {low} to {high} tokens (median {middle:g})")
    for column in ("arm", "images / s", "over fixed batches", "over transformers, sorted"):
        view.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for row in record["rows"]:
        view.add_row(
            row["name"], f"{row['images_per_second']:.2f}", f"{row['over_fixed_batches']:.2f}",
            f"{row['over_transformers']:.2f}",
        )  # fmt: skip
    view.caption = (
        f"{record['batch_size']} slots; identical to alone: {record['identical']}/{record['compared']};"
        f" load {record['load']:.1f}"
    )
    return view
