"""The rows of `bench kernels`: for each operator our call, the same in eager torch, and the bytes moved.

Inputs are built when a row is measured, so that the rows for a GPU can be listed without one.
R rows, B batch rows, N draft nodes, V vocabulary, K neighbours, F features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from visspec import kernels
from visspec.accept.lantern import Lantern, LanternPlus
from visspec.eval.bench import kernels_loops as loops
from visspec.eval.bench.kernels_loops import LEVELS, loop_over_children, verification_case

LEVELS_26 = (4, 8, 8, 3, 2)  # nodes per depth of LANTERN's published tree of 26 nodes, root aside
LEVELS_64 = (10, 16, 14, 12, 11)  # nodes per depth of a 64-node tree, root aside
NODES = sum(LEVELS) + 1
VOCABULARY, NEIGHBOURS, DELTA = 16384, 1000, 0.1
GUIDANCE, TEMPERATURE, TOP_K = 7.5, 0.9, 1000
DRAWS = 8  # sets of uniforms of a captured verification
RULES = (  # name, rule, whether drafts are sampled with a distribution
    ("rule lantern", partial(Lantern, k=1000, delta=0.1), False),
    ("rule lantern_plus", partial(LanternPlus, k=1000, lam=2.0), True),
)


@dataclass
class KernelJob:
    """One row of the table. `build` makes the inputs and returns (ours, eager), which take the index of the repeat."""

    kernel: str
    shape: str
    dtype: str
    build: Callable[[], tuple]
    bytes: int
    against: str
    draws: int = 1  # period of the inputs in the index; 1: they don't depend on it
    whole_round: bool = False


def _tried_bytes(V):
    """Of a relaxed verification, on average over these uniforms: eight nodes tested, one distribution sampled from."""
    return 8 * NEIGHBOURS * (4 + 4) + V * 4 * 2


def _verify(case, p, i, **options):
    i %= case["uniforms"].shape[0]
    options |= {"neighbours": case["neighbours"], "delta": DELTA, "depth": case["paths"].shape[1] - 1}
    return kernels.accept_tree(case["tokens"], case["parent"], p, None, case["uniforms"][i], case["draw"][i], **options)


def _verify_in_loop(loop, case, shape, distributions, table, i, **options):
    i %= case["uniforms"].shape[0]
    uniforms, draw = case["uniforms"][i, 0], case["draw"][i, 0]
    return loop(case["tokens"][0], shape, distributions, table, DELTA, uniforms, draw, **options)


def _verification_jobs(device):
    def build(name, **options):
        case = verification_case(device, V=VOCABULARY, K=NEIGHBOURS)
        if name == "children":
            loop, shape, table = loop_over_children, case["parent"][0], case["neighbours"].long()
        else:
            loop, shape, table = loops.loop_over_paths, case["paths"], case["neighbours"].long().cpu().numpy()
        eager = partial(_verify_in_loop, loop, case, shape, case["p"][0], table, **options)
        return partial(_verify, case, case["p"]), eager

    shape = f"{NODES}x{VOCABULARY} k={NEIGHBOURS}"
    row = partial(KernelJob, "accept_tree relaxed", shape, "float32", bytes=_tried_bytes(VOCABULARY), draws=DRAWS)
    return [
        row(build=partial(build, "paths", copied=True), against="loop over paths, laws copied as published"),
        row(build=partial(build, "paths", copied=False), against="loop over paths, no copy of the laws"),
        row(build=partial(build, "children"), against="loop over reached children"),
    ]


def _round_job(device, levels, V):
    """A round from the target's logits to the verdict: guidance, warp, acceptance, the next token."""
    N = sum(levels) + 1

    def build():
        case = verification_case(device, levels, V, NEIGHBOURS)
        uncond = torch.randn(N, V, generator=torch.Generator().manual_seed(1)).to(device)
        # with guidance these give the case's distribution
        cond = uncond + (case["logits"] * TEMPERATURE - uncond) / GUIDANCE
        cond, uncond = cond.to(torch.bfloat16), uncond.to(torch.bfloat16)
        table = case["neighbours"].long()

        def ours(i):
            scores = kernels.guided_warp(cond, uncond, GUIDANCE, TEMPERATURE, TOP_K, scores=True)  # as in the engine
            return _verify(case, scores.unsqueeze(0), i, scores=True)

        def eager(i):
            distributions = _torch_warp(cond, uncond)
            return _verify_in_loop(loop_over_children, case, case["parent"][0], distributions, table, i)

        return ours, eager

    moved, against = _warp_bytes(N, V) + _tried_bytes(V), "torch steps, loop over reached children"
    shape, name = f"{N}x{V} k={NEIGHBOURS}", "verification round"
    return KernelJob(name, shape, "bfloat16", build, moved, against, draws=DRAWS, whole_round=True)


