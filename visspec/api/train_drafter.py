"""Distil a feature drafter for any vision-language target from a folder of images, or a JSONL of {image, prompt}.

The command behind `visspec train drafter --target FOLDER --data DATA --out FOLDER`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

from visspec.accept.exact import Exact
from visspec.api import loading as targets
from visspec.api import requests, sources, zoo
from visspec.api.captions import PROMPT, chat_text, move_inputs, prepare
from visspec.api.drafter_presets import check_preset, focused_state, frequent, of_preset
from visspec.api.train_processes import workers
from visspec.eval.report import training
from visspec.io.checkpoint import CONFIG, read_json
from visspec.io.images import MAX_PIXELS, open_image, read_image
from visspec.io.provenance import provenance
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.drafter import FeatureDrafter
from visspec.train.loop import DRAFTER, PROGRESS, RUN, SingleProcess, Trainer, checkpoint
from visspec.train.options import TrainingOptions
from visspec.train.validation import measure
from visspec.types import Request

STEP_ROWS, GROUP = 8, 8
NETWORK = ("image_latents", "draft_vocab", "head_rank", "block", "layers")  # options of a drafter's network
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


def digest(items: list[tuple[Any, str]]) -> str:
    """What tells data apart: the number of items, and a hash of names (or bytes) and requests, wherever they lie."""
    found = hashlib.sha256()
    for image, text in items:
        found.update(image if isinstance(image, bytes) else repr(Path(image).name).encode())
        found.update(repr(text).encode())
    return f"{len(items)} items, sha256 {found.hexdigest()[:16]}"


def check_out(out: Path, resume: bool, overwrite: bool) -> None:
    """Raises ValueError unless a drafter can be written into a folder without loss of something else."""
    saved, config = checkpoint(out), out / CONFIG
    if config.exists() or any(out.glob("*.safetensors*")):
        if not config.is_file() or "kind" not in read_json(out, CONFIG):
            raise ValueError(f"out: got {out}, which holds another model, expected a folder of its own")
    elif saved is None:
        return
    if not overwrite and not (resume and saved):
        how = "--resume or --overwrite" if saved else "--overwrite"
        raise ValueError(f"out: got {out}, which holds a drafter, expected a folder of its own or {how}")


def as_image(image: str | Path | bytes) -> Image.Image:
    """A PIL image, from a path or the bytes of a file."""
    return read_image(image, "data", MAX_PIXELS) if isinstance(image, bytes) else open_image(image)


class Prompts:
    """Batches of requests from items, a pure function of their number: epoch by epoch in a seeded order. total: the
    number of batches of a run that begins with text alone (MSD): no pictures in the first half, then in more and more
    of its batches, in all of the last fortieth.
    """

    def __init__(
        self, model, processor, items: list[tuple[Any, str]], rows: int, max_new_tokens: int, seed: int, total: int = 0
    ):
        self.model, self.processor, self.items = model, processor, items
        self.rows, self.max_new_tokens, self.seed, self.total = min(rows, len(items)), max_new_tokens, seed, total

    def __call__(self, number: int, temperature: float = 1.0) -> Request:
        inputs, seed = self.inputs(number), (self.seed << 40) + number * self.rows
        return request_of(self.model, inputs, temperature=temperature, max_new_tokens=self.max_new_tokens, seed=seed)

    def inputs(self, number: int) -> dict[str, Any]:
        """Arguments of the model for a batch."""
        per_epoch = max(len(self.items) // self.rows, 1)
        epoch, place = divmod(number, per_epoch)
        shuffle = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.items), generator=shuffle)[place * self.rows :][: self.rows].tolist()
        texts = [self.items[i][1] for i in order]
        if self.pictures(number):
            return prepare(self.processor, [as_image(self.items[i][0]) for i in order], texts, self.model)
        return text_inputs(self.processor, texts, self.model)

    def pictures(self, number: int) -> bool:
        """Whether a batch has pictures."""
        done = 1.0 if self.total == 0 else number / self.total
        if done < 0.5 or done >= 0.975:
            return done >= 0.975
        share = 0.05 + 0.9 * (done - 0.5) / 0.475
        uniform = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return bool(torch.rand((), generator=uniform) < share)


def text_inputs(processor, texts: list[str], model) -> dict[str, Any]:
    """A model's inputs for requests without a picture, left-padded."""
    processor.tokenizer.padding_side = "left"
    messages = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
    chats = [chat_text(processor, message) for message in messages]
    return move_inputs(dict(processor(text=chats, return_tensors="pt", padding=True)), model)


