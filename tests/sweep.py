"""Makes `docs/models.md`: every class of transformers that generates, stock `generate` against ours.

python -P tests/sweep.py [--workers 2] [--out FILE] [class ...]. Each class runs in a process of its own with limits of
time and memory.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import multiprocessing
import os
import resource
import sys
import traceback
import types
import warnings
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
from tests import tiny_class_inputs, tiny_classes
from tests.doubles import Oracle, TreeOracle, new_tokens
from tests.tiny_class_inputs import NEW
from tests.tiny_sizes import SPECIAL, WINDOW
from visspec import tree as trees
from visspec.models.decoder.prefix import ROOM
from visspec.types import Draft, State

SECONDS, MEMORY = 120, 3 << 30  # limits of one class
DRAFTERS = ("none", "ngram", "chain", "tree")
STREAMED = ("none", "ngram")
LIMITS = (NEW, NEW // 2, NEW // 2, NEW // 3)  # of the prompts of a stream: rows enter while others run
WRONG = 0.3  # share of an oracle's drafts that are wrong
HOME = Path(visspec.__file__).resolve().parents[1]
SECTIONS = {  # of the page, by outcome: title and explanation
    "WRONG": ("Wrong tokens", "Bugs in visspec."),
    "traceback": ("Unexpected errors", "Bugs in visspec."),
    "identical": ("Identical", "With every drafter and batch size, and in a stream."),
    "refused": ("Refused", "Use stock `generate` for these classes."),
    "stock fails": ("Nothing to compare", "The class is accepted, but its own `generate` fails on these inputs."),
    "not built": ("Not built", "No tiny model could be made from the configuration."),
}
ORDER = ("WRONG", "traceback", "not built", "stock fails", "refused", "identical")  # the worst first


@dataclass
class Row:
    """A line of the table: one class with one kind of input. `cells` is drafter -> batch -> what became of it."""

    name: str
    inputs: str
    cells: dict[str, dict[str, str]] = field(default_factory=dict)
    reason: str = ""  # of the first cell that is not identical

    @property
    def outcome(self) -> str:
        """The worst that happened."""
        found = {cell for cells in self.cells.values() for cell in cells.values()}
        return next(outcome for outcome in ORDER if outcome in found)


class ErringOracle(Oracle):
    """Drafts the known answer as a chain, with wrong tokens mixed in."""

    def __init__(self, answers: list[list[int]], wrong: float = WRONG, seed: int = 0):
        super().__init__(answers)
        self.wrong, self.random = wrong, torch.Generator().manual_seed(seed)

    def propose(self, state: State, depth: int) -> Draft:
        right = torch.tensor(self.ahead(state, depth))
        other = torch.randint(SPECIAL[0], right.shape, generator=self.random)
        miss = torch.rand(right.shape, generator=self.random) < self.wrong
        return trees.chain_draft(state.pending, torch.where(miss, other, right))


def drafter_of(kind: str, expected: list[list[int]]) -> Any:
    if kind == "chain":
        return ErringOracle(expected)
    if kind == "tree":
        return TreeOracle(expected, WRONG, per_row=len(expected) > 1)
    return "ngram" if kind == "ngram" else None


def sentence_of(error: Exception) -> str | None:
    """The sentence of a refusal: a ValueError of our own, one line of one sentence. None for any other error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    inside = Path(last.filename).resolve().is_relative_to(HOME)  # where an environment may lie as well
    ours = inside and not {"tests", "site-packages"} & set(Path(last.filename).parts)
    text = str(error)
    return text if isinstance(error, ValueError) and ours and "\n" not in text and ". " not in text else None


def trace_of(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"


def stock(model: nn.Module, inputs: dict[str, Tensor] | list[dict[str, Tensor]]) -> list[list[int]]:
    """Greedy tokens of transformers' own generate; of a list of prompts, of each alone."""
    if isinstance(inputs, list):
        alone = {id(each): stock(model, each)[0] for each in inputs}
        return [alone[id(each)] for each in inputs]
    return new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)


def compare(row: Row, model: nn.Module, batches: dict[str, Any]) -> Row:
    """Fills the cells of a row: every drafter on every batch."""
    known: dict[str, Any] = {}
    for batch, inputs in batches.items():
        try:
            known[batch] = stock(model, inputs)
        except Exception as error:
            known[batch] = error
    for kind in DRAFTERS:
        chosen = [batch for batch in batches if batch != "stream" or kind in STREAMED]
        row.cells[kind] = {batch: run_cell(row, model, kind, batches[batch], known[batch]) for batch in chosen}
    return row


def run_cell(row: Row, model: nn.Module, kind: str, inputs: Any, known: list[list[int]] | Exception) -> str:
    """One drafter on one batch."""
    expected = [[]] if isinstance(known, Exception) else known
    try:
        fast = visspec.accelerate(model, drafter_of(kind, expected), adaptive=False)
        if isinstance(known, Exception):
            row.reason = row.reason or trace_of(known)
            return "stock fails"
        if isinstance(inputs, list):
            expected = [answer[:n] for answer, n in zip(expected, LIMITS)]
            streams = [streamed(fast, inputs, room) for room in (0, ROOM)]
            found = next((answers for answers in streams if answers != expected), expected)
        else:
            found = new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    except Exception as error:
        sentence = sentence_of(error)
        row.reason = row.reason or sentence or trace_of(error)
        return "refused" if sentence else "traceback"
    if found == expected:
        return "identical"
    wrong = [sum(x != y for x, y in zip(a, e)) for a, e in zip(found, expected)]
    row.reason = row.reason or f"{kind}: wrong tokens in each row: {wrong}"
    return "WRONG"


