"""Online distillation of a drafter on batches recorded from the target; recorded states are not written to disk.

Training proceeds in groups: the target generates answers to `group` batches of prompts, the drafter is trained on them
`reuse` times in random order, `rows` answers per step, and the group is discarded. Everything is a function of (seed,
step), so a resumed run ends with the same weights as an uninterrupted one. The trainer is independent of model classes
and data: its arguments are a target, a drafter with `head` (a module), `borrowed` (modules of the target), `rollout`,
`ids` (those that its logits are of, or None) and `refresh`, and `prompts`, a function that returns request i.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from visspec.io.checkpoint import read_json
from visspec.io.files import replacing, write_json
from visspec.train import losses
from visspec.train.capture import capture, split, to
from visspec.types import Acceptance, Request, Target, TrainedDrafter, TrainingBatch

RUN, OPTIMISER, PROGRESS, PROVENANCE = "run", "optimiser.safetensors", "progress.json", "provenance.json"
DRAFTER = "drafter"  # the folder of its weights in a checkpoint
POINTS = 200  # of the curve of a run


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a run. `opening` is the share of steps trained on soft cross-entropy before `loss` takes over."""

    steps: int = 2000
    unroll: int = 5
    loss: str = "tv"
    opening: float = 0.5
    decay: float = 0.8
    feature_weight: float = 0.0
    confidence_weight: float = 0.0  # of a head that expects acceptance rates: `expected` of its `sequential`
    selector_weight: float = 0.0  # of a selector's cross-entropy over its candidates: `scores` of the same
    rate: float = 1e-3
    floor: float = 0.02
    warm_up: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    batch: int = 32  # rows per request of `prompts`
    rows: int = 8  # rows per training step
    group: int = 16
    reuse: int = 4
    seed: int = 0
    save_every: int = 200
    validate_every: int = 0
    autocast: bool = False  # bfloat16 matrix products
    ahead: bool = False  # generate the next group in a second thread during training

    def __post_init__(self):
        losses.of(self.loss)
        for name in ("steps", "unroll", "batch", "rows", "group", "reuse", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")

    @property
    def parts(self) -> int:
        """Training steps per epoch over a group."""
        return self.group * math.ceil(self.batch / self.rows)

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `floor` of the peak."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class SingleProcess:
    """What a run asks of its processes: here one, or several that do the same. `api.train_processes.Workers` are
    several that train on lessons of their own and average gradients.
    """

    world, sharded = 1, False  # sharded: the trained module's weights are spread over the processes
    device = torch.device("cpu")  # of several processes, that of this one

    def __init__(self, rank: int = 0):
        self.rank = rank

    def prepare(self, module: nn.Module, optimiser: Optimizer) -> tuple[nn.Module, Optimizer]:
        """The module and its optimiser as they are trained."""
        return module, optimiser


class Step(nn.Module):
    """The loss of a lesson as a forward pass, so that what wraps a module for several processes sees one."""

    def __init__(self, drafter: TrainedDrafter, plan: TrainingOptions):
        super().__init__()
        self.head: Any = drafter.head
        self.plan = plan
        self._drafter = (drafter,)  # the target's modules are not trained

    def forward(self, lesson: TrainingBatch, kind: str) -> tuple[Tensor, Tensor]:
        """(loss, share of agreement (K,) by step of the rollout)."""
        (drafter,), plan, ids = self._drafter, self.plan, self._drafter[0].ids
        with self._autocast(lesson):
            rollout = drafter.rollout(lesson, plan.unroll)
        weights = [step.weight for step in rollout]
        if ids is not None:  # the distributions over these ids, where the target's choice is one of them (EAGLE-3)
            inside_BT = torch.isin(lesson.best, ids)
            weights = [weight * inside_BT for weight in weights]
        states_NX = lesson.states.flatten(0, 1)

        def law(at_N: Tensor) -> Tensor:
            logits_NV = lesson.law(states_NX[at_N])
            return logits_NV if ids is None else logits_NV[:, ids]

        each = partial(self._each, lesson, kind, [plan.decay**k for k in range(len(rollout))])
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        return losses.rollout_loss(rollout, weights, law, each, lesson.best.shape[1], lesson.width, parameters)

    def _autocast(self, lesson: TrainingBatch) -> torch.autocast:
        return torch.autocast(lesson.ids.device.type, torch.bfloat16, enabled=self.plan.autocast)

    def _each(self, lesson: TrainingBatch, kind: str, decays: list[float], part: losses.Part) -> tuple[Tensor, Tensor]:
        """Losses and agreements of elements (N,), see `losses.rollout_loss`."""
        (drafter,), plan, start, count = self._drafter, self.plan, lesson.prompt_length, lesson.best.shape[1]
        k, at_N, states_Nd, p_NV = part
        before_N, after_N = (lesson.ids[:, start + i :][:, :count].flatten()[at_N] for i in (0, 1))
        with self._autocast(lesson):
            q_NV = drafter.trained_logits(states_Nd, before_N)
        loss_N = losses.of(kind)(q_NV, p_NV)
        if plan.feature_weight:  # the target's features after each answer token, which the rollout predicts
            feature_Nd = lesson.features[:, start : start + count, -states_Nd.shape[1] :].flatten(0, 1)[at_N]
            loss_N = loss_N + plan.feature_weight * losses.distance(states_Nd, feature_Nd)
        loss_N = loss_N * (decays[k] / sum(decays))
        if k == 0 and plan.confidence_weight:
            expected_N = self.head.sequential.expected(states_Nd, before_N)
            loss_N = loss_N + plan.confidence_weight * losses.confidence(expected_N, q_NV, p_NV)
        if k == 0 and plan.selector_weight:
            scores_NC, ids_NC = self.head.sequential.scores(q_NV, states_Nd, before_N, after_N)
            loss_N = loss_N + plan.selector_weight * losses.soft_ce(scores_NC, p_NV.gather(-1, ids_NC))
        best_N = p_NV.argmax(dim=-1)
        return loss_N, q_NV.argmax(dim=-1) == best_N


class Trainer:
    """A training run: weights, optimiser and progress are saved to `folder` every `save_every` steps.

    provenance: of the drafter; its `settings` are what a run that is resumed has to share, beside the plan.
    workers: the processes of the run (default `SingleProcess`); prompts are numbered over all of them, only the first
    writes.
    """

    def __init__(
        self,
        target: Target,
        drafter: TrainedDrafter,
        rule: Acceptance,
        prompts: Callable[[int], Request],
        plan: TrainingOptions,
        folder: str | Path,
        provenance: dict[str, Any],
        validate: Callable[[], dict[str, float]] | None = None,
        workers: SingleProcess | None = None,
    ):
        self.target, self.drafter, self.rule, self.prompts, self.plan = target, drafter, rule, prompts, plan
        self.folder, self.provenance, self.validate = Path(folder), provenance, validate
        self.head: nn.Module = drafter.head
        self.workers = workers = workers or SingleProcess()
        student = drafter
        if workers.sharded:  # the drafter keeps whole weights, for validation and for files
            student = copy.copy(drafter)
            student.head = copy.deepcopy(drafter.head)
        module = Step(student, plan)
        matrices = [p for p in module.parameters() if p.dim() > 1]
        vectors = [p for p in module.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimiser = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98))
        self.module, self.optimiser = workers.prepare(module, optimiser)
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.curve: list[dict[str, float]] = []
        self._group: tuple[int, list[TrainingBatch]] = (-1, [])
        self._coming: tuple[int, Future] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1)

    def run(self, report: Callable[[dict], None] | None = None) -> list[dict]:
        """Train to the last step. `report` is called with a record after each step. Returns all validations."""
        start = time.time() - self.seconds
        frozen = [p for module in self.drafter.borrowed for p in module.parameters()]
        wanted = [p.requires_grad for p in frozen]
        for p in frozen:
            p.requires_grad_(False)
        try:
            while self.step < self.plan.steps:
                record = self.update(self.lesson(self.step))
                self.step += 1
                if self.step % max(self.plan.steps // POINTS, 1) == 0:
                    self.curve.append({"step": self.step, "loss": record["loss"], "agreed": record["agreed"][0]})
                self.seconds = time.time() - start
                last = self.step == self.plan.steps
                if self.plan.validate_every and (self.step % self.plan.validate_every == 0 or last):
                    record |= self._validate()
                if self.step % self.plan.save_every == 0 or last:
                    self.save()
                if report is not None:
                    report({"step": self.step, "s": round(self.seconds, 1), **record})
        finally:
            for p, flag in zip(frozen, wanted):
                p.requires_grad_(flag)
            self.drafter.refresh()
        return self.history

    def lesson(self, step: int) -> TrainingBatch:
        """The batch of a step. A group is generated at its first step, or at the first step after a resume."""
        plan = self.plan
        index, within = divmod(step, plan.parts * plan.reuse)
        if self._group[0] != index:
            self._group = (index, self._answers(index))
        shuffle = torch.Generator().manual_seed(plan.seed * 1_000_003 + index)
        epoch, place = divmod(within, plan.parts)
        orders = [torch.randperm(plan.parts, generator=shuffle) for _ in range(epoch + 1)]
        return self._group[1][int(orders[-1][place])]

    def _answers(self, index: int) -> list[TrainingBatch]:
        """The batches of a group. With `ahead` the next group is generated in another thread meanwhile."""
        waiting, self._coming = self._coming, None
        answers = self._answer(index) if waiting is None or waiting[0] != index else waiting[1].result()
        if self.plan.ahead and (index + 1) * self.plan.parts * self.plan.reuse < self.plan.steps:
            self._coming = (index + 1, self._pool.submit(self._answer, index + 1))
        return answers

    def _answer(self, index: int) -> list[TrainingBatch]:
        plan, parts = self.plan, []
        for number in range(index * plan.group, (index + 1) * plan.group):
            mine = number * self.workers.world + self.workers.rank
            parts += split(capture(self.target, self.rule, self.prompts(mine)), plan.rows)
        if len(parts) != plan.parts:
            raise ValueError(f"batch: got {plan.batch}, expected the rows of a request of `prompts`")
        return parts

    def update(self, lesson: TrainingBatch) -> dict[str, Any]:
        """One optimiser step."""
        plan = self.plan
        for group in self.optimiser.param_groups:
            group["lr"] = plan.rate_at(self.step)
        kind = "soft_ce" if self.step < plan.opening * plan.steps else plan.loss
        lesson = to(lesson, next(self.head.parameters()).dtype)
        self.module.train()
        with torch.random.fork_rng():  # what a network draws in training is a function of (seed, step)
            torch.manual_seed(plan.seed * 1_000_003 + self.step)
            loss, agreed = self.module(lesson, kind)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = whole(nn.utils.clip_grad_norm_(self.module.parameters(), plan.clip))
        if torch.isfinite(norm):  # the same in every process
            self.optimiser.step()
        return {"loss": round(loss.item(), 4), "kind": kind, "agreed": [round(a, 3) for a in agreed.tolist()]}

    def _trained_weights(self) -> list[tuple[str, Tensor]]:
        """The trained weights by their names in the head."""
        named = self.module.named_parameters()
        return [(name.removeprefix("module.").removeprefix("head."), p) for name, p in named]

    @torch.no_grad()
    def _gather(self) -> None:
        """Whole weights for the drafter, if they are spread over processes."""
        if self.workers.sharded:
            own = dict(self.head.named_parameters())
            for name, p in self._trained_weights():
                own[name].copy_(whole(p))

    def _validate(self) -> dict[str, float]:
        if self.validate is None:
            return {}
        if self._coming is not None:
            wait([self._coming[1]])  # the target is not shared between threads
        self._gather()
        self.drafter.refresh()
        figures = self.validate()
        self.history.append({"step": self.step, **figures})
        return figures

    def progress(self) -> dict[str, Any]:
        """How far the run is, what was measured on the way, and its plan."""
        progress = {"step": self.step, "seconds": round(self.seconds, 1), "plan": asdict(self.plan)}
        return progress | {"workers": self.workers.world, "validations": self.history, "curve": self.curve}

    def save(self) -> None:
        """Save a checkpoint, the folder `run/step-N` with drafter and optimiser, then the drafter in the run's folder.

        `run/progress.json` names the step and is replaced in one move once the checkpoint is whole: a run that ends
        anywhere before it has the checkpoint that it had.
        """
        self._gather()
        state = self.optimiser.state
        entries = [
            (f"{name}/{key}", value) for name, p in self._trained_weights() for key, value in state.get(p, {}).items()
        ]
        tensors = {name: whole(value.detach()).contiguous() for name, value in entries}
        if self.workers.rank:
            return
        progress, saved = self.progress(), self.folder / RUN / f"step-{self.step}"
        try:
            self.drafter.save_pretrained(saved / DRAFTER, {**self.provenance, "training": progress})
            save_file(tensors, saved / OPTIMISER, {"step": str(self.step)})
            for path in (saved / OPTIMISER, *(saved / DRAFTER).iterdir()):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        except BaseException:
            shutil.rmtree(saved, ignore_errors=True)  # a disk may be full
            raise
        write_json(self.folder / RUN / PROGRESS, progress)
        for before in saved.parent.glob("step-*"):
            if before != saved:
                shutil.rmtree(before)
        self._publish(saved)

    def _publish(self, saved: Path) -> None:
        """Copy the drafter of a checkpoint into the folder of the run, each file in one move."""
        for path in sorted((saved / DRAFTER).iterdir()):
            with replacing(self.folder / path.name) as draft:
                shutil.copyfile(path, draft)

    def resume(self) -> bool:
        """Continue the run in the folder, if there is one; the drafter must have the weights of its `checkpoint`.

        Raises ValueError if the run in the folder has another plan or other `settings` in its provenance, or if its
        checkpoint has parts of several steps.
        """
        saved = checkpoint(self.folder)
        if saved is None:
            return False
        progress, record = read_json(self.folder / RUN, PROGRESS), read_json(saved / DRAFTER, PROVENANCE)
        planned = {"workers": progress.get("workers", 1), **record.get("settings", {}), **progress["plan"]}
        asked = {"workers": self.workers.world, **self.provenance.get("settings", {}), **asdict(self.plan)}
        for name, value in asked.items():
            if planned.get(name) != value:
                raise ValueError(f"resume: got {name} {value!r}, expected {planned.get(name)!r} as in {self.folder}")
        with safe_open(saved / OPTIMISER, framework="pt") as file:
            steps = {progress["step"], record["training"]["step"], int((file.metadata() or {}).get("step", -1))}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if len(steps) > 1:
            raise ValueError(f"resume: got parts of the steps {sorted(steps)} in {saved}, expected those of one step")
        for name, p in self._trained_weights():
            entries = {k.rpartition("/")[2]: v for k, v in tensors.items() if k.rpartition("/")[0] == name}
            if entries:
                self.optimiser.state[p] = {key: spread(value, p) for key, value in entries.items()}
        self.step, self.seconds, self.history = progress["step"], progress["seconds"], progress["validations"]
        self.curve = progress.get("curve", [])
        if self.workers.rank == 0:
            self._publish(saved)
        return True


def checkpoint(folder: str | Path) -> Path | None:
    """The folder of the last whole checkpoint of the run in a folder, with the one of its drafter; None without one."""
    run = Path(folder) / RUN
    return run / f"step-{read_json(run, PROGRESS).get('step')}" if (run / PROGRESS).is_file() else None


def whole(value: Tensor) -> Tensor:
    """A tensor whose parts are in several processes, put together; another one as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def spread(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, spread over processes as `like` is, if it has the same shape."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)
