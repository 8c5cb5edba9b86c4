"""What becomes of every class that generates: stock `generate` against ours, by drafter and batch.

`verdicts` runs one class, `sweep` many, each in a process of its own with limits of time and memory, and `page` makes
`docs/models.md` of what they found.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import visspec
from tests import tiny_class_inputs
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


@dataclass
class Row:
    """A line of the table: one class with one kind of input. `cells` is drafter -> batch -> what became of it."""

    name: str
    kind: str
    inputs: str
    cells: dict[str, dict[str, str]] = field(default_factory=dict)
    reason: str = ""
    details: list[str] = field(default_factory=list)  # for debugging a failure; not in the table
    variety: int = 0  # distinct tokens of the least varied answer: a constant one would check little
    tau: dict[str, float] = field(default_factory=dict)  # tokens a pass, by drafter

    @property
    def outcome(self) -> str:
        """The worst that happened: WRONG, traceback, ... or identical."""
        found = {cell for cells in self.cells.values() for cell in cells.values()}
        return next((o for o in ORDER if o in found), "identical")


ORDER = ("WRONG", "traceback", "not built", "stock fails", "refused", "identical")  # the worst first


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


def kind_of(name: str) -> str:
    """The family's name, as configurations have it."""
    return getattr(tf, name).config_class.model_type or getattr(tf, name).config_class.__name__


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
    if isinstance(error, ValueError) and ours and "\n" not in text and ". " not in text:
        return text
    return None


def trace_of(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"


def stock(model: nn.Module, inputs: dict[str, Tensor] | list[dict[str, Tensor]]) -> tuple[list[list[int]], Any]:
    """Greedy tokens of transformers' own generate, and how far the second choice was behind, (B, T); of a list of
    prompts, of each alone.
    """
    if isinstance(inputs, list):
        alone = {id(each): stock(model, each) for each in inputs}
        known = [alone[id(each)] for each in inputs]
        return [tokens for (tokens,), _ in known], [margin[0] for _, margin in known]
    output = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    top = torch.stack(output.logits, dim=1).float().topk(2).values
    return new_tokens(output, inputs), top[..., 0] - top[..., 1]


def compared(row: Row, model: nn.Module, batches: dict[str, dict[str, Tensor]]) -> Row:
    """Fills the cells of a row: every drafter on every batch."""
    known = {}
    for batch, inputs in batches.items():
        try:
            known[batch] = stock(model, inputs)
            row.variety = min(row.variety or NEW, *(len(set(map(str, answer))) for answer in known[batch][0]), NEW)
        except Exception as error:
            known[batch] = trace_of(error)
    for kind in DRAFTERS:
        row.cells[kind] = {
            b: case(row, model, kind, b, inputs, known[b])
            for b, inputs in batches.items()
            if b != "stream" or kind in STREAMED
        }
    return row


def case(row: Row, model: nn.Module, kind: str, batch: str, inputs: dict[str, Tensor], known: Any) -> str:
    """One drafter on one batch."""
    expected, margin = known if isinstance(known, tuple) else ([[]], None)
    try:
        fast = visspec.accelerate(model, drafter_of(kind, expected), adaptive=False)
        if margin is None:
            row.reason = row.reason or known
            return "stock fails"
        if batch == "stream":
            expected = [answer[:n] for answer, n in zip(expected, LIMITS)]
            streams = [streamed(fast, inputs, room) for room in (0, ROOM)]
            found = next((answers for answers in streams if answers != expected), expected)
        else:
            found = new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    except Exception as error:
        sentence = sentence_of(error)
        row.reason = row.reason or sentence or trace_of(error)
        if sentence:
            return "refused"
        row.details.append(f"{kind} {batch}: " + "".join(traceback.format_exception(error)[-4:]))
        return "traceback"
    if fast.last_stats is not None:
        row.tau[f"{kind} {batch}"] = round(fast.last_stats.tau, 2)
    if found == expected:
        return "identical"
    for b, (a, e) in enumerate(zip(found, expected)):
        if a != e:
            at = next((i for i, (x, y) in enumerate(zip(a, e)) if x != y), min(len(a), len(e)))
            wrong = sum(x != y for x, y in zip(a, e))
            behind = float(margin[b][at]) if at < len(margin[b]) else 0
            row.details.append(
                f"{kind} {batch} row {b}: first at {at} of {NEW}, {wrong} differ, margin {behind:.3g},"
                f" {len(set(map(str, e)))} distinct tokens"
            )
    row.reason = row.reason or next(d for d in row.details if d.startswith(f"{kind} {batch}"))
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
    kind = kind_of(name)
    try:
        made = tiny_class_inputs.cases(name)
    except Exception as error:
        row = Row(name, kind, "none", {d: {"1": "not built", "3": "not built"} for d in DRAFTERS}, trace_of(error))
        row.details.append(traceback.format_exc())
        return [row]
    rows = [compared(Row(name, kind, inputs), model, batches) for inputs, model, batches in made]
    # a model that needs pictures has no row of text
    return [row for row in rows if row.outcome != "stock fails" or row is rows[-1]]


# --- many classes ---------------------------------------------------------------------------------------------------


def _child(name: str, pipe: Any) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some models print
    pipe.send([asdict(row) for row in verdicts(name)])


def quiet() -> None:
    warnings.filterwarnings("ignore")
    tf.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def sweep(names: list[str], workers: int = 1) -> Iterator[tuple[float, list[Row]]]:
    """Seconds and rows of each class as it is done. A crash or a hang ends its own process only."""
    quiet()
    verdicts("LlamaForCausalLM")  # imports what all need, before processes part
    fork = multiprocessing.get_context("fork")
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(name, theirs))
            process.start()
            theirs.close()
            running[name] = (process, ours, time.monotonic())
        multiprocessing.connection.wait([pipe for _, pipe, _ in running.values()], timeout=1)
        for name, (process, pipe, began) in list(running.items()):
            taken = time.monotonic() - began
            if not pipe.poll() and process.is_alive() and taken < SECONDS:
                continue
            try:
                rows = [Row(**row) for row in pipe.recv()] if pipe.poll() else None
            except EOFError:
                rows = None
            if rows is None:
                why = f"took more than {SECONDS} s" if taken >= SECONDS else "its process died"
                rows = [Row(name, kind_of(name), "none", _all("traceback"), why)]
            process.kill()
            process.join()
            del running[name]
            yield taken, rows


