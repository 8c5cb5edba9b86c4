"""The first places of a Jacobi window by a trained drafter: its distributions and the window's, multiplied.

Behind a rejected code a window's first guess is the weakest: it was made for the code that was rejected. A trained head
has seen the code that took its place, but not what stands behind. The two are mixed as q in proportion to
own^weight * window^(1 - weight), place by place, until a place keeps its token: those behind it were drafted for that
token, and stay. Tokens are drawn with the numbers of their positions, the target's own under the rule `exact`.

Shapes: B rows, W places, V ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.distributions import Categorical
from visspec.models.jacobi.drafter import Window
from visspec.sampling import warp
from visspec.types import Draft, State

LEAST = -100.0  # of a logarithm that is multiplied: top-k and top-p of the two may have no token in common


class Front:
    """Builds the draft of a window level by level, as `drafting.structure.Chain` builds a chain. weight: of the logits
    that are added, 0 to 1, beside the window's.
    """

    def __init__(self, state: State, window: Window, depth: int, weight: float):
        self.pending, self.sampling, self.window, self.weight = state.pending, state.request.sampling, window, weight
        noise = window.noise or state.noise
        self.numbers = None if noise is None else noise.window(depth)
        self.tokens = list(window.tokens[:, :depth].unbind(1))
        self.q = None if window.q is None else list(window.q[:, :depth].unbind(1))
        self.open_B = torch.ones_like(self.pending, dtype=torch.bool)  # no place has kept its token yet
        self.level = 0

    def add(self, logits_BV: Tensor) -> Tensor:
        """Mix the next place with these logits of the drafter. Returns its tokens (B,)."""
        level, window = self.level, self.window
        self.level += 1
        logp_BV = warp(logits_BV, self.sampling).log_softmax(dim=-1)
        if window.logp is not None and window.judged is not None:
            known_BV = window.logp[:, level].clamp(min=LEAST)
            mixed_BV = self.weight * logp_BV.clamp(min=LEAST) + (1 - self.weight) * known_BV
            logp_BV = torch.where(window.judged[:, level, None], mixed_BV, logp_BV)
        scores_BV = logp_BV if self.numbers is None else logp_BV + self.numbers[:, level, : logp_BV.shape[-1]]
        old_B = self.tokens[level]
        token_B = torch.where(self.open_B, scores_BV.argmax(dim=-1), old_B)
        self.tokens[level] = token_B
        if self.q is not None:
            self.q[level] = torch.where(self.open_B[:, None], logp_BV.softmax(dim=-1), self.q[level])
        self.open_B = self.open_B & (token_B != old_B)
        return token_B

    def finish(self) -> Draft:
        q = None if self.q is None else Categorical(p=torch.stack([self.q[0], *self.q], dim=1))  # the root's is unused
        return trees.chain_draft(self.pending, torch.stack(self.tokens, dim=1), q)
