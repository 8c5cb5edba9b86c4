"""The residuals of LANTERN's published code, reproduced for comparisons, in float64, node by node.

After a rejection of x, with B the k + 1 codes nearest to x if at least one neighbour was within the bound, else
empty (as in the code of both papers; the set whose mass is added is smaller than B):

    point masses (LANTERN's dynamic tree)     p <- p without x and B
    draws (LANTERN++'s static tree)           p <- [p - q]+ outside B, p itself on B

renormalised, and uniform if that is zero; later siblings and the corrected token use this p. The output's distribution
does not follow from f alone, so the drift of a tested node is the total variation between its distribution and the
distribution after one test, computed from the vectors (for samples: averaged over x ~ q). Their sum is an upper bound
for the round, with equality if no node has siblings. The displacement is not measured here.

For samples that average takes nearly all of the time; on a CPU it runs over the codes that can be rejected.
B rows, N nodes, D path nodes, V vocabulary, R codes, k neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from visspec.distributions import categorical, draw
from visspec.kernels.common import host
from visspec.types import Draft, Verdict

TINY = 1e-30
FEW = 32  # neighbours read first; sufficient for most codes
ROWS = 512  # codes whose neighbours are looked up at a time


class Bounds(NamedTuple):
    """What a code may borrow: of its k neighbours in a table (V, k + 1), whose last one the rule does not use, up to a
    mass `delta` or a factor `lam`. codes: number of codes; larger ids are grammar.
    """

    table: Tensor
    k: int
    codes: int
    delta: float | None = None
    lam: float | None = None


def walk(draft: Draft, p_BNV: Tensor, coins_BN: Tensor, draw_B: Tensor, bounds: Bounds, logs: bool = False) -> Verdict:
    """The verdict of the published rule. logs: p holds log-distributions."""
    if p_BNV.device.type == "cpu":
        return walk_rows(draft, p_BNV, coins_BN, draw_B, bounds, logs)
    return walk_batch(draft, p_BNV.softmax(-1) if logs else p_BNV, coins_BN, draw_B, bounds)


def walk_rows(draft: Draft, p_BNV: Tensor, coins_BN: Tensor, draw_B: Tensor, bounds: Bounds, logs: bool) -> Verdict:
    """The CPU path: tested nodes only, on numpy views of the tensors."""
    x_BN, over_BN = host(draft.value), host(draft.tree.parent.expand_as(draft.value))
    real_BN = np.ones_like(x_BN, bool) if draft.real is None else host(draft.real)
    q_BNV = None if draft.q is None else host(categorical(draft.q).p)
    near, coin_BN = host(bounds.table), host(coins_BN)
    lend = partial(_lent_on_host, *bounds[1:])
    path_BD = np.full((len(x_BN), draft.levels + 1), -1)
    length_B, drift_B, last = np.ones(len(x_BN), np.int64), np.zeros(len(x_BN), np.float32), []
    for b in range(len(x_BN)):
        current, law_V, moved = 0, _law(p_BNV[b, 0], logs), 0.0
        path_BD[b, 0] = 0
        for n in range(1, x_BN.shape[1]):
            x = int(x_BN[b, n])
            if over_BN[b, n] != current or not real_BN[b, n]:
                continue
            if q_BNV is None:
                f, rest_V, apart = _point_on_host(x, law_V, near, lend)
            else:
                f, rest_V, apart = _drawn_on_host(x, law_V, q_BNV[b, n].astype(np.float64), near, lend)
            moved += apart
            if coin_BN[b, n] < f:
                current, law_V = n, _law(p_BNV[b, n], logs)
                path_BD[b, length_B[b]] = n
                length_B[b] += 1
            else:
                law_V = rest_V
        drift_B[b] = moved
        last.append(torch.from_numpy(law_V))
    following_B = draw(torch.stack(last), draw_B.double())
    path, length, drift = map(torch.from_numpy, (path_BD, length_B, drift_B))
    return Verdict(path, length, following_B, drift)


def _law(p_V: Tensor, logs: bool) -> np.ndarray:
    return host((p_V.softmax(-1) if logs else p_V).double())


def _point_on_host(x, law_V, near, lend):
    """As `_point`, for one row."""
    lent, some, _ = (part[0] for part in lend(law_V, np.array([x]), near[x : x + 1]))
    f, rest_V = min(1.0, law_V[x] + lent), law_V.copy()
    rest_V[x] = 0.0
    if some:
        rest_V[near[x]] = 0.0
    left = rest_V.sum()
    if not left > 0:
        rest_V = np.full_like(law_V, 1.0 / len(law_V))
        output_V = (1 - f) * rest_V
        output_V[x] += f
        return f, rest_V, 0.5 * np.abs(output_V - law_V).sum()
    rest_V /= left  # differences: x, the zeroed codes, and a common factor on all others
    return f, rest_V, 0.5 * (abs(f - law_V[x]) + abs(1.0 - f - left) + abs(1.0 - law_V[x] - left))


def _drawn_on_host(x, law_V, q_V, near, lend):
    """As `_draw_correction`, over the codes R that can be rejected, for which q exceeds p plus the neighbours' mass."""
    plain_V, shared_V = np.maximum(law_V - q_V, 0.0), np.minimum(law_V, q_V)
    over_R = np.flatnonzero(q_V > law_V)
    short_V, some_V = np.zeros_like(q_V), np.zeros(len(q_V), bool)
    for ids in np.split(over_R, range(ROWS, len(over_R), ROWS)):
        short_V[ids], some_V[ids] = _short(ids, law_V, q_V, near, lend)
    rejected_R = np.flatnonzero(short_V > 0)
    onto_V, weight_V = np.zeros_like(q_V), short_V / max(plain_V.sum(), TINY)
    lenders_R = rejected_R[some_V[rejected_R]]
    for ids in np.split(lenders_R, range(ROWS, len(lenders_R), ROWS)):
        near_Rk = near[ids]
        pair = np.flatnonzero((shared_V > 0)[near_Rk])  # pairs of a rejected code and a code that regains mass
        row, code = pair // near.shape[1], near_Rk.ravel()[pair]
        back = np.bincount(row, shared_V[code], len(ids))
        weight_V[ids] = short_V[ids] / np.maximum(plain_V.sum() + back, TINY)
        onto_V += np.bincount(code, weight_V[ids][row], len(q_V))
    output_V = q_V - short_V + plain_V * weight_V.sum() + shared_V * onto_V
    lent, some, _ = (part[0] for part in lend(law_V, np.array([x]), near[x : x + 1]))
    rest_V = plain_V.copy()
    if some:
        rest_V[near[x]] = law_V[near[x]]
    left = rest_V.sum()
    rest_V = rest_V / left if left > 0 else np.full_like(law_V, 1.0 / len(law_V))
    return min(1.0, (law_V[x] + lent) / max(q_V[x], TINY)), rest_V, 0.5 * np.abs(output_V - law_V).sum()


