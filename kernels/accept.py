"""Acceptance of a draft tree and sampling of the next token, in one pass without host synchronization.

At a node with target distribution p, the siblings are tested in index order against a residual distribution r, which
is p before the first one:

    point mass    accept x with probability r(x),              else r <- r without x, renormalized
    drawn from q  accept x with probability min(1, r(x)/q(x)), else r <- [r - q]+, renormalized

After the last one, `next` is drawn from r by inverse CDF (the bonus token if a node has no children). This preserves
the distribution of the target (Leviathan et al. 2023, Chen et al. 2023; trees: SpecInfer, EAGLE). A relaxed rule adds a
mass to r(x): f = min(1, (r(x) + mass)/q(x)), never below the exact f, with the residual unchanged, and `drift` sums f -
min(1, r(x)/q(x)) over the tested nodes. With `neighbours` the mass is LANTERN's (`neighbour_mass`) under r: later
siblings use the residual, and a code within the bound of an earlier sibling has no mass for them.

Closed forms avoid a pass over V for each sibling. Point mass: r(x_j) = p(x_j) / (1 - sum of the earlier siblings'
p). Drawn: with M_0 = 1, u_j = u_{j-1} - M_{j-1} q_j and M_j = sum [u_j]+, the residual is [u_j]+ / M_j.

Distributions are read in their dtype and summed in fp64, so that the launch geometry does not change a decision.
If rounding makes the residual all-zero, the most likely token of the node's distribution is taken.
B rows, N draft nodes, V vocabulary, D = depth + 1, K neighbors.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from visspec.kernels.common import (
    FLOATS,
    INTS,
    TINY,
    BenchCase,
    as_float32,
    check_ids,
    check_tensor,
    host,
    in_range,
    jit,
    next_power_of_2,
    on_device,
    ones,
    require,
    tl,
    widen,
)
from visspec.kernels.neighbours import checked_bound, prefix_mass, reference_prefix, table_on_host


def reference(
    tokens, parent, p, q, uniforms, draw, mass=None, neighbours=None, delta=None, lam=None, depth=None, branch=None
):
    """Define the result in Python floats for one row: tokens (N), parent (N), p and q (N, V), uniforms (N), draw.

    Returns the accepted path (list of nodes), the next token and the drift.
    """
    tokens, parent, uniforms, draw = tokens.tolist(), parent.tolist(), uniforms.double().tolist(), float(draw)
    p, q = p.double().tolist(), None if q is None else q.double().tolist()
    current, path, drift, siblings = 0, [0], 0.0, 0
    residual, left = list(p[0]), 1.0
    zeroed: set[int] = set()
    used: set[int] = set()
    for n in range(1, len(tokens)):
        if parent[n] != current or len(path) - 1 == depth or siblings == branch:
            continue
        x = tokens[n]
        siblings += 1
        exact = max(residual[x], 0.0) / max(left * (1.0 if q is None else q[n][x]), TINY)
        exact = min(1.0, exact)
        extra = 0.0 if mass is None else float(mass[n])
        if neighbours is not None and x not in zeroed:
            bound = as_float32(delta) * left if lam is None else (as_float32(lam) - 1.0) * max(residual[x], 0.0)
            weights = [0.0 if y in used else max(r, 0.0) for y, r in enumerate(residual)]
            borrowed, count = reference_prefix(weights, neighbours[x].tolist(), bound)
            extra = borrowed / max(left, TINY)
            used.update(neighbours[x, :count].tolist())
        if q is None and x in zeroed:
            extra = 0.0
        f = max(exact, min(1.0, exact + extra / (1.0 if q is None else max(q[n][x], TINY))))
        drift += f - exact
        if uniforms[n] < f:
            current, residual, left, zeroed, used, siblings = n, list(p[n]), 1.0, set(), set(), 0
            path.append(n)
        elif q is None:
            left -= 0.0 if x in zeroed else p[current][x]
            residual[x] = 0.0
            zeroed.add(x)
        else:
            residual = [r - left * s for r, s in zip(residual, q[n])]
            left = sum(max(r, 0.0) for r in residual)
    return path, _draw(residual, p[current], draw), drift


def _draw(residual, law, draw):
    weights = [max(r, 0.0) for r in residual]
    total, running = sum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if running > draw * total:
            return token
    return max(range(len(law)), key=law.__getitem__)


def accept_tree_host(tokens, parent, p, q, uniforms, draw, mass, neighbours, delta, lam, depth, branch, scores=False):
    """Run on a CPU: loop over the reachable nodes, on numpy views of the tensors.

    On a CPU there is no synchronization to avoid, and only the rows of the tested nodes are read.
    """
    B, N, V = p.shape
    check_ids("tokens", tokens, V)
    laws = _softmax_of(p) if scores else _rows_of(host(p))
    q, mass = None if q is None else host(q), None if mass is None else mass.tolist()
    tokens, uniforms, draw = tokens.tolist(), uniforms.tolist(), draw.tolist()
    parent = parent.tolist() if parent.dim() == 2 else [parent.tolist()] * B
    bounds = None if neighbours is None else (table_on_host(neighbours), delta, lam)
    columns = min(depth + 1, N)
    path = np.full((B, columns), -1)
    length, following, drift = np.empty(B, np.int64), np.empty(B, np.int64), np.empty(B, np.float32)
    for b, ids in enumerate(tokens):
        drafts, extra, law_at = None if q is None else q[b], None if mass is None else mass[b], laws(b)
        walk = _walk(ids, parent[b], law_at, drafts, uniforms[b], extra, bounds, columns, branch)
        accepted, residual, law, drift[b] = walk
        following[b], length[b] = _draw_by_blocks(residual, law, draw[b]), len(accepted)
        path[b, : len(accepted)] = accepted
    return tuple(map(torch.from_numpy, (path, length, following, drift)))


def _rows_of(p):
    return lambda b: lambda n: widen(p[b, n])


def _softmax_of(scores):
    """Like `_rows_of`, from log-distributions; the softmax is computed for reached nodes only."""
    return lambda b: lambda n: widen(host(torch.softmax(scores[b, n], -1)))


def _walk(tokens, parent, law_at, q, uniforms, mass, near, columns, branch):
    """Walk one row. Returns the accepted nodes, the residual after them (fp64), its distribution and the drift."""
    kept, current, drift = [0], 0, 0.0
    tried: set[int] = set()
    rest: np.ndarray | None = None  # the residual of drawn nodes; stays None for point masses
    spent: list[np.ndarray] = []
    left, siblings, law = 1.0, 0, law_at(0)
    source = law
    for n in range(1, len(tokens)):
        if parent[n] != current or siblings == branch or len(kept) == columns:
            continue
        x = tokens[n]
        siblings += 1
        if q is None and x in tried:  # a repeated point mass has no mass left
            continue
        px = float(law[x])
        if q is None:
            qx, room = 1.0, px
        else:
            drawn = widen(q[n])
            qx, room = float(drawn[x]), px if rest is None else float(rest[x])
        f = exact = min(1.0, max(room, 0.0) / max(left * qx, TINY))
        used = None
        if near is not None and exact < 1.0:
            table, delta, lam = near
            bound = left * delta if lam is None else (lam - 1.0) * max(room, 0.0)
            added, count = prefix_mass(source, table[x], bound)
            f, used = max(exact, min(1.0, exact + added / max(left * qx, TINY))), table[x, :count]
        elif mass is not None:
            f = max(exact, min(1.0, exact + mass[n] / max(qx, TINY)))
        drift += f - exact
        if uniforms[n] < f:
            kept.append(n)
            tried, rest, left, spent, siblings, current, law = set(), None, 1.0, [], 0, n, law_at(n)
            source = law
            continue
        if q is None:
            tried.add(x)
            left -= px
        else:
            rest = _less(law if rest is None else rest, drawn, left)
            left = float(rest.astype(np.float64).dot(ones(len(rest))))
        if used is not None and siblings < branch:  # later siblings may not use these codes
            spent.append(used)
            if rest is None:
                source = _zeroed_weights(law.copy() if source is law else source, spent[-1:])
                source[x] = 0.0
            else:
                source = _zeroed_weights(rest.copy(), spent)
    return kept, _zero_ids((law if rest is None else rest).astype(np.float64), tried), law, drift


def _less(law, drawn, left):
    """Return [distribution - left * drawn]+, in the dtype of the distribution."""
    rest = drawn if left == 1.0 else np.multiply(drawn, left, dtype=law.dtype)
    rest = np.subtract(law, rest, dtype=law.dtype)
    return np.maximum(rest, 0.0, out=rest)


def _zero_ids(weights, ids):
    for x in ids:
        weights[x] = 0.0
    return weights


def _zeroed_weights(weights, spent):
    """Set the weights at these ids to 0, in place. Ids outside the vocabulary are ignored."""
    for ids in spent:
        if not in_range(ids, len(weights)):
            ids = ids[(ids >= 0) & (ids < len(weights))]
        weights[ids] = 0.0
    return weights


def _draw_by_blocks(weights, law, draw):
    """Draw by inverse CDF in two steps, a block of 128 tokens and a token in it: a fifth of a long cumsum's time."""
    blocks = len(weights) // 128
    ends = (weights[: 128 * blocks].reshape(blocks, 128) @ ones(128)).cumsum()
    if len(weights) % 128:
        ends = np.append(ends, (ends[-1] if blocks else 0.0) + np.add.reduce(weights[128 * blocks :]))
    block = int(ends.searchsorted(draw * ends[-1], side="right"))
    if block == len(ends):
        return int(law.argmax())
    inside = weights[128 * block : 128 * block + 128]
    running = inside.cumsum()
    if block:
        running += ends[block - 1]
    # The two sums may differ in their last bit: clamp to the last token with a non-zero weight.
    place = min(int(running.searchsorted(draw * ends[-1], side="right")), int(inside.nonzero()[0][-1]))
    return 128 * block + place


