"""Distillation of a feature drafter for any vision-language target, from images, prompts or conversations.

Used by `visspec train drafter --target FOLDER --data DATA --out FOLDER`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visspec import registry
from visspec.accept.exact import Exact
from visspec.api import loading as targets
from visspec.api.captions import default_prompt, move_inputs, process_chats, tokenizer_of
from visspec.api.progress import Progress
from visspec.api.text import requests
from visspec.api.training import export as drafter_export
from visspec.api.training import self_prompts
from visspec.api.training.conversations import Message
from visspec.api.training.data import Item, Reader, TrainingData
from visspec.api.training.options import DrafterTraining
from visspec.api.training.presets import check_preset, focused_state, frequent, of_preset
from visspec.api.training.processes import workers
from visspec.api.training.structure import LEAST, MOST, TOKENS, choose, name_of, taus
from visspec.eval.report import training
from visspec.io.checkpoint import CONFIG, read_json
from visspec.io.options import sampling_arguments
from visspec.io.provenance import provenance
from visspec.models.decoder.target import HFDecoder
from visspec.presets import Recipe
from visspec.train.capture import AnsweredRequest
from visspec.train.loop import DRAFTER, PROGRESS, RUN, SingleProcess, Trainer, checkpoint
from visspec.train.options import TrainingOptions
from visspec.train.store import Store
from visspec.types import Request

NETWORK = ("image_latents", "draft_vocab", "block", "layers", "intermediate", "structure")
STEPS, STEP_ROWS, GROUP = 2000, 8, 8


def request_of(model, inputs: dict[str, Any], *, temperature: float, max_new_tokens: int, seed: int) -> Request:
    """Return the request that `model.generate` would decode, for our loop. Row b uses the seed `seed + b`."""
    request = requests.of_generate(model, inputs, max_new_tokens=max_new_tokens, **sampling_arguments(temperature))
    if temperature > 0:
        request.generators = requests.generators(None, seed, request.prompt)
    return request


def check_out(out: Path, resume: bool, overwrite: bool) -> None:
    """Raise ValueError if writing a drafter to the folder would destroy something else."""
    saved, config = checkpoint(out), out / CONFIG
    if config.exists() or any(out.glob("*.safetensors*")):
        if not config.is_file() or "kind" not in read_json(out, CONFIG):
            raise ValueError(f"out: {out} holds another model. Choose another folder.")
    elif saved is None:
        return
    if not overwrite and not (resume and saved):
        how = "--resume or --overwrite" if saved else "--overwrite"
        raise ValueError(f"out: {out} already holds a drafter. Choose another folder, or pass {how}.")


class Prompts:
    """Batches of requests as a pure function of their number, epoch by epoch in a seeded order.

    An item that can't be read is counted by the reader and replaced by the next one in the order. With `own`, the
    data's answers replace the target's. `total` is the number of batches of a run that begins with text only (MSD):
    none of the first half has pictures, then more and more, all of the last fortieth.
    """

    def __init__(
        self,
        model,
        processor,
        reader: Reader,
        number_N: Tensor,
        rows: int,
        max_new_tokens: int,
        seed: int,
        *,
        own: bool = False,
        total: int = 0,
    ):
        self.model, self.processor, self.reader, self.number_N, self.own = model, processor, reader, number_N, own
        self.rows, self.max_new_tokens, self.seed, self.total = min(rows, len(number_N)), max_new_tokens, seed, total
        self.per_epoch = len(number_N) // self.rows
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def __call__(self, number: int, temperature: float = 1.0) -> Request:
        (inputs, items), seed = self.batch(number), (self.seed << 40) + number * self.rows
        request = request_of(self.model, inputs, temperature=temperature, max_new_tokens=self.max_new_tokens, seed=seed)
        return self.answered(request, items) if self.own else request

    def batch(self, number: int) -> tuple[dict[str, Any], list[Item]]:
        """Return the model's arguments, and the items."""
        epoch, place = divmod(number, self.per_epoch)
        order_N = self.reader.data.shuffle(self.number_N, self.seed + epoch).roll(-place * self.rows)
        pictures = self.pictures(number)
        while True:
            items: dict[int, tuple[Item, list[Any]]] = {}
            for n in order_N.tolist():
                if len(items) == self.rows:
                    break
                if (item := self.reader(n, pictures)) is not None:
                    items[n] = item
            if len(items) < self.rows:
                raise ValueError(f"data: got {len(items)} items that can be read, expected the {self.rows} of a batch.")
            try:
                return self.inputs(list(items.values())), [item for item, _ in items.values()]
            except Exception:  # chat templates and processors may raise anything
                count = len(self.reader.bad)
                for n, item in items.items():
                    try:
                        self.inputs([item])
                    except Exception as error:
                        self.reader.skip(n, error)
                if len(self.reader.bad) == count:
                    raise

    def inputs(self, items: list[tuple[Item, list[Any]]]) -> dict[str, Any]:
        """Return the model's arguments for items with their pictures. Raises ValueError if a prompt is too long."""
        media = [pictures for _, pictures in items]
        conversations = [item.conversation for item, _ in items]
        chats = [one.messages if any(media) else one.texts() for one in conversations]
        inputs = prepare(self.processor, chats, media, self.model)
        length = inputs["input_ids"].shape[1]
        if self.context is not None and length + self.max_new_tokens > self.context:
            raise ValueError(f"{length} + {self.max_new_tokens} tokens exceed {self.context}, the model's context.")
        return inputs

    def answered(self, request: Request, items: list[Item]) -> AnsweredRequest:
        """Return a request with the data's answers, stop token included, cut at `max_new_tokens`."""
        ends = self.model.generation_config.eos_token_id
        end = ends if isinstance(ends, list) else [] if ends is None else [ends]
        tokenizer = tokenizer_of(self.processor)
        ids = [tokenizer(item.answer, add_special_tokens=False)["input_ids"] for item in items]
        answers = [(own + end[:1])[: self.max_new_tokens] for own in ids]
        return AnsweredRequest(**{f.name: getattr(request, f.name) for f in fields(request)}, answers=answers)

    def pictures(self, number: int) -> bool:
        """Return whether a batch has pictures."""
        progress = 1.0 if self.total == 0 else number / self.total
        if progress < 0.5 or progress >= 0.975:
            return progress >= 0.975
        share = 0.05 + 0.9 * (progress - 0.5) / 0.475
        uniform = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return bool(torch.rand((), generator=uniform) < share)


