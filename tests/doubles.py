"""Drafters for the tests: one that knows the answer, one that errs, one that is hostile, and ways to run a target."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import visspec
from tests.tiny import FAMILIES, VOCAB, model_of, prompt, shapes
from visspec import tree as trees
from visspec.accept.rejection import Rejection
from visspec.api.text import requests
from visspec.cli.main import main
from visspec.distributions import Categorical, draw
from visspec.sampling import SIBLINGS
from visspec.types import Draft, Drafter, DrafterTraits, Scores, State, Verdict

NEW = 24  # tokens asked for where a test does not say
THREADS = 8


@contextmanager
def raises_line(match: str | None) -> Iterator[pytest.ExceptionInfo[ValueError]]:
    with pytest.raises(ValueError, match=match) as error:
        yield error
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text


def refused(capsys, *argv, code=2) -> str:
    """Run, expect an exit code and exactly one line on stderr; return it."""
    try:
        result = main(list(map(str, argv)))
    except SystemExit as error:
        result = error.code
    line = capsys.readouterr().err.strip()
    assert result == code, line
    assert "Traceback" not in line
    return line


def together(jobs: list[Callable[[], None]]) -> None:
    """Run the jobs on eight threads at once; raises what the first failing one raised."""
    with ThreadPoolExecutor(THREADS) as pool:
        for call in [pool.submit(job) for job in jobs]:
            call.result()


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def drafted(tokens: Any, tree: Any, q: Any = None) -> Draft:
    """A draft in compact notation: -1 where there is no node, q as a tensor."""
    q = Categorical(p=q) if isinstance(q, Tensor) else q
    return Draft(tokens.masked_fill(tokens == -1, 0), tree, q, tokens != -1)


def chain_of(pending: Tensor, tokens: Tensor) -> Draft:
    """A chain below the pending tokens in the same notation."""
    return drafted(torch.cat([pending[:, None], tokens], dim=1), trees.chain(tokens.shape[1], str(tokens.device)))


def compact(draft: Draft) -> Tensor:
    """Ids of a draft, -1 where there is no node."""
    return draft.value if draft.real is None else torch.where(draft.real, draft.value, -1)


def altered(folder: Path, out: Path, change: Callable[[dict, dict], None]) -> Path:
    """A checkpoint folder of one file written to `out` after `change(tensors, entries)`; `out`."""
    tensors, entries = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, entries)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(entries))
    return out


class Double(Drafter):
    """A drafter that keeps nothing. Subclasses propose."""

    traits = DrafterTraits(levels=5)

    def propose(self, state: State, depth: int) -> Draft:
        return trees.empty_draft(state.pending)


class Oracle(Double):
    def __init__(self, answers: list[list[int]]):
        self.answers = answers

    def ahead(self, state: State, depth: int) -> list[list[int]]:
        """The next `depth` tokens of each live row, padded with -1 behind the end of the answer."""
        following = [self.answers[r][len(state.tokens[r]) :][:depth] for r in state.rows]
        return [f + [-1] * (depth - len(f)) for f in following]

    def propose(self, state: State, depth: int) -> Draft:
        return chain_of(state.pending, torch.tensor(self.ahead(state, depth), device=state.pending.device))


class TreeOracle(Oracle):
    """Two children a level below a spine; the spine's node is the right token, or with probability `wrong` another.

    The spine runs through the first or the second child at random, so that accepted paths are not prefixes.
    """

    def __init__(self, answers: list[list[int]], wrong: float = 0.0, seed: int = 0, per_row: bool = False):
        super().__init__(answers)
        self.wrong, self.per_row = wrong, per_row
        self.random = torch.Generator().manual_seed(seed)

    def _random(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.random)

    def propose(self, state: State, depth: int) -> Draft:
        rows = len(state.rows)
        spines, parent = self._random(2, rows if self.per_row else 1, depth).tolist(), []
        for turns in spines:
            parent.append([-1])
            above = 0
            for level, turn in enumerate(turns):
                parent[-1] += [above, above]
                above = 2 * level + 1 + turn
        tokens = torch.full((rows, 1 + 2 * depth), -1)
        tokens[:, 1:] = self._random(VOCAB, rows, 2 * depth)
        right = torch.tensor(self.ahead(state, depth))
        hit = torch.rand(rows, depth, generator=self.random) >= self.wrong
        for b in range(rows):
            for level, turn in enumerate(spines[b % len(spines)]):
                if hit[b, level]:
                    tokens[b, 2 * level + 1 + turn] = right[b, level]
        tokens[:, 0] = state.pending
        tree = trees.from_parents(torch.tensor(parent), depth) if self.per_row else trees.static(tuple(parent[0]))
        return drafted(tokens, tree)


class Hostile(Double):
    """Random trees of random shape full of random ids: twins, image ids and absent nodes among them."""

    def __init__(self, seed: int = 0):
        self.random = torch.Generator().manual_seed(seed)

    def propose(self, state: State, depth: int) -> Draft:
        parent, below = [-1], [0]
        for n in range(1, 2 + int(torch.randint(9, (), generator=self.random))):
            above = int(torch.randint(n, (), generator=self.random))
            if below[above] == depth:
                above = 0
            parent.append(above)
            below.append(below[above] + 1)
        few = 6  # ids from a small set collide with the target's choice often enough
        tokens = torch.randint(-1, few, (len(state.rows), len(parent)), generator=self.random)
        tokens = torch.where(tokens < few - 1, tokens, torch.randint(VOCAB, tokens.shape, generator=self.random))
        tokens[:, 0] = state.pending
        return drafted(tokens, trees.static(tuple(parent)))


class Grower(TreeOracle):
    """Trees grown best-first from noisy laws that favour the right token: every row has its own shape."""

    def propose(self, state: State, depth: int) -> Draft:
        tree_builder = trees.TreeBuilder(state.pending, width=3)
        right, rows = torch.tensor(self.ahead(state, depth)), len(state.rows)
        for level in range(depth):
            width = tree_builder.frontier_total.shape[1]
            logits = torch.randn(rows, width, VOCAB, generator=self.random)
            hint = right[:, level, None, None].clamp(min=0).expand(rows, width, 1)
            logits.scatter_add_(2, hint, torch.full(hint.shape, 3.0))
            tree_builder.grow(logits.log_softmax(-1))
        return tree_builder.finish(nodes=8)


class Careless(Rejection):
    """Draws from p after a rejection, not from the residual."""

    def __call__(self, draft: Draft, scores: Scores, noise: Any) -> Verdict:
        verdict = super().__call__(draft, scores, noise)
        again = draw(scores.distribution.p[:, 0], noise.window(1)[:, 0, SIBLINGS])
        return Verdict(verdict.path, verdict.length, torch.where(verdict.length == 2, verdict.next, again))


def generators(rows: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + row) for row in range(rows)]


def new_tokens(output: Any, inputs: dict[str, Tensor]) -> list[list[int]]:
    sequences = output if isinstance(output, Tensor) else output.sequences
    return sequences[:, inputs["input_ids"].shape[1] :].tolist()


@functools.cache
def stock(name: str, shape: str, new: int = NEW) -> list[list[int]]:
    inputs = prompt(name, shapes(name)[shape])
    return new_tokens(model_of(name).generate(**inputs, max_new_tokens=new, do_sample=False), inputs)


def fast(name: str, drafter: Any, **options) -> visspec.api.text.accelerate.Accelerated:
    return visspec.accelerate(model_of(name), drafter, **{"adaptive": False, **options})


def opened(name: str, rows: list[str], seed: int = 0):
    """Target, state and scores of a request after its prefill and first token."""
    return opened_model(model_of(name), prompt(name, rows, seed))


def opened_model(model: Any, inputs: dict[str, Tensor]):
    """The same of a model and its inputs."""
    from visspec.accept.exact import Exact
    from visspec.loop.decode import open_request
    from visspec.models.decoder.target import HFDecoder

    target, kept = HFDecoder(model), []

    def take(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        request = requests.build(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        with torch.inference_mode():
            kept.extend(open_request(target, Exact(), request))
        return input_ids

    model.generate(**inputs, custom_generate=take, max_new_tokens=200, do_sample=False)
    return target, *kept


def forced(name: str, rows: list[str], tokens_BT: list[list[int]], seed: int = 0) -> Tensor:
    """Stock logits (B, T + 1, V) after the prompt and after each of the given tokens: generate, led by the hand."""
    inputs = prompt(name, rows, seed)
    length, steps = inputs["input_ids"].shape[1], len(tokens_BT[0])

    def lead(row: int, ids: Tensor) -> list[int]:
        at = ids.shape[0] - length
        return [tokens_BT[row][at] if at < steps else 0]

    output = model_of(name).generate(
        **inputs, max_new_tokens=steps + 1, do_sample=False, prefix_allowed_tokens_fn=lead,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert FAMILIES[name] and len(output.logits) == steps + 1
    return torch.stack(output.logits, dim=1)


class ProductRows(TorchFunctionMode):
    """Records how many rows each product of a linear layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (F.linear, torch.addmm):
            self.rows.append(args[function is torch.addmm].shape[:-1].numel())
        return function(*args, **kwargs or {})
