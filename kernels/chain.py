"""Acceptance of a chain of drafts, the one-child case of `accept.py`, in closed form.

Draft x_n ~ q_n is accepted with probability min(1, p_{n-1}(x_n)/q_n(x_n)), p_{n-1} being the law after node n-1; a
point mass with probability p_{n-1}(x_n). The chain ends at the first rejection, where `next` is drawn from
[p - q]+ (or p without x), or from p after the last node (Leviathan et al. 2023, Chen et al. 2023; with q the row of an
earlier pass it is the test of speculative Jacobi decoding). `mass` relaxes the rule as in `accept.py`.

B rows, N nodes (node 0 pending), V vocabulary. Laws are read as stored, sums kept in fp64.
"""

import torch

from visspec.kernels.accept import accept_tree_triton, check_draft, check_values, random_case
from visspec.kernels.accept import reference as tree_reference
from visspec.kernels.common import INTS, TINY, check_ids, check_tensor, on_device


def reference(tokens, p, q, coins, draw, mass=None, count=None):
    """The definition, one row: a chain is the tree in which node n hangs from node n - 1."""
    parent = torch.arange(-1, len(tokens) - 1)
    if count is not None:
        parent[int(count) :] = -1
    return tree_reference(tokens, parent, p, q, coins, draw, mass)


def accept_chain_torch(tokens, p, q, coins, draw, mass, count):
    """The CPU path: ratios of all nodes at once, then a running product."""
    B, N = tokens.shape
    V = p.shape[-1]
    check_ids("tokens", tokens, V)
    count = None if count is None else count.clamp_max(N)
    ids = tokens[:, 1:].unsqueeze(2)
    exact = p[:, :-1].gather(2, ids).double()
    if q is not None:
        qx = q[:, 1:].gather(2, ids).double().clamp_min_(TINY)
        exact = exact / qx
    exact = exact.squeeze(2).clamp_max_(1.0)
    real = None if count is None else torch.arange(1, N, device=p.device) < count.unsqueeze(1)
    accept, extra = exact, None
    if mass is not None:
        added = mass[:, 1:] if q is None else mass[:, 1:] / qx.squeeze(2)
        accept = torch.maximum((exact + added).clamp_max_(1.0), exact)
        extra = accept - exact
    alive = coins[:, 1:] < accept
    if real is not None:
        alive = alive & real
        extra = None if extra is None else extra * real
    alive = alive.cumprod(1)
    last = alive.sum(1)
    order = torch.arange(N, device=p.device)
    path = torch.where(order <= last.unsqueeze(1), order, -1)
    drift = None
    if extra is not None:  # node n is tried when every node before it was accepted
        tried = torch.cat((torch.ones_like(last).unsqueeze(1), alive[:, :-1]), 1)[:, : N - 1]
        drift = (extra * tried).sum(1, dtype=torch.float32)
    batch = torch.arange(B, device=p.device)
    row = p[batch, last]
    rejected = last + 1 < (N if count is None else count)
    after = (last + 1).clamp_max(N - 1)
    if q is None:
        x = tokens.gather(1, after.unsqueeze(1))
        left = row.scatter_reduce(1, x, (~rejected).to(row.dtype).unsqueeze(1), "amin")
    else:
        kind = torch.promote_types(row.dtype, torch.float32)
        left = (row.to(kind) - q[batch, after].to(kind) * rejected.unsqueeze(1)).clamp_min_(0.0)
    running = left.cumsum(1, dtype=torch.float64)
    found = torch.searchsorted(running, (draw.unsqueeze(1) * running[:, -1:]), right=True)
    next_token = torch.where(found < V, found, row.argmax(1, keepdim=True)).squeeze(1)
    return path, last + 1, next_token, torch.zeros_like(draw, dtype=torch.float32) if drift is None else drift


def accept_chain_triton(tokens, p, q, coins, draw, mass, count):
    """A chain is a tree: the same kernel, with the parents of a chain."""
    N = tokens.shape[1]
    parent = torch.arange(-1, N - 1, device=tokens.device)
    if count is not None:
        parent = torch.where(parent + 1 < count.unsqueeze(1), parent, -1)
    return accept_tree_triton(tokens, parent, p, q, coins, draw, mass, None, None, None, N - 1, 1)


@torch.library.custom_op("visspec::accept_chain", mutates_args=())
def _accept_chain_op(
    tokens: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor | None,
    coins: torch.Tensor,
    draw: torch.Tensor,
    mass: torch.Tensor | None,
    count: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return accept_chain_torch(tokens, p, q, coins, draw, mass, count)


_accept_chain_op.register_kernel("cuda")(on_device(accept_chain_triton))


@_accept_chain_op.register_fake
def _accept_chain_fake(tokens, p, q, coins, draw, mass, count):
    ids = tokens.new_empty(tokens.shape[0], dtype=torch.int64)
    path = tokens.new_empty(tokens.shape, dtype=torch.int64)
    return path, ids, torch.empty_like(ids), torch.empty_like(ids, dtype=torch.float32)


def accept_chain(tokens, p, q=None, coins=None, draw=None, *, mass=None, count=None, check=False):
    """Accepts a prefix of the chain and draws the token after it; shapes and results as in `accept_tree`.

    count (B,) int: real nodes of each row, node 0 included (None, or more than N: all N). Raises ValueError or
    TypeError naming the argument; with check=True also for laws that do not sum to one, at the cost of a
    synchronisation.
    """
    check_draft("chain", tokens, p, q, coins, draw, mass)
    if count is not None:
        check_tensor("count", count, (p.shape[0],), INTS, p.device)
    if check:
        check_values(tokens, p, q)
    return torch.ops.visspec.accept_chain(tokens.long(), p, q, coins, draw, mass, count)


def random_chain(seed, ragged=False, **kwargs):
    """Arguments of `accept_chain` for the tests."""
    case = random_case(seed, **kwargs)
    case.pop("parent")
    if ragged:
        rows, nodes = case["tokens"].shape
        case["count"] = torch.randint(1, nodes + 1, (rows,), generator=torch.Generator().manual_seed(seed))
    return case


CASES = [
    {"nodes": 1, "vocabulary": 5},
    {"nodes": 6, "vocabulary": 11, "drawn": True},
    {"nodes": 6, "vocabulary": 11, "drawn": True, "ragged": True},
    {"nodes": 6, "vocabulary": 11, "relaxed": True, "ragged": True},
    {"nodes": 6, "vocabulary": 9, "drawn": True, "relaxed": True},
    {"nodes": 9, "vocabulary": 33, "drawn": True, "dtype": torch.bfloat16},
]