def prepare(processor, chats: Sequence[list[Message]], media: Sequence[list[Any]], model) -> dict[str, Any]:
    """Return a model's left-padded inputs for conversations and their pictures, on its device."""
    return move_inputs(process_chats(processor, chats, media), model)


def run(target: str | Path, data: str | Path, out: str | Path, **options: Any) -> list[dict]:
    """Train a drafter and save the one with the best validation.

    Under torchrun every process runs this, and trains on its own answers. A run can be resumed with another number of
    processes if it divides the training batches of an update: `accumulate`, or the original number of processes.

    Args:
        target: Folder or hub id of the target.
        data: As in `TrainingData`.
        out: Folder of the drafter.
        options: Fields of `DrafterTraining` and `TrainingOptions`. Defaults come from the preset.

    Returns:
        The validations.

    Raises:
        ValueError: If an option does not fit, `out` holds something else, or a run to resume has other data or
            settings.
    """
    arguments = {**options, "target": str(target), "data": str(data), "out": Path(out)}
    settings, plan, recipe = begin(arguments, ("prompts", "height", "width"))
    if settings.steps is not None and settings.epochs is not None:
        raise ValueError(f"epochs: got {settings.epochs} and {settings.steps} steps, expected one of the two.")
    rows, seed, most = settings.rows, settings.seed, settings.max_new_tokens
    device, several = device_of(settings)
    load_data = partial(TrainingData, answers=settings.answers, ignore=settings.ignore, prompt=default_prompt(target))
    count = self_prompts.count_of(settings, several.world > 1 or device == "tp")
    items = None if count else load_data(data)
    model, processor = targets.load(str(target), **settings.hardware | {"device": device})
    items = items or load_data(self_prompts.write(model, processor, settings, count))
    training, validating = items.hold_out(settings.eval_rows, seed)
    network, _ = of_preset(settings.preset, model, network_of(settings))
    planned = options_of(settings, plan, min(rows, len(training)))
    resumed = settings.resume and checkpoint(out) is not None
    lessons = lessons_of(out, resumed, planned, several)
    if settings.epochs is not None:
        steps = steps_of(settings.epochs * len(training), planned, lessons)
        planned = options_of(settings, plan, min(rows, len(training)), steps)
    total = requests_of(planned, lessons) if recipe.text_first else 0
    reader, own = Reader(items, settings.max_bad, settings.max_pixels), settings.answers == "own"
    prompts = Prompts(model, processor, reader, training, rows, most, seed, own=own, total=total)
    checks = [
        Prompts(model, processor, reader, part, rows, most, seed + 1 + n)
        for n, part in enumerate(validating.split(rows))
    ]
    if several.rank == 0:
        drafter_export.say(what_is_seen(items, len(training), len(validating), planned, lessons, settings.answers))
    if network.get("fusion") == "cross" and not resumed:
        network["feature_layers"] = (focused_state(model, prompts.batch(0)[0]), -1)
    drafter = fresh_or_resumed(model, out, resumed, seed, registry.drafter_class(recipe.kind), **network)
    answering = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=True)
    record = provenance(
        model, seed=seed, target=str(target), data=str(data), recipe="train_drafter", preset=settings.preset
    )
    shared: dict[str, Any] = {"target": Path(target).name, "data": items.digest, "dtype": str(model.dtype)}
    shared |= {name: getattr(settings, name) for name in ("answers", "max_new_tokens", "max_pixels", "eval_rows")}
    record["settings"] = shared | {name: getattr(settings, name) for name in ("preset", *NETWORK)}

    def held_out(temperature: float) -> list[Request]:
        return [check(0, temperature) for check in checks]

    validate = partial(taus, model, drafter, held_out)
    trainer = Trainer(answering, drafter, Exact(), prompts, planned, out, record, validate, several)
    if settings.store is not None:
        stored = {"layers": [*drafter.traits.feature_layers], "rows": prompts.rows, "text_until": total}
        keep_answers(trainer, settings.store, {**shared, **stored, "seed": seed}, requests_of(planned, lessons))
    if drafter.ids is not None and not resumed:
        drafter_export.say(f"Counting ids in {GROUP} batches of answers, for the drafter's vocabulary.")
        recorded = {number: trainer.answers(number) for number in range(GROUP)}
        drafter.keep(frequent(recorded.values(), answering.capabilities.vocab, drafter.config.draft_vocab))
        trainer.recorded = recorded if trainer.store is None else {}
    history = train(trainer, settings.resume)
    if reader.bad:
        last, count = [*reader.bad.values()][-1], len(reader.bad)
        drafter_export.say(f"{count} items could not be read and were replaced by others, the last of them: {last}")
    structure: dict[str, Any] = {"structure": name_of(drafter.config.structure)}
    if several.rank == 0 and device != "tp" and settings.structure is None and len(validating) >= LEAST:
        each = [Prompts(model, processor, reader, n, 1, min(most, TOKENS), seed) for n in validating[:MOST].split(1)]
        structure = choose(model, trainer.folder, each, held_out)
    drafter_export.finish(trainer, history, len(validating), chosen=structure)
    return history


