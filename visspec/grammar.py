"""Grammar tokens of images: tokens fixed by the layout (end of row, end of image). They are never drafted.

`Request.fixed` has the fixed id of every output position, or FREE. The target's distribution there is a
point mass, and drafts are filled in before they are verified, so such tokens are always accepted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from visspec.cache import to_device
from visspec.distributions import Categorical
from visspec.types import FREE, Draft, State


def fixed_ids(state: State, ahead: Tensor) -> Tensor:
    """The fixed id, or FREE, at `ahead` (1|B, N) positions after each live row's last token: (B, N)."""
    fixed = state.request.fixed
    assert fixed is not None
    newest = to_device([[len(state.tokens[row]) - 1] for row in state.rows], fixed.device)
    return fixed[(newest + ahead).clamp(max=len(fixed) - 1)]


def constrain(logits_BNV: Tensor, draft: Draft, state: State) -> Tensor:
    """Log-distributions after each node; a point mass where the next token is fixed."""
    if state.request.fixed is None:
        return logits_BNV
    following_BN = fixed_ids(state, draft.tree.depth + 1)
    point = torch.full_like(logits_BNV, float("-inf")).scatter_(-1, following_BN.clamp(min=0)[..., None], 0.0)
    return torch.where((following_BN == FREE)[..., None], logits_BNV, point)


def fill(draft: Draft, state: State) -> Draft:
    """The draft with fixed ids inserted, as point masses in q."""
    if state.request.fixed is None or draft.tree.size == 1:
        return draft
    own_BN, free_BN = fixed_ids(state, draft.tree.depth), draft.tree.depth == 0
    if draft.real is not None:
        free_BN = free_BN | ~draft.real
    free_BN = free_BN | (own_BN == FREE)
    q = draft.q
    if q is not None:
        assert isinstance(q, Categorical)
        point = torch.zeros_like(q.p).scatter_(-1, own_BN.clamp(min=0)[..., None], 1.0)
        q = Categorical(p=torch.where(free_BN[..., None], q.p, point))
    return replace(draft, value=torch.where(free_BN, draft.value, own_BN), q=q)
