"""Displacement of relaxed acceptance in the decoder's latent space: E ||e(x) - e(y)||, summed over a round.

x was accepted with probability f, by the exact rule with f*. With the same random number for both, given that x was
accepted, the exact rule would have rejected it with probability (f - f*)/f, the gain of the node, and drawn y from its
residual. The displacement is the sum over accepted nodes of the gain times the mean of ||e(x) - e(y)|| over y. Total
variation measures how much mass a rule moves, displacement how far. Ids above the codes (grammar) have no vector.

Computed by `accept_tree`: on a CPU its loop over the nodes has the residual already, on CUDA all accepted nodes are
computed at once. B rows, N nodes, D path nodes, V vocabulary, K codes, E features.
"""

import numpy as np
import torch
from torch import Tensor

NARROW = 32  # up to so many features, distances to all codes are cheaper than selecting codes


def coordinates(codes: Tensor) -> Tensor:
    """Codes (K, E) -> the table for distances (E + 2, K) float32: codes, squared norms and ones."""
    codes = codes.detach().float()
    table = torch.cat([codes.T, codes.square().sum(1)[None], codes.new_ones(1, len(codes))])
    return table if len(table) <= NARROW else table.T.contiguous().T  # contiguous per code


def mean_distance(x: int, rest: np.ndarray, table: np.ndarray) -> float:
    """Mean of ||e(x) - e(y)|| with y drawn in proportion to rest (V,), on the host; 0 if rest sums to 0."""
    left, count = float(rest.sum()), table.shape[1]
    if x >= count or not left > 0:
        return 0.0
    query, weight = table[:, x].copy(), rest[:count]
    query[:-2] *= -2.0
    query[-2:] = 1.0, query[-2]
    if len(table) > NARROW and 4 * len(likely := np.flatnonzero(weight > 0)) < count:
        table, weight = table.T[likely].T, weight[likely]
    squared = query @ table
    far = np.sqrt(np.maximum(squared, 0.0, out=squared), out=squared)
    return float(weight @ far) / left


def between(x: Tensor, y: Tensor, codes: Tensor) -> Tensor:
    """Distances of codes x and y, ids of one shape, by their vectors (K, E); 0 if one of the ids is grammar."""
    last = len(codes) - 1
    far = (codes[x.clamp(0, last)] - codes[y.clamp(0, last)]).norm(dim=-1)
    return far * ((x <= last) & (y <= last))


def batched_displacement(
    tokens: Tensor, parent: Tensor, p: Tensor, q: Tensor | None, path: Tensor, gain: Tensor, table: Tensor, branch: int
) -> Tensor:
    """The displacement on CUDA, (B,): all accepted nodes of all rows at once, without synchronisation.

    gain (B, D), of the nodes of path (B, D); branch: maximum number of children; the others as in `accept_tree`.
    """
    node, above = path[:, 1:].clamp(min=0), path[:, :-1].clamp(min=0)
    rows = torch.arange(len(p), device=p.device)[:, None]
    index = torch.arange(tokens.shape[1], device=p.device)
    tried = (parent.expand_as(tokens)[:, None] == above[..., None]) & (index <= node[..., None])
    law = p[rows, above]
    if q is None:
        ids = tokens.clamp(min=0)[:, None].expand_as(tried)
        rest = law.scatter_reduce(2, ids, (~tried).to(law.dtype), "amin")
    else:
        law = _after_siblings(law, q, tried & (index < node[..., None]), rows, branch - 1)
        rest = (law - q[rows, node]).clamp_(min=0.0)
    left, x, count = rest.sum(-1), tokens.gather(1, node), table.shape[1]
    codes, norms, unit = table[:, x.clamp(0, count - 1).flatten()].split([len(table) - 2, 1, 1])
    squared = torch.cat([-2.0 * codes, unit, norms]).T @ table
    far = squared.clamp_(min=0.0).sqrt_().unflatten(0, x.shape)
    moved = gain[:, 1:] * (rest[..., :count] * far).sum(-1) / left
    return torch.where((path[:, 1:] > 0) & (x < count) & (left > 0), moved, 0.0).sum(1).float()


def _after_siblings(law, q, earlier, rows, most):
    """The renormalised residual (B, D, V) under which a node was tested after its sampled siblings, `most` at most.

    earlier (B, D, N) marks them. With u_0 = p, M_0 = 1, u_j = u_{j-1} - M_{j-1} q_j and M_j = sum [u_j]+, it is
    [u_j]+ / M_j.
    """
    if most < 1:
        return law
    size = q.shape[1]
    index = torch.arange(size, device=law.device)
    order = torch.where(earlier, index, size).sort(-1).values[..., :most]
    mass = torch.ones_like(law[..., :1])
    for there, n in zip((order < size).unbind(-1), order.clamp(max=size - 1).unbind(-1)):
        law = torch.addcmul(law, there[..., None] * mass, q[rows, n], value=-1.0)
        mass = law.clamp(min=0.0).sum(-1, keepdim=True)
    return law.clamp_(min=0.0) / mass
