"""`bench kernels`: time, bytes moved, share of the copy bandwidth and ratio to eager torch, per kernel.

Ours and eager run in one process, alternating, on the same inputs; a ratio is the geometric mean of the paired ratios
(eager time / our time, each the best of three calls) with a bootstrap interval. CPU rows are in processor time, for the
ratios only. A GPU row that was not measured says so. The calls are in `kernels_jobs`, the eager loops of a tree
verification in `kernels_loops`.
"""

import json
import math
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from visspec.eval.kernels_jobs import jobs
from visspec.eval.kernels_loops import LEVELS, verification_case
from visspec.kernels import accept

NOT_MEASURED = "not measured"


def _seconds(call, index, device):
    """Wall time on a GPU; on a CPU the processor's, so that other work on the machine does not count."""
    if device.type != "cuda":
        start = time.process_time()
        call(index)
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call(index)
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def paired(ours, eager, device, repeats):
    """(median seconds of ours, geometric mean of eager / ours, its 95 % interval), arms alternating in order."""
    for index in range(2):
        ours(index), eager(index)
    mine, theirs = [], []
    for index in range(repeats):
        order = ((ours, mine), (eager, theirs)) if index % 2 else ((eager, theirs), (ours, mine))
        for call, times in order:
            times.append(min(_seconds(call, index, device) for _ in range(3)))
    logs = torch.tensor(theirs).log() - torch.tensor(mine).log()
    picks = torch.randint(repeats, (1000, repeats), generator=torch.Generator().manual_seed(0))
    low, high = logs[picks].mean(1).quantile(torch.tensor([0.025, 0.975])).exp().tolist()
    return float(torch.tensor(mine).median()), math.exp(float(logs.mean())), [low, high]


def copy_bandwidth(device, repeats=9):
    """Bytes read plus bytes written per second by a large `copy_`."""
    source = torch.ones((256 if device.type == "cuda" else 32) << 20, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = [_seconds(lambda _: target.copy_(source), i, device) for i in range(repeats)]
    return 2 * source.numel() / sorted(times)[repeats // 2]


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.waits = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        name = func.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.waits += masks or name in ("_local_scalar_dense", "nonzero", "masked_select")
        return func(*args, **(kwargs or {}))


def dispatched(case, delta=0.1):
    """(ATen calls, host waits) of one relaxed verification on the CPU path, counted inside the operator.

    Its work there is done on numpy views, which the mode does not see; on a GPU the operator is one launch.
    """
    arguments = (case["tokens"], case["parent"], case["p"], None, case["coins"][0], case["draw"][0], None)
    arguments = tuple(None if a is None else a.cpu() for a in arguments)
    rule = (case["neighbours"].cpu(), delta, None, len(LEVELS), max(LEVELS))
    accept.accept_tree_host(*arguments, *rule)
    with _Count() as count:
        accept.accept_tree_host(*arguments, *rule)
    return count.calls, count.waits


def run(device="cpu", json_path=None, quick=False):
    """Measures every kernel on `device` and returns the object described in the benchmark notes; writes it as JSON."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: found {device} on a machine without CUDA, expected cpu")
    bandwidth = copy_bandwidth(device)
    calls, waits = dispatched(verification_case(device, draws=1))
    rows = []
    for job in jobs(device, quick):
        repeats = 8 if quick else 40
        seconds, ratio, interval = paired(job.ours, job.eager, device, repeats)
        share = job.bytes / seconds / bandwidth
        rows.append(
            {
                "kernel": job.kernel, "shape": job.shape, "dtype": job.dtype, "device": str(device),
                "time_us": seconds * 1e6, "bytes": job.bytes, "share_of_copy_bandwidth": share,
                "ratio_to_eager": ratio, "ratio_ci95": interval, "eager": job.against, "repeats": repeats,
            }
        )  # fmt: skip
    if device.type != "cuda":
        rows += [{**row, **_blank()} for row in rows]
    result = {
        "bench": "kernels",
        "host_syncs_per_round": waits,
        "dispatched_ops_per_verification": calls,
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "rows": rows,
        "provenance": provenance(device),
    }
    print(table(result))
    if json_path:
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
    return result


def table(result):
    """The rows as text; a ratio under 1 is called a slowdown."""
    lines = [
        f"kernels on {result['provenance']['device']}, copy {result['copy_bandwidth_gb_s']:.1f} GB/s",
        f"a relaxed verification: {result['dispatched_ops_per_verification']} dispatched calls,"
        f" {result['host_syncs_per_round']} host waits",
    ]
    for row in result["rows"]:
        name = f"{row['kernel']:26} {row['shape']:34} {row['dtype']:9} {row['device']:5}"
        if row["time_us"] == NOT_MEASURED:
            lines.append(f"{name} {NOT_MEASURED}")
            continue
        low, high = row["ratio_ci95"]
        ratio = f"{row['ratio_to_eager']:.2f} ({low:.2f} to {high:.2f}) times eager, {row['eager']}"
        word = " - a slowdown" if row["ratio_to_eager"] < 1 else ""
        lines.append(f"{name} {row['time_us']:10.0f} us {row['share_of_copy_bandwidth']:6.1%} of copy {ratio}{word}")
    return "\n".join(lines)


def _blank():
    numbers = ("time_us", "share_of_copy_bandwidth", "ratio_to_eager", "ratio_ci95")
    return {"device": "cuda", "repeats": 0, **dict.fromkeys(numbers, NOT_MEASURED)}


def provenance(device):
    """What a number needs to be repeated."""
    revision = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    git = subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "git": git or None,
        "torch": torch.__version__,
        "device": name,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
