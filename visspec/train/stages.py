"""What training stages share: learning rate, checkpoints, several one-thread processes.

Each worker is one process with one thread: at this size that is faster than two threads inside each operation, and it
suffers less from other work on the machine. Workers hold equal weights and average their gradients.
"""

import argparse
import ctypes
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from visspec.io.files import replacing


def keep_memory() -> None:
    """Let glibc keep freed memory: large tensors are otherwise mapped and zeroed by the kernel at every step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 28)):  # no mmap, no trim, grow by 256 MiB
            libc.mallopt(option, value)
    except OSError:
        pass


def begin(options: argparse.Namespace, threads: int) -> None:
    """What a recipe's command line does first: the settings of this process, and the folder `options.out`."""
    keep_memory()
    torch.set_num_threads(threads)
    options.out.mkdir(parents=True, exist_ok=True)


def average_gradients(parameters: list[nn.Parameter], workers: int) -> None:
    """Replace every gradient by its mean over the workers, in one message."""
    if workers == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]  # of the same parameters on every worker
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.div_(workers).split([gradient.numel() for gradient in gradients])):
        gradient.copy_(mean.view_as(gradient))


def descend(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], loss: torch.Tensor, workers: int) -> None:
    """One step down a loss: gradients averaged over the workers and clipped to norm 1."""
    optimiser.zero_grad()
    loss.backward()
    average_gradients(parameters, workers)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimiser.step()


class Stage:
    """One worker's part of a training stage: AdamW, warm-up and cosine, gradients averaged over equal workers.

    A subclass sets `parts`, whatever has state_dict and load_state_dict and must survive a restart, and defines
    `loss()`, the loss of the next batch, and `report()`, called on every worker, what is to be known of the model.
    """

    warm = 0.04  # share of the steps in which the learning rate rises
    betas = (0.9, 0.98)
    vectors_decay = False  # whether parameters of one dimension have weight decay too

    def __init__(
        self,
        options: argparse.Namespace,
        rank: int,
        file: str,
        steps: int,
        peak: float,
        trained: list[nn.Parameter],
        decay: float,
        parts: dict,
    ):
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
        decays = (matrices, decay), (vectors, decay if self.vectors_decay else 0.0)
        groups = [{"params": parameters, "weight_decay": share} for parameters, share in decays]
        self.optimiser = torch.optim.AdamW(groups, lr=peak, betas=self.betas)
        self.trained, self.steps, self.peak = trained, steps, peak
        self.parts = parts | {"optimiser": self.optimiser} | self.schedules()
        self.options, self.rank, self.workers = options, rank, options.workers
        self.file, self.step, self.seconds = options.out / file, 0, 0.0
        self.notes: dict[str, float] = {}  # printed with the loss

    def loss(self) -> torch.Tensor:
        """Loss of this worker's batch number `self.step`."""
        raise NotImplementedError

    def report(self) -> dict:
        """Figures of the model as it stands."""
        raise NotImplementedError

    def schedules(self) -> dict:
        """What else of the optimisation must survive a restart."""
        return {}

    def rate(self) -> float:
        """Learning rate: linear warm-up, then a cosine down to 2 % of the peak."""
        warm = max(1, int(self.warm * self.steps))
        done = max(0.0, (self.step - warm) / max(1, self.steps - warm))
        return self.peak * min((self.step + 1) / warm, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    def adjust(self) -> None:
        """Set the learning rate of the next step."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate()

    def update(self) -> float:
        """One optimiser step; returns the loss."""
        self.adjust()
        loss = self.loss()
        descend(self.optimiser, self.trained, loss, self.workers)
        self.step += 1
        return loss.item()

    def checkpoint(self, loss: float) -> None:
        """Write every part, the progress and the mean loss so far, replacing the former checkpoint in one move."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"step": self.step, "seconds": self.seconds, "loss": round(loss, 4)}
        with replacing(self.file) as draft:
            torch.save(state, draft)

    def restore(self) -> None:
        """Take up the last checkpoint, if there is one."""
        if self.file.exists():
            saved = torch.load(self.file, weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])
            self.step, self.seconds = saved["step"], saved["seconds"]

    def run(self) -> None:
        """Train to the last step; a report and a checkpoint every `options.every` steps."""
        losses: list[float] = []
        begun = time.time() - self.seconds
        while self.step < self.steps:
            losses.append(self.update())
            self.seconds = time.time() - begun
            if self.rank == 0 and self.step % 50 == 0:
                line = {"file": self.file.name, "step": self.step, "loss": round(sum(losses[-50:]) / 50, 4)}
                print(json.dumps(line | {"s": round(self.seconds)} | self.notes), flush=True)
            if self.step % self.options.every == 0 or self.step == self.steps:
                if self.rank == 0:
                    self.checkpoint(sum(losses[-100:]) / len(losses[-100:]))
                if measured := self.report():
                    print(json.dumps({"file": self.file.name, "step": self.step, **measured}), flush=True)


class OneCycleStage(Stage):
    """A stage with torch's one-cycle schedule, which moves the momentum too, and weight decay of all parameters."""

    vectors_decay = True
    rises: float  # share of the steps in which the learning rate rises

    def schedules(self) -> dict:
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimiser, self.peak, total_steps=self.steps, pct_start=self.rises
        )
        return {"schedule": self.schedule}

    def adjust(self) -> None:
        if self.step:  # it has set that of the first step itself
            self.schedule.step()


def _worker(
    rank: int, meeting: str, make: Callable[[argparse.Namespace, int], Stage], options: argparse.Namespace
) -> None:
    """Body of one worker process; `meeting` is a fresh file through which the workers find each other."""
    keep_memory()
    torch.set_num_threads(1)
    if options.workers > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.workers)
    stage = make(options, rank)
    if options.resume:
        stage.restore()
    stage.run()
    if options.workers > 1:
        dist.destroy_process_group()


def in_workers(make: Callable[[argparse.Namespace, int], Stage], options: argparse.Namespace) -> None:
    """Run a stage in `options.workers` processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (str(Path(folder) / "meeting"), make, options), nprocs=options.workers)