def _short(ids, law_V, q_V, near, lend):
    """(q (1 - f) of codes, whether any of their neighbours was within the bound)."""
    lent, some, more = lend(law_V, ids, near[ids, :FEW])
    short = q_V[ids] - law_V[ids] - lent
    if near.shape[1] > FEW and (more := np.flatnonzero(more & (short > 0))).size:
        lent, some[more], _ = lend(law_V, ids[more], near[ids[more]])
        short[more] = q_V[ids[more]] - law_V[ids[more]] - lent
    return np.maximum(short, 0.0), some


def _lent_on_host(k, codes, delta, lam, law_V, ids, near_Rk):
    """For codes: the added mass, whether any neighbour was within the bound, whether all that were read were."""
    summed_Rk = law_V[near_Rk[:, :k]].cumsum(1)
    bound = delta if lam is None else (lam - 1.0) * law_V[ids][:, None]
    within_Rk = (summed_Rk <= bound) & (ids < codes)[:, None]
    return (summed_Rk * within_Rk).max(1), within_Rk[:, 0], within_Rk[:, -1]


def walk_batch(draft: Draft, p_BNV: Tensor, coins_BN: Tensor, draw_B: Tensor, bounds: Bounds) -> Verdict:
    """The CUDA path: all rows at once, node by node, without synchronisation."""
    parent_BN, size = draft.tree.parent.expand_as(draft.value), draft.tree.size
    lend = partial(_borrowed_mass, bounds.table.long(), *bounds[1:])
    law_BV, current_B = p_BNV[:, 0].double(), torch.zeros_like(parent_BN[:, 0])
    kept_BN, drift_B = torch.zeros_like(parent_BN, dtype=torch.bool), torch.zeros_like(law_BV[:, 0])
    kept_BN[:, 0] = True
    for n in range(1, size):
        tried_B, x_B = parent_BN[:, n] == current_B, draft.value[:, n]
        if draft.real is not None:
            tried_B = tried_B & draft.real[:, n]
        if draft.q is None:
            f_B, rest_BV, moved_B = _point(x_B, law_BV, lend)
        else:
            q_BV = categorical(draft.q).p[:, n].double()
            trials = [_draw_correction(x, law, q, lend) for x, law, q in zip(x_B, law_BV, q_BV)]
            f_B, rest_BV, moved_B = (torch.stack(part) for part in zip(*trials))
        kept_BN[:, n] = tried_B & (coins_BN[:, n] < f_B)
        drift_B += moved_B * tried_B
        law_BV = torch.where(tried_B[:, None], rest_BV, law_BV)
        law_BV = torch.where(kept_BN[:, n, None], p_BNV[:, n].double(), law_BV)
        current_B = torch.where(kept_BN[:, n], n, current_B)
    index = torch.arange(size, device=p_BNV.device)
    path_BD = torch.where(kept_BN, index, size).sort(dim=1).values[:, : draft.levels + 1]
    following_B = draw(law_BV, draw_B.double())
    return Verdict(torch.where(path_BD < size, path_BD, -1), kept_BN.sum(1), following_B, drift_B.float())


