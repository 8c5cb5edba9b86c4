"""`bench kernels`: time, bytes moved, share of the copy bandwidth and ratio to eager torch, per kernel.

Ours and eager run in one process, alternating, on the same inputs; a ratio is the geometric mean of the paired ratios
(eager time / our time, each the best of three calls) with a bootstrap interval. Times on a CPU are for the ratios only.
A GPU row that was not measured says so. The two loops below are the eager form of a relaxed tree verification: one over
the children of the current node, one over root-to-leaf paths as the published implementations write it.
B rows, N draft nodes, V vocabulary, K neighbours.
"""

import json
import math
import platform
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from visspec import kernels
from visspec.kernels import accept

NOT_MEASURED = "not measured"
LEVELS = (10, 16, 14, 10, 8)  # nodes per depth of a 59-node tree, root aside


# Eager forms.


def loop_over_children(tokens, parent, p, neighbours, delta, coins, draw):
    """The relaxed rule, one candidate after another: tokens (N), parent (N), p (N, V), coins (N), draw ()."""
    children = {}
    for n, above in enumerate(parent.tolist()):
        children.setdefault(above, []).append(n)
    current, path = 0, [0]
    law = p[0]
    while children.get(current):
        law = p[current].clone()
        for n in children[current]:
            x = tokens[n]
            summed = p[current][neighbours[x]].cumsum(0)
            kept = summed[summed <= delta]
            mass = kept[-1] if kept.numel() else 0.0
            if coins[n] < law[x] + mass:
                current, law = n, p[n]
                path.append(n)
                break
            law[x] = 0
            law = law / law.sum()
        else:
            break
    return path, int(torch.searchsorted(law.cumsum(0), draw * law.sum(), right=True))


def loop_over_paths(tokens, paths, p, neighbours, delta, coins, draw):
    """The same rule over root-to-leaf paths (P, D), padded with -1, with the id table on the host (as published)."""
    candidates = torch.where(paths >= 0, tokens[paths], -1)
    accepted, law = 1, p[0]
    best = 0
    for depth in range(1, paths.shape[1]):
        if accepted != depth:
            break
        same = (candidates[:, :accepted] == candidates[best, :accepted]).all(dim=1)
        first = torch.nonzero(same, as_tuple=True)[0][0]
        node = paths[first, depth - 1]
        law, tried = p[node].clone(), []
        for j in range(paths.shape[0]):
            if not same[j]:
                continue
            x = candidates[j, depth].item()
            if x in tried or x == -1:
                continue
            tried.append(x)
            near = torch.tensor(neighbours[x], device=p.device)
            summed = torch.cumsum(p[node][near], dim=0)
            kept = summed[summed <= delta]
            mass = kept[-1].item() if len(kept) > 0 else 0.0
            if coins[paths[j, depth]].item() < law[x].item() + mass:
                best, accepted = j, accepted + 1
                law = p[paths[j, depth]]
                break
            law[x] = 0
            law = law / law.sum()
    path = paths[best, :accepted].tolist()
    return path, int(torch.searchsorted(law.cumsum(0), draw * law.sum(), right=True))


def verification_case(device, nodes_per_level=LEVELS, V=16384, K=1000, seed=0, draws=64):
    """A 59-node tree of likely tokens under image-like laws (top-1 about 7 %, top-1000 kept), and `draws` uniforms."""
    g = torch.Generator().manual_seed(seed)
    parent, last = [-1], [0]
    for count in nodes_per_level:
        first = len(parent)
        parent += sorted(last[i % min(5, len(last))] for i in range(count))
        last = list(range(first, first + count))
    N = len(parent)
    p = kernels.guided_warp(torch.randn(N, V, generator=g) * 2.0, top_k=1000).unsqueeze(0)
    best = p[0].topk(20).indices
    place = [parent[:n].count(above) for n, above in enumerate(parent)]
    tokens = torch.stack([best[max(above, 0), k] for above, k in zip(parent, place)]).unsqueeze(0)
    neighbours = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(256)])[torch.arange(V) % 256]
    leaves = [n for n in range(N) if n not in parent]
    chains = []
    for n in leaves:
        chain = [n]
        while chain[0] != 0:
            chain.insert(0, parent[chain[0]])
        chains.append(chain)
    width = len(nodes_per_level) + 1
    paths = torch.tensor([chain + [-1] * (width - len(chain)) for chain in sorted(chains)])
    case = {"tokens": tokens, "parent": torch.tensor([parent]), "p": p, "neighbours": neighbours, "paths": paths}
    case.update(coins=torch.rand(draws, 1, N, generator=g), draw=torch.rand(draws, 1, generator=g))
    return {k: v.to(device) for k, v in case.items()}


