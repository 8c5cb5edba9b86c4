"""`bench kernels`: time, bytes moved, share of the copy bandwidth and ratio to eager torch, per kernel.

Ours and eager run in one process, alternating, on the same inputs; a ratio is the geometric mean of the paired ratios
(eager time / our time) with a bootstrap interval. How a call is timed is in `clock`: CPU rows are in processor time,
for the ratios only; GPU rows are device time, with host time in addition. GPU rows that were not measured or failed are
marked. The calls are in `kernels_jobs`, the eager loops of a tree verification in `kernels_loops`.
"""

import contextlib
from statistics import median

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from visspec.eval.bench.clock import clock_of
from visspec.eval.bench.kernels_jobs import jobs
from visspec.eval.bench.kernels_loops import LEVELS, verification_case
from visspec.eval.bench.paired import bootstrap, geometric_mean
from visspec.io.files import write_json
from visspec.io.provenance import provenance
from visspec.kernels import accept

NOT_MEASURED = "not measured"
WEIGHTS_7B = 2 * 7_000_000_000  # bytes, bf16: minimum read by a pass of a 7B target
TIMES = ("time_us", "time_us_quartiles", "host_us", "eager_us", "eager_host_us", "timed", "eager_timed")
SHARES = ("share_of_copy_bandwidth", "share_of_reading_14_gb")
MEASURED = (*TIMES, *SHARES, "ratio_to_eager", "ratio_ci95")


def time_pair(ours, eager, clock, repeats, draws=1):
    """((seconds of each repeat, how they were timed) of ours, the same of eager), interleaved."""
    arms = [clock.arm(call, draws) for call in (ours, eager)]
    started: tuple[list, list] = ([], [])
    for index in range(repeats):
        for which in (0, 1) if index % 2 else (1, 0):
            started[which].append(clock.start(arms[which][0], index))
    return [(clock.seconds(s), how) for s, (_, how) in zip(started, arms)]


def ratio_of(mine, theirs):
    """(geometric mean of theirs / mine, its 95 % bootstrap interval)."""
    ratios = [slow / fast for slow, fast in zip(theirs, mine)]
    return geometric_mean(ratios), list(bootstrap(ratios))


def _median_time(call, clock):
    armed, _ = clock.arm(call)
    return median(clock.seconds([clock.start(armed, index) for index in range(9)]))


def copy_bandwidth(device, clock):
    """Bytes read plus bytes written per second by a large `copy_`."""
    source = torch.ones((256 if device.type == "cuda" else 32) << 20, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.numel() / _median_time(lambda _: target.copy_(source), clock)


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


def count_dispatches(case):
    """(ATen calls, host synchronisations) of one relaxed verification on the CPU path, counted inside the operator.

    It uses numpy views there, which are not counted; on a GPU the operator is one launch.
    """
    tensors = (case["tokens"], case["parent"], case["p"], None, case["uniforms"][0], case["draw"][0], None)
    rule = (case["neighbours"].cpu(), 0.1, None, len(LEVELS), max(LEVELS))
    arguments = [*(None if t is None else t.cpu() for t in tensors), *rule]
    accept.accept_tree_host(*arguments)
    with _Count() as count:
        accept.accept_tree_host(*arguments)
    return count.calls, count.waits


def measure_row(job, clock, repeats, bandwidth):
    """The figures of one row. In inference mode, as in the engine."""
    with torch.inference_mode():
        ours, eager = job.build()
        (mine, how), (theirs, eager_how) = time_pair(ours, eager, clock, repeats, job.draws)
        host, eager_host = (clock.host(call, repeats) for call in (ours, eager))
    seconds, (ratio, ends) = median(mine), ratio_of(mine, theirs)
    low, high = torch.tensor(mine, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75]).double()).tolist()
    row = {"time_us": seconds * 1e6, "time_us_quartiles": [low * 1e6, high * 1e6], "eager_us": median(theirs) * 1e6}
    row |= {"host_us": median(host) * 1e6 if host else None, "timed": how, "eager_timed": eager_how}
    row |= {"eager_host_us": median(eager_host) * 1e6 if eager_host else None, "ratio_to_eager": ratio}
    row |= {"share_of_copy_bandwidth": job.bytes / seconds / bandwidth, "ratio_ci95": ends}
    whole = job.whole_round and host is not None
    return row | {"share_of_reading_14_gb": seconds / (WEIGHTS_7B / bandwidth) if whole else None}


