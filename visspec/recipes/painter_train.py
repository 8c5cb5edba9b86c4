"""What both training stages of the painter share: learning rate, checkpoints, and several one-thread processes."""

import argparse
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

from visspec.files import replacing
from visspec.recipes.captioner import descend, keep_memory


class Stage:
    """One worker's part of a training stage: AdamW, warm-up and cosine, gradients averaged over equal workers.

    A subclass sets `parts`, whatever has state_dict and load_state_dict and must survive a restart, and defines
    `loss()`, the loss of the next batch, and `report()`, called on every worker, what is to be known of the model.
    """

    def __init__(
        self, options: argparse.Namespace, rank: int, file: str, steps: int, peak: float, trained: list[nn.Parameter],
        decay: float, parts: dict,
    ):  # fmt: skip
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98))
        self.parts = parts | {"optimiser": self.optimiser}
        self.trained, self.steps, self.peak = trained, steps, peak
        self.options, self.rank, self.workers = options, rank, options.workers
        self.file, self.step, self.seconds = options.out / file, 0, 0.0
        self.notes: dict[str, float] = {}  # printed with the loss

    def loss(self) -> torch.Tensor:
        """Loss of this worker's batch number `self.step`."""
        raise NotImplementedError

    def report(self) -> dict:
        """Figures of the model as it stands."""
        raise NotImplementedError

    def rate(self) -> float:
        """Learning rate: linear warm-up over 4 % of the steps, then a cosine down to 2 % of the peak."""
        warm = max(1, int(0.04 * self.steps))
        done = max(0.0, (self.step - warm) / max(1, self.steps - warm))
        return self.peak * min((self.step + 1) / warm, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    def update(self) -> float:
        """One optimiser step; returns the loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate()
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
    """Run a stage in `options.workers` processes of one thread each, which is faster here than threads."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (str(Path(folder) / "meeting"), make, options), nprocs=options.workers)