def _rule_jobs(device, V=16384):
    rows, against = [], "the published loop, from warped logits on"
    for name, make, samples in RULES:
        moved = 4 * V * (8 if samples else 4)  # about two distributions read and written, a sample; also of the drafts
        for levels in (LEVELS_26, LEVELS):
            build = partial(loops.rule_and_loop, make(), levels, samples, device)
            shape = f"{sum(levels) + 1}x{V} k=1000"
            rows.append(KernelJob(name, shape, "float32", build, moved, against, draws=loops.ROUNDS))
    return rows


def _exact_job(device, B=8):
    N, V = NODES, VOCABULARY

    def build():
        case = verification_case(device, V=V, draws=DRAWS * B)
        tokens, p = case["tokens"].expand(B, N).contiguous(), case["p"].expand(B, N, V).contiguous()
        parent = case["parent"]

        def rows(i):
            first = i % DRAWS * B
            return case["uniforms"][first : first + B, 0], case["draw"][first : first + B, 0]

        def ours(i):
            return kernels.accept_tree(tokens, parent, p, None, *rows(i), depth=len(LEVELS))

        def eager(i):
            uniforms, draw = rows(i)
            return [loop_over_children(tokens[b], parent[0], p[b], None, None, uniforms[b], draw[b]) for b in range(B)]

        return ours, eager

    against = "loop over reached children"
    return KernelJob("accept_tree exact", f"{B} rows, {N}x{V}", "float32", build, B * V * 4 * 3, against, draws=DRAWS)


def _torch_warp(cond, uncond):
    z = uncond.float() + GUIDANCE * (cond.float() - uncond.float())
    z = z / TEMPERATURE
    return z.masked_fill(z < z.topk(TOP_K).values[:, -1:], float("-inf")).softmax(-1)


def _warp_bytes(N, V):
    return N * V * (2 * 2 + 4)


def _warp_job(device, N, V):
    def build():
        cond, uncond = torch.randn(2, N, V, device=device).to(torch.bfloat16)
        ours = partial(kernels.guided_warp, cond, uncond, GUIDANCE, TEMPERATURE, TOP_K)
        return lambda _: ours(), lambda _: _torch_warp(cond, uncond)

    return KernelJob("guided_warp top-k", f"{N}x{V}", "bfloat16", build, _warp_bytes(N, V), "torch steps")


def _neighbour_job(device, R=NODES, V=VOCABULARY, K=NEIGHBOURS):
    def build():
        p = torch.randn(R, V, device=device).softmax(-1)
        table = torch.randint(V, (V, K), device=device)
        token = torch.randint(V, (R,), device=device)

        def eager(_):
            out = []
            for r in range(R):
                summed = p[r, table[token[r]]].cumsum(0)
                kept = summed[summed <= DELTA]
                out.append(kept[-1] if kept.numel() else summed.new_zeros(()))
            return torch.stack(out)

        return lambda _: kernels.neighbour_mass(p, token, table, delta=DELTA), eager

    return KernelJob("neighbour_mass", f"{R}x{V} k={K}", "float32", build, R * K * 12, "loop over tokens")


