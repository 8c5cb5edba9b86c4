"""What `tests/test_train_processes.py` runs in two processes: a drafter trained whole, broken off, resumed."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image

from tests.tiny import model_of, prompt
from visspec.api.training import drafter as train_drafter
from visspec.api.training import processes as workers
from visspec.train.loop import SingleProcess, Trainer

STOP = 6


class ByHand(SingleProcess):
    """Gradients averaged one by one, without a wrapper."""

    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu")

    def prepare(self, module, optimisers):
        def average(p):
            dist.all_reduce(p.grad)
            p.grad /= self.world

        for p in module.parameters():
            p.register_post_accumulate_grad_hook(average)
        return module, optimisers


def pictures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(3):
        Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(folder / f"{i}.png")


def run_of(home: Path, name: str, **options) -> list[dict]:
    """A short run of eight steps on pictures in `data`, without a processor."""
    model = model_of("llava")
    train_drafter.targets.load = lambda *a, **k: (model, None)
    train_drafter.prepare = lambda p, images, texts, m: prompt("llava", ["4 i 5"] * len(images))
    sizes = {"steps": 8, "rows": 2, "max_new_tokens": 8, "group": 1, "reuse": 2, "unroll": 2, "image_latents": 0}
    saving = {"save_every": 4, "validate_every": 4, "warm_up": 0.125}
    return train_drafter.run("x", home / "data", home / name, **sizes | saving | options)


def main(home: Path) -> None:
    run = partial(run_of, home)
    result = run("whole")
    update = Trainer.update

    def stopping(self, lesson):
        if self.step == STOP:
            raise KeyboardInterrupt
        return update(self, lesson)

    Trainer.update = stopping
    try:
        run("broken")
    except KeyboardInterrupt:
        Trainer.update = update
    assert run("broken", resume=True)[-1]["tau_greedy"] == result[-1]["tau_greedy"]
    train_drafter.workers = lambda *a: ByHand()
    run("by-hand")
    several = workers.Workers("cpu")
    assert several.world == 2
    several.accelerator.end_training()
