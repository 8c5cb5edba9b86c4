"""How far relaxed acceptance moves an image in the decoder's latent space: E ||e(x) - e(y)||, summed over a round.

x was accepted with probability f where the exact rule has f*. Toss both with one coin: given that x was accepted, the
exact rule would have rejected it with probability (f - f*)/f and drawn y from its residual. This meter adds that
probability times the mean of ||e(x) - e(y)|| over y for every accepted node. Total variation says how much mass a rule
displaces (all rules pay alike for acceptance); this says how far. Grammar ids, behind the codes, are nowhere.
B rows, N nodes, D path steps, V vocabulary, K codes, E features.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from visspec.types import Draft, Tree

_branches: WeakKeyDictionary[Tree, int] = WeakKeyDictionary()


def expected(draft: Draft, p_BNV: Tensor, mass_BD: Tensor, path_BD: Tensor, codes_KE: Tensor) -> Tensor:
    """(B,) expected displacement of the accepted nodes; mass_BD is what the rule added to the nodes of the path."""
    on_BD, q_BDV, mass_BD1 = path_BD[:, 1:] > 0, draft.q, mass_BD[..., None]
    if draft.tree.chain:
        x_BD1 = draft.tokens[:, 1:, None].clamp(min=0)
        law_BDV, q_BDV = p_BNV[:, :-1], None if q_BDV is None else q_BDV[:, 1:]
        rest_BDV = law_BDV.scatter(2, x_BD1, 0.0) if q_BDV is None else None
    else:
        node_BD, above_BD = path_BD[:, 1:].clamp(min=0), path_BD[:, :-1].clamp(min=0)
        rows = torch.arange(len(p_BNV), device=p_BNV.device)[:, None]
        x_BD1 = draft.tokens.gather(1, node_BD)[..., None]
        law_BDV, q_BDV = p_BNV[rows, above_BD], None if q_BDV is None else q_BDV[rows, node_BD]
        tried_BDN = _tried(draft, node_BD, above_BD)
        if q_BDV is None:
            ids_BDN = draft.tokens.clamp(min=0)[:, None].expand_as(tried_BDN)
            rest_BDV = law_BDV.scatter_reduce(2, ids_BDN, (~tried_BDN).to(law_BDV.dtype), "amin")
        else:
            law_BDV = _after_siblings(draft, law_BDV, node_BD, tried_BDN, rows)
    here_BD1 = law_BDV.gather(2, x_BD1)
    if q_BDV is None:
        left_BD1 = rest_BDV.sum(-1, keepdim=True)
        exact_BD1 = here_BD1 / (here_BD1 + left_BD1)
    else:
        rest_BDV = (law_BDV - q_BDV).clamp_(min=0.0)
        left_BD1, q_BD1 = rest_BDV.sum(-1, keepdim=True), q_BDV.gather(2, x_BD1)
        exact_BD1, mass_BD1 = (here_BD1 / q_BD1).clamp_(max=1.0), mass_BD1 / q_BD1
    gain_BD1 = torch.minimum(mass_BD1, 1.0 - exact_BD1).clamp_(min=0.0)
    x_BD, vocab = x_BD1[..., 0], p_BNV.shape[-1]
    if len(codes_KE) < vocab:
        on_BD, rest_BDV = on_BD & (x_BD < len(codes_KE)), rest_BDV[..., : len(codes_KE)]
        x_BD = x_BD.clamp(max=len(codes_KE) - 1)
    far_BD1 = (rest_BDV * torch.cdist(codes_KE[x_BD], codes_KE)).sum(-1, keepdim=True)
    moved_BD1 = gain_BD1 * far_BD1 / ((exact_BD1 + gain_BD1) * left_BD1)  # nan where the law leaves nothing to move to
    return torch.where(on_BD, moved_BD1[..., 0], 0.0).nansum(1).float()


def between(x_BD: Tensor, y_BD: Tensor, codes_KE: Tensor) -> Tensor:
    """(B, D) distances of two codes; 0 where one of the ids is grammar."""
    last = len(codes_KE) - 1
    far_BD = (codes_KE[x_BD.clamp(0, last)] - codes_KE[y_BD.clamp(0, last)]).norm(dim=-1)
    return far_BD * ((x_BD <= last) & (y_BD <= last))


def _tried(draft: Draft, node_BD: Tensor, above_BD: Tensor) -> Tensor:
    """(B, D, N): the siblings that were tried when a node was accepted, itself included."""
    index = torch.arange(draft.tree.size, device=node_BD.device)
    before_BDN = (draft.tree.parent[:, None] == above_BD[..., None]) & (index <= node_BD[..., None])
    return before_BDN & (draft.tokens >= 0)[:, None]


def _after_siblings(draft: Draft, law_BDV: Tensor, node_BD: Tensor, tried_BDN: Tensor, rows: Tensor) -> Tensor:
    """Drawn siblings: the renormalised residual under which the accepted node was tried."""
    size = draft.tree.size
    index = torch.arange(size, device=node_BD.device)
    order_BDN = torch.where(tried_BDN & (index < node_BD[..., None]), index, size).sort(-1).values
    for rank in range(_branch(draft.tree) - 1):
        n_BD = order_BDN[..., rank]
        rest_BDV = (law_BDV - draft.q[rows, n_BD.clamp(max=size - 1)]).clamp_(min=0.0)
        rest_BDV /= rest_BDV.sum(-1, keepdim=True)
        law_BDV = torch.where((n_BD < size)[..., None], rest_BDV, law_BDV)
    return law_BDV


def _branch(tree: Tree) -> int:
    """Most children of a node. Asked of the device once for a shape; shapes of one row each count as the worst."""
    if tree.parent.shape[0] > 1:
        return tree.size - 1
    if tree not in _branches:
        _branches[tree] = int((tree.parent[:, :, None] == tree.parent[:, None]).sum(-1).amax())
    return _branches[tree]
