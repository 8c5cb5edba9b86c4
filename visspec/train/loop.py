"""Online distillation of a drafter on batches recorded from the target, which a `Store` can keep on disk.

Training proceeds in groups: the target generates answers to `group` batches of prompts, the drafter is trained on them
`reuse` times in random order, `rows` answers per training batch, and the group is discarded. The trainer does not
depend on model classes or data: it takes a target, a drafter (`types.TrainedDrafter`), and `prompts`, which returns
request i.

An update averages the gradients of `accumulate` training batches, one from each of as many streams of prompts, which
are distributed over the processes. Everything is a function of (seed, step, accumulate). A resumed run therefore ends
with the weights of an uninterrupted one: bit for bit with the same number of processes, otherwise up to the order of
sums.

Shapes: B rows, T elements, N elements of a chunk, K steps of a rollout, V vocabulary, C candidates, d hidden size, X
numbers of a state of the target.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from visspec.io.checkpoint import read_json
from visspec.io.files import atomic_write, write_json
from visspec.train import losses
from visspec.train.batches import TrainedDrafter, TrainingBatch
from visspec.train.capture import capture, split, to
from visspec.train.options import TrainingOptions
from visspec.train.store import Store
from visspec.types import Acceptance, Request, Target

RUN, OPTIMISER, PROGRESS, PROVENANCE = "run", "optimiser.safetensors", "progress.json", "provenance.json"
DRAFTER = "drafter"  # folder of the drafter's weights in a checkpoint
POINTS = 200  # maximum number of points of a run's curve
LAW_ROWS = 256  # rows of the target's logits at a time, if the drafter predicts only some ids
MUON = 8.0  # learning rate of Muon, as a multiple of AdamW's
HEADS = ("lm_head", "head")  # names of output layers, which AdamW trains
READS = 10  # steps between reads of the loss from an accelerator, which synchronise
PATIENCE = 10  # maximum number of consecutive updates skipped because of non-finite gradients
FREE = ("save_every", "keep")  # options that a resumed run may change, since they don't affect weights


class Step(nn.Module):
    """The loss of a training batch as a forward pass, so that wrappers for several processes see a single one."""

    def __init__(self, drafter: TrainedDrafter, plan: TrainingOptions):
        super().__init__()
        self.head: Any = drafter.head
        self.plan = plan
        self._drafter = (drafter,)  # a tuple hides the target's modules, which are not trained

    def forward(self, batch: TrainingBatch, kind: str) -> tuple[Tensor, Tensor]:
        """Return the loss and the agreement (K,) at each step of the rollout."""
        (drafter,), plan, ids = self._drafter, self.plan, self._drafter[0].ids
        with self._autocast(batch):
            rollout = drafter.rollout(batch, plan.unroll)
        weights, width = [step.weight for step in rollout], batch.width
        if ids is not None:  # distributions over these ids, where the target's choice is among them (EAGLE-3)
            inside_BT, width = torch.isin(batch.best, ids), len(ids)
            weights = [weight * inside_BT for weight in weights]
        states_NX = batch.states.flatten(0, 1)

        def law(part: slice) -> Tensor:
            if ids is None:
                return batch.law(states_NX[part])
            return torch.cat([batch.law(piece_NX)[:, ids] for piece_NX in states_NX[part].split(LAW_ROWS)])

        each = partial(self._each, batch, kind, [plan.decay**k for k in range(len(rollout))])
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        with torch.autocast(batch.ids.device.type, enabled=False):  # keeps the chunks' cached casts of weights
            return losses.rollout_loss(rollout, weights, law, each, width, parameters)

    def _autocast(self, batch: TrainingBatch) -> torch.autocast:
        return torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=self.plan.autocast)

    def _each(self, batch: TrainingBatch, kind: str, decays: list[float], chunk: losses.Chunk) -> tuple[Tensor, Tensor]:
        (drafter,), plan, start, count = self._drafter, self.plan, batch.prompt_length, batch.best.shape[1]
        k, part, states_Nd, p_NV, best_N = chunk
        before_N, after_N = (batch.ids[:, start + i :][:, :count].flatten()[part] for i in (0, 1))
        with self._autocast(batch):
            q_NV = drafter.trained_logits(states_Nd, before_N)
        loss_N = losses.of(kind)(q_NV, p_NV)
        if plan.feature_weight:  # the rollout predicts the target's features after each answer token
            feature_Nd = batch.features[:, start : start + count, -states_Nd.shape[1] :].flatten(0, 1)[part]
            loss_N = loss_N + plan.feature_weight * losses.distance(states_Nd, feature_Nd)
        loss_N = loss_N * (decays[k] / sum(decays))
        if k == 0 and plan.confidence_weight:
            expected_N = self.head.sequential.expected(states_Nd, before_N)
            loss_N = loss_N + plan.confidence_weight * losses.confidence(expected_N, q_NV, p_NV)
        if k == 0 and plan.selector_weight:
            scores_NC, ids_NC = self.head.sequential.scores(q_NV, states_Nd, before_N, after_N)
            share_NC = F.normalize(p_NV.gather(-1, ids_NC), p=1, dim=-1)
            loss_N = loss_N + plan.selector_weight * losses.soft_ce(scores_NC, share_NC)
        return loss_N, q_NV.argmax(dim=-1) == best_N


class SingleProcess:
    """The process of a run. `api.training.processes.Workers` are several, which average gradients."""

    world = 1
    device = torch.device("cpu")  # the device of this process, if there are several

    def __init__(self, rank: int = 0):
        self.rank = rank

    def prepare(self, module: nn.Module, optimisers: list[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        """Wrap the module and its optimisers for training."""
        return module, optimisers

    def first(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the first process's figures, so that all processes make the same decision."""
        return figures


