"""Distil a feature drafter for any vision-language target from a folder of images, or a JSONL of {image, prompt}.

The command behind `visspec train drafter --target FOLDER --data DATA --out FOLDER`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from visspec.accept.exact import Exact
from visspec.api import loading as targets
from visspec.api import requests, sources
from visspec.api.captions import PROMPT, prepare
from visspec.eval.metrics.images import MAX_PIXELS, open_image, read_image
from visspec.eval.report import training
from visspec.models.drafters.eagle import FeatureDrafter
from visspec.models.drafters.feature_checkpoint import CONFIG
from visspec.models.targets.hf_decoder import HFDecoder
from visspec.provenance import provenance
from visspec.recipes.workers import workers
from visspec.train.loop import Alone, Plan, Trainer
from visspec.train.validation import measure
from visspec.types import Request

STEP_ROWS, GROUP = 8, 8
HELD_OUT = 0.05  # share of the data that only validates, at least one item


def request_of(model, inputs: dict[str, Any], *, temperature: float, max_new_tokens: int, seed: int) -> Request:
    """The request that `model.generate` would decode, for our loop. Row b draws from the seed `seed + b`."""
    sampled = temperature > 0
    options: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": max_new_tokens}
    if sampled:
        options |= {"temperature": float(temperature), "top_k": 0, "top_p": 1.0}
    request = requests.of_generate(model, inputs, **options)
    if sampled:
        request.generators = requests.generators(None, seed, request.prompt)
    return request


def items_of(data: str | Path) -> list[tuple[Any, str]]:
    """(image, request) pairs of what `visspec caption` reads: a folder, a glob, .jsonl, .parquet, .tar or hf:NAME. An
    image is a path, or the bytes of a file. Raises ValueError for data without any, or a record that can't be read.
    """
    path = Path(data)
    if not path.exists() and sources.is_plain(path):
        raise ValueError(f"data: {path} is neither a folder nor a file, expected a folder of images or a JSONL file")
    items = []
    for number, record in enumerate(sources.records([str(data)]), start=1):
        if record.error is not None:
            line = f"line {number} of {path} is not an object with image (and prompt)"
            raise ValueError(f"data: {line if path.suffix == '.jsonl' else record.error}")
        items.append((record.image, record.prompt or PROMPT))
    if not items:
        raise ValueError(f"data: {path} holds no line, expected JSONL of {{image, prompt}}")
    return items


def opened(image: Any) -> Any:
    """A PIL image, from a path or the bytes of a file."""
    return read_image(image, "data", MAX_PIXELS) if isinstance(image, bytes) else open_image(image)


class Prompts:
    """Batches of requests from items, a pure function of their number: epoch by epoch in a seeded order."""

    def __init__(self, model, processor, items: list[tuple[Any, str]], rows: int, max_new_tokens: int, seed: int):
        self.model, self.processor, self.items = model, processor, items
        self.rows, self.max_new_tokens, self.seed = min(rows, len(items)), max_new_tokens, seed

    def __call__(self, number: int, temperature: float = 1.0) -> Request:
        per_epoch = max(len(self.items) // self.rows, 1)
        epoch, place = divmod(number, per_epoch)
        shuffle = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.items), generator=shuffle)[place * self.rows :][: self.rows].tolist()
        images = [opened(self.items[i][0]) for i in order]
        inputs = prepare(self.processor, images, [self.items[i][1] for i in order], self.model)
        seed = (self.seed << 40) + number * self.rows
        return request_of(self.model, inputs, temperature=temperature, max_new_tokens=self.max_new_tokens, seed=seed)


def run(
    target: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    steps: int = 2000,
    loss: str = "tv",
    seed: int = 0,
    resume: bool = False,
    rows: int = 16,
    max_new_tokens: int = 256,
    image_latents: int = 1,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    parallel: str | None = None,
    **plan: Any,
) -> list[dict]:
    """Train and save a drafter; `plan` are further fields of `visspec.train.loop.Plan`. Returns the validations.

    Under torchrun every process runs this, with `parallel` "ddp" or "fsdp": each trains on answers of its own.
    """
    unknown = sorted(set(plan) - {f.name for f in fields(Plan)})
    if unknown:
        raise ValueError(f"plan: got {unknown[0]!r}, expected a field of Plan")
    items = items_of(data)
    several = workers(parallel, device)
    if several.world > 1 and device != "cpu":
        device = str(several.device)
    model, processor = targets.load(str(target), device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    held = max(int(HELD_OUT * len(items)), 1)
    training, validating = (items[held:], items[:held]) if len(items) > 1 else (items, items)
    prompts = Prompts(model, processor, training, rows, max_new_tokens, seed)
    checks = Prompts(model, processor, validating[:rows], rows, max_new_tokens, seed + 1)
    sizes = {"batch": prompts.rows, "rows": min(prompts.rows, STEP_ROWS), "group": GROUP}
    sizes["validate_every"] = max(steps // 5, 1)
    options = Plan(**{"steps": steps, "loss": loss, "seed": seed, **sizes, **plan})
    drafter = fresh_or_resumed(model, out, resume, seed, image_latents=image_latents)
    record = provenance(model, seed=seed, target=str(target), data=str(data), recipe="train_drafter")
    validate = Validation(model, drafter, lambda temperature: [checks(0, temperature)])
    return train(validate.target, drafter, prompts, options, out, record, validate, resume, several=several)


def parser_of(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """What the recipes of the shipped drafters are asked on the command line; `defaults` where they differ."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", help="shipped name or folder of the target")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="outputs that the target makes together")
    parser.add_argument("--rows", type=int, default=8, help="outputs of a training step")
    parser.add_argument("--group", type=int)
    parser.add_argument("--reuse", type=int, default=4)
    parser.add_argument("--loss", default="tv", choices=("tv", "soft_ce", "kl"))
    parser.add_argument("--opening", type=float, help="share of steps on soft_ce before --loss")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--middle", type=int, help="width of the MLP; default the target's")
    parser.add_argument("--levels", type=int, help="depth that the drafter asks for; not trained")
    parser.add_argument("--validate-every", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="of each of the two: training, and the target ahead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--export", type=Path, help="folder for the finished weights, in half precision")
    parser.set_defaults(**defaults)
    return parser


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan of a parser's options, with the target ahead in a thread of its own."""
    given = {f.name: getattr(options, f.name) for f in fields(Plan) if hasattr(options, f.name)}
    return Plan(**given, autocast=True, ahead=True)