def begin(
    arguments: Mapping[str, Any], strange: Collection[str], needs: str = "text"
) -> tuple[DrafterTraining, dict[str, Any], Recipe]:
    """Check the options of a run before any work; `strange` are those that it does not have. Returns them, those of the
    training, and the preset. Raises ValueError.
    """
    settings, plan = split(arguments, strange)
    recipe = registry.recipe(settings.preset, needs)
    check_preset(settings.preset, network_of(settings), recipe)
    plan = {**recipe.plan, **plan}
    options_of(settings, plan)  # rejects bad options
    check_out(settings.out, settings.resume, settings.overwrite)
    return settings, plan, recipe


def device_of(settings: DrafterTraining) -> tuple[str, SingleProcess]:
    """Return the device of a run, and its processes."""
    device = settings.device if settings.device in targets.SPREAD else targets.resolve_device(settings.device)
    several = workers(device)
    return str(several.device) if several.world > 1 and device != "cpu" else device, several


def split(options: Mapping[str, Any], strange: Collection[str] = ()) -> tuple[DrafterTraining, dict[str, Any]]:
    """Split the options of a run from those of the training. Raises ValueError for unknown or unsupported ones."""
    own, plan = ({f.name for f in fields(kind)} for kind in (DrafterTraining, TrainingOptions))
    if unknown := sorted({*options} - ((own | plan) - {*strange})):
        raise ValueError(f"{unknown[0]}: This run has no such option. --data trains for text, --prompts for images.")
    others = {name: value for name, value in options.items() if name in plan and name not in ("steps", "rows", "seed")}
    return DrafterTraining(**{name: value for name, value in options.items() if name in own}), others