def _point(x_B, law_BV, lend):
    """Test of a point mass: acceptance probability, distribution after a rejection, total variation."""
    near_Bk, lent_B, some_B = lend(law_BV, x_B)
    f_B = (law_BV.gather(1, x_B[:, None])[:, 0] + lent_B).clamp(max=1.0)
    rest_BV = law_BV.scatter(1, x_B[:, None], 0.0)
    rest_BV = _normalise(torch.where(some_B[:, None], rest_BV.scatter(1, near_Bk, 0.0), rest_BV))
    output_BV = (1 - f_B)[:, None] * rest_BV
    output_BV.scatter_add_(1, x_B[:, None], f_B[:, None])
    return f_B, rest_BV, 0.5 * (output_BV - law_BV).abs().sum(1)


def _draw_correction(x, law_V, q_V, lend):
    """The same for one row's draw x ~ q. The total variation is that of the distribution averaged over x."""
    every = torch.arange(len(law_V), device=law_V.device)
    near_Vk, lent_V, some_V = lend(law_V.expand(len(law_V), -1), every)
    f_V = ((law_V + lent_V) / q_V.clamp(min=TINY)).clamp(max=1.0)
    plain_V, shared_V = (law_V - q_V).clamp(min=0.0), torch.minimum(law_V, q_V)
    # Rejecting y leaves (plain + shared on B(y)), divided by its sum: summed over y without a matrix of distributions.
    back_Vk = shared_V[near_Vk] * some_V[:, None]
    weight_V = q_V * (1 - f_V) / (plain_V.sum() + back_Vk.sum(1)).clamp(min=TINY)
    onto_Vk = (weight_V * some_V)[:, None].expand_as(near_Vk)
    onto_V = torch.zeros_like(law_V).scatter_add(0, near_Vk.flatten(), onto_Vk.flatten())
    output_V = q_V * f_V + plain_V * weight_V.sum() + shared_V * onto_V
    # a plain index x would synchronise
    f, near_k, some = (each.index_select(0, x[None])[0] for each in (f_V, near_Vk, some_V))
    rest_V = torch.where(some, plain_V.scatter(0, near_k, law_V[near_k]), plain_V)
    return f, _normalise(rest_V), 0.5 * (output_V - law_V).abs().sum()


def _borrowed_mass(table, k, codes, delta, lam, law_RV, x_R):
    """Of codes x under their distributions: the k + 1 neighbours, the mass they lend, and whether any was within the
    bound.
    """
    near_Rk = table[x_R]
    summed_Rk = law_RV.gather(1, near_Rk[:, :k]).cumsum(1)
    bound = delta if lam is None else (lam - 1.0) * law_RV.gather(1, x_R[:, None])
    within_Rk = (summed_Rk <= bound) & (x_R < codes)[:, None]
    return near_Rk, (summed_Rk * within_Rk).amax(1), within_Rk.any(1)


def _normalise(law):
    total = law.sum(-1, keepdim=True)
    return torch.where(total > 0, law / total.clamp(min=TINY), 1.0 / law.shape[-1])
