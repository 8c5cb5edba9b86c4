"""Acceptance of a draft tree and the token after it, in one pass without a host synchronisation.

At a node with target law p the siblings are tried in index order with a residual law r, r = p before the first:

    point mass    accept x with probability r(x),              else r <- r without x, renormalised
    drawn from q  accept x with probability min(1, r(x)/q(x)), else r <- [r - q]+, renormalised

and after the last one `next` is drawn from r by inverse CDF (the bonus token where a node has no children). This keeps
the law of the target (Leviathan et al. 2023, Chen et al. 2023; trees: SpecInfer, EAGLE). A relaxed rule adds a mass to
r(x): f = min(1, (r(x) + mass)/q(x)), never below the exact f, with the residual unchanged, and `drift` sums
f - min(1, r(x)/q(x)) over the tried nodes (LANTERN's neighbourhood mass is computed here when `neighbours` is given).

Closed forms, which need no loop over nodes. Point mass: r(x_j) = p(x_j) / (1 - sum of the earlier siblings' p).
Drawn: with M_0 = 1, u_j = u_{j-1} - M_{j-1} q_j and M_j = sum [u_j]+, the residual is [u_j]+ / M_j.

Laws are read as they are stored, their sums are kept in fp64, so the launch geometry cannot turn a decision.
An all-zero residual (rounding only) falls back to the most likely token of the node's law.
B rows, N draft nodes, V vocabulary, D = depth + 1, K neighbours.
"""

from functools import lru_cache

import torch

from visspec.kernels.common import (
    FLOATS,
    INTS,
    TINY,
    as_float32,
    check_laws,
    check_tensor,
    jit,
    launchable,
    law_tolerance,
    next_power_of_2,
    require,
    tl,
)


def reference(tokens, parent, p, q, coins, draw, mass=None, neighbours=None, delta=None, lam=None):
    """The definition, one row at a time in Python floats: tokens (N), parent (N), p and q (N, V), coins (N), draw.

    Returns the accepted path (list of nodes), the next token and the drift.
    """
    tokens, parent, coins, draw = tokens.tolist(), parent.tolist(), coins.double().tolist(), float(draw)
    p, q = p.double().tolist(), None if q is None else q.double().tolist()
    current, path, drift = 0, [0], 0.0
    residual, left, zeroed = list(p[0]), 1.0, set()
    for n in range(1, len(tokens)):
        if parent[n] != current:
            continue
        x = tokens[n]
        exact = max(residual[x], 0.0) / max(left * (1.0 if q is None else q[n][x]), TINY)
        exact = min(1.0, exact)
        extra = 0.0 if mass is None else float(mass[n])
        if neighbours is not None:
            bound, total = (lam - 1.0) * p[current][x] if delta is None else delta, 0.0
            for y in neighbours[x].tolist():
                if total + p[current][y] > bound:
                    break
                total += p[current][y]
            extra = total
        if q is None and x in zeroed:
            extra = 0.0
        f = max(exact, min(1.0, exact + extra / (1.0 if q is None else max(q[n][x], TINY))))
        drift += f - exact
        if coins[n] < f:
            current, residual, left, zeroed = n, list(p[n]), 1.0, set()
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