def fresh_or_resumed(model, out: str | Path, resume: bool, seed: int, kind: Any = FeatureDrafter, **options: Any):
    """The drafter of a run's folder when it is to be resumed and there is one, else a new one, of class `kind`."""
    if resume and (Path(out) / CONFIG).is_file():
        return kind.from_pretrained(out, model)
    return kind.for_model(model, seed=seed, **options)


class Validation:
    """tau at temperature 0 and 1 on held-out requests, at the drafter's own depth."""

    def __init__(self, model, drafter: FeatureDrafter, held_out: Callable[[float], list[Request]]):
        self.target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True)
        self.drafter, self.held_out = drafter, held_out

    def __call__(self) -> dict[str, float]:
        found = {}
        for name, temperature in (("tau_greedy", 0.0), ("tau_sampled", 1.0)):
            requests_ = self.held_out(temperature)
            found[name] = round(
                measure(self.target, self.drafter, Exact(), requests_, self.drafter.traits.levels).tau, 3
            )
        return found


def train(
    target, drafter, prompts, plan: Plan, out, record: dict, validate, resume: bool, rule=None, several: Any = None
) -> list[dict]:  # fmt: skip
    """Run a trainer under a progress bar, a JSON line a hundred steps; the drafter is saved to `out`, its curves in
    `out/run/curves.html`. several: the processes of the run.
    """
    several = several or Alone()
    trainer = Trainer(target, drafter, rule or Exact(), prompts, plan, out, record, validate, several)
    if resume:
        trainer.resume()
    first = several.rank == 0
    with tqdm(total=plan.steps, initial=trainer.step, unit="step", mininterval=2.0, disable=not first) as bar:

        def report(entry: dict) -> None:
            bar.update(entry["step"] - bar.n)
            bar.set_postfix(loss=entry["loss"], agreed=entry["agreed"][0], refresh=False)
            if first and (entry["step"] % 100 == 0 or "tau_sampled" in entry):
                bar.write(json.dumps(entry))

        found = trainer.run(report)
    if first and trainer.curve:
        training.write_page(Path(out) / "run" / "curves.html", trainer.progress(), record)
    return found