# Measurement.


@dataclass
class Job:
    """One row of the table: ours and eager take the index of the repeat."""

    kernel: str
    shape: str
    dtype: str
    ours: object
    eager: object
    bytes: int
    against: str


def _seconds(call, index, device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call(index)
    if device.type == "cuda":
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
    """(ATen calls, host waits) of one relaxed verification on the CPU path, counted inside the operator."""
    arguments = (case["tokens"], case["parent"], case["p"], None, case["coins"][0], case["draw"][0], None)
    arguments = tuple(None if a is None else a.cpu() for a in arguments)
    rule = (case["neighbours"].cpu(), delta, None, len(LEVELS), max(LEVELS))
    accept.accept_tree_host(*arguments, *rule)
    with _Count() as count:
        accept.accept_tree_host(*arguments, *rule)
    return count.calls, count.waits


# Jobs.


def _verification_jobs(device, delta=0.1):
    case = verification_case(device)
    N, K = case["tokens"].shape[1], case["neighbours"].shape[1]
    host_table = case["neighbours"].cpu().numpy().astype("uint16")

    def ours(i):
        i %= case["coins"].shape[0]
        return kernels.accept_tree(
            case["tokens"], case["parent"], case["p"], None, case["coins"][i], case["draw"][i],
            neighbours=case["neighbours"], delta=delta, depth=len(LEVELS),
        )  # fmt: skip

    def eager(loop, shape, table):
        def call(i):
            i %= case["coins"].shape[0]
            laws, coins, draw = case["p"][0], case["coins"][i, 0], case["draw"][i, 0]
            return loop(case["tokens"][0], shape, laws, table, delta, coins, draw)

        return call

    moved = N * K * (8 + 4) + 16384 * 4 * 2
    children = eager(loop_over_children, case["parent"][0], case["neighbours"])
    paths = eager(loop_over_paths, case["paths"], host_table.astype("int64"))
    name = f"{N}x{case['p'].shape[2]} k={K}"
    return [
        Job("accept_tree relaxed", name, "float32", ours, children, moved, "loop over children"),
        Job("accept_tree relaxed", name, "float32", ours, paths, moved, "loop over paths"),
    ]


def _warp_job(device, N, V):
    cond, uncond = torch.randn(2, N, V, device=device).to(torch.bfloat16)

    def eager(_):
        z = uncond.float() + 7.5 * (cond.float() - uncond.float())
        z = z / 0.9
        return z.masked_fill(z < z.topk(1000).values[:, -1:], float("-inf")).softmax(-1)

    def ours(_):
        return kernels.guided_warp(cond, uncond, 7.5, 0.9, 1000)

    return Job("guided_warp top-k", f"{N}x{V}", "bfloat16", ours, eager, N * V * (2 * 2 + 4), "torch steps")


def _neighbour_job(device, R=59, V=16384, K=1000):
    p = torch.randn(R, V, device=device).softmax(-1)
    table = torch.randint(V, (V, K), device=device)
    token = torch.randint(V, (R,), device=device)

    def eager(_):
        out = []
        for r in range(R):
            summed = p[r, table[token[r]]].cumsum(0)
            kept = summed[summed <= 0.1]
            out.append(kept[-1] if kept.numel() else summed.new_zeros(()))
        return torch.stack(out)

    def ours(_):
        return kernels.neighbour_mass(p, token, table, delta=0.1)

    return Job("neighbour_mass", f"{R}x{V} k={K}", "float32", ours, eager, R * K * 12, "loop over tokens")


def _group_job(device, R=16, V=65536, group=14):
    p, q = torch.randn(2, R, V, device=device).softmax(-1)
    token = torch.randint(V, (R,), device=device)

    def eager(_):
        out = []
        for r in range(R):
            order = p[r].sort(descending=True).indices
            rank = int((order == token[r]).nonzero())
            ids = order[max(0, rank - group // 2) : rank + group // 2 + 1]
            out.append(p[r, ids].sum() / q[r, ids].sum())
        return torch.stack(out)

    def ours(_):
        return kernels.grouped_mass(p, q, token, group=group)

    return Job("grouped_mass dynamic", f"{R}x{V} G={group}", "float32", ours, eager, R * V * 4, "loop with a sort")


def _codebook_job(device, V, F, k):
    e = torch.randn(V, F, device=device)

    def eager(_):
        return torch.cdist(e, e).fill_diagonal_(float("inf")).sort(dim=1).indices[:, :k]

    def ours(_):
        return kernels.codebook_neighbours(e, k)

    return Job("codebook_neighbours", f"{V}x{F} k={k}", "float32", ours, eager, V * F * 4 + V * k * 8, "cdist and sort")


def _commit_job(device, layers, B=4, H=8, S=1024, F=128, count=5):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kv = [torch.randn(B, H, S, F, device=device).to(dtype) for _ in range(2 * layers)]
    path = torch.tensor([[0, 3, 12, 30, 50]] * B, device=device)
    length = torch.full((B,), S - 64, device=device)
    counts = torch.full((B,), count, device=device)

    def eager(_):
        for t in kv:
            for b in range(B):
                first = int(length[b])
                t[b, :, first : first + count] = t[b, :, first + path[b]]

    def ours(_):
        kernels.commit_kv(kv, length, path, counts)

    moved = 2 * 2 * layers * B * H * (count - 1) * F * kv[0].element_size()
    name = f"{2 * layers} x {B}x{H}x{S}x{F}"
    return Job("commit_kv", name, str(dtype)[6:], ours, eager, moved, "index per row and tensor")


def _growth_job(device, B=1, W=10, V=16384, width=10):
    law, score = torch.randn(B, W, V, device=device).softmax(-1), -torch.rand(B, W, device=device)

    def eager(_):
        value, index = (score.unsqueeze(2) + law.log()).flatten(1).topk(width)
        return index % V, index // V, value

    def ours(_):
        return kernels.draft_topk(score, law, width)

    return Job("draft_topk", f"{B}x{W}x{V} top {width}", "float32", ours, eager, B * W * V * 4, "one flat top-k")


def _attention_job(device, prefix, H=32, G=8, N=64, F=128):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, h, s, F, device=device).to(dtype) for h, s in ((H, N), (G, prefix + N), (G, prefix + N)))
    parent = ((torch.arange(N, device=device) - 1) // 4).clamp_min(-1).unsqueeze(0)
    parent[:, 0] = -1
    length = torch.tensor([prefix], device=device)
    ancestors = kernels.ancestor_mask(parent)
    mask = torch.cat((torch.ones(1, N, prefix, dtype=torch.bool, device=device), ancestors), 2).unsqueeze(1)

    def eager(_):
        wide = [t.repeat_interleave(H // G, 1) for t in (k, v)]
        return torch.nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=mask)

    def ours(_):
        return kernels.tree_attention(q, k, v, length, ancestors=ancestors)

    moved = (k.numel() + v.numel() + 2 * q.numel()) * q.element_size()
    name = f"{N} nodes, prefix {prefix}, {H}/{G} heads"
    return Job("tree_attention", name, str(dtype)[6:], ours, eager, moved, "SDPA, 4-D mask, repeated keys")


def _losses_job(device, R, V):
    draft, target = torch.randn(2, R, V, device=device)
    draft.requires_grad_()

    def eager(_):
        log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
        q, p = log_q.exp(), log_p.exp()
        tv, kl, ce = (p - q).abs().sum(-1) / 2, (p * (log_p - log_q)).sum(-1), -(p * log_q).sum(-1)
        (tv + kl + ce).sum().backward()
        draft.grad = None

    def ours(_):
        sum(kernels.draft_losses(draft, target)).sum().backward()
        draft.grad = None

    return Job("draft_losses with gradient", f"{R}x{V}", "float32", ours, eager, R * V * 4 * 7, "torch formula")


def jobs(device, quick):
    """The rows of the table; `quick` shrinks the ones that take seconds on a CPU."""
    small = quick or device.type == "cpu"
    out = _verification_jobs(device)
    out += [_warp_job(device, 59, 16384)]
    out += [] if small else [_warp_job(device, 64, 32768)]
    out += [_neighbour_job(device), _group_job(device, R=4 if small else 16)]
    out += [_codebook_job(device, *((1024, 8, 100) if small else (16384, 8, 1000)))]
    out += [_commit_job(device, 4 if small else 32), _growth_job(device)]
    out += [_attention_job(device, 512 if small else 4096), _losses_job(device, 8 if small else 256, 32768)]
    return out


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
