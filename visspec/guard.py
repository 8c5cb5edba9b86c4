"""A drafter that can't hurt: whatever goes wrong in it costs speed, never output.

Exceptions (out of memory included) and malformed drafts end drafting for the request; single bad nodes (ids out of
range or standing for image content, a law q that is no law, or q = 0 at the drafted token) become ABSENT. Each is
counted in the trace, and the first one warns. The target is never guarded: its faults are errors.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import told
from visspec.grammar import fill, held
from visspec.types import ABSENT, Capabilities, Draft, Drafter, Outcome, Scores, State, Tree, Verdict

MAX_NODES = 1024
SUM_TOLERANCE = 1e-3  # a float32 softmax over 256k entries sums to one within 1e-4


class Guarded:
    """Wraps a drafter for one target. Same protocol."""

    def __init__(self, drafter: Drafter, capabilities: Capabilities, device: torch.device | str = "cpu"):
        self.inner, self.needs = drafter, drafter.needs
        self.vocab = capabilities.vocab
        self.trees = capabilities.trees
        self.allowed = torch.ones(self.vocab, dtype=torch.bool, device=device)
        banned = [i for i in capabilities.never_drafted if 0 <= i < self.vocab]
        self.allowed[banned] = False
        self.warned = False

    def start(self, state: State, scores: Scores) -> None:
        state.refused = torch.zeros((), dtype=torch.long, device=self.allowed.device)
        self._try(state, self.inner.start, state, scores)

    def propose(self, state: State, depth: int) -> Draft:
        draft = self._try(state, self._checked, state, depth)
        return trees.root(state.pending) if draft is None else draft

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        self._try(state, self.inner.observe, state, draft, scores, verdict, outcome)

    def select(self, state: State, keep: list[int]) -> None:
        self._try(state, self.inner.select, state, keep)

    def finish(self, state: State) -> None:
        """After the request: count the refused nodes, and warn of the first."""
        refused = 0 if state.refused is None else int(state.refused)
        state.trace.faults += refused
        if refused:
            self._warn(f"{refused} drafted nodes had an id or a law that can't be")

    def _warn(self, what: str) -> None:
        if not self.warned:
            self.warned = True
            name = type(self.inner).__name__
            warnings.warn(f"drafter {name}: {what}; decoding goes on without it", RuntimeWarning, stacklevel=3)

    def _try(self, state: State, call, *args):
        if not state.drafting:
            return None  # it has failed before in this request
        try:
            return call(*args)
        except Exception as error:
            state.drafting, state.memory = False, None  # frees what an out-of-memory drafter holds
            state.trace.faults += 1
            self._warn(f"{type(error).__name__}: {error}")
            return None

    def _checked(self, state: State, depth: int) -> Draft:
        draft = self.inner.propose(state, depth)
        rows = len(state.rows)
        if not isinstance(draft, Draft):
            raise TypeError(f"propose: got {type(draft).__name__}, expected a Draft")
        tokens, size = draft.tokens, draft.tree.size
        if tokens.shape != (rows, size) or tokens.dtype != torch.long or size > MAX_NODES:
            raise ValueError(
                f"tokens: got shape {tuple(tokens.shape)} of {tokens.dtype}, expected ({rows}, {size}) of torch.int64"
            )
        if draft.levels > depth:
            raise ValueError(f"levels: got {draft.levels}, expected at most {depth}")
        if not (self.trees or draft.tree.chain):
            raise ValueError("tree: got a branching draft, expected a chain (the target takes no trees)")
        if size == 1:
            return trees.root(state.pending)
        tree, sound = self._sound(draft.tree, rows)
        q, inside = draft.q, (tokens >= 0) & (tokens < self.vocab)
        wrong = ~(inside & sound) & (tokens != ABSENT)
        may = self.allowed[tokens.clamp(0, self.vocab - 1)]
        if state.request.fixed is not None:  # where grammar holds a place any id will do: `fill` puts the right one in
            may = may | (held(state, tree.depth) != ABSENT)
        tokens = torch.where(inside & sound & may, tokens, ABSENT)
        if q is not None:
            if q.shape != (rows, size, self.vocab):
                raise ValueError(f"q: got shape {tuple(q.shape)}, expected ({rows}, {size}, {self.vocab})")
            lawful = _lawful(q, tokens)
            wrong |= ~lawful & (tokens != ABSENT)
            tokens, q = torch.where(lawful, tokens, ABSENT), torch.where(lawful[..., None], q, 0.0)
        state.refused += wrong[:, 1:].sum()
        # a row drafts no further than it would alone, so that coins fall the same in any batch
        room = [state.request.max_new_tokens - len(state.tokens[row]) - 1 for row in state.rows]
        if min(room) < draft.levels:
            tokens = torch.where(tree.depth > told(room, tokens.device)[:, None], ABSENT, tokens)
        tokens = torch.cat([state.pending[:, None], tokens[:, 1:]], dim=1)
        return fill(Draft(tokens, tree, q), state)

    def _sound(self, tree: Tree, rows: int) -> tuple[Tree, Tensor | bool]:
        """The tree with its impossible nodes hung below the root, and which nodes are not of that kind (1|B, N).

        A node is sound when it comes after its parent, its ancestors are its parent's and itself, and its depth is
        their number and within `levels`. Decided on the device, without a synchronisation.
        """
        parent, depth, ancestor, size = tree.parent, tree.depth, tree.ancestor, tree.size
        if trees.is_static(tree):
            return tree, True
        shapes = parent.shape, depth.shape, ancestor.shape[:2], ancestor.shape[-1]
        if parent.shape[0] not in (1, rows) or shapes != (parent.shape, parent.shape, parent.shape, size):
            raise ValueError(
                f"tree: got parent {tuple(parent.shape)}, depth {tuple(depth.shape)}, ancestor {tuple(ancestor.shape)},"
                f" expected 1 or {rows} rows of {size} nodes"
            )
        index = torch.arange(size, device=parent.device)
        own = index[:, None] == index
        above = ancestor.gather(1, parent.clamp(0, size - 1)[..., None].expand_as(ancestor)) & (index > 0)[:, None]
        sound = ((above | own) == ancestor).all(dim=-1) & (depth == ancestor.sum(dim=-1) - 1) & (depth <= tree.levels)
        sound &= (parent < index) & ((parent >= 0) == (index > 0))
        if tree.chain:
            sound &= parent == index - 1
        below = (index > 0).long()
        mended = Tree(
            torch.where(sound, parent, below - 1),
            torch.where(sound, depth, below),
            torch.where(sound[..., None], ancestor, own | (index == 0)),
            max(tree.levels, 1),
            tree.chain and tree.levels == size - 1,
        )
        return mended, sound


def _lawful(q: Tensor, tokens: Tensor) -> Tensor:
    """Which nodes carry a law that could have yielded them: finite, no negatives, sum one, positive at the token."""
    drawn = q.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    sums = (q.sum(dim=-1) - 1.0).abs() <= SUM_TOLERANCE
    return q.isfinite().all(dim=-1) & (q >= 0).all(dim=-1) & sums & (drawn > 0) & (tokens >= 0)