class Trainer:
    """A training run. Weights, optimiser and progress are saved to `folder` every `save_every` steps.

    The folder holds the drafter with the best validation, by the mean of its `tau`s, or the last one without
    validations. If `store` is set, it keeps the target's answers. `prompts` returns request i, numbered over all
    processes. A resumed run must have the same plan and `settings` in its provenance.
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
        self.store: Store | None = None
        self.recorded: dict[int, TrainingBatch] = {}  # answers to requests of the first group, if they are known
        self.head: nn.Module = drafter.head
        self.workers = workers = workers or SingleProcess()
        module = Step(drafter, plan)
        self.module, self.optimisers = workers.prepare(module, optimisers_of(module, plan))
        self.trained_by = {p: each for each in self.optimisers for group in each.param_groups for p in group["params"]}
        self.step, self.seconds, self.accumulate = 0, 0.0, max(plan.accumulate, workers.world)
        self._check_accumulate()
        device = next(self.head.parameters()).device
        self.reads = 1 if device.type == "cpu" else READS
        self.left_out = torch.zeros((), device=device)  # consecutive skipped updates
        self.history: list[dict[str, Any]] = []
        self.curve: list[dict[str, float]] = []
        self.kept: list[int] = []  # steps of the checkpoints on disk
        self.answered: Callable[[int, int], None] | None = None
        self.best: dict[str, float] = {}  # step and tau
        self._group: tuple[int, list[list[TrainingBatch]]] = (-1, [])

    def run(
        self, report: Callable[[dict], None] | None = None, answered: Callable[[int, int], None] | None = None
    ) -> list[dict]:
        """Train to the last step and return all validations. `report` is called with a record after each step whose
        loss is read: every step on a CPU, one in `READS` elsewhere. `answered` is called with the number of answered
        requests of a group, and their total. Raises ValueError after `PATIENCE` consecutive skipped updates.
        """
        start, self.answered = time.time() - self.seconds, answered
        with self.freeze_target():
            while self.step < self.plan.steps:
                figures = self.update(self.lessons(self.step))
                self.step += 1
                self.seconds = time.time() - start
                last = self.step == self.plan.steps
                validates = self.plan.validate_every and (self.step % self.plan.validate_every == 0 or last)
                saves = self.step % self.plan.save_every == 0 or last
                if not (validates or saves or self.step % self.reads == 0):
                    continue
                record = self._read(figures)
                if validates:
                    best = self.best
                    record |= self._validate()
                    saves |= self.best is not best
                if saves:
                    self.save()
                if report is not None:
                    report({"step": self.step, "s": round(self.seconds, 1), **record})
        return self.history

    @contextmanager
    def freeze_target(self) -> Iterator[None]:
        """Disable gradients of the target's modules, and reset the drafter's cached values before and after."""
        frozen = [p for module in self.drafter.borrowed for p in module.parameters()]
        required = [p.requires_grad for p in frozen]
        self.drafter.refresh()
        try:
            for p in frozen:
                p.requires_grad_(False)
            yield
        finally:
            for p, flag in zip(frozen, required):
                p.requires_grad_(flag)
            self.drafter.refresh()

    def _check_accumulate(self) -> None:
        if self.accumulate % self.workers.world:
            raise ValueError(f"accumulate: got {self.accumulate}, expected a multiple of {self.workers.world}.")

    @property
    def streams(self) -> range:
        """The streams of prompts of this process. Each contributes one training batch to every update."""
        return range(self.workers.rank, self.accumulate, self.workers.world)

    @property
    def parts(self) -> int:
        return self.plan.parts(self.accumulate)

    def lessons(self, step: int) -> list[TrainingBatch]:
        """Return this process's training batches of a step. A group is generated when it is first needed."""
        plan = self.plan
        index, offset = divmod(step, self.parts * plan.reuse)
        if self._group[0] != index:
            self._group = (-1, [])  # frees it
            self._group = (index, self._answers(index))
        shuffle = torch.Generator().manual_seed(plan.seed * 1_000_003 + index)
        epoch, place = divmod(offset, self.parts)
        orders = [torch.randperm(self.parts, generator=shuffle) for _ in range(epoch + 1)]
        return [stream[int(orders[-1][place])] for stream in self._group[1]]

    def _answers(self, index: int) -> list[list[TrainingBatch]]:
        plan, streams = self.plan, list[list[TrainingBatch]]()
        count = plan.batches(self.accumulate)
        for stream in self.streams:
            parts: list[TrainingBatch] = []
            for place in range(count):
                parts += split(self.answers((index * count + place) * self.accumulate + stream), plan.rows)
                if self.answered is not None:
                    self.answered(len(streams) * count + place + 1, len(self.streams) * count)
            if len(parts) != self.parts:
                raise ValueError(f"batch: got {plan.batch}, expected the rows of a request of `prompts`.")
            streams.append(parts)
        self.recorded.clear()  # the rest belongs to other processes
        return streams

    def answers(self, number: int) -> TrainingBatch:
        """Return the target's answers to a request, or the data's own, from the store if it has them."""

        def record() -> TrainingBatch:
            batch = self.recorded.pop(number, None)
            return batch or capture(self.target, self.rule, self.prompts(number))

        return record() if self.store is None else self.store.answers(number, record)

    def update(self, lessons: Sequence[TrainingBatch]) -> Tensor:
        """Run one optimiser step. Returns (K + 2,) on the device: the loss, the agreement at each step of the rollout,
        and the number of consecutive updates skipped for non-finite gradients, including this one.
        """
        plan, figures = self.plan, []
        self.module.train()
        self.module.zero_grad(set_to_none=True)
        for stream, batch in zip(self.streams, lessons):
            batch = to(batch, next(self.head.parameters()).dtype)
            with torch.random.fork_rng():  # makes random numbers in training a function of the batch's number
                torch.manual_seed(plan.seed * 1_000_003 + self.step * self.accumulate + stream)
                loss, agreed = self.module(batch, plan.loss_at(self.step))
            (loss / len(lessons)).backward()
            figures.append(torch.cat([loss.detach()[None], agreed]))
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), plan.clip)  # equal in every process
        wrong = ~torch.isfinite(norm)
        self.left_out = torch.where(wrong, self.left_out + 1, 0)
        self._step_unless(wrong)
        return torch.cat([torch.stack(figures).mean(dim=0), self.left_out[None]])

    @torch.no_grad()
    def _step_unless(self, wrong: Tensor) -> None:
        """Step the optimisers, except where `wrong` () is true, without synchronising."""
        for optimiser in self.optimisers:
            weights = []
            for group in optimiser.param_groups:
                group["lr"] = group["share"] * self.plan.rate_at(self.step)
                weights += group["params"]
            if not isinstance(optimiser, torch.optim.Muon):
                optimiser.found_inf = wrong.float()  # type: ignore[attr-defined]  # as a `GradScaler` tells it
                optimiser.step()
                continue
            before = [(p.clone(), {name: value.clone() for name, value in optimiser.state[p].items()}) for p in weights]
            optimiser.step()
            for p, (weight, moments) in zip(weights, before):
                p.copy_(torch.where(wrong, weight, p))
                for name, value in optimiser.state[p].items():
                    value.copy_(torch.where(wrong, moments.get(name, torch.zeros_like(value)), value))

    def _read(self, figures: Tensor) -> dict[str, Any]:
        loss, *agreed, left_out = figures.tolist()
        if left_out:
            where = f"the gradient of step {self.step} is not finite, and of {left_out - 1:.0f} before it"
            if left_out >= PATIENCE:
                raise ValueError(f"loss: {where}. Check the target's answers, or lower the rate.")
            warnings.warn(f"{where}: weights stay as they are", RuntimeWarning, stacklevel=2)
        elif self.step % max(self.plan.steps // POINTS, 1) == 0:
            self.curve.append({"step": self.step, "loss": round(loss, 4), "agreed": round(agreed[0], 3)})
        kind = self.plan.loss_at(self.step - 1)
        return {"loss": round(loss, 4), "kind": kind, "agreed": [round(a, 3) for a in agreed]}

    def _trained_weights(self) -> list[tuple[str, Tensor]]:
        named = self.module.named_parameters()
        return [(name.removeprefix("module.").removeprefix("head."), p) for name, p in named]

    def _validate(self) -> dict[str, float]:
        if self.validate is None:
            return {}
        self.drafter.refresh()
        figures = self.workers.first(self.validate())
        self.drafter.refresh()
        self.history.append({"step": self.step, **figures})
        taus = [value for name, value in figures.items() if name.startswith("tau")]
        if taus and (tau := sum(taus) / len(taus)) > self.best.get("tau", 0.0):
            self.best = {"step": self.step, "tau": tau}
        return figures

    def progress(self) -> dict[str, Any]:
        """The state of the run, its measurements, and its plan."""
        progress = {"step": self.step, "seconds": round(self.seconds, 1), "plan": asdict(self.plan)}
        progress |= {"workers": self.workers.world, "accumulate": self.accumulate, "kept": self.kept, "best": self.best}
        return progress | {"validations": self.history, "curve": self.curve}

    def save(self) -> None:
        """Save a checkpoint to `run/step-N` with drafter and optimiser, then the drafter to the run's folder.
        `run/progress.json` contains the step and is replaced in one move when the checkpoint is complete. If the run
        ends earlier, it still has the previous checkpoint.
        """
        entries = [
            (f"{name}/{key}", value)
            for name, p in self._trained_weights()
            for key, value in self.trained_by[p].state.get(p, {}).items()
        ]
        tensors = {name: value.detach().contiguous() for name, value in entries}
        if self.workers.rank:
            return
        self.kept = [*(step for step in self.kept if step < self.step), self.step][-self.plan.keep :]
        progress, saved = self.progress(), self.folder / RUN / f"step-{self.step}"
        try:
            self.drafter.save_pretrained(saved / DRAFTER, {**self.provenance, "training": progress})
            save_file(tensors, saved / OPTIMISER, {"step": str(self.step)})
            for path in (saved / OPTIMISER, *(saved / DRAFTER).iterdir()):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        except BaseException:
            shutil.rmtree(saved, ignore_errors=True)  # removes it if the disk is full
            raise
        write_json(self.folder / RUN / PROGRESS, progress)
        stay = {f"step-{step}" for step in (*self.kept, self.best.get("step"))}
        for old in saved.parent.glob("step-*"):
            if old.name not in stay:
                shutil.rmtree(old)
        self._publish()

    def _publish(self) -> None:
        """Copy the drafter of the best checkpoint to the run's folder, each file in one move."""
        best = self.folder / RUN / f"step-{self.best.get('step', self.step)}"
        for path in sorted((best / DRAFTER).iterdir()):
            with atomic_write(self.folder / path.name) as draft:
                shutil.copyfile(path, draft)

    def resume(self) -> bool:
        """Continue the run in the folder, if there is one. The drafter must have the weights of its `checkpoint`.
        Raises ValueError if that run has another plan or other `settings`, or its checkpoint mixes several steps.
        """
        saved = checkpoint(self.folder)
        if saved is None:
            return False
        progress, record = read_json(self.folder / RUN, PROGRESS), read_json(saved / DRAFTER, PROVENANCE)
        planned = {**record.get("settings", {}), **progress["plan"]}
        settings = {**self.provenance.get("settings", {}), **asdict(self.plan)}
        for name, value in settings.items():
            if name not in FREE and planned.get(name) != value:
                raise ValueError(f"resume: got {name} {value!r}, expected {planned.get(name)!r} as in {self.folder}.")
        self.accumulate = progress["accumulate"]
        self._check_accumulate()
        with safe_open(saved / OPTIMISER, framework="pt") as file:
            steps = {progress["step"], record["training"]["step"], int((file.metadata() or {}).get("step", -1))}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if len(steps) > 1:
            raise ValueError(f"resume: {saved} mixes parts of the steps {sorted(steps)}.")
        for name, p in self._trained_weights():
            entries = {k.rpartition("/")[2]: v for k, v in tensors.items() if k.rpartition("/")[0] == name}
            if entries:
                self.trained_by[p].state[p] = {key: value.to(p.device) for key, value in entries.items()}
        self.step, self.seconds, self.history = progress["step"], progress["seconds"], progress["validations"]
        self.curve, self.kept, self.best = progress["curve"], progress["kept"], progress["best"]
        if self.workers.rank == 0:
            self._publish()
        return True


def optimisers_of(module: nn.Module, plan: TrainingOptions) -> list[Optimizer]:
    """Return Muon for the weights of linear layers except output layers, and AdamW for all other parameters."""
    layers = [(name.split(".")[-1], layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    hidden = dict.fromkeys(layer.weight for name, layer in layers if name not in HEADS)
    matrices = [p for p in module.parameters() if p.dim() > 1 and p not in hidden]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay, "share": 1.0},
        {"params": vectors, "weight_decay": 0.0, "share": 1.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), fused=True)
    if not hidden:
        return [adamw]
    group = {"params": list(hidden), "share": MUON}
    return [torch.optim.Muon([group], weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"), adamw]


def checkpoint(folder: str | Path) -> Path | None:
    """Return the folder of the last complete checkpoint of a run, with that of its drafter, or None."""
    run = Path(folder) / RUN
    return run / f"step-{read_json(run, PROGRESS).get('step')}" if (run / PROGRESS).is_file() else None
