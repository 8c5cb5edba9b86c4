"""Jacobi windows: drafts from the target's distributions of the previous pass, without training. B rows, N nodes.

After a pass, the distribution at every window position is known, given the drafts before it. Rejected positions are
sampled again from it and form the next draft, with that distribution as q (speculative Jacobi decoding: Teng et al.,
ICLR 2025). `redraw` is how the new draft depends on the old one:

    gumbel       the position's noise, as used by the target: token-identical to plain sampling with `exact`
    maximal      the old draft is kept with probability min(1, p_new/p_old), else sampled from the residual: the maximal
                 coupling of the two distributions (speculative coupled decoding, 2025)
    independent  sampled independently (the published SJD)

`start` initializes positions without a distribution: a "random" code, or the code of the "left" neighbor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import gather_rows
from visspec.distributions import Categorical, categorical, draw, residual
from visspec.grammar import fixed_ids
from visspec.sampling import BufferedNoise, Gumbel, Uniform, warp
from visspec.types import FREE, Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

REDRAWS = ("gumbel", "maximal", "independent")
STARTS = ("random", "left")
NARROWEST = 4  # minimum window, whatever the number of rows
NODES = 64  # maximum number of positions over all rows of a pass
LEAST = -100.0  # lower bound of logarithms that are mixed: the two top-k or top-p sets may be disjoint


@dataclass
class Window:
    """Drafts of the next positions, in order. Every q is the distribution that its token was sampled from."""

    tokens: Tensor  # (B, W)
    q: Tensor | None  # (B, W, V); None where drafts are point masses or coupled to the target's own noise
    noise: BufferedNoise | None  # the drafter's random numbers, independent of the rule's; None without q
    logp: Tensor | None = None  # (B, W, V) from the last pass
    judged: Tensor | None = None  # (B, W) bool: whether the last pass covered the position before this one

    def select(self, keep: list[int]) -> Window:
        """Return the window of some of the rows."""
        if self.noise is not None:
            self.noise.select(keep)
        q, logp, judged = (None if of is None else of[keep] for of in (self.q, self.logp, self.judged))
        return Window(self.tokens[keep], q, self.noise, logp, judged)


class Jacobi(Drafter):
    """Drafts windows of the target's distributions of the previous pass.

    With many rows, windows are narrowed, down to 4, to keep a pass at `NODES` positions. This only happens with rules
    that use the position's noise, where tokens do not depend on it.

    Args:
        window: Positions of a window.
        redraw: One of REDRAWS, or "auto": gumbel for rules that use the position's noise, else maximal. maximal and
            independent need a rule with its own random numbers; `exact` has none.
        start: One of STARTS, how to initialize positions without a distribution.

    Raises:
        ValueError: An argument is not one of these.
    """

    def __init__(self, window: int = 16, redraw: str = "auto", start: str = "left"):
        if window < 1:
            raise ValueError(f"window: got {window}, expected at least 1.")
        if redraw not in ("auto", *REDRAWS):
            raise ValueError(f"redraw: got {redraw!r}, expected one of auto, {', '.join(REDRAWS)}.")
        if start not in STARTS:
            raise ValueError(f"start: got {start!r}, expected one of {', '.join(STARTS)}.")
        self.window, self.redraw, self.begin = window, redraw, start
        samples = redraw in ("maximal", "independent")
        self.traits = DrafterTraits(levels=window, samples=samples, adaptive_depth=False, own_noise=True)

    def start(self, state: State, scores: Scores) -> None:
        state.memory = self.first_window(state, scores)

    def first_window(self, state: State, scores: Scores) -> Window:
        rows, vocab = len(state.rows), scores.distribution.width
        window = Window(state.pending.new_zeros(rows, 0), None, None)
        width = min(self.window, max(NARROWEST, NODES // max(rows, 1)))
        if state.noise is not None and state.noise.samples:
            generators = state.noise.child_generators()
            coupled = self.redraw == "gumbel"
            noise = Gumbel(generators, vocab) if coupled else Uniform(generators, 2)
            empty_BWV = torch.zeros(rows, 0, vocab, device=state.pending.device)
            window, width = Window(window.tokens, empty_BWV, noise), self.window
        return self._extend_window(state, window, torch.zeros_like(state.pending), vocab, width)

    def propose(self, state: State, depth: int) -> Draft:
        window: Window = state.memory
        tokens, q = window.tokens[:, :depth], window.q
        if q is None:
            return trees.chain_draft(state.pending, tokens)
        q = torch.cat([q[:, :1], q[:, :depth]], dim=1)  # the root's row is unused
        return trees.chain_draft(state.pending, tokens, Categorical(p=q))

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        state.memory = self.next_window(state.memory, state, draft, scores, verdict, outcome)

    def next_window(
        self, old: Window, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome
    ) -> Window:
        """Shift every row by its new tokens, resample from the new distributions, and initialize later positions.

        With l = verdict.length, the old node l + j is at position j + 1 of the new window (j from 0), and the
        distribution of that position is the one after old node l + j.
        """
        width = old.tokens.shape[1]
        at_BW = verdict.length[:, None] + torch.arange(width, device=verdict.length.device)
        judged_BW, stands_BW = at_BW <= draft.levels, at_BW < width
        tokens = old.tokens.gather(1, at_BW.clamp(max=width - 1))
        logits_BNV = categorical(scores.distribution).logits
        logp_BWV = gather_rows(logits_BNV, at_BW.clamp(max=logits_BNV.shape[1] - 1))
        if old.q is None:
            window = Window(torch.where(judged_BW, self._coupled_tokens(logp_BWV, state), tokens), None, None)
        else:
            assert old.noise is not None  # it comes with q
            p_BWV, q_BWV = logp_BWV.softmax(dim=-1), gather_rows(old.q, at_BW.clamp(max=width - 1))
            if self.redraw == "gumbel":  # noise is indexed by position
                old.noise.advance([len(t) for t in outcome.tokens])
            sampled = self._redraw(p_BWV, tokens, q_BWV, stands_BW, old.noise)
            if self.redraw != "gumbel":  # new random numbers in every round
                old.noise.advance([width] * len(outcome.tokens))
            q_BWV = torch.where(judged_BW[..., None], p_BWV, q_BWV)
            window = Window(torch.where(judged_BW, sampled, tokens), q_BWV, old.noise)
        known_B = (judged_BW | stands_BW).sum(dim=1)
        window = self._extend_window(state, window, known_B, scores.distribution.width, width)
        return replace(window, logp=logp_BWV, judged=judged_BW)

    def select(self, state: State, keep: list[int]) -> None:
        state.memory = state.memory.select(keep)

    def _coupled_tokens(self, logp_BWV: Tensor, state: State) -> Tensor:
        """Return each position's token under its current distribution: argmax with the position's noise."""
        if state.noise is None:
            return logp_BWV.argmax(dim=-1)
        return (logp_BWV + state.noise.window(logp_BWV.shape[1])[..., : logp_BWV.shape[-1]]).argmax(dim=-1)

    def _redraw(self, p_BWV: Tensor, old_BW: Tensor, q_BWV: Tensor, stands_BW: Tensor, noise: BufferedNoise) -> Tensor:
        """Sample from p, coupled to the old draft as `redraw` says."""
        u_BWX = noise.window(p_BWV.shape[1])
        if self.redraw == "gumbel":
            return (p_BWV.log() + u_BWX).argmax(dim=-1)
        if self.redraw == "independent":
            return draw(p_BWV, u_BWX[..., 1])
        p_BW, q_BW = (distribution.gather(-1, old_BW[..., None])[..., 0] for distribution in (p_BWV, q_BWV))
        kept_BW = stands_BW & (u_BWX[..., 0] * q_BW < p_BW)
        rest_BWV = torch.where(stands_BW[..., None], residual(p_BWV, q_BWV), p_BWV)
        return torch.where(kept_BW, old_BW, draw(rest_BWV, u_BWX[..., 1]))

    def _extend_window(self, state: State, window: Window, known_B: Tensor, vocab: int, width: int) -> Window:
        """Extend the window to full width: entries from `known_B` on are initialized by `start`, with their q."""
        rows = len(window.tokens)
        missing = width - window.tokens.shape[1]
        tokens_BW, q_BWV = window.tokens, window.q
        if missing:
            tokens_BW = torch.cat([tokens_BW, tokens_BW.new_zeros(rows, missing)], dim=1)
        fresh_BW = torch.arange(width, device=tokens_BW.device) >= known_B[:, None]
        if self.begin == "random" and state.noise is not None:
            begun_BW = self._random(state, window, vocab, width)
        else:
            with_pending = torch.cat([state.pending[:, None], tokens_BW], dim=1)
            newest_B = known_B if state.request.fixed is None else self._last_code(state, known_B, width)
            begun_BW = with_pending.gather(1, newest_B[:, None]).expand(rows, width)
        tokens_BW = torch.where(fresh_BW, begun_BW, tokens_BW)
        if q_BWV is not None:
            if missing:
                q_BWV = torch.cat([q_BWV, q_BWV.new_zeros(rows, missing, vocab)], dim=1)
            if self.begin == "random":
                distribution = torch.full_like(q_BWV, 1.0 / vocab)
            else:
                distribution = torch.zeros_like(q_BWV).scatter_(-1, tokens_BW[..., None], 1.0)
            q_BWV = torch.where(fresh_BW[..., None], distribution, q_BWV)
        return Window(tokens_BW, q_BWV, window.noise)

    def _last_code(self, state: State, known_B: Tensor, width: int) -> Tensor:
        """Return the index (B,) of the last code among the pending token and the first `known_B` entries; 0 if there
        is none. Entries after a row end are initialized with it.
        """
        place_W = torch.arange(width + 1, device=known_B.device)
        free_BW = (fixed_ids(state, place_W[None]) == FREE) & (place_W <= known_B[:, None])
        return (free_BW * place_W).amax(dim=1)

    def _random(self, state: State, window: Window, vocab: int, width: int) -> Tensor:
        """Return a uniform id for each entry, (B, W)."""
        if window.noise is None or self.redraw == "gumbel":  # uniform distribution, sampled by the noise
            noise = state.noise if window.noise is None else window.noise
            assert noise is not None
            return noise.window(width)[..., :vocab].argmax(dim=-1)
        u_BW2 = window.noise.window(width)
        window.noise.advance([width] * u_BW2.shape[0])
        return (u_BW2[..., 0] * vocab).long().clamp(max=vocab - 1)


class Front:
    """Builds the first places of a window with a trained drafter, level by level, as `drafting.base.Chain` does a
    chain. Multiplies the drafter's and the window's distributions.

    After a rejected code, a window's first guess is the weakest, because it was made for the rejected code. A
    trained head has seen the code that replaced it, but not the codes after it. The two are mixed as q in proportion
    to own^weight * window^(1 - weight), place by place, until a place keeps its token: later ones were drafted for
    that token and stay. Tokens are drawn with the numbers of their positions, the target's own under the rule
    `exact`.

    Args:
        weight: Weight of the drafter's logits in the mixture, 0 to 1.
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
        """Mix the next place with the drafter's logits for it. Returns its tokens (B,)."""
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
