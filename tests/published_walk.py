"""The published residuals of LANTERN (`visspec.accept.published`), all rows at once and node by node: a reference for
the library's walk. B rows, V vocabulary, k neighbours.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from visspec.accept.published import TINY, Bounds
from visspec.distributions import categorical, draw
from visspec.types import Draft, Verdict


def walk_batch(draft: Draft, p_BNV: Tensor, coins_BN: Tensor, draw_B: Tensor, bounds: Bounds) -> Verdict:
    """The verdict, without synchronisation."""
    parent_BN, size = draft.tree.parent.expand_as(draft.value), draft.tree.size
    lend = partial(borrowed_mass, bounds.table.long(), *bounds[1:])
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
            trials = [draw_correction(x, law, q, lend) for x, law, q in zip(x_B, law_BV, q_BV)]
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


def draw_correction(x, law_V, q_V, lend):
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


def borrowed_mass(table, k, codes, delta, lam, law_RV, x_R):
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