def network_of(settings: DrafterTraining) -> dict[str, Any]:
    """Return the options of the network that were set."""
    values = {name: value for name in NETWORK if (value := getattr(settings, name)) is not None}
    return values | ({"structure": registry.parse(f":{settings.structure}")[1]} if settings.structure else {})


def options_of(
    settings: DrafterTraining, plan: Mapping[str, Any], rows: int | None = None, steps: int | None = None
) -> TrainingOptions:
    """Return the options of the training, overridden by those in `plan`, and by `rows` and `steps`."""
    rows, steps = rows or settings.rows, steps or settings.steps or STEPS
    every = settings.eval_every or plan.get("validate_every", max(steps // 5, 1))
    usual = {"steps": steps, "batch": rows, "rows": min(rows, STEP_ROWS), "group": GROUP, "autocast": settings.bf16}
    return TrainingOptions(**{**usual, "seed": settings.seed, **plan, "validate_every": every})


def lessons_of(out: str | Path, resumed: bool, options: TrainingOptions, several: SingleProcess) -> int:
    """Return the number of training batches per update, which a resumed run keeps."""
    progress = read_json(Path(out) / RUN, PROGRESS) if resumed else {}
    return progress.get("accumulate", max(options.accumulate, several.world))


def keep_answers(trainer: Trainer, folder: str | Path, settings: dict[str, Any], requests: int) -> None:
    """Give a run a store for `requests` requests, and print its size. Raises ValueError if it does not fit."""
    if Path(folder).resolve() == trainer.folder.resolve():
        raise ValueError(f"store: {folder} is the folder of the drafter. Choose another one.")
    target, prompts, device = trainer.target, trainer.prompts, next(trainer.head.parameters()).device
    trainer.store = Store(folder, settings, lambda: target.law(prompts(0)), device)
    if trainer.workers.rank == 0:
        rows = len(trainer.answers(0).lengths)
        drafter_export.say(trainer.store.check_space(requests, rows))


def requests_of(options: TrainingOptions, lessons: int) -> int:
    """Return the number of requests in a run, given the training batches per update of all processes."""
    return -(-options.steps // (options.parts(lessons) * options.reuse)) * options.batches(lessons) * lessons


def steps_of(items: float, options: TrainingOptions, lessons: int) -> int:
    """Return the number of steps of a run that sees this many items."""
    groups = items / (options.batches(lessons) * lessons * options.batch)
    return max(math.ceil(groups * options.parts(lessons) * options.reuse), 1)


def what_is_seen(
    data: TrainingData, count: int, validating: int, options: TrainingOptions, lessons: int, answers: str
) -> str:
    """Return a sentence on how much of the data a run sees, and whose answers it trains on."""
    items_seen = requests_of(options, lessons) * options.batch
    whose = "the data's own answers" if answers == "own" else "the target's answers"
    if answers == "target" and data.answers:
        whose += f", not on the {data.answers:,} of the data (--answers own)"
    return (
        f"{options.steps:,} steps see {min(items_seen, count):,} of {count:,} items ({items_seen / count:.2g} epochs),"
        f" {validating:,} validate; they train on {whose}"
    )


def fresh_or_resumed(model, out: str | Path, resume: bool, seed: int, kind: type[Any], **options: Any):
    """Return the drafter of the run's folder if it is resumed and exists, else a new one of class `kind`."""
    if resume and (saved := checkpoint(out)):
        return kind.from_pretrained(saved / DRAFTER, model)
    return kind.for_model(model, seed=seed, **options)


def train(trainer: Trainer, resume: bool) -> list[dict]:
    """Run a trainer and show its progress. Saves the drafter, and its curves in `run/curves.html`."""
    first, run = trainer.workers.rank == 0, trainer.folder / RUN
    if resume:
        trainer.resume()
    elif first:
        (run / PROGRESS).unlink(missing_ok=True)  # left by a previous run
    with Progress("steps", trainer.plan.steps, trainer.step, hidden=not first) as bar:

        def report(entry: dict) -> None:
            bar.update(entry["step"], {"loss": entry["loss"], "agreed": entry["agreed"][0]})
            if first and (entry["step"] % 100 == 0 or "tau_sampled" in entry):
                bar.write(json.dumps(entry), sys.stdout)

        history = trainer.run(report, lambda count, of: bar.update(trainer.step, {"answers": f"{count}/{of}"}))
    if first and trainer.curve:
        training.write_page(run / "curves.html", trainer.progress(), trainer.provenance)
    return history