def _all(what: str) -> dict[str, dict[str, str]]:
    return {d: {"1": what, "3": what} for d in DRAFTERS}


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
SECTIONS = {
    "WRONG": ("Wrong tokens", "Bugs in visspec."),
    "traceback": ("Unexpected errors", "Bugs in visspec."),
    "identical": ("Identical", "With every drafter and batch size, and in a stream."),
    "refused": ("Refused", "Use stock `generate` for these classes."),
    "stock fails": ("Nothing to compare", "The class is accepted, but its own `generate` fails on these inputs."),
    "not built": ("Not built", "No tiny model could be made from the configuration."),
}


def line(row: Row) -> str:
    """A row as the page has it."""
    start = f"| `{row.name}` | {row.kind} | {row.inputs} |"
    if row.outcome == "identical":
        return start
    cells = {"/".join(dict.fromkeys(by_batch.values())) for by_batch in row.cells.values()}
    if len(cells) == 1 and "/" not in (only := cells.pop()) and only == row.outcome:
        return f"{start} all | {_escaped(row.reason)} |"
    which = "; ".join(f"{d} {b}" for d, by in row.cells.items() for b, cell in by.items() if cell == row.outcome)
    return f"{start} {which} | {_escaped(row.reason)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def page(rows: list[Row], day: str) -> str:
    """`docs/models.md`: counts, then a table for each outcome."""
    by_outcome = {o: sorted((r for r in rows if r.outcome == o), key=lambda r: (r.name, r.inputs)) for o in SECTIONS}
    parts = [
        INTRODUCTION.format(version=tf.__version__, new=NEW, window=WINDOW, wrong=WRONG, day=day),
        "| outcome | classes | rows with text | with pictures |\n|---|---|---|---|",
    ]
    worst = {r.name: o for o in reversed(ORDER) for r in by_outcome[o]}
    for outcome, found in by_outcome.items():
        classes, pictures = list(worst.values()).count(outcome), sum(r.inputs == "pictures" for r in found)
        parts[-1] += f"\n| {outcome} | {classes} | {len(found) - pictures} | {pictures} |"
    for outcome, (title, words) in SECTIONS.items():
        if not by_outcome[outcome]:
            continue
        header = "| class | family | inputs |\n|---|---|---|"
        if outcome != "identical":
            header = "| class | family | inputs | drafter and batch | why |\n|---|---|---|---|---|"
        parts.append(f"## {title}\n\n{words}\n\n" + "\n".join([header, *map(line, by_outcome[outcome])]))
    return "\n\n".join(part.strip() for part in parts) + "\n"
