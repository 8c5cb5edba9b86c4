"""Code shared by the benches: options, scenes, captioning arms, and tables."""

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, ProcessorMixin

from visspec.api.captions import prepare
from visspec.api.sources import Record, RecordStream
from visspec.api.text.accelerate import Accelerated
from visspec.cli.arguments import JsonOption
from visspec.eval.bench.clock import seconds_of, waiter
from visspec.eval.bench.paired import ArmRun, turns
from visspec.io import included
from visspec.io.files import write_json
from visspec.io.options import Positive, option
from visspec.io.provenance import provenance
from visspec.io.videos import open_media
from visspec.loop.setup import DecodingSetup
from visspec.types import Processor

PARTS = 3  # number of parts of a stream's inputs; the ratio is their median
PART_GROUPS = 3  # groups per part, so that rows enter while others run
Prompt = tuple[int, dict[str, Any]]  # the number of a batch, and the model's inputs
Cell = str | Callable[[Mapping[str, Any]], str]  # a column: a format of a row's fields, "{tau:.2f}", or a function


@dataclass(kw_only=True)
class BenchOptions(JsonOption):
    threads: Positive | None = option("torch threads", None)

    def begin(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)

    def end(self, record: dict[str, Any], *views: Table) -> None:
        """Print the tables of a record at full width, even beyond the terminal's, and write the record."""
        width = Console().width
        Console(width=max(width, *(Console(width=10 * width).measure(view).maximum for view in views))).print(*views)
        write_json(self.json, record)


@dataclass(kw_only=True)
class ScenesOptions(BenchOptions):
    """Held-out scenes of a world."""

    world: str | None = option(
        "world of the scenes (default: the one whose words the model knows)", None, choices=[*included.table().worlds]
    )

    def check_scenes(self, model: str | None, instead: str) -> None:
        """Raise ValueError for a model that is not included, unless --world explicitly selects a world's scenes."""
        if self.world is None and model is not None and not included.is_included(model):
            raise ValueError(
                f"{instead}: got none for {model}. Pass {instead} of yours, or --world to use the rendered scenes,"
                " which are for included models."
            )

    def scenes(self, processor: ProcessorMixin, use: str = "captions") -> included.World:
        return included.scenes(self.world, processor, use)


def measured_on(model: PreTrainedModel, **more: Any) -> dict[str, Any]:
    """Return fields of a record: the name of the model, and the provenance of its figures."""
    return {"target": getattr(model.config, "_name_or_path", ""), "provenance": provenance(model, **more)}


def compilations(setup: DecodingSetup) -> dict[str, Any]:
    """Return whether passes ran compiled, and the number of graphs after a warm-up, including the drafter's."""
    target, recorder, passes = setup.target.passes, setup.target.recorder, setup.passes
    counts = {"graphs": sum(p.graphs for p in passes), "recompilations": sum(p.late for p in passes)}
    compiled = recorder.compiled if recorder is not None else target is not None and not target.refused
    return {"compiled": compiled, **counts}


class StockCaptionArm:
    """transformers' own generate. `first` is measured by a separate call that stops after one token."""

    def __init__(self, model, options: dict[str, Any], seed: int):
        self.model, self.options, self.seed = model, options, seed

    def __call__(self, prompt: Prompt) -> ArmRun:
        index, inputs = prompt
        wait = waiter(inputs["input_ids"].device)
        torch.manual_seed(self.seed + index)
        seconds, out = seconds_of(partial(self.model.generate, **inputs, **self.options), wait)
        first, _ = seconds_of(partial(self.model.generate, **inputs, **(self.options | {"max_new_tokens": 1})), wait)
        return ArmRun(seconds, trim_rows(out[:, inputs["input_ids"].shape[1] :], self.model.generation_config), first)


class CaptionArm:
    """The accelerated generate. Each row has its own seed, so that arms with equal seeds can be compared."""

    def __init__(self, fast: Accelerated, options: dict[str, Any], seed: int):
        self.fast, self.options, self.seed = fast, options, seed

    def __call__(self, prompt: Prompt) -> ArmRun:
        index, inputs = prompt
        seeds, wait = row_seeds(self.seed, index, len(inputs["input_ids"])), waiter(inputs["input_ids"].device)
        seconds, result = seconds_of(partial(self.fast.run, **inputs, **self.options, seed=seeds), wait)
        state, trace = result.state, result.state.trace
        first = seconds - sum(v for k, v in trace.times.items() if k not in ("prefill", "draft_prefill"))
        more = {"drift": result.stats.drift_per_token, "origin": [list(o) for o in trace.origin]}
        return ArmRun.of_trace(seconds, [list(t) for t in state.tokens], trace, first, **more)


