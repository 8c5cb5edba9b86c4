"""An any-order model as its own drafter: distributions of later codes given what is known, without those in between.

The pass that verifies a draft also gives, after each of its nodes, the distributions of the places after the next one
(`models.randar.target`); those after the last accepted node are the next draft's. So one network drafts and verifies
(any-subset speculative decoding, ASSD: Guo and Ermon, ICLR 2026), in one pass per round instead of two; in exchange, a
draft's distributions are not conditioned on the pending code. B rows, A later places, V codes.
"""

from __future__ import annotations

import torch

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Categorical
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict


class Ahead(Drafter):
    """levels: codes per draft; each adds one input per node to the pass before it."""

    def __init__(self, levels: int = 8):
        if not 1 <= levels <= 64:
            raise ValueError(f"levels: got {levels}, expected 1..64.")
        self.traits = DrafterTraits(levels=levels, any_order=True, ahead=levels)

    def start(self, state: State, scores: Scores) -> None:
        ahead_BNAV = scores.aux["ahead"]  # includes rows that ended with their first code
        state.memory = ahead_BNAV[to_device(state.rows, ahead_BNAV.device), 0]

    def propose(self, state: State, depth: int) -> Draft:
        depth = min(depth, state.memory.shape[1], state.budget - 1)
        if depth < 1:
            return trees.empty_draft(state.pending)
        distribution = Categorical(state.memory[:, :depth])
        if state.noise is None:
            return trees.chain_draft(state.pending, distribution.logits.argmax(dim=-1))
        drafts = [state.noise.draft(Categorical(distribution.logits[:, level]), level) for level in range(depth)]
        values, distributions = zip(*drafts)
        laws = [q for q in distributions if q is not None]
        return trees.chain_draft(state.pending, torch.stack(values, dim=1), Categorical.chain(laws) if laws else None)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        last_B1 = verdict.path.gather(1, verdict.length[:, None] - 1)
        ahead_BNAV = scores.aux["ahead"]
        index = last_B1[..., None, None].expand(-1, 1, *ahead_BNAV.shape[2:])
        state.memory = ahead_BNAV.gather(1, index)[:, 0]

    def select(self, state: State, keep: list[int]) -> None:
        state.memory = state.memory[keep]
