"""Makes `docs/models.md`: every class of transformers that generates, as a tiny random model of its default
configuration, made small by the names of its fields; stock `generate` against ours. Nothing is downloaded.

python -P tests/sweep.py [--workers 2] [--out FILE] [class ...]. Each class runs in a process of its own with limits of
time and memory. With BATCH_INVARIANT=1 in the environment it counts what that mode promises: models in bfloat16,
against our plain decoding of each prompt alone.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import multiprocessing
import os
import re
import resource
import sys
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

if __name__ == "__main__":  # as pytest does: with the root on the path, transformers could take kernels/ for a package
    sys.modules["tests"] = types.ModuleType("tests")
    sys.modules["tests"].__path__ = [str(Path(__file__).resolve().parent)]

import visspec
from tests.doubles import Oracle, TreeOracle, new_tokens
from tests.tiny import PAD, VOCAB
from tests.tiny_classes import NEW, WINDOW, Batches, cases, generating, single_row
from visspec.eval.bench.oracle import with_errors
from visspec.models.decoder.prefix import ROOM

INVARIANT = bool(os.environ.get("BATCH_INVARIANT"))
SECONDS, MEMORY = 120, 3 << 30  # limits of one class
STREAMED = ("none", "ngram")  # drafters that a stream takes
LIMITS = (NEW, NEW // 2, NEW // 2, NEW // 3)  # of the prompts of a stream: rows enter while others run
WRONG = 0.3  # share of an oracle's drafts that are wrong
DRAFTERS: dict[str, Callable[[list[list[int]]], Any]] = {
    "none": lambda answers: None, "ngram": lambda answers: "ngram",
    "chain": lambda answers: Oracle(with_errors(torch.tensor(answers), 1 - WRONG, VOCAB).tolist()),
    "tree": lambda answers: TreeOracle(answers, WRONG, per_row=len(answers) > 1),
}  # fmt: skip
ORDER = ("WRONG", "traceback", "not built", "stock fails", "refused", "identical")  # the worst first


@dataclass
class Row:
    """A line of the table: one class with one kind of input, and what became of each drafter and batch."""

    name: str
    inputs: str
    cells: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # of the first cell that is not identical

    @property
    def outcome(self) -> str:
        """The worst that happened."""
        return min(self.cells.values(), key=ORDER.index)


def sentence_of(error: Exception) -> str | None:
    """The sentence of a refusal: a ValueError of our own, one line of one sentence. None for any other error."""
    file, text = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve(), str(error)
    root = Path(visspec.__file__).resolve().parents[1]  # where an environment may lie as well
    ours = file.is_relative_to(root) and not {"tests", "site-packages"} & set(file.relative_to(root).parts)
    return text if isinstance(error, ValueError) and ours and "\n" not in text and ". " not in text else None


def trace_of(error: Exception) -> str:
    last, text = traceback.extract_tb(error.__traceback__)[-1], str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"


def stock(model: nn.Module, inputs: dict[str, Tensor] | list[dict[str, Tensor]]) -> list[list[int]]:
    """Greedy tokens of transformers' own generate; of a list of prompts, of each alone."""
    if isinstance(inputs, list):
        return [stock(model, each)[0] for each in inputs]
    return new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)


def alone(model: nn.Module, inputs: Any) -> list[list[int]]:
    """Greedy tokens of our plain decoding of each prompt alone, under `batch_invariant=True`."""
    fast = visspec.accelerate(model, None, batch_invariant=True)
    rows = inputs if isinstance(inputs, list) else [single_row(inputs, b) for b in range(len(inputs["input_ids"]))]
    result = [new_tokens(fast.generate(**each, max_new_tokens=NEW, do_sample=False), each)[0] for each in rows]
    longest = 0 if isinstance(inputs, list) else max(map(len, result))
    return [tokens + [PAD] * (longest - len(tokens)) for tokens in result]


def cast(inputs: Any) -> Any:
    """The same with floating numbers in bfloat16."""
    if isinstance(inputs, list):
        return [cast(each) for each in inputs]
    if isinstance(inputs, dict):
        return {name: cast(each) for name, each in inputs.items()}
    return inputs.bfloat16() if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs


def compare(row: Row, model: nn.Module, batches: Batches) -> Row:
    """Fills the cells of a row: every drafter on every batch."""
    if INVARIANT:
        model = model.bfloat16()
        # a batch of pictures is refused: they need one row a call
        batches = {b: cast(each) for b, each in batches.items() if row.inputs == "text" or b != "3"}
    for batch, inputs in batches.items():
        failure, expected = "", [[]]
        try:
            expected = (alone if INVARIANT else stock)(model, inputs)
        except Exception as error:
            failure = trace_of(error)
        for kind in DRAFTERS if batch != "stream" else STREAMED:
            cell, reason = run_cell(model, kind, inputs, expected, failure)
            row.cells[f"{kind} {batch}"] = cell
            row.reason = row.reason or reason
    return row