def run(
    target: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    steps: int = 2000,
    loss: str = "tv",
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    rows: int = 16,
    max_new_tokens: int = 256,
    image_latents: int | None = None,
    preset: str | None = None,
    draft_vocab: int | None = None,
    head_rank: int | None = None,
    block: int | None = None,
    layers: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    parallel: str | None = None,
    bf16: bool = False,
    eval_every: int | None = None,
    **plan: Any,
) -> list[dict]:
    """Train and save a drafter; `plan` are further fields of `visspec.train.options.TrainingOptions`. Returns the
    validations. The folder holds the drafter of the best of them.

    preset: a published drafter (`presets.TRAINED`), whose network, plan and trees are taken where nothing else is said;
    without one, ours with `image_latents`. draft_vocab, head_rank: of the head of a preset that has its own.
    block, layers: places of a pass, and layers, of a preset that predicts several.
    bf16: matrix products of the drafter in bfloat16. eval_every: steps between validations, a fifth without it.
    overwrite: a drafter that is in `out` already. Raises ValueError for a folder `out` of anything else, for one of a
    drafter that is neither resumed nor overwritten, and for a run to resume with other data or settings.

    Under torchrun every process runs this, with `parallel` "ddp" or "fsdp": each trains on answers of its own. Another
    number of processes can resume a run if it divides the lessons of an update: `accumulate`, or as many as the
    processes that it began with.
    """
    unknown = sorted(set(plan) - {f.name for f in fields(TrainingOptions)})
    if unknown:
        raise ValueError(f"plan: got {unknown[0]!r}, expected a field of Plan")
    given: dict[str, Any] = dict(zip(NETWORK, (image_latents, draft_vocab, head_rank, block, layers)))
    asked = {name: value for name, value in given.items() if value is not None}
    check_preset(preset, asked)
    check_out(Path(out), resume, overwrite)
    items = items_of(data)
    several = workers(parallel, device)
    if several.world > 1 and device != "cpu":
        device = str(several.device)
    model, processor = targets.load(str(target), device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    held = max(int(HELD_OUT * len(items)), 1)
    training, validating = (items[held:], items[:held]) if len(items) > 1 else (items, items)
    network, found = of_preset(preset, model, asked) if preset else ({}, None)
    if found is not None:
        plan = {**found.plan, **plan}
    first = found is not None and found.text_first
    per_group = GROUP * -(-min(rows, len(training)) // STEP_ROWS) * plan.get("reuse", TrainingOptions.reuse)
    resumed = resume and checkpoint(out) is not None
    known = read_json(Path(out) / RUN, PROGRESS) if resumed else {}
    lessons = steps * known.get("accumulate", max(plan.get("accumulate", 1), several.world))
    total = -(-lessons // per_group) * GROUP if first else 0
    prompts = Prompts(model, processor, training, rows, max_new_tokens, seed, total)
    checks = Prompts(model, processor, validating[:rows], rows, max_new_tokens, seed + 1)
    sizes = {"batch": prompts.rows, "rows": min(prompts.rows, STEP_ROWS), "group": GROUP}
    sizes |= {"validate_every": eval_every or max(steps // 5, 1), "autocast": bf16}
    options = TrainingOptions(**{"steps": steps, "loss": loss, "seed": seed, **sizes, **plan})
    if found is None:
        drafter: Any = fresh_or_resumed(model, out, resume, seed, **{"image_latents": 1, **asked})
    else:
        if network.get("fusion") == "cross" and not resumed:
            network["feature_layers"] = (focused_state(model, prompts.inputs(0)), -1)
        drafter = fresh_or_resumed(model, out, resume, seed, zoo.drafter_class(found.kind), found.draft, **network)
        if drafter.ids is not None and not resumed:
            target_ = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=True)
            drafter.keep(frequent(target_, prompts, drafter.config.draft_vocab, GROUP))
    record = provenance(model, seed=seed, target=str(target), data=str(data), recipe="train_drafter", preset=preset)
    record["settings"] = {
        "target": Path(target).name,
        "data": digest(items),
        "dtype": str(model.dtype),
        "preset": preset,
        "max_new_tokens": max_new_tokens,
        **given,
    }
    validate = TextValidation(model, drafter, lambda temperature: [checks(0, temperature)])
    return train(validate.target, drafter, prompts, options, out, record, validate, resume, several=several)


def plan_of(options: argparse.Namespace) -> TrainingOptions:
    """The plan of a parser's options, with the target ahead in a thread of its own."""
    given = {f.name: getattr(options, f.name) for f in fields(TrainingOptions) if hasattr(options, f.name)}
    return TrainingOptions(**given, autocast=True, ahead=True)


def fresh_or_resumed(
    model,
    out: str | Path,
    resume: bool,
    seed: int,
    kind: type[Any] = FeatureDrafter,
    draft: Mapping[str, Any] | None = None,
    **options: Any,
):
    """The drafter of a run's folder when it is to be resumed and there is one, else a new one, of class `kind`. draft:
    width and nodes of its trees, or another shape of `Shaped.shaped`.
    """
    sizes = {name: value for name, value in (draft or {}).items() if name not in zoo.SHAPE}
    shape = {name: value for name, value in (draft or {}).items() if name in zoo.SHAPE}
    if resume and (saved := checkpoint(out)):
        drafter = kind.from_pretrained(saved / DRAFTER, model, **sizes)
    else:
        drafter = kind.for_model(model, seed=seed, **options)
        drafter = kind(drafter.head, model, **sizes) if sizes else drafter
    return drafter.shaped(**shape) if shape else drafter


class TextValidation:
    """tau at temperature 0 and 1 on held-out requests, at the drafter's own depth."""

    def __init__(self, model, drafter: FeatureDrafter, held_out: Callable[[float], list[Request]]):
        self.target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=True)
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
    target,
    drafter,
    prompts,
    plan: TrainingOptions,
    out,
    record: dict,
    validate,
    resume: bool,
    rule=None,
    several: SingleProcess | None = None,
) -> list[dict]:
    """Run a trainer under a progress bar, a JSON line a hundred steps; the drafter is saved to `out`, its curves in
    `out/run/curves.html`. several: the processes of the run.
    """
    several = several or SingleProcess()
    trainer = Trainer(target, drafter, rule or Exact(), prompts, plan, out, record, validate, several)
    first = several.rank == 0
    if resume:
        trainer.resume()
    elif first:
        (Path(out) / RUN / PROGRESS).unlink(missing_ok=True)  # of the run that this one takes the place of
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
