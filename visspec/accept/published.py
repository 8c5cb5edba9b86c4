"""The residuals of LANTERN's published code, reproduced for comparisons, in float64, node by node.

After a rejection of x, with B the k + 1 codes nearest to x if at least one neighbour was within the bound, else
empty (as in the code of both papers; the set whose mass is added is smaller than B):

    point masses (LANTERN's dynamic tree)     p <- p without x and B
    draws (LANTERN++'s static tree)           p <- [p - q]+ outside B, p itself on B

renormalised, and uniform if that is zero; later siblings and the corrected token use this p. The output's distribution
does not follow from f alone, so the drift of a tested node is the total variation between its distribution and the
distribution after one test, computed from the vectors (for samples: averaged over x ~ q). Their sum is an upper bound
for the round, with equality if no node has siblings. The displacement is not measured here.

For samples that average takes nearly all of the time; it runs over the codes that can be rejected.
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
    """The verdict of the published rule. logs: p holds log-distributions. On the host, for tested nodes only, on numpy
    views of the tensors; those of another device are copied, which waits for it.
    """
    device, p_BNV = p_BNV.device, p_BNV.cpu()
    x_BN, over_BN = _read(draft.value), _read(draft.tree.parent.expand_as(draft.value))
    real_BN = np.ones_like(x_BN, bool) if draft.real is None else _read(draft.real)
    q_BNV = None if draft.q is None else _read(categorical(draft.q).p)
    near, coin_BN = _read(bounds.table), _read(coins_BN)
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
    following_B = draw(torch.stack(last), draw_B.double().cpu())
    path, length, drift = map(torch.from_numpy, (path_BD, length_B, drift_B))
    return Verdict(*(part.to(device) for part in (path, length, following_B, drift)))


def _read(x: Tensor) -> np.ndarray:
    return host(x.cpu())


def _law(p_V: Tensor, logs: bool) -> np.ndarray:
    return host((p_V.softmax(-1) if logs else p_V).double())


def _point_on_host(x, law_V, near, lend):
    """Test of a point mass: acceptance probability, distribution after a rejection, total variation."""
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
    """The same of a draw x ~ q; the total variation is that of the distribution averaged over x. R: the codes that can
    be rejected, for which q exceeds p plus the neighbours' mass.
    """
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
