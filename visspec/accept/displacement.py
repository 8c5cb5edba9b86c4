"""How far relaxed acceptance moves an image in the decoder's latent space: E ||e(x) - e(y)||, summed over a round.

x was accepted with probability f where the exact rule has f*. Toss both with one coin: given that x was accepted, the
exact rule would have rejected it with probability (f - f*)/f and drawn y from its residual. This meter adds that
probability times the mean of ||e(x) - e(y)|| over y for every accepted node. Total variation says how much mass a rule
displaces (all rules pay alike for acceptance); this says how far. Grammar ids, behind the codes, are nowhere.
B rows, N nodes, D path steps, V vocabulary, K codes, E features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from visspec.kernels.common import TINY, host
from visspec.tree import branch
from visspec.types import Draft


def expected(draft: Draft, p_BNV: Tensor, mass_BD: Tensor, path_BD: Tensor, codes_KE: Tensor) -> Tensor:
    """(B,) expected displacement of the accepted nodes; mass_BD is what the rule added to the nodes of the path."""
    tree = draft.tree
    return torch.ops.visspec.displacement(
        draft.tokens, tree.parent, p_BNV, draft.q, mass_BD, path_BD, codes_KE, tree.chain, branch(tree)
    )


def walked(
    tokens_BN: Tensor, parent: Tensor, p_BNV: Tensor, q_BNV: Tensor | None, mass_BD: Tensor, path_BD: Tensor,
    codes_KE: Tensor, chain: bool, branch: int,
) -> Tensor:  # fmt: skip
    """The CPU path: a walk over the accepted nodes that borrowed, on numpy views. A CPU has no device to wait for."""
    x_BN, law_BNV, lent_BD, path_BD = host(tokens_BN), host(p_BNV), host(mass_BD), host(path_BD)
    over_BN, q_BNV = host(parent.expand_as(tokens_BN)), None if q_BNV is None else host(q_BNV)
    moves = []  # row, code, what the exact rule draws from without it, the chance that it does over that law's sum
    for b, d in zip(*np.where((path_BD[:, 1:] > 0) & (lent_BD > 0))):
        above, n = path_BD[b, d], path_BD[b, d + 1]
        x, law = x_BN[b, n], law_BNV[b, above]
        earlier = np.where((over_BN[b, :n] == above) & (x_BN[b, :n] >= 0))[0]
        if q_BNV is None:
            rest, drawn = law.copy(), 1.0
            rest[x_BN[b, earlier]] = rest[x] = 0.0
            here = law[x] / max(law[x] + rest.sum(), TINY)
        else:
            for m in earlier:
                law = np.maximum(law - q_BNV[b, m], 0.0)
                law /= max(law.sum(), TINY)
            rest, drawn = np.maximum(law - q_BNV[b, n], 0.0), max(q_BNV[b, n, x], TINY)
            here = law[x]
        exact, left = min(here / drawn, 1.0), rest.sum()
        gain = min(lent_BD[b, d] / drawn, 1.0 - exact)
        if x < len(codes_KE) and gain > 0 and left > 0:
            moves.append((b, x, rest[: len(codes_KE)], gain / ((exact + gain) * left)))
    total_B = np.zeros(len(x_BN), np.float32)
    if moves:
        rows, codes, rests, chances = map(np.array, zip(*moves))
        far = host(torch.cdist(codes_KE[torch.from_numpy(codes)], codes_KE))
        np.add.at(total_B, rows, chances * np.einsum("mk,mk->m", rests, far))
    return torch.from_numpy(total_B)


def batched(
    tokens_BN: Tensor, parent: Tensor, p_BNV: Tensor, q_BNV: Tensor | None, mass_BD: Tensor, path_BD: Tensor,
    codes_KE: Tensor, chain: bool, branch: int,
) -> Tensor:  # fmt: skip
    """The path of a device: all steps of all rows at once, and nothing is read on the host."""
    on_BD, q_BDV, mass_BD1 = path_BD[:, 1:] > 0, q_BNV, mass_BD[..., None]
    if chain:
        x_BD1 = tokens_BN[:, 1:, None].clamp(min=0)
        law_BDV, q_BDV = p_BNV[:, :-1], None if q_BNV is None else q_BNV[:, 1:]
        rest_BDV = law_BDV.scatter(2, x_BD1, 0.0) if q_BNV is None else None
    else:
        node_BD, above_BD = path_BD[:, 1:].clamp(min=0), path_BD[:, :-1].clamp(min=0)
        rows = torch.arange(len(p_BNV), device=p_BNV.device)[:, None]
        x_BD1 = tokens_BN.gather(1, node_BD)[..., None]
        law_BDV = p_BNV[rows, above_BD]
        index = torch.arange(tokens_BN.shape[1], device=p_BNV.device)
        tried_BDN = (parent[:, None] == above_BD[..., None]) & (index <= node_BD[..., None])
        tried_BDN &= (tokens_BN >= 0)[:, None]
        if q_BNV is None:
            ids_BDN = tokens_BN.clamp(min=0)[:, None].expand_as(tried_BDN)
            rest_BDV = law_BDV.scatter_reduce(2, ids_BDN, (~tried_BDN).to(law_BDV.dtype), "amin")
        else:
            law_BDV = _after_siblings(law_BDV, q_BNV, tried_BDN & (index < node_BD[..., None]), rows, branch - 1)
            q_BDV = q_BNV[rows, node_BD]
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


def _after_siblings(law_BDV: Tensor, q_BNV: Tensor, earlier_BDN: Tensor, rows: Tensor, most: int) -> Tensor:
    """The renormalised residual under which a node was tried after its earlier drawn siblings, `most` at most.

    With u_0 = p, M_0 = 1, u_j = u_{j-1} - M_{j-1} q_j and M_j = sum [u_j]+, it is [u_j]+ / M_j (`kernels.accept`).
    """
    if most < 1:
        return law_BDV
    size = q_BNV.shape[1]
    index = torch.arange(size, device=law_BDV.device)
    order_BDR = torch.where(earlier_BDN, index, size).sort(-1).values[..., :most]
    mass_BD1 = torch.ones_like(law_BDV[..., :1])
    for there_BD, n_BD in zip((order_BDR < size).unbind(-1), order_BDR.clamp(max=size - 1).unbind(-1)):
        law_BDV = torch.addcmul(law_BDV, there_BD[..., None] * mass_BD1, q_BNV[rows, n_BD], value=-1.0)
        mass_BD1 = law_BDV.clamp(min=0.0).sum(-1, keepdim=True)
    return law_BDV.clamp_(min=0.0) / mass_BD1


def between(x_BD: Tensor, y_BD: Tensor, codes_KE: Tensor) -> Tensor:
    """(B, D) distances of two codes; 0 where one of the ids is grammar."""
    last = len(codes_KE) - 1
    far_BD = (codes_KE[x_BD.clamp(0, last)] - codes_KE[y_BD.clamp(0, last)]).norm(dim=-1)
    return far_BD * ((x_BD <= last) & (y_BD <= last))


def _fake(tokens_BN, parent, p_BNV, q_BNV, mass_BD, path_BD, codes_KE, chain, branch):
    return p_BNV.new_empty(len(tokens_BN), dtype=torch.float32)


# Not `custom_op`, as in `kernels`: its wrapper alone takes 40 us a call, a fifth of a small verification.
torch.library.define(
    "visspec::displacement",
    "(Tensor tokens, Tensor parent, Tensor p, Tensor? q, Tensor mass, Tensor path, Tensor codes,"
    " bool chain, int branch) -> Tensor",
)
torch.library.impl("visspec::displacement", "CPU", walked)
torch.library.impl("visspec::displacement", "CUDA", batched)
torch.library.register_fake("visspec::displacement", _fake)