def streamed(fast: Any, prompts: list[dict[str, Tensor]], room: int) -> list[list[int]]:
    """Greedy tokens of prompts in three slots. Raises the first prompt's error."""
    entries = [{**inputs, "max_new_tokens": n} for inputs, n in zip(prompts, LIMITS)]
    stream = fast.stream(entries, slots=3, prefix_cache=room, do_sample=False)
    answers = sorted(stream, key=lambda answer: answer.id)
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return [answer.tokens[:n] for answer, n in zip(answers, LIMITS)]  # some count by an option of their own


def verdicts(name: str) -> list[Row]:
    """The rows of one class: text, and pictures where prompts with them can be made."""
    try:
        made = tiny_class_inputs.cases(name)
    except Exception as error:
        return [failed(name, "not built", trace_of(error))]
    rows = [compare(Row(name, inputs), model, batches) for inputs, model, batches in made]
    # a model that needs pictures has no row of text
    return [row for row in rows if row.outcome != "stock fails" or row is rows[-1]]


def failed(name: str, outcome: str, why: str) -> Row:
    return Row(name, "none", {drafter: {"1": outcome, "3": outcome} for drafter in DRAFTERS}, why)


# --- many classes ---------------------------------------------------------------------------------------------------


def _child(name: str, pipe: Any) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some models print
    pipe.send(verdicts(name))


def isolated(name: str) -> list[Row]:
    """The rows of a class, made in a process of its own: a crash or a hang ends only that."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        rows = ours.recv() if ours.poll(SECONDS) else [failed(name, "traceback", f"took more than {SECONDS} s")]
    except EOFError:
        rows = [failed(name, "traceback", "its process died")]
    process.kill()
    process.join()
    return rows


# --- the page -------------------------------------------------------------------------------------------------------

INTRODUCTION = """# Models of transformers

Results for every public class of transformers {version} that generates, as a tiny random model made from its
default configuration: `visspec.accelerate(model, drafter).generate` against the stock `generate`, greedy, float32,
{new} new tokens, windows of {window} tokens where the configuration has a field for one. Batch 1 is a single prompt,
batch 3 three prompts padded on the left (where transformers gives padded rows other tokens than alone, as for Whisper,
`generate` gives the same ones); "stream" is `visspec.accelerate(...).stream` of such prompts in three slots, each with
a picture of its own, without a drafter and with n-grams, with and without the prefix cache, against `generate` of each
alone; "pictures" are prompts with a picture in each row.
Drafters: none; n-grams;
chains and trees that draft the known answer with {wrong:.0%} of the drafts wrong, so that acceptance and rejection both
happen.

*Identical* means every token of every row. *Refused* means a `ValueError` with one sentence, given below. A random
model tests that a class is handled correctly; it gives no information about speed. Generated by `make models` on
{day}; `make test` runs a sample.
"""


def line(row: Row) -> str:
    """A row as the page has it."""
    config = getattr(tf, row.name).config_class
    start = f"| `{row.name}` | {config.model_type or config.__name__} | {row.inputs} |"
    if row.outcome == "identical":
        return start
    cells = [(f"{d} {batch}", cell) for d, batches in row.cells.items() for batch, cell in batches.items()]
    which = [name for name, cell in cells if cell == row.outcome]
    reason = row.reason.replace("|", "\\|").replace("<", "&lt;")
    return f"{start} {'all' if len(which) == len(cells) else '; '.join(which)} | {reason} |"


def page(rows: list[Row], day: str) -> str:
    """`docs/models.md`: counts, then a table for each outcome."""
    intro = INTRODUCTION.format(version=tf.__version__, new=NEW, window=WINDOW, wrong=WRONG, day=day)
    parts = ["| outcome | classes | rows with text | with pictures |\n|---|---|---|---|"]
    worst: dict[str, str] = {}  # of each class
    for row in sorted(rows, key=lambda row: ORDER.index(row.outcome)):
        worst.setdefault(row.name, row.outcome)
    for outcome, (title, words) in SECTIONS.items():
        found = sorted((row for row in rows if row.outcome == outcome), key=lambda row: (row.name, row.inputs))
        classes, pictures = list(worst.values()).count(outcome), sum(row.inputs == "pictures" for row in found)
        parts[0] += f"\n| {outcome} | {classes} | {len(found) - pictures} | {pictures} |"
        header = "| class | family | inputs |\n|---|---|---|"
        if outcome != "identical":
            header = "| class | family | inputs | drafter and batch | why |\n|---|---|---|---|---|"
        if found:
            parts.append("\n".join([f"## {title}\n\n{words}\n\n{header}", *map(line, found)]))
    return "\n\n".join([intro.strip(), *parts]) + "\n"


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
        for found in pool.map(isolated, arguments.names or tiny_classes.generating()):
            rows += found
            for row in found:
                print(f"{row.name:50} {row.inputs:12} {row.outcome:12} {row.reason}", flush=True)
    if arguments.out:
        arguments.out.write_text(page(rows, datetime.date.today().isoformat()))


if __name__ == "__main__":
    main()
