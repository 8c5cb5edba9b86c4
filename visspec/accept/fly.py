"""FLy: a mismatch is kept where the target is undecided and agrees with what follows (arXiv 2511.22972, ICLR 2026).

A drafted x that the exact rule would reject is kept if the target's distribution there is ambiguous, H(p) / log V >=
theta, and the exact rule accepts each of the `window` drafts behind it, all of which have to be there: chains of up to
`window` levels are judged exactly. A token of probability 0 is never kept. The defaults are the paper's. With `top` the
entropy is that of so many largest probabilities, in nats, as in vLLM (top=3).

With random numbers the exact rule is `rejection`, and a draft has f = 1 or the exact f*, by the drafts and numbers
behind it. These are independent of its own number, so the drift, the sum of f - f* over the tested drafts, bounds the
total variation as in `rejection`; where only one draft of a round may be kept, it is equal to it. As they decide, none
of them may serve a later round (`block`). At temperature 0 every kept mismatch adds 1 to the drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.accept.block import RoundNoise
from visspec.accept.exact import follow
from visspec.accept.rejection import Rejection, draft_probabilities
from visspec.distributions import categorical
from visspec.types import Draft, RuleTraits, Scores, Verdict

TINY = 1e-30


class Fly(Rejection):
    """theta: minimum entropy; window: drafts that must agree; top: probabilities in the entropy, 0: all, and the
    entropy as a share of the largest one (theta above 1: exact).
    """

    traits = RuleTraits(judges_draws=True, chains_only=True, whole_chains=True)

    def __init__(self, theta: float = 0.3, window: int = 6, top: int = 0):
        if not theta >= 0:
            raise ValueError(f"theta: got {theta}, expected an entropy of at least 0")
        for name, value, least in (("window", window, 1), ("top", top, 0)):
            if value < least:
                raise ValueError(f"{name}: got {value}, expected a number of at least {least}")
        self.theta, self.window, self.top = theta, window, top

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> RoundNoise:
        return RoundNoise(generators)

    def deferred(self, draft: Draft, p_BNV: Tensor, agreed_BT: Tensor) -> Tensor:
        """(B, T) whether each draft is kept even as a mismatch. agreed_BT: those that the exact rule accepts where they
        are real.
        """
        p_BTV = p_BNV[:, :-1]
        if draft.real is not None:
            agreed_BT = agreed_BT & draft.real[:, 1:]
        if self.top:
            entropy_BT = torch.special.entr(p_BTV.topk(min(self.top, p_BTV.shape[-1])).values).sum(-1)
        else:
            entropy_BT = torch.special.entr(p_BTV).sum(-1) / math.log(p_BTV.shape[-1])
        possible_BT = draft_probabilities(draft, p_BNV)[:, 1:] > 0
        behind_BT = F.pad(agreed_BT, (0, self.window))[:, 1:].unfold(1, self.window, 1).all(-1)
        return behind_BT & possible_BT & (entropy_BT >= self.theta)

    def relaxation(self, draft: Draft, p_BNV: Tensor, coins_BN: Tensor) -> dict[str, Any]:
        p_BT = draft_probabilities(draft, p_BNV)[:, 1:]
        q_BT = torch.ones_like(p_BT) if draft.q is None else categorical(draft.q).at(draft.value)[:, 1:].clamp(min=TINY)
        return {"mass": F.pad(self.deferred(draft, p_BNV, coins_BN[:, 1:] < p_BT / q_BT).float(), (1, 0))}

    def greedy(self, draft: Draft, scores: Scores) -> Verdict:
        if draft.tree.size == 1:
            return super().greedy(draft, scores)
        distribution = categorical(scores.distribution)
        best_BN, drafted_BT = distribution.logits.argmax(dim=-1), draft.value[:, 1:]
        agreed_BT = drafted_BT == best_BN[:, :-1]
        deferred_BT = self.deferred(draft, distribution.p, agreed_BT) & ~agreed_BT
        verdict = follow(draft, torch.cat([torch.where(deferred_BT, drafted_BT, best_BN[:, :-1]), best_BN[:, -1:]], 1))
        passed_BT = torch.arange(1, draft.tree.size, device=best_BN.device) < verdict.length[:, None]
        return replace(verdict, drift=(deferred_BT & passed_BT).sum(1).float())