def row_description(job, device, repeats):
    row = {"kernel": job.kernel, "shape": job.shape, "dtype": job.dtype, "device": device.type, "bytes": job.bytes}
    return row | {"eager": job.against, "repeats": repeats} | dict.fromkeys(MEASURED, NOT_MEASURED)


def run(device="cpu", json_path=None, quick=False):
    """Measures every kernel on `device` and returns the object described in docs/evaluate.md; writes it as JSON."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: found {device} on a machine without CUDA, expected cpu")
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        result = _measured_on(device, quick)
    print(table(result))
    write_json(json_path, result)
    return result


def _measured_on(device, quick):
    clock = clock_of(device)
    bandwidth = copy_bandwidth(device, clock)
    calls, waits = count_dispatches(verification_case(device, draws=1))
    rows, repeats = [], clock.fewest if quick else clock.repeats
    for job in jobs(device, quick):
        row = row_description(job, device, repeats)
        try:
            row |= measure_row(job, clock, repeats, bandwidth)
        except Exception as error:  # continue with the other rows if a kernel fails
            row |= {"repeats": 0, "failure": f"{type(error).__name__}: {error}"}
        rows.append(row)
    if device.type != "cuda":
        rows += [row_description(job, torch.device("cuda"), 0) for job in jobs(torch.device("cuda"), quick=False)]
    reading = WEIGHTS_7B / bandwidth * 1e3 if device.type == "cuda" else None
    record = {"bench": "kernels", "host_syncs_per_round": waits, "dispatched_ops_per_verification": calls}
    record |= {"copy_bandwidth_gb_s": bandwidth / 1e9, "ms_to_read_14_gb_at_copy_bandwidth": reading}
    record["failures"] = [f"{row['kernel']} {row['shape']}: {row['failure']}" for row in rows if "failure" in row]
    return record | {"rows": rows, "provenance": provenance(device=device)}


def table(result):
    """The rows as text; a ratio below 1 is marked as a slowdown."""
    where = result["provenance"]
    lines = [
        f"kernels on {where['device']}, {where['date']}, copy {result['copy_bandwidth_gb_s']:.1f} GB/s",
        f"a relaxed verification: {result['dispatched_ops_per_verification']} dispatched calls,"
        f" {result['host_syncs_per_round']} host waits",
    ]
    if "driver" in where:
        lines.insert(1, f"driver {where['driver']}, CUDA {where['cuda']}, Triton {where['triton']}")
    return "\n".join(lines + [_line(row) for row in result["rows"]])


def _line(row):
    name = f"{row['kernel']:26} {row['shape']:34} {row['dtype']:9} {row['device']:5}"
    if row["time_us"] == NOT_MEASURED:
        return f"{name} {'failed: ' + row['failure'] if 'failure' in row else NOT_MEASURED}"
    low, high = row["time_us_quartiles"]
    parts = [f"{name} {row['time_us']:10.1f} us [{low:.1f}, {high:.1f}]"]
    if row["host_us"] is not None:
        parts.append(f"host {row['host_us']:.1f} us ({row['timed']})")
    parts.append(f"{row['share_of_copy_bandwidth']:.1%} of copy")
    if row["share_of_reading_14_gb"] is not None:
        parts.append(f"{row['share_of_reading_14_gb']:.2%} of the time to read 14 GB at the measured copy bandwidth")
    low, high = row["ratio_ci95"]
    word = " - a slowdown" if row["ratio_to_eager"] < 1 else ""
    against = row["eager"] + ("" if row["eager_timed"] == row["timed"] else f" ({row['eager_timed']})")
    parts.append(f"{row['ratio_to_eager']:.2f} ({low:.2f} to {high:.2f}) times eager, {against}{word}")
    return ", ".join(parts)