def run_cell(model: nn.Module, kind: str, inputs: Any, expected: list[list[int]], failure: str) -> tuple[str, str]:
    """One drafter on one batch: what became of it, and why. failure: of stock generate."""
    try:
        fast = visspec.accelerate(model, DRAFTERS[kind](expected), adaptive=False, batch_invariant=INVARIANT)
        if failure:
            return "stock fails", failure
        if isinstance(inputs, list):
            expected = [answer[:n] for answer, n in zip(expected, LIMITS)]
            made = [streamed(fast, inputs, room) for room in (0, ROOM)]
        else:
            made = [new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)]
    except Exception as error:
        sentence = sentence_of(error)
        return ("refused", sentence) if sentence else ("traceback", trace_of(error))
    wrong = [[sum(x != y for x, y in zip(a, e)) for a, e in zip(one, expected)] for one in made if one != expected]
    return ("WRONG", f"{kind}: wrong tokens in each row: {wrong[0]}") if wrong else ("identical", "")


def streamed(fast: Any, prompts: list[dict[str, Tensor]], room: int) -> list[list[int]]:
    """Greedy tokens of prompts in three slots. Raises the first prompt's error."""
    entries = [{**inputs, "max_new_tokens": n} for inputs, n in zip(prompts, LIMITS)]
    answers = sorted(fast.stream(entries, slots=3, prefix_cache=room, do_sample=False), key=lambda answer: answer.id)
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return [answer.tokens[:n] for answer, n in zip(answers, LIMITS)]  # some count by an option of their own


def verdicts(name: str) -> list[Row]:
    """The rows of one class: text, and pictures where prompts with them can be made."""
    try:
        made = cases(name)
    except Exception as error:
        return [Row(name, "none", {"all": "not built"}, trace_of(error))]
    rows = [compare(Row(name, inputs), model, batches) for inputs, model, batches in made]
    # a model that needs pictures has no row of text
    return [row for row in rows if row.outcome != "stock fails" or row is rows[-1]]


def limit() -> None:
    """Bounds the memory of a process, and silences models that print."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def isolated(name: str) -> list[Row]:
    """The rows of a class, made in a process of its own: a crash or a hang ends only that."""
    with multiprocessing.get_context("fork").Pool(1, limit) as pool:
        try:
            return pool.apply_async(verdicts, (name,)).get(SECONDS)
        except multiprocessing.TimeoutError:
            reason = f"its process died or took more than {SECONDS} s"
        except Exception as error:
            reason = trace_of(error)
        return [Row(name, "none", {"all": "traceback"}, reason)]


# --- the page -------------------------------------------------------------------------------------------------------

INTRODUCTION = f"""# Models of transformers

Every public class of transformers {tf.__version__} that generates, as a tiny random model of its default configuration.
`visspec.accelerate(model, drafter).generate` and `.stream` are compared with the stock `generate`: greedy, float32,
{NEW} new tokens, windows of {WINDOW} tokens where the configuration has a field for one. Batches are a single prompt,
three prompts padded on the left, and a stream of such prompts in three slots, with and without the prefix cache.
Drafters are none, n-grams, and chains and trees that draft the known answer with {WRONG:.0%} of the drafts wrong.

*Identical* means every token of every row, with every drafter and batch. *Refused* means a `ValueError` that says why;
use stock `generate` for these classes. *Stock fails*: the class is accepted, but its own `generate` fails on these
inputs. *Not built*: no tiny model could be made. Random models test correctness and say nothing about speed. Written by
`make models` on {datetime.date.today()}; `make test` runs a sample.

| outcome | rows with text | with pictures |
|---|---|---|"""


REASONS = {  # words of a refusal, and what the page says of it; the first that fits
    "is an encoder-decoder": "It is an encoder-decoder.",
    "states that every pass attends to|wrote keys and values": "It attends to states outside of the prompt.",
    "full or sliding attention|for a draft|run a draft|'num_hidden_layers'": "It cannot verify a draft or undo it.",
    "from its mask|counts positions itself": "It computes positions itself.",
    "no output embeddings": "It has no head over a vocabulary.",
    "its own (generate|decoding loop)": "It has its own decoding loop.",
    "no cache": "It keeps no cache of keys and values.",
    "": "It is refused for some calls, with a reason.",
}


def reason_of(row: Row) -> str:
    """The reason of a row, which classes share: of a refusal one of `REASONS`, else without names and values."""
    if row.outcome == "refused":
        return next(message for words, message in REASONS.items() if re.search(words, row.reason))
    return row.reason.replace("|", "\\|").replace("<", "&lt;")


def page(rows: list[Row]) -> str:
    """`docs/models.md`: counts, then a line for each outcome and reason, the worst first."""
    counts = Counter((row.outcome, row.inputs == "pictures") for row in rows)
    table = [f"| {outcome} | {counts[outcome, False]} | {counts[outcome, True]} |" for outcome in ORDER]
    groups: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: (ORDER.index(row.outcome), row.name, row.inputs)):
        names = groups.setdefault((row.outcome, reason_of(row) or f"with {row.inputs}"), [])
        names += [f"`{row.name}`"] * (f"`{row.name}`" not in names)
    head = ["", "| outcome | why | classes |", "|---|---|---|"]
    result = [f"| {outcome} | {why} | {', '.join(names)} |" for (outcome, why), names in groups.items()]
    return "\n".join([INTRODUCTION, *table, *head, *result, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    tf.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    verdicts("LlamaForCausalLM")  # imports what all need, before processes part
    rows: list[Row] = []
    with ThreadPoolExecutor(arguments.workers) as pool:
        for result in pool.map(isolated, arguments.names or generating()):
            rows += result
            for row in result:
                print(f"{row.name:50} {row.inputs:12} {row.outcome:12} {row.reason}", flush=True)
    if arguments.out:
        arguments.out.write_text(page(rows))


if __name__ == "__main__":
    main()
