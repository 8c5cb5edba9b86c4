"""Training in several processes started by torchrun, with the library `accelerate`: DDP or FSDP2."""

from __future__ import annotations

import os

from torch import nn
from torch.optim import Optimizer

from visspec.api.sources import need
from visspec.train.loop import SingleProcess

EXTRA = "train"


def workers(parallel: str | None, device: str) -> SingleProcess:
    """Return the processes that torchrun has started, or `SingleProcess`. `parallel` is "ddp" (each process has all
    weights of the drafter), "fsdp" (they are sharded) or None (ddp if there are several processes). Raises ValueError
    for anything else.
    """
    if parallel not in (None, "ddp", "fsdp"):
        raise ValueError(f"parallel: got {parallel!r}, expected ddp or fsdp")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "tp":  # they share one target, so all of them train the same drafter on the same answers
        if parallel is not None:
            raise ValueError(f"parallel: got {parallel} with device tp, expected one of the two")
        return SingleProcess(int(os.environ.get("RANK", "0")))  # only the first process writes
    if world == 1:
        if parallel is not None:
            raise ValueError(f"parallel: got {parallel} in one process, expected several (torchrun)")
        return SingleProcess()
    need("accelerate", f"{world} processes", EXTRA)
    return Workers(parallel == "fsdp", device)


class Workers(SingleProcess):
    """Several processes. The trained module is wrapped; everything else belongs to a single process."""

    def __init__(self, sharded: bool, device: str):
        from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

        plugin = None
        if sharded:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
            )
        unused = DistributedDataParallelKwargs(
            find_unused_parameters=True
        )  # batches without images leave parameters unused
        self.accelerator = Accelerator(cpu=device == "cpu", fsdp_plugin=plugin, kwargs_handlers=[unused])
        self.rank, self.world, self.sharded = self.accelerator.process_index, self.accelerator.num_processes, sharded
        self.device = self.accelerator.device

    def prepare(self, module: nn.Module, optimiser: Optimizer) -> tuple[nn.Module, Optimizer]:
        module, wrapped = self.accelerator.prepare(module, optimiser)
        return module, wrapped.optimizer

    def first(self, figures: dict[str, float]) -> dict[str, float]:
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([figures])[0]