@jit("parent_stride N D branch")
def _accept_tree_kernel(  # noqa: C901
    tokens, parent, p, q, uniforms, draw, mass, neighbours, scratch, marks, path, length, next_token, drift,
    parent_stride, N, V, K, D, branch, delta, lam,
    DRAWN: tl.constexpr, MASS: tl.constexpr, NEAR: tl.constexpr, LAM: tl.constexpr, ONCE: tl.constexpr,
    TINY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per row: loop over the nodes, test the children of the current one, draw the next token."""
    row = tl.program_id(0).to(tl.int64)
    kind = scratch.dtype.element_ty
    nodes = tl.arange(0, BLOCK_N)
    inside = nodes < N
    parents = tl.load(parent + row * parent_stride + nodes, mask=inside, other=-1).to(tl.int32)
    drafted = tl.load(tokens + row * N + nodes, mask=inside, other=-1).to(tl.int64)
    before = tl.zeros((BLOCK_N,), tl.float64)
    laws, drafts, rest = p + row * N * V, q + row * N * V, scratch + row * V
    cur = tl.full((), 0, tl.int32)
    count = tl.full((), 1, tl.int32)
    siblings = tl.full((), 0, tl.int32)
    tried = tl.full((), 0, tl.int32)
    left = tl.full((), 1.0, tl.float64)
    spent = tl.full((), 0.0, tl.float64)
    moved = tl.full((), 0.0, tl.float64)
    tl.store(path + row * D, cur.to(tl.int64))
    if DRAWN:
        for start in range(0, V, BLOCK_V):
            at = start + tl.arange(0, BLOCK_V)
            tl.store(rest + at, tl.load(laws + at, mask=at < V, other=0.0).to(kind), mask=at < V)
    used_at = marks + row * V  # 1 + the node at which a code was used, or rejected as a point mass
    if ONCE:
        for start in range(0, V, BLOCK_V):
            at = start + tl.arange(0, BLOCK_V)
            tl.store(used_at + at, tl.zeros((BLOCK_V,), tl.int32), mask=at < V)
    if DRAWN or ONCE:
        tl.debug_barrier()
    for n in range(1, N):
        parent_n = tl.load(parent + row * parent_stride + n).to(tl.int32)
        if (parent_n == cur) & (count < D) & (siblings < branch):
            siblings += 1
            tried = tl.full((), 0, tl.int32) + n
            x = tl.load(tokens + row * N + n).to(tl.int64)
            draft = drafts + (tl.full((), 0, tl.int64) + n) * V
            in_vocabulary = (x >= 0) & (x < V)
            safe = tl.where(in_vocabulary, x, 0)
            law = laws + cur.to(tl.int64) * V
            px = tl.load(law + safe).to(tl.float64)
            earlier = (parents == parent_n) & (nodes < n)
            valid = in_vocabulary
            qx = tl.full((), 1.0, tl.float64)
            room = px
            remaining = left
            if DRAWN:
                qx = tl.load(draft + safe).to(tl.float64)
                past = tl.load(drafts + nodes.to(tl.int64) * V + safe, mask=earlier, other=0.0).to(tl.float64)
                room = tl.maximum(px - tl.sum(before * past), 0.0)
                qx = tl.maximum(qx, TINY)
                exact = tl.minimum(room / tl.maximum(left * qx, TINY), 1.0)
            else:
                twins = tl.sum((earlier & (drafted == x)).to(tl.int32))
                valid = in_vocabulary & (twins == 0)
                remaining = 1.0 - spent
                exact = tl.minimum(px / tl.maximum(remaining, TINY), 1.0)
            share = qx
            extra = tl.full((), 0.0, tl.float64)
            if MASS:
                extra = tl.load(mass + row * N + n).to(tl.float64)
            if NEAR:
                share = tl.maximum(remaining * qx, TINY)
                bound = remaining * delta
                if LAM:
                    bound = room * (lam - 1.0)
                total = tl.full((), 0.0, tl.float64)
                k = tl.full((), 0, tl.int32)
                limit = tl.full((), 0, tl.int32) + K
                while k < limit:
                    at = k + tl.arange(0, BLOCK_K)
                    neighbour = tl.load(neighbours + safe * K + at, mask=at < K, other=0).to(tl.int64)
                    near_ok = (at < K) & (neighbour >= 0) & (neighbour < V)
                    if DRAWN:
                        weight = tl.maximum(tl.load(rest + neighbour, mask=near_ok, other=0.0), 0.0).to(tl.float64)
                    else:
                        weight = tl.load(law + neighbour, mask=near_ok, other=0.0).to(tl.float64)
                    if ONCE:
                        weight = tl.where(tl.load(used_at + neighbour, mask=near_ok, other=0) == cur + 1, 0.0, weight)
                    summed = total + tl.cumsum(weight, 0)
                    kept = summed <= bound
                    extra = tl.maximum(extra, tl.max(tl.where(kept, summed, 0.0), 0))
                    total += tl.sum(weight, 0)
                    if ONCE:  # an accepted node's marks are not read again
                        used = (near_ok & kept & valid) != 0  # an int where the interpreter made `valid` one
                        tl.store(used_at + neighbour, tl.zeros((BLOCK_K,), tl.int32) + cur + 1, mask=used)
                    k += BLOCK_K
                    limit = tl.where(total <= bound, limit, 0)
            exact = tl.where(valid, exact, 0.0)
            relaxed = tl.maximum(tl.minimum(exact + extra / share, tl.where(valid, 1.0, 0.0)), exact)
            moved += relaxed - exact
            uniform = tl.load(uniforms + row * N + n).to(tl.float64)
            if uniform < relaxed:
                cur = tl.full((), 0, tl.int32) + n
                tl.store(path + row * D + count, cur.to(tl.int64))
                count += 1
                siblings = tl.full((), 0, tl.int32)
                left = tl.full((), 1.0, tl.float64)
                spent = tl.full((), 0.0, tl.float64)
                if DRAWN:
                    tl.debug_barrier()
                    for start in range(0, V, BLOCK_V):
                        at = start + tl.arange(0, BLOCK_V)
                        fresh = tl.load(laws + cur.to(tl.int64) * V + at, mask=at < V, other=0.0)
                        tl.store(rest + at, fresh.to(kind), mask=at < V)
                    tl.debug_barrier()
            else:
                spent += tl.where(valid, px, 0.0)
                if ONCE:
                    if not DRAWN:
                        tl.store(used_at + safe, cur + 1, mask=valid != 0)
                    tl.debug_barrier()
                if DRAWN:
                    before = tl.where(nodes == n, left, before)
                    weight = left.to(kind)
                    total = tl.full((), 0.0, tl.float64)
                    for start in range(0, V, BLOCK_V):
                        at = start + tl.arange(0, BLOCK_V)
                        u = tl.load(rest + at, mask=at < V, other=0.0)
                        s = tl.load(draft + at, mask=at < V, other=0.0).to(kind)
                        u = u - weight * s
                        tl.store(rest + at, u, mask=at < V)
                        total += tl.sum(tl.maximum(u, 0.0).to(tl.float64), 0)
                    left = total
                    tl.debug_barrier()
    law = laws + cur.to(tl.int64) * V
    if not DRAWN:
        for start in range(0, V, BLOCK_V):
            at = start + tl.arange(0, BLOCK_V)
            tl.store(rest + at, tl.load(law + at, mask=at < V, other=0.0).to(kind), mask=at < V)
        tl.debug_barrier()
        rejected = (parents == cur) & (nodes <= tried) & (drafted >= 0) & (drafted < V)
        tl.store(rest + drafted, tl.zeros((BLOCK_N,), kind), mask=rejected)
    tl.debug_barrier()
    mode = tl.full((), 0, tl.int64)
    peak = tl.full((), -1.0, tl.float64)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, V, BLOCK_V):
        at = start + tl.arange(0, BLOCK_V)
        w = tl.maximum(tl.load(rest + at, mask=at < V, other=0.0), 0.0).to(tl.float64)
        total += tl.sum(w, 0)
        w = tl.load(law + at, mask=at < V, other=-1.0).to(tl.float64)
        top = tl.max(w, 0)
        where = tl.min(tl.where(w == top, at, V), 0).to(tl.int64)
        mode = tl.where(top > peak, where, mode)
        peak = tl.maximum(top, peak)
    threshold = tl.load(draw + row).to(tl.float64) * total
    chosen = tl.full((), 0, tl.int32) + V
    running = tl.full((), 0.0, tl.float64)
    for start in range(0, V, BLOCK_V):
        at = start + tl.arange(0, BLOCK_V)
        w = tl.maximum(tl.load(rest + at, mask=at < V, other=0.0), 0.0).to(tl.float64)
        hit = (running + tl.cumsum(w, 0) > threshold) & (w > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(hit, at, V), 0))
        running += tl.sum(w, 0)
    tl.store(next_token + row, tl.where(chosen < V, chosen.to(tl.int64), tl.minimum(mode, V - 1)))
    tl.store(length + row, count.to(tl.int64))
    tl.store(drift + row, moved.to(tl.float32))


def accept_tree_triton(tokens, parent, p, q, uniforms, draw, mass, neighbours, delta, lam, depth, branch):
    B, N = tokens.shape
    V, D = p.shape[-1], min(depth + 1, N)
    tokens, parent, p, uniforms, draw = (t.contiguous() for t in (tokens, parent, p, uniforms, draw))
    q, mass, neighbours = (None if t is None else t.contiguous() for t in (q, mass, neighbours))
    kind = torch.promote_types(p.dtype, torch.float32)
    path = torch.full((B, D), -1, dtype=torch.int64, device=p.device)
    length, next_token = (torch.empty(B, dtype=torch.int64, device=p.device) for _ in range(2))
    drift = torch.empty(B, dtype=torch.float32, device=p.device)
    scratch = torch.empty(B, V, dtype=kind, device=p.device)
    once = neighbours is not None and branch > 1
    marks = torch.empty(B, V, dtype=torch.int32, device=p.device) if once else length
    _accept_tree_kernel[(B,)](
        tokens, parent, p, p if q is None else q, uniforms, draw, uniforms if mass is None else mass,
        tokens if neighbours is None else neighbours, scratch, marks, path, length, next_token, drift,
        N if parent.dim() == 2 else 0, N, V, 0 if neighbours is None else neighbours.shape[1], D, branch,
        0.0 if delta is None else delta, 1.0 if lam is None else lam,
        DRAWN=q is not None, MASS=mass is not None, NEAR=neighbours is not None, LAM=delta is None, ONCE=once,
        TINY=TINY, BLOCK_N=next_power_of_2(N), BLOCK_V=min(2048, next_power_of_2(V)),
        BLOCK_K=128 if neighbours is None else min(1024, next_power_of_2(neighbours.shape[1])),
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return path, length, next_token, drift


@on_device
def accept_tree_device(tokens, parent, p, q, uniforms, draw, mass, neighbours, delta, lam, depth, branch, scores=False):
    p = torch.softmax(p, -1) if scores else p
    return accept_tree_triton(tokens, parent, p, q, uniforms, draw, mass, neighbours, delta, lam, depth, branch)


def _fake(tokens, parent, p, q, uniforms, draw, mass, neighbours, delta, lam, depth, branch, scores=False):
    B, N = tokens.shape
    ids = tokens.new_empty(B, dtype=torch.int64)
    path = tokens.new_empty((B, min(depth + 1, N)), dtype=torch.int64)
    return path, ids, torch.empty_like(ids), tokens.new_empty(B, dtype=torch.float32)


# Not `custom_op`: its wrapper takes 40 us per call, a tenth of a verification in the engine.
torch.library.define(
    "visspec::accept_tree",
    "(Tensor tokens, Tensor parent, Tensor p, Tensor? q, Tensor uniforms, Tensor draw, Tensor? mass,"
    " Tensor? neighbours, float? delta, float? lam, int depth, int branch, bool scores=False)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("visspec::accept_tree", "CPU", accept_tree_host)
torch.library.impl("visspec::accept_tree", "CUDA", accept_tree_device)
torch.library.register_fake("visspec::accept_tree", _fake)


def accept_tree(
    tokens: Tensor,
    parent: Tensor,
    p: Tensor,
    q: Tensor | None = None,
    uniforms: Tensor | None = None,
    draw: Tensor | None = None,
    *,
    mass: Tensor | None = None,
    neighbours: Tensor | None = None,
    delta: float | None = None,
    lam: float | None = None,
    depth: int | None = None,
    branch: int | None = None,
    scores: bool = False,
) -> tuple[Tensor, ...]:
    """Accept a path of the draft tree and draw the token after it.

    tokens (B, N) int, within the vocabulary at padding nodes too; parent (B, N), (1, N) or (N,) int: -1 at node 0, the
    pending token, and at padding nodes; a parent precedes its children. p (B, N, V): distribution after each node. q
    (B, N, V): distribution from which each node was drawn given its earlier siblings; None: nodes are point masses.
    uniforms (B, N) and draw (B,): uniforms in [0, 1). Relaxed: mass (B, N), or neighbours (V, K) with delta (LANTERN)
    or lam (LANTERN++), see `neighbour_mass`, applied to the residual. depth: maximum path length without the root
    (default N - 1); branch: maximum number of children tested per node (default N - 1). Deeper nodes and later siblings
    are treated as padding. scores: p contains log-distributions, whose softmax is computed here.

    Returns path (B, depth + 1) int64, padded with -1 and starting with node 0; length (B,) int64, including node 0;
    next (B,) int64; drift (B,) fp32. Raises ValueError or TypeError naming the argument; on a CPU also for a token
    outside the vocabulary, which CUDA never accepts.
    """
    if isinstance(parent, Tensor) and parent.dim() == 2 and parent.shape[0] == 1:
        parent = parent[0]
    _check_draft(tokens, p, q, uniforms, draw, mass)
    B, N, V = p.shape
    check_tensor("parent", parent, (N,) if getattr(parent, "ndim", 2) == 1 else (B, N), INTS, p.device)
    if neighbours is None:
        delta = lam = None
    else:
        require(mass is None, "mass", "a tensor beside neighbours", "one of the two")
        check_tensor("neighbours", neighbours, (V, None), INTS, p.device)
        delta, lam = checked_bound(delta, lam)
    depth, branch = (N - 1 if value is None else int(value) for value in (depth, branch))
    require(depth >= 0, "depth", depth, "a number of nodes of at least 0")
    require(branch >= 0, "branch", branch, "a number of children of at least 0")
    return torch.ops.visspec.accept_tree(
        tokens, parent, p, q, uniforms, draw, mass, neighbours, delta, lam, depth, branch, scores
    )


def _check_draft(
    tokens: Tensor, p: Tensor, q: Tensor | None, uniforms: Tensor | None, draw: Tensor | None, mass: Tensor | None
) -> None:
    """Check types, shapes and devices of a draft, its distributions and its random numbers."""
    check_tensor("p", p, (None, None, None), FLOATS)
    B, N, V = p.shape
    if not (N > 0 and B > 0 and V > 0):
        require(N > 0, "p", "an empty tree (0 nodes)", "at least the pending token as node 0")
        require(False, "p", f"shape {tuple(p.shape)}", "at least one row and one token")
    check_tensor("tokens", tokens, (B, N), INTS, p.device)
    if q is not None:
        check_tensor("q", q, (B, N, V), FLOATS, p.device)
    check_tensor("uniforms", uniforms, (B, N), (torch.float32, torch.float64), p.device)
    check_tensor("draw", draw, (B,), (torch.float32, torch.float64), p.device)
    if mass is not None:
        check_tensor("mass", mass, (B, N), FLOATS, p.device)


def bench_case(device: str, levels: Sequence[int] = (10, 16, 14, 10, 8), vocabulary: int = 16384) -> BenchCase:
    """Time a tree of 59 likely tokens under flat laws, exact rule, against a walk over its children in torch."""
    g, parent, last = torch.Generator().manual_seed(0), [-1], [0]
    for count in levels:
        first = len(parent)
        parent += sorted(last[i % min(5, len(last))] for i in range(count))
        last = list(range(first, first + count))
    nodes = len(parent)
    p = (2 * torch.randn(nodes, vocabulary, generator=g)).softmax(-1)
    rank = [parent[:n].count(above) for n, above in enumerate(parent)]
    tokens = p.topk(max(rank) + 1).indices[[max(above, 0) for above in parent], rank].to(device)
    uniforms = 0.05 * torch.rand(nodes, generator=g)  # small, so that nodes are accepted at several depths
    p, uniforms, draw = p.to(device), uniforms.to(device), torch.rand(1, generator=g).to(device)
    above = torch.tensor(parent, device=device)

    def ours() -> tuple[Tensor, Tensor]:
        path, _, following, _ = accept_tree(tokens[None], above, p[None], None, uniforms[None], draw, depth=len(levels))
        return path, following

    def eager() -> tuple[list[int], Tensor]:
        path, law = [0], p[0].clone()
        for n in range(1, nodes):
            if parent[n] == path[-1]:
                if uniforms[n] < law[tokens[n]]:
                    path, law = [*path, n], p[n].clone()
                else:
                    law[tokens[n]] = 0.0
                    law /= law.sum()
        return path, torch.searchsorted(law.cumsum(0), draw, right=True)

    return BenchCase(f"{nodes} nodes, V={vocabulary}", "float32", ours, eager)
