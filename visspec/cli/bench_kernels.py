"""`visspec bench kernels`: time of each kernel compared with eager torch.

On a GPU the Triton kernels are timed, on a CPU their torch replacements, of which only ratios are meaningful.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from rich.table import Table
from torch.utils.benchmark import Timer

from visspec import kernels
from visspec.api.loading import resolve_device
from visspec.cli.bench import BenchOptions, Cell, table
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.kernels.common import BenchCase

COLUMNS: dict[str, Cell] = {
    "kernel": "{kernel}",
    "shape": "{shape}",
    "dtype": "{dtype}",
    "us": "{time_us:.1f}",
    "eager torch's time over it": "{ratio_to_eager:.2f}",
}


@dataclass(kw_only=True)
class Options(BenchOptions):
    device: str = option("torch device; auto: the GPU if there is one", "auto")


def run(arguments: Options) -> None:
    arguments.begin()
    record = bench_kernels(torch.device(resolve_device(arguments.device)))
    arguments.end(record, view(record))


@torch.inference_mode()
def bench_kernels(device: torch.device) -> dict[str, Any]:
    """Return the JSON object of docs/results.md: a row for each kernel file with a `bench_case`."""
    makers = {name: getattr(import_module(f"visspec.kernels.{name}"), "bench_case", None) for name in kernels.FILES}
    cases: dict[str, BenchCase] = {name: make(str(device)) for name, make in makers.items() if make}
    rows = []
    for name, case in cases.items():
        ours, eager = microseconds(case.ours, device), microseconds(case.eager, device)
        row = {"kernel": name, "shape": case.shape, "dtype": case.dtype, "device": device.type}
        rows.append(row | {"time_us": ours, "ratio_to_eager": eager / ours})
    return {"bench": "kernels", "rows": rows, "provenance": provenance(device=device)}


def microseconds(call, device: torch.device) -> float:
    """Return the median time of a call, by `triton.testing` on a GPU and `torch.utils.benchmark` on a CPU."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return 1e3 * do_bench(call, return_mode="median")
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return 1e6 * timer.blocked_autorange(min_run_time=0.1).median


def view(record: dict[str, Any]) -> Table:
    device = record["rows"][0]["device"]
    note = "on a CPU the torch forms of the kernels are timed; the Triton kernels need --device cuda"
    return table(f"kernels on {device}", record["rows"], COLUMNS, note if device == "cpu" else None, ["shape", "dtype"])