def _group_job(device, R, V=65536, group=14):
    def build():
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

        return lambda _: kernels.grouped_mass(p, q, token, group=group), eager

    return KernelJob("grouped_mass dynamic", f"{R}x{V} G={group}", "float32", build, R * V * 4, "loop with a sort")


def _cache_dtype(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _commit_job(device, layers, B=4, H=8, S=1024, F=128, count=5):
    dtype = _cache_dtype(device)

    def build():
        kv = [torch.randn(B, H, S, F, device=device).to(dtype) for _ in range(2 * layers)]
        path = torch.tensor([[0, 3, 12, 30, 50]] * B, device=device)
        length = torch.full((B,), S - 64, device=device)
        counts = torch.full((B,), count, device=device)

        def eager(_):
            for t in kv:
                for b in range(B):
                    first = int(length[b])
                    t[b, :, first : first + count] = t[b, :, first + path[b]]

        return lambda _: kernels.commit_kv(kv, length, path, counts), eager

    moved = 2 * 2 * layers * B * H * (count - 1) * F * dtype.itemsize
    name = f"{2 * layers} x {B}x{H}x{S}x{F}"
    return KernelJob("commit_kv", name, str(dtype)[6:], build, moved, "index per row and tensor")


def _attention_jobs(device, prefix, H=32, G=8, N=64, F=128):
    dtype = _cache_dtype(device)

    def build(baseline):
        heads = ((H, N), (G, prefix + N), (G, prefix + N))
        q, k, v = (torch.randn(1, h, s, F, device=device).to(dtype) for h, s in heads)
        parent = ((torch.arange(N, device=device) - 1) // 4).clamp_min(-1).unsqueeze(0)
        parent[:, 0] = -1
        length = torch.tensor([prefix], device=device)
        ancestors = kernels.ancestors(parent)
        mask = torch.cat((torch.ones(1, N, prefix, dtype=torch.bool, device=device), ancestors), 2).unsqueeze(1)
        wide = [t.repeat_interleave(H // G, 1) for t in (k, v)] if baseline == "before" else None

        def eager(_):
            pair = [k, v]
            if baseline != "grouped":
                pair = wide or [t.repeat_interleave(H // G, 1) for t in pair]
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(q, pair[0], pair[1], attn_mask=mask, enable_gqa=baseline == "grouped")

        return lambda _: kernels.tree_attention(q, k, v, length, ancestors=ancestors), eager

    moved = (2 * G * (prefix + N) + 2 * H * N) * F * dtype.itemsize
    shape = f"{N} nodes, prefix {prefix}, {H}/{G} heads"
    row = partial(KernelJob, "tree_attention", shape, str(dtype)[6:], bytes=moved)
    return [
        row(build=partial(build, "repeated"), against="SDPA, 4-D mask, repeated keys"),
        row(build=partial(build, "before"), against="SDPA, 4-D mask, keys repeated beforehand"),
        row(build=partial(build, "grouped"), against="SDPA, 4-D mask, enable_gqa"),
    ]


def jobs(device, quick):
    """The rows of the table; `quick`, or a CPU, reduces the sizes that take seconds on a CPU."""
    small = quick or device.type == "cpu"
    rounds = [(LEVELS, VOCABULARY)] + ([] if small else [(LEVELS_64, 32768)])
    return [
        *_verification_jobs(device),
        *_rule_jobs(device),
        _exact_job(device),
        *(_round_job(device, levels, V) for levels, V in rounds),
        *(_warp_job(device, sum(levels) + 1, V) for levels, V in rounds),
        _neighbour_job(device),
        _group_job(device, 4 if small else 16),
        _commit_job(device, layers=4 if small else 32),
        *_attention_jobs(device, prefix=512 if small else 4096),
    ]