def accept_tree_torch(tokens, parent, p, q, coins, draw, mass, neighbours, delta, lam, depth, branch):
    """All nodes of all rows at once, without a host wait; `[v, n]` matrices hold what node v knows of its child n."""
    B, N = tokens.shape
    V = p.shape[-1]
    tok, par = tokens.unsqueeze(1), (parent.unsqueeze(1) if parent.dim() == 2 else parent.expand(B, 1, N))
    rows = par if B == 1 else par + torch.arange(0, B * N, N, device=p.device).view(B, 1, 1)
    key = torch.add(tok, rows, alpha=V)
    if q is None:  # a repeated sibling has no residual mass left: it is no child at all
        par = par.masked_fill((key == key.mT).triu(1).any(1, keepdim=True), -1)
    order, column, root = _constants(N, p.device)
    child = par == column
    px = torch.take(p, key)
    if q is None:
        part, scale, residual = child * px, None, None
        exact = part / (part - part.cumsum(2, dtype=torch.float64)).add_(1.0).clamp_min_(TINY)
    else:
        drawn = _drawn_chain if branch == 1 else _drawn_siblings
        exact, scale, residual = drawn(tok, par, child, px, p, q, branch)
    if neighbours is not None:
        mass = _neighbourhood(tok, rows, px, p, neighbours, delta, lam)
    elif mass is not None:
        mass = mass.unsqueeze(1)
    coins = coins if B == 1 else coins.unsqueeze(1)
    if mass is None:
        extra, flag = None, (exact > coins).double()
    else:
        exact = exact.clamp_max_(1.0)
        relaxed = torch.clamp(exact + (mass if scale is None else mass / scale), min=exact, max=child)
        extra, flag = relaxed - exact, relaxed.gt_(coins)
    seen = flag.cumsum(2)
    tried = seen.eq_(flag)  # no earlier sibling was accepted, and this one is the first if it is
    # A row of `taken` has at most one entry, the step from v to its accepted child; the path is e_0 (I - taken)^-1.
    taken = (tried * flag).neg_()
    alive = torch.linalg.solve_triangular(taken, root, upper=True, left=False, unitriangular=True)
    if extra is None:
        drift = torch.zeros(B, device=p.device)
    else:
        drift = torch.bmm(alive, tried.mul_(extra)).sum((1, 2), dtype=torch.float32)
    value, index = torch.topk(torch.sub(alive, order, alpha=2.0**-20), min(depth + 1, N))
    path = index.masked_fill(value <= 0, -1).squeeze(1)
    length = alive.sum((1, 2), dtype=torch.int64)
    return path, length, _next_token(tok, par, p, path.amax(1), draw, residual), drift


def accept_tree_walk(tokens, parent, p, q, coins, draw, mass, neighbours, delta, lam, depth, branch):
    """Drawn trees on a CPU, where no device waits: a walk that stops early reads a few rows of q, not all of them."""
    B, N, V = p.shape
    kind, parent = torch.promote_types(p.dtype, torch.float32), parent.expand(B, N)
    if neighbours is not None:
        row = (parent.clamp_min(0) + torch.arange(0, B * N, N).unsqueeze(1)).unsqueeze(1)
        px = torch.take(p, torch.add(tokens.unsqueeze(1), row, alpha=V))
        mass = _neighbourhood(tokens.unsqueeze(1), row, px, p, neighbours, delta, lam).squeeze(1)
    path = torch.full((B, min(depth + 1, N)), -1)
    length, following = (torch.empty(B, dtype=torch.int64) for _ in range(2))
    drift = torch.zeros(B)
    for b in range(B):
        ids, above, tosses = (t[b].tolist() for t in (tokens, parent, coins))
        extra = None if mass is None else mass[b].tolist()
        current, kept, u, left = 0, [0], p[b, 0].to(kind), 1.0
        for n in range(1, N):
            if above[n] != current:
                continue
            qx = max(float(q[b, n, ids[n]]), TINY)
            exact = min(1.0, max(float(u[ids[n]]), 0.0) / max(left * qx, TINY))
            f = exact if extra is None else max(exact, min(1.0, exact + extra[n] / qx))
            drift[b] += f - exact
            if tosses[n] < f:
                current, u, left = n, p[b, n].to(kind), 1.0
                kept.append(n)
            else:
                u = u - left * q[b, n].to(kind)
                left = float(u.clamp_min(0).sum(dtype=torch.float64))
        running = u.clamp_min(0).cumsum(0, dtype=torch.float64)
        found = torch.searchsorted(running, draw[b] * running[-1], right=True)
        following[b] = torch.where(found < V, found, p[b, current].argmax())
        length[b] = len(kept)
        path[b, : len(kept)] = torch.tensor(kept[: path.shape[1]])
    return path, length, following, drift


def _neighbourhood(tok, rows, px, p, neighbours, delta, lam):
    """(B, 1, N): the largest prefix sum of the neighbours' p, nearest first, within the bound."""
    flat = torch.embedding(neighbours, tok).long().add_(rows.unsqueeze(3), alpha=p.shape[-1])
    if delta is None:
        summed = torch.take(p, flat).cumsum(3, dtype=torch.float64)
        return summed.mul_(torch.sub(summed, px.unsqueeze(3), alpha=lam - 1.0) <= 0).amax(3)
    # Calls more than `take` does, in half its time; the nodes without a parent read any law.
    found = p.reshape(-1).index_select(0, flat.clamp_min_(0).view(-1)).view_as(flat)
    summed = found.cumsum(3, dtype=torch.float64)
    return summed.sub_(torch.nn.functional.hardshrink(summed, delta)).amax(3)


