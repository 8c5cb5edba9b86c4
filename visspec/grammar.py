"""Tokens that are known before they are sampled. They need no drafter.

Images: the layout fixes tokens such as the end of a row or of the image. `Request.fixed` has the fixed id of every
output position, or FREE. The target's distribution there is a point mass, and drafts are filled in before they are
verified, so these tokens are always accepted.
Text: processors such as those of a JSON schema may leave only one continuation. These forced tokens are drafted like
any others; if the text can be tokenised in several ways, the target decides.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Categorical
from visspec.types import FREE, Draft, State

MOST_FORCED = 64  # maximum number of forced tokens in a row's draft


def fixed_ids(state: State, ahead: Tensor) -> Tensor:
    """Return the fixed id, or FREE, at `ahead` (1|B, N) positions after each live row's last token: (B, N)."""
    fixed = state.request.fixed
    assert fixed is not None
    newest = to_device([[len(state.tokens[row]) - 1] for row in state.rows], fixed.device)
    return fixed[(newest + ahead).clamp(max=len(fixed) - 1)]


def constrain(logits_BNV: Tensor, draft: Draft, state: State) -> Tensor:
    """Return log-distributions after each node, with point masses where `Request.fixed` fixes the next token."""
    following_BN = fixed_ids(state, draft.tree.depth + 1)
    point = torch.full_like(logits_BNV, float("-inf")).scatter_(-1, following_BN.clamp(min=0)[..., None], 0.0)
    return torch.where((following_BN == FREE)[..., None], logits_BNV, point)


def fill(draft: Draft, state: State) -> Draft:
    """Insert the ids of `Request.fixed` into a draft, as point masses in q.

    Args:
        draft: The draft.
        state: The request.
    """
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


def draft_forced(state: State) -> Draft | None:
    """Return a chain of each row's forced tokens; None if there are fewer tokens than rows."""
    runs = [forced_tokens(state, row) for row in state.rows]
    return trees.ragged_draft(state.pending, runs) if sum(map(len, runs)) >= len(runs) else None


def forced_tokens(state: State, row: int) -> list[int]:
    """Return the tokens that must follow those of a row, up to its end or the first choice."""
    own, index = state.request.of(row)
    run: list[int] = []
    if not (processors := own.sampling.row_processors):
        return run
    ids = state.output.ids(row)[0].tolist()
    while len(run) < min(state.room(row) - 1, MOST_FORCED) and not (run and run[-1] in own.eos):
        token = next((t for each in processors if (t := each.forced_token(index, ids + run)) is not None), None)
        if token is None:
            break
        run.append(token)
    return run
