"""Training in several processes started by torchrun, with DDP of the library `accelerate`."""

from __future__ import annotations

import os

from torch import nn
from torch.optim import Optimizer

from visspec.api.sources import need
from visspec.train.loop import SingleProcess

EXTRA = "train"


def workers(device: str) -> SingleProcess:
    """Return the processes that torchrun has started, or `SingleProcess`. Raises ValueError without `accelerate`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "tp":  # they share one target, so all of them train the same drafter on the same answers
        return SingleProcess(int(os.environ.get("RANK", "0")))  # only the first process writes
    if world == 1:
        return SingleProcess()
    need("accelerate", f"{world} processes", EXTRA)
    return Workers(device)


class Workers(SingleProcess):
    """Several processes, each with all weights of the drafter, whose gradients are averaged (DDP)."""

    def __init__(self, device: str):
        from accelerate import Accelerator, DistributedDataParallelKwargs

        # batches without images leave parameters unused
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[unused])
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.device = self.accelerator.device

    def prepare(self, module: nn.Module, optimisers: list[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        module, *wrapped = self.accelerator.prepare(module, *optimisers)
        return module, [each.optimizer for each in wrapped]

    def first(self, figures: dict[str, float]) -> dict[str, float]:
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([figures])[0]