@lru_cache(maxsize=64)
def _constants(N, device):
    order = torch.arange(N, device=device)
    return order, order.unsqueeze(1), torch.eye(1, N, dtype=torch.float64, device=device)


def _drawn_chain(tok, par, child, px, p, q, branch):
    """`_drawn_siblings` where no node has two children: nothing needs a sweep but the last residual."""
    scale = q.gather(2, tok.mT).mT.double().clamp_min(TINY)

    def residual(last):
        batch, kind = torch.arange(len(last), device=p.device), torch.promote_types(p.dtype, torch.float32)
        below = par.squeeze(1) == last.unsqueeze(1)
        rejected = q[batch, below.long().argmax(1)].to(kind) * below.any(1, keepdim=True)
        return (p[batch, last].to(kind) - rejected).clamp_min_(0).unsqueeze(1)

    return child * (px / scale).clamp_max(1), scale, residual


def _drawn_siblings(tok, par, child, px, p, q, branch):
    """Acceptance ratios [v, n], the draft law q(x_n) (B, 1, N), and the residual (B, 1, V) after a node's children.

    Rank j handles the (j+1)-th child of every node at once; at most (N-1)/(j+1) nodes have one, so with the nodes
    sorted by their number of children the work is (N-1)(1 + 1/2 + 1/3 + ...) rows, without a synchronisation.
    """
    B, N, _ = p.shape
    dtype = torch.promote_types(p.dtype, torch.float32)
    batch = torch.arange(B, device=p.device).unsqueeze(1)
    by_children = child.sum(2).argsort(dim=1, descending=True, stable=True)
    ranked = torch.where(child, torch.arange(N, device=p.device), N).sort(2).values
    ranked = ranked.gather(1, by_children.unsqueeze(2).expand(B, N, N))
    u = p[batch, by_children].to(dtype)
    left = torch.ones(B, N, dtype=torch.float64, device=p.device)
    before = torch.ones(B, N + 1, dtype=torch.float64, device=p.device)
    for rank in range(min(branch, N - 1)):
        count = (N - 1) // (rank + 1)
        node = ranked[:, :count, rank]
        before.scatter_(1, node, left[:, :count])
        weight = (left[:, :count] * (node < N)).to(dtype)
        u[:, :count].sub_(weight.unsqueeze(2) * q[batch, node.clamp(max=N - 1)].to(dtype))
        left = u[:, :count].clamp_min(0).sum(2, dtype=torch.float64)
    cross = q.gather(2, tok.expand(B, N, N)).double()  # [m, n] = q_m(x_n)
    earlier = (par.mT == par).triu(1) * before[:, :N].unsqueeze(2)
    remaining = px - (earlier * cross).sum(1, keepdim=True)
    scale = cross.diagonal(dim1=1, dim2=2).unsqueeze(1).clamp_min(TINY)
    ratio = remaining.clamp_min(0) / (scale * before[:, :N].unsqueeze(1)).clamp_min(TINY)
    back = torch.empty_like(by_children).scatter_(1, by_children, torch.arange(N, device=p.device).expand(B, N))

    def residual(last):
        return u[batch, back.gather(1, last.unsqueeze(1))].clamp_min(0)

    return child * ratio.clamp_max(1), scale, residual


def _next_token(tok, par, p, last, draw, residual):
    """Inverse-CDF draw from what is left of the law at the last accepted node."""
    B, _, V = p.shape
    if B == 1:
        row, node, uniform = p.index_select(1, last), last, draw
    else:
        batch = torch.arange(B, device=p.device)
        row, node, uniform = p[batch, last].unsqueeze(1), last.view(B, 1, 1), draw.view(B, 1, 1)
    if residual is None:
        left = row.scatter_reduce(2, tok, (par != node).to(row.dtype), "amin")
    else:
        left = residual(last)
    running = left.cumsum(2, dtype=torch.float64)
    found = torch.searchsorted(running, uniform * running[..., -1:], right=True)
    return torch.where(found < V, found, row.argmax(2, keepdim=True)).view(B)


