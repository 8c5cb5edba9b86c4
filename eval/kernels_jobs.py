"""The rows of `bench kernels`: for each operator our call, the same in eager torch, and the bytes that must move.

R rows, B batch rows, N draft nodes, V vocabulary, K neighbours, F features.
"""

from dataclasses import dataclass

import torch

from visspec import kernels
from visspec.eval.kernels_loops import LEVELS, loop_over_children, loop_over_paths, verification_case


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


def _verification_jobs(device, delta=0.1):
    case = verification_case(device)
    N, K = case["tokens"].shape[1], case["neighbours"].shape[1]
    host_table = case["neighbours"].cpu().numpy()

    def ours(i):
        i %= case["coins"].shape[0]
        return kernels.accept_tree(
            case["tokens"], case["parent"], case["p"], None, case["coins"][i], case["draw"][i],
            neighbours=case["neighbours"], delta=delta, depth=len(LEVELS),
        )  # fmt: skip

    def eager(loop, shape, table, **options):
        def call(i):
            i %= case["coins"].shape[0]
            laws, coins, draw = case["p"][0], case["coins"][i, 0], case["draw"][i, 0]
            return loop(case["tokens"][0], shape, laws, table, delta, coins, draw, **options)

        return call

    moved = 8 * K * (8 + 4) + 16384 * 4 * 2  # of these uniforms' mean: eight nodes tried, one law drawn from
    published, lean = (eager(loop_over_paths, case["paths"], host_table, copied=copied) for copied in (True, False))
    children = eager(loop_over_children, case["parent"][0], case["neighbours"])
    name = f"{N}x{case['p'].shape[2]} k={K}"
    return [
        Job("accept_tree relaxed", name, "float32", ours, published, moved, "loop over paths, as published"),
        Job("accept_tree relaxed", name, "float32", ours, lean, moved, "loop over paths, no copy of the laws"),
        Job("accept_tree relaxed", name, "float32", ours, children, moved, "loop over reached children"),
    ]


def _exact_job(device, B=8):
    case = verification_case(device, draws=8 * B)
    N, V = case["p"].shape[1:]
    tokens, p = case["tokens"].expand(B, N).contiguous(), case["p"].expand(B, N, V).contiguous()

    def rows(i):
        first = i % 8 * B
        return case["coins"][first : first + B, 0], case["draw"][first : first + B, 0]

    def ours(i):
        return kernels.accept_tree(tokens, case["parent"], p, None, *rows(i), depth=len(LEVELS))

    def eager(i):
        coins, draw = rows(i)
        return [loop_over_children(tokens[b], case["parent"][0], p[b], None, None, coins[b], draw[b]) for b in range(B)]

    name = f"{B} rows, {N}x{V}"
    return Job("accept_tree exact", name, "float32", ours, eager, B * V * 4 * 3, "loop over reached children")


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
    out = [*_verification_jobs(device), _exact_job(device), _warp_job(device, 59, 16384)]
    out += [] if small else [_warp_job(device, 64, 32768)]
    out += [_neighbour_job(device), _group_job(device, R=4 if small else 16)]
    out += [_codebook_job(device, *((1024, 8, 100) if small else (16384, 8, 1000)))]
    out += [_commit_job(device, 4 if small else 32), _growth_job(device)]
    out += [_attention_job(device, 512 if small else 4096), _losses_job(device, 8 if small else 256, 32768)]
    return out