def row_seeds(seed: int, prompt: int, rows: int) -> list[int]:
    """Return a different seed for each row of a prompt."""
    return [1000 * (seed + prompt) + row for row in range(rows)]


def trim_rows(new: torch.Tensor, config) -> list[list[int]]:
    """Return rows of new ids up to and including their first end token."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stops = [next((i for i, t in enumerate(row) if t in ends), len(row) - 1) for row in new.tolist()]
    return [row[: stop + 1] for row, stop in zip(new.tolist(), stops)]


def by_category(records: Iterable[Record]) -> dict[str, list[int]]:
    """Return the numbers of the records of each category."""
    groups: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        groups.setdefault(record.category, []).append(number)
    return groups


def in_turns(records: Iterable[Record]) -> list[Record]:
    """Return the records with categories alternating, so that the first ones cover all categories."""
    records = list(records)
    turns = [(place, number) for numbers in by_category(records).values() for place, number in enumerate(numbers)]
    return [records[number] for _, number in sorted(turns, key=lambda turn: turn[0])]


def readable(records: RecordStream) -> Iterator[Record]:
    """Yield records with their images, alternating between categories. Unreadable ones are reported and skipped."""
    for record in records if records.total is None else in_turns(records):
        try:
            if record.error is not None:
                raise ValueError(record.error)
            yield replace(record, image=open_media(record.image, record.id))
        except (ValueError, OSError) as error:
            print(f"visspec: {error}", file=sys.stderr)


def throughput(
    fast: Accelerated, groups: Sequence[Sequence], batches: Sequence, warm: Sequence, options: dict[str, Any]
) -> dict[str, float]:
    """Return the inputs per second of a stream, and the ratio to transformers' generate in batches of as many rows.

    `groups` have as many inputs as there are slots, `batches` the same as (index, inputs). They are measured in up to
    `PARTS` parts of several groups, each once and none before, because drafters remember answers. `warm` holds
    other batches for the warm-up.
    """
    slots, model, parts = len(groups[0]), cast(Any, fast.model), min(PARTS, max(len(groups) // PART_GROUPS, 1))
    list(fast.stream((inputs for _, inputs in warm), slots=slots, **options))
    arms: dict[str, Callable[[int], Any]] = {
        "stream": lambda part: list(fast.stream(chain(*groups[part::parts]), slots=slots, **options)),
        "transformers": lambda part: [model.generate(**inputs, **options) for _, inputs in batches[part::parts]],
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for part, order in turns(list(arms), parts):
        for name in order:
            seconds[name].append(seconds_of(partial(arms[name], part), waiter(fast.model.device))[0])
    ratio = statistics.median(slow / quick for slow, quick in zip(seconds["transformers"], seconds["stream"]))
    return {"items_per_second": sum(map(len, groups)) / sum(seconds["stream"]), "over_transformers": ratio}


def groups_of(items: Sequence[Any], size: int) -> list[Any]:
    """Return the items in groups of this size; the last one may be smaller."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def in_groups(
    processor: Processor, records: Sequence[Record], size: int, model: PreTrainedModel, first: int = 0
) -> list[Prompt]:
    """Return a model's inputs, with numbers from `first`, for groups of `size` records, whose images are open."""
    groups = []
    for number, group in enumerate(groups_of(records, size), first):
        images = [[] if record.image is None else record.image for record in group]
        groups.append((number, prepare(processor, images, [str(record.prompt) for record in group], model)))
    return groups


def cell(form: Cell, row: Mapping[str, Any]) -> str:
    """Format a cell of a row; empty if a field of the format is missing or None."""
    if callable(form):
        return form(row)
    try:
        return form.format(**row).replace("nan..nan", "")  # the interval of a single prompt
    except (KeyError, TypeError):
        return ""


def table(
    title: str,
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, Cell],
    caption: str | None = None,
    left: Iterable[str] = (),
    whole: Iterable[str] | None = None,
) -> Table:
    """Return a rich table. Columns in `left` are left-aligned; those in `whole` are not wrapped."""
    view = Table(title=title, caption=caption)
    left = {next(iter(columns)), *left}
    whole = left if whole is None else set(whole)
    for head in columns:
        view.add_column(head, justify="left" if head in left else "right", no_wrap=head in whole)
    for row in rows:
        view.add_row(*(cell(form, row) for form in columns.values()))
    return view