@jit
def _accept_tree_kernel(  # noqa: C901
    tokens, parent, p, q, coins, draw, mass, neighbours, scratch, path, length, next_token, drift,
    parent_stride, N, V, K, D, delta, lam,
    DRAWN: tl.constexpr, MASS: tl.constexpr, NEAR: tl.constexpr, LAM: tl.constexpr, TINY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per row: walk the nodes, try the children of the current one, draw the next token."""
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
    left = tl.full((), 1.0, tl.float64)
    spent = tl.full((), 0.0, tl.float64)
    moved = tl.full((), 0.0, tl.float64)
    tl.store(path + row * D, cur.to(tl.int64))
    if DRAWN:
        for start in range(0, V, BLOCK_V):
            at = start + tl.arange(0, BLOCK_V)
            tl.store(rest + at, tl.load(laws + at, mask=at < V, other=0.0).to(kind), mask=at < V)
        tl.debug_barrier()
    for n in range(1, N):
        above = tl.load(parent + row * parent_stride + n).to(tl.int32)
        if above == cur:
            x = tl.load(tokens + row * N + n).to(tl.int64)
            draft = drafts + (tl.full((), 0, tl.int64) + n) * V
            known = (x >= 0) & (x < V)
            safe = tl.where(known, x, 0)
            law = laws + cur.to(tl.int64) * V
            px = tl.load(law + safe).to(tl.float64)
            earlier = (parents == above) & (nodes < n)
            valid = known
            qx = tl.full((), 1.0, tl.float64)
            if DRAWN:
                qx = tl.load(draft + safe).to(tl.float64)
                past = tl.load(drafts + nodes.to(tl.int64) * V + safe, mask=earlier, other=0.0).to(tl.float64)
                room = tl.maximum(px - tl.sum(before * past), 0.0)
                qx = tl.maximum(qx, TINY)
                exact = tl.minimum(room / tl.maximum(left * qx, TINY), 1.0)
            else:
                twins = tl.sum((earlier & (drafted == x)).to(tl.int32))
                valid = known & (twins == 0)
                exact = tl.minimum(px / tl.maximum(1.0 - spent, TINY), 1.0)
            extra = tl.full((), 0.0, tl.float64)
            if MASS:
                extra = tl.load(mass + row * N + n).to(tl.float64)
            if NEAR:
                bound = tl.full((), 0.0, tl.float64) + delta
                if LAM:
                    bound = px * (lam - 1.0)
                total = tl.full((), 0.0, tl.float64)
                k = tl.full((), 0, tl.int32)
                limit = tl.full((), 0, tl.int32) + K
                while k < limit:
                    at = k + tl.arange(0, BLOCK_K)
                    near = tl.load(neighbours + safe * K + at, mask=at < K, other=0).to(tl.int64)
                    near_ok = (at < K) & (near >= 0) & (near < V)
                    weight = tl.load(law + near, mask=near_ok, other=0.0).to(tl.float64)
                    summed = total + tl.cumsum(weight, 0)
                    kept = summed <= bound
                    extra = tl.maximum(extra, tl.max(tl.where(kept, summed, 0.0), 0))
                    total += tl.sum(weight, 0)
                    k += BLOCK_K
                    limit = tl.where(total <= bound, limit, 0)
            exact = tl.where(valid, exact, 0.0)
            relaxed = tl.maximum(tl.minimum(exact + extra / qx, tl.where(valid, 1.0, 0.0)), exact)
            moved += relaxed - exact
            coin = tl.load(coins + row * N + n).to(tl.float64)
            if coin < relaxed:
                cur = tl.full((), 0, tl.int32) + n
                tl.store(path + row * D + count, cur.to(tl.int64), mask=count < D)
                count += 1
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
        rejected = (parents == cur) & (drafted >= 0) & (drafted < V)
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


def accept_tree_triton(tokens, parent, p, q, coins, draw, mass, neighbours, delta, lam, depth, branch):
    """Launches one program per row; `branch` is of no use here."""
    launchable(p)
    B, N = tokens.shape
    V, D = p.shape[-1], min(depth + 1, N)
    tokens, parent, p, coins, draw = (t.contiguous() for t in (tokens, parent, p, coins, draw))
    q, mass, neighbours = (None if t is None else t.contiguous() for t in (q, mass, neighbours))
    kind = torch.promote_types(p.dtype, torch.float32)
    path = torch.full((B, D), -1, dtype=torch.int64, device=p.device)
    length, next_token = (torch.empty(B, dtype=torch.int64, device=p.device) for _ in range(2))
    drift = torch.empty(B, dtype=torch.float32, device=p.device)
    scratch = torch.empty(B, V, dtype=kind, device=p.device)
    _accept_tree_kernel[(B,)](
        tokens, parent, p, p if q is None else q, coins, draw, coins if mass is None else mass,
        tokens if neighbours is None else neighbours, scratch, path, length, next_token, drift,
        N if parent.dim() == 2 else 0, N, V, 0 if neighbours is None else neighbours.shape[1], D,
        0.0 if delta is None else delta, 1.0 if lam is None else lam,
        DRAWN=q is not None, MASS=mass is not None, NEAR=neighbours is not None, LAM=delta is None, TINY=TINY,
        BLOCK_N=next_power_of_2(N), BLOCK_V=min(2048, next_power_of_2(V)), BLOCK_K=128,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return path, length, next_token, drift


@torch.library.custom_op("visspec::accept_tree", mutates_args=())
def _accept_tree_op(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor | None,
    coins: torch.Tensor,
    draw: torch.Tensor,
    mass: torch.Tensor | None,
    neighbours: torch.Tensor | None,
    delta: float | None,
    lam: float | None,
    depth: int,
    branch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    body = accept_tree_walk if q is not None and branch != 1 and not p.is_cuda else accept_tree_torch
    return body(tokens, parent, p, q, coins, draw, mass, neighbours, delta, lam, depth, branch)


@_accept_tree_op.register_kernel("cuda")
def _accept_tree_cuda(*args):
    return accept_tree_triton(*args)


@_accept_tree_op.register_fake
def _accept_tree_fake(tokens, parent, p, q, coins, draw, mass, neighbours, delta, lam, depth, branch):
    B, N = tokens.shape
    ids = tokens.new_empty(B, dtype=torch.int64)
    path = tokens.new_empty((B, min(depth + 1, N)), dtype=torch.int64)
    return path, ids, torch.empty_like(ids), tokens.new_empty(B, dtype=torch.float32)


def accept_tree(
    tokens, parent, p, q=None, coins=None, draw=None, *, mass=None, neighbours=None, delta=None, lam=None,
    depth=None, branch=None, check=False,
):  # fmt: skip
    """Accepts a path of the draft tree and draws the token after it.

    tokens (B, N) int, within the vocabulary at padding nodes too; parent (B, N), (1, N) or (N,) int: -1 at node 0, the
    pending token, and at padding nodes; others after their parent. p (B, N, V): law after each node. q (B, N, V): law
    from which each node was drawn given its earlier siblings; None: nodes are point masses. coins (B, N) and draw (B,):
    uniforms in [0, 1). Relaxed: mass (B, N), or neighbours (V, K) with delta (LANTERN) or lam (LANTERN++), see
    `neighbour_mass`. depth: longest path without the root (default N - 1); branch: most children of a node (default
    N - 1; 1 promises a chain). Both must hold: deeper nodes or later siblings are left out.

    Returns path (B, depth + 1) int64 padded with -1 and starting with node 0, length (B,) int64 (node 0 counted),
    next (B,) int64, drift (B,) fp32. Raises ValueError or TypeError naming the argument; with check=True also for laws
    that do not sum to one, a parent that is not an earlier node, and a token outside the vocabulary.
    """
    if isinstance(parent, torch.Tensor) and parent.dim() == 2 and parent.shape[0] == 1:
        parent = parent[0]
    _validate(tokens, parent, p, q, coins, draw, mass, neighbours, delta, lam)
    N = tokens.shape[1]
    depth, branch = (N - 1 if value is None else int(value) for value in (depth, branch))
    if check:
        _validate_values(tokens, parent, p, q)
    lam = None if lam is None or delta is not None else as_float32(lam)
    delta = None if delta is None else as_float32(delta)
    try:
        return torch.ops.visspec.accept_tree(
            tokens, parent, p, q, coins, draw, mass, neighbours, delta, lam, depth, branch
        )
    except (IndexError, RuntimeError) as error:
        if "out of bounds" in str(error) or "out of range" in str(error):
            raise ValueError(f"tokens: found an id outside [0, {p.shape[-1]}), expected vocabulary ids") from error
        raise


def _validate(tokens, parent, p, q, coins, draw, mass, neighbours, delta, lam):
    check_tensor("p", p, (None, None, None), FLOATS)
    B, N, V = p.shape
    require(N > 0, "p", "an empty tree (0 nodes)", "at least the pending token as node 0")
    require(B > 0 and V > 0, "p", f"shape {tuple(p.shape)}", "at least one row and one token")
    check_tensor("tokens", tokens, (B, N), INTS, p.device)
    if not isinstance(parent, torch.Tensor) or parent.dim() != 1:
        check_tensor("parent", parent, (B, N), INTS, p.device)
    check_tensor("parent", parent, (N,) if parent.dim() == 1 else (B, N), INTS, p.device)
    if q is not None:
        check_tensor("q", q, (B, N, V), FLOATS, p.device)
    check_tensor("coins", coins, (B, N), (torch.float32, torch.float64), p.device)
    check_tensor("draw", draw, (B,), (torch.float32, torch.float64), p.device)
    if mass is not None:
        check_tensor("mass", mass, (B, N), FLOATS, p.device)
        require(neighbours is None, "mass", "a tensor beside neighbours", "one of the two")
    if neighbours is not None:
        check_tensor("neighbours", neighbours, (V, None), INTS, p.device)
        require((delta is None) != (lam is None), "delta", f"delta={delta} and lam={lam}", "exactly one of the two")


def _validate_values(tokens, parent, p, q):
    check_laws("p", p, law_tolerance(p.dtype))
    if q is not None:
        check_laws("q", q[:, 1:], law_tolerance(q.dtype))
    low, high, V = int(tokens.min()), int(tokens.max()), p.shape[-1]
    require(0 <= low and high < V, "tokens", f"ids from {low} to {high}", f"ids in [0, {V})")
    earlier = parent < torch.arange(parent.shape[-1], device=parent.device)
    require(
        bool(earlier.all()) and int(parent.min()) >= -1, "parent", "a parent at or after its node", "an earlier node"
    )
    require(bool((parent[..., 0] == -1).all()), "parent", "a root with a parent", "-1 at node 0")


def random_case(seed, rows=4, nodes=7, vocabulary=11, drawn=False, dtype=torch.float32, relaxed=False, near=None):
    """Arguments of `accept_tree` for the tests: random trees with padding, repeated siblings and peaked laws.

    near: "delta" or "lam" adds a table of neighbours.
    """
    g = torch.Generator().manual_seed(seed)
    shape = (rows, nodes, vocabulary)
    sharp = torch.randint(1, 6, (rows, 1, 1), generator=g)
    p = (torch.randn(shape, generator=g) * sharp).softmax(-1)
    q = (torch.randn(shape, generator=g) * sharp + p.log().clamp_min(-9)).softmax(-1)
    parent = (torch.rand(rows, nodes, generator=g) * torch.arange(nodes)).long()
    parent[:, 0] = -1
    parent[torch.rand(rows, nodes, generator=g) < 0.05] = -1
    likely = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(rows, nodes)
    tokens = torch.where(torch.rand(rows, nodes, generator=g) < 0.2, likely.roll(1, 1), likely)
    case = {
        "tokens": tokens,
        "parent": parent,
        "p": p.to(dtype),
        "q": q.to(dtype) if drawn else None,
        "coins": torch.rand(rows, nodes, generator=g),
        "draw": torch.rand(rows, generator=g),
    }
    if relaxed:
        case["mass"] = torch.rand(rows, nodes, generator=g) * 0.3 - 0.05
    if near:
        table = torch.rand(vocabulary, vocabulary, generator=g).argsort(1)[:, : vocabulary // 2]
        case.update({"neighbours": table, near: 0.15 if near == "delta" else 3.0})
    return case


CASES = [
    {"nodes": 1, "vocabulary": 5},
    {"nodes": 7, "vocabulary": 11},
    {"nodes": 7, "vocabulary": 11, "relaxed": True},
    {"nodes": 7, "vocabulary": 11, "drawn": True},
    {"nodes": 6, "vocabulary": 9, "drawn": True, "relaxed": True},
    {"near": "delta"},
    {"near": "lam", "drawn": True},
    {"nodes": 9, "vocabulary": 33, "near": "lam", "dtype": torch.bfloat16},
    {"nodes": 9, "vocabulary": 33, "dtype": torch.bfloat16},
    {"nodes": 9, "vocabulary": 33, "drawn": True, "dtype": torch.bfloat16},
    {"nodes": 5, "vocabulary": 2100, "rows": 2},
]
