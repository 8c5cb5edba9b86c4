"""`visspec bench text`: drafters against transformers' own ways of decoding a text model, by kind of prompt.

All arms run in one process with the same prompts, dtype, attention, threads and limit, and take turns prompt by prompt.
Each arm calls `generate`, so every time includes the prefill.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visspec.api import loading, sources
from visspec.api.sources import Record
from visspec.api.text.accelerate import accelerate
from visspec.cli import bench
from visspec.cli.arguments import SamplingOptions
from visspec.cli.bench import BenchOptions, CaptionArm, Cell, StockCaptionArm, in_turns, measured_on, table
from visspec.eval.bench import paired as speed
from visspec.io.options import HardwareOptions, Positive, option

LOOKUP_LENGTHS = (3, 5, 10)  # transformers' prompt lookup gets the best of these, chosen on the warm-up prompts
WARMUP = 5  # number of prompts of the training split, or two batches, that are not measured
PROMPTS = Path(speed.__file__).with_name("prompts.jsonl")
COLUMNS: dict[str, Cell] = {
    "arm": "{name}",
    "prompts": "{kind}",
    "n": "{compared}",
    "faster than generate by": "{speedup:.2f}",
    "95 %": "{speedup_ci95[0]:.2f}..{speedup_ci95[1]:.2f}",
    "tau": "{tau:.2f}",
    "identical": "{identical}/{compared}",
}


@dataclass(kw_only=True)
class Options(BenchOptions, SamplingOptions, HardwareOptions):
    model: str = option("folder or hub id of a text model")
    prompts: Path | None = option(
        "file with a prompt per line, or JSON lines of {prompt, kind or category} (default: 48 prompts of ten kinds)",
        None,
    )
    count: Positive | None = option("maximum number of prompts (default: all)", None)
    drafter: list[str] | None = option(
        "drafters: names with options, or folders (default: the model's own, else context)", None, metavar="DRAFTER"
    )
    batch_size: Positive = option("number of prompts decoded together", 1)
    stream: bool = option("also measure the throughput of a stream with --batch-size slots", False)


def run(arguments: Options) -> None:
    arguments.begin()
    prompts = in_turns(read_prompts(arguments.prompts))[: arguments.count]
    model, tokenizer = loading.load(arguments.model, **arguments.hardware)
    record = bench_text(model, tokenizer, prompts, arguments, arguments.drafter or ["auto"])
    title = f"{len(prompts)} prompts, {arguments.max_new_tokens} tokens, temperature {arguments.temperature}"
    sentences = filter(None, (bench.choice_in_words(record), bench.stream_in_words(record, "prompts")))
    arguments.end(record, table(title, record["rows"], COLUMNS, "\n".join(sentences), ["prompts"]))


def read_prompts(path: Path | None, split: str = "held-out") -> list[Record]:
    """Return the prompts of a file, or of a split of the package's. Raises ValueError if a line has none."""
    if path is not None:
        return sources.checked_prompts(path)
    rows = map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines())
    return [Record(row["prompt"], prompt=row["prompt"], category=row["kind"]) for row in rows if row["split"] == split]


def bench_text(
    model: Any, tokenizer: Any, prompts: Sequence[Record], arguments: Options, drafters: Sequence[str]
) -> dict[str, Any]:
    """Run all arms on all prompts. Returns the JSON object of docs/results.md; only batch 1 has kinds."""
    size, base, seed = arguments.batch_size, arguments.generation, arguments.seed
    others = in_turns(read_prompts(None, "train"))[: max(WARMUP, 2 * size)]
    texts, warmup = ([str(prompt.prompt) for prompt in some] for some in (prompts, others))
    inputs = bench.in_groups(tokenizer, [[]] * len(texts), texts, size, model)
    warm = bench.in_groups(tokenizer, [[]] * len(warmup), warmup, size, model, len(inputs))
    static = {"cache_implementation": "static", "disable_compile": True}
    ours = {spec: CaptionArm(accelerate(model, spec), base, seed) for spec in drafters}  # raises before any work
    arms: dict[str, StockCaptionArm | CaptionArm] = {
        "generate": StockCaptionArm(model, base, seed),
        "generate_static": StockCaptionArm(model, base | static, seed),
    }
    if size == 1:
        lookup = [StockCaptionArm(model, base | {"prompt_lookup_num_tokens": n}, seed) for n in LOOKUP_LENGTHS]
        arms["prompt_lookup"] = speed.fastest(lookup, warm)
    arms["plain"] = CaptionArm(accelerate(model, None), base, seed)
    arms |= ours
    runs, failures = speed.interleave(arms, inputs, warm, "bench text")
    kinds: dict[str, Any] = {"all": None} | (bench.by_category(prompts) if size == 1 else {})
    rows: list[dict[str, Any]] = []
    for name, arm in list(arms.items())[1:]:
        guarantee = {"guarantee": arm.fast.setup.guarantee} if isinstance(arm, CaptionArm) else {}
        for kind, numbers in kinds.items():
            if kind:
                figures = bench.against(runs, "generate", name, arguments.temperature > 0, numbers)
                rows.append({"name": name, "kind": kind, "n": figures["compared"]} | figures | guarantee)
    record = {"bench": "text", "rows": rows, "failures": failures, "n_prompts": len(prompts)}
    record |= bench.choice_of(ours["auto"].fast) if "auto" in ours else {}
    if size == 1:
        record["prompt_lookup_num_tokens"] = arms["prompt_lookup"].options["prompt_lookup_num_tokens"]
    if arguments.stream:
        single = [each for _, each in bench.in_groups(tokenizer, [[]] * len(texts), texts, 1, model)]
        fast = accelerate(model, drafters[0])
        record |= bench.throughput(fast, bench.groups_of(single, size), inputs, warm, base)
    return record | base | {"batch_size": size, "seed": seed} | measured_on(model, seed=seed)
