"""A drafter that knows the answer and errs at a given rate, so that a bench can set its acceptance."""

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import to_device
from visspec.types import Draft, Drafter, DrafterTraits, State


class Oracle(Drafter):
    """Drafts chains of known tokens (B, T). If `adaptive`, a draft-length policy chooses their number."""

    def __init__(self, drafts_BT: Tensor | None = None, levels: int = 8, adaptive: bool = False):
        self.traits = DrafterTraits(levels=levels, adaptive_depth=adaptive)
        self.drafts_BT = drafts_BT

    def propose(self, state: State, depth: int) -> Draft:
        drafts_BT, done_B = self.drafts_BT, [len(state.tokens[row]) for row in state.rows]
        assert drafts_BT is not None
        depth = min(depth, drafts_BT.shape[1] - max(done_B))
        if depth < 1:
            return trees.empty_draft(state.pending)
        at_B2 = to_device([list(pair) for pair in zip(state.rows, done_B)], drafts_BT.device)
        ahead = torch.arange(depth, device=drafts_BT.device)
        return trees.chain_draft(state.pending, drafts_BT[at_B2[:, :1], at_B2[:, 1:] + ahead])


def with_errors(answer_BT: Tensor, acceptance: float, vocabulary: int, seed: int = 0) -> Tensor:
    """Return an answer in which each token is replaced by another one with probability 1 - acceptance."""
    uniforms = torch.rand(answer_BT.shape, generator=torch.Generator().manual_seed(seed)).to(answer_BT.device)
    return torch.where(uniforms < acceptance, answer_BT, (answer_BT + 1) % vocabulary)
