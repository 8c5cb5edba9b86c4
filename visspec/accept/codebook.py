"""Tables of nearest codes in a codebook, for image rules. Shapes: K codes, E features, V vocabulary (V >= K: larger ids
are grammar tokens, without neighbours), k neighbours. Tables are computed once per codebook, on its device, and the
last few are cached.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from visspec.types import Capabilities

_tables: deque[tuple[Tensor, tuple[int, int], Tensor]] = deque(maxlen=8)  # (codebook, (k, vocab), table)


def require_codebook(capabilities: Capabilities, rule: str, k: int = 1, itself: bool = False) -> Tensor:
    """Return the target's codebook. Raises ValueError if there is none, or it has too few codes for k neighbours."""
    codebook = capabilities.codebook
    if codebook is None:
        raise ValueError(
            f"acceptance: {rule} needs the codebook of the model's codes, and this pipeline has no codec."
            " Give parts={'codec': ...}, or convert the weights with --vq."
        )
    most = len(codebook) - (not itself)
    if k > most:
        raise ValueError(f"k: got {k}, expected at most {most} neighbours in a codebook of {len(codebook)}.")
    return codebook.detach()


def neighbours(codebook_KE: Tensor, k: int, vocab: int) -> Tensor:
    """Return the k codes nearest to each code, nearest first, (V, k) int32. The row of a grammar id repeats that id."""
    for known_KE, sizes, table in tuple(_tables):  # other threads may add tables meanwhile
        if sizes == (k, vocab) and known_KE.device == codebook_KE.device and torch.equal(known_KE, codebook_KE):
            return table
    near_Kk = nearest(codebook_KE.float(), k).int()
    grammar = torch.arange(len(near_Kk), max(vocab, len(near_Kk)), device=near_Kk.device)
    table = torch.cat([near_Kk, grammar[:, None].expand(-1, k).int()])
    _tables.append((codebook_KE.clone(), (k, vocab), table))
    return table


def nearest(codes_KE: Tensor, k: int, chunk: int = 256) -> Tensor:
    """Return (K, k) int64: for each code i, the k codes j != i with the smallest |e_i|^2 + |e_j|^2 - 2 e_i . e_j, ties
    by index. Uses one matrix product and one selection per `chunk` of rows.
    """
    squared, order = codes_KE.square().sum(1), torch.arange(len(codes_KE), device=codes_KE.device)
    table = order.new_empty(len(codes_KE), k)
    for rows in order.split(chunk):
        far = torch.addmm(squared, codes_KE[rows], codes_KE.T, alpha=-2).add_(squared[rows, None]).clamp_(min=0)
        # bits of non-negative floats are ordered like the floats; with the index below them, keys are unique
        key = far.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(order)
        key[order[: len(rows)], rows] = torch.iinfo(torch.int64).max
        table[rows] = key.topk(k, dim=1, largest=False).values & 0xFFFFFFFF
    return table
