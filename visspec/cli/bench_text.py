"""`visspec bench text`: drafters against transformers' own ways of decoding a text model, by kind of prompt."""

import json
from dataclasses import dataclass
from pathlib import Path

from visspec.api import loading, sources
from visspec.api.sources import Record
from visspec.cli.bench import in_turns
from visspec.cli.bench_caption import DecodingOptions, bench_prompts, views
from visspec.eval.bench import paired
from visspec.io.options import HardwareOptions, option

WARMUP = 5  # number of prompts of the training split, or two batches, that are not measured
PROMPTS = Path(paired.__file__).with_name("prompts.jsonl")


@dataclass(kw_only=True)
class Options(DecodingOptions, HardwareOptions):
    model: str = option("folder or hub id of a text model")
    prompts: Path | None = option(
        "file with a prompt per line, or JSON lines of {prompt, kind or category} (default: 48 prompts of ten kinds)",
        None,
    )


def run(arguments: Options) -> None:
    arguments.begin()
    prompts = in_turns(read_prompts(arguments.prompts))[: arguments.count]
    warm = in_turns(read_prompts(None, "train"))[: max(WARMUP, 2 * arguments.batch_size)]
    model, tokenizer = loading.load(arguments.model, **arguments.hardware)
    record = bench_prompts("text", model, tokenizer, prompts, warm, arguments)
    arguments.end(record, *views(record))


def read_prompts(path: Path | None, split: str = "held-out") -> list[Record]:
    """Return the prompts of a file, or of a split of the package's. Raises ValueError if a line has none."""
    if path is not None:
        return sources.checked_prompts(path)
    rows = map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines())
    return [Record(row["prompt"], prompt=row["prompt"], category=row["kind"]) for row in rows if row["split"] == split]
