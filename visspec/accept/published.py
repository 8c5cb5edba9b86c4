"""The residuals of LANTERN's published code, reproduced for comparisons: a slow walk in float64, node by node.

After a rejection of x, with B the k + 1 codes nearest to x where at least one neighbour had been within the bound, and
empty where none had (facts read in the code of both papers; the set that lent its mass is smaller than B):

    point masses (LANTERN's dynamic tree)     p <- p without x and B
    draws (LANTERN++'s static tree)           p <- [p - q]+ outside B, p itself on B

renormalised, and uniform where nothing is left; later siblings and the corrected token follow this p. The output's law
is then not known from f alone, so the drift of a tried node is the true total variation between the law it was tried
under and the law of trying it once, computed from the vectors (for draws: averaged over x ~ q). Their sum bounds that
of the round and is equal to it where no node has siblings. The displacement is not measured here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from visspec import sampling
from visspec.types import Draft, Verdict

TINY = 1e-30


def walk(
    draft: Draft, p_BNV: Tensor, coins_BN: Tensor, draw_B: Tensor, table: Tensor, k: int, codes: int,
    delta: float | None = None, lam: float | None = None,
) -> Verdict:  # fmt: skip
    """The verdict of the published rule. table (V, k + 1): neighbours, the last of them beyond the rule's own k."""
    parent_BN, size = draft.tree.parent.expand_as(draft.tokens), draft.tree.size
    lend = partial(_lent, table.long(), k, codes, delta, lam)
    law_BV, current_B = p_BNV[:, 0].double(), torch.zeros_like(parent_BN[:, 0])
    kept_BN, drift_B = torch.zeros_like(parent_BN, dtype=torch.bool), torch.zeros_like(law_BV[:, 0])
    kept_BN[:, 0] = True
    for n in range(1, size):
        tried_B = (parent_BN[:, n] == current_B) & (draft.tokens[:, n] >= 0)
        x_B = draft.tokens[:, n].clamp(min=0)
        if draft.q is None:
            f_B, rest_BV, moved_B = _point(x_B, law_BV, lend)
        else:
            trials = [_drawn(x, law, q.double(), lend) for x, law, q in zip(x_B, law_BV, draft.q[:, n])]
            f_B, rest_BV, moved_B = (torch.stack(part) for part in zip(*trials))
        kept_BN[:, n] = tried_B & (coins_BN[:, n] < f_B)
        drift_B += moved_B * tried_B
        law_BV = torch.where(tried_B[:, None], rest_BV, law_BV)
        law_BV = torch.where(kept_BN[:, n, None], p_BNV[:, n].double(), law_BV)
        current_B = torch.where(kept_BN[:, n], n, current_B)
    index = torch.arange(size, device=p_BNV.device)
    path_BD = torch.where(kept_BN, index, size).sort(dim=1).values[:, : draft.levels + 1]
    following_B = sampling.draw(law_BV, draw_B.double())
    return Verdict(torch.where(path_BD < size, path_BD, -1), kept_BN.sum(1), following_B, drift_B.float())


def _point(x_B, law_BV, lend):
    """Trying a point mass: the chance to accept it, the law after a rejection, the total variation of the trial."""
    near_Bk, lent_B, some_B = lend(law_BV, x_B)
    f_B = (law_BV.gather(1, x_B[:, None])[:, 0] + lent_B).clamp(max=1.0)
    rest_BV = law_BV.scatter(1, x_B[:, None], 0.0)
    rest_BV = _normalised(torch.where(some_B[:, None], rest_BV.scatter(1, near_Bk, 0.0), rest_BV))
    output_BV = (1 - f_B)[:, None] * rest_BV
    output_BV.scatter_add_(1, x_B[:, None], f_B[:, None])
    return f_B, rest_BV, 0.5 * (output_BV - law_BV).abs().sum(1)


def _drawn(x, law_V, q_V, lend):
    """The same for one row's draw x ~ q. The total variation is that of the law averaged over x."""
    every = torch.arange(len(law_V), device=law_V.device)
    near_Vk, lent_V, some_V = lend(law_V.expand(len(law_V), -1), every)
    f_V = ((law_V + lent_V) / q_V.clamp(min=TINY)).clamp(max=1.0)
    plain_V, shared_V = (law_V - q_V).clamp(min=0.0), torch.minimum(law_V, q_V)
    # Rejecting y leaves (plain + shared on B(y)), divided by its sum: summed over y without a matrix of laws.
    back_Vk = shared_V[near_Vk] * some_V[:, None]
    weight_V = q_V * (1 - f_V) / (plain_V.sum() + back_Vk.sum(1)).clamp(min=TINY)
    onto_Vk = (weight_V * some_V)[:, None].expand_as(near_Vk)
    onto_V = torch.zeros_like(law_V).scatter_add(0, near_Vk.flatten(), onto_Vk.flatten())
    output_V = q_V * f_V + plain_V * weight_V.sum() + shared_V * onto_V
    # As a plain index x would be waited for.
    f, near_k, some = (each.index_select(0, x[None])[0] for each in (f_V, near_Vk, some_V))
    rest_V = torch.where(some, plain_V.scatter(0, near_k, law_V[near_k]), plain_V)
    return f, _normalised(rest_V), 0.5 * (output_V - law_V).abs().sum()


def _lent(table, k, codes, delta, lam, law_RV, x_R):
    """Of codes x under their laws: the k + 1 neighbours, the mass they lend, and whether any was within the bound."""
    near_Rk = table[x_R]
    summed_Rk = law_RV.gather(1, near_Rk[:, :k]).cumsum(1)
    bound = delta if lam is None else (lam - 1.0) * law_RV.gather(1, x_R[:, None])
    within_Rk = (summed_Rk <= bound) & (x_R < codes)[:, None]
    return near_Rk, (summed_Rk * within_Rk).amax(1), within_Rk.any(1)


def _normalised(law):
    total = law.sum(-1, keepdim=True)
    return torch.where(total > 0, law / total.clamp(min=TINY), 1.0 / law.shape[-1])
