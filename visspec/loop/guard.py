"""A drafter that can't hurt: whatever goes wrong in it costs speed, never output.

Exceptions (out of memory included) and malformed drafts end drafting for the request; single bad nodes (ids out of
range or standing for image content, a law q that is no law, or q = 0 at the drafted token) become ABSENT. Each is
counted in the trace, and the first one warns. Nothing that a drafter is handed can be written through: it sees a `View`
for the state, copies of what the loop goes on with, and tensors that the loop is done with. The target is never
guarded: its faults are errors.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import told
from visspec.grammar import fill, held
from visspec.loop.view import View, copied
from visspec.types import ABSENT, MAX_NODES, Capabilities, Draft, Drafter, Outcome, Scores, State, Tree, Verdict

SUM_TOLERANCE = 1e-3  # a float32 softmax over 256k entries sums to one within 1e-4


class Guarded:
    """Wraps a drafter for one target. Same protocol. chains: the rule judges no trees."""

    def __init__(
        self, drafter: Drafter, capabilities: Capabilities, device: torch.device | str = "cpu", chains: bool = False
    ):
        self.inner, self.needs = drafter, drafter.needs
        self.vocab = capabilities.vocab
        self.trees = capabilities.trees and not chains
        self.allowed = torch.ones(self.vocab, dtype=torch.bool, device=device)
        banned = [i for i in capabilities.never_drafted if 0 <= i < self.vocab]
        self.allowed[banned] = False
        self.warned = False

    def start(self, state: State, scores: Scores) -> None:
        state.refused = torch.zeros((), dtype=torch.long, device=self.allowed.device)
        self._try(state, self.inner.start, View(state), replace(scores, aux=copied(scores.aux)))

    def propose(self, state: State, depth: int) -> Draft:
        draft = self._try(state, self._checked, state, depth)
        return trees.undrafted(state.pending) if draft is None else draft

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """The loop is done with all of these but the tree's shape, which others share, and the next token."""
        if state.drafting:
            draft = Draft(draft.tokens, trees.shown(draft.tree), draft.q)
            next_B = verdict.next.clone()
            verdict = Verdict(verdict.path, verdict.length, next_B, verdict.drift, verdict.displacement)
            self._try(state, self.inner.observe, View(state), draft, scores, verdict, outcome)

    def select(self, state: State, keep: list[int]) -> None:
        self._try(state, self.inner.select, View(state), keep)

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
            self._warn(_said(error))
            return None

    def _checked(self, state: State, depth: int) -> Draft:
        """The inner drafter's draft, of which nothing is believed, on tensors that it does not hold."""
        draft = self.inner.propose(View(state), depth)
        rows, like = len(state.rows), state.pending
        if type(draft) is not Draft or type(draft.tree) is not Tree:
            raise TypeError(f"propose: got {type(draft).__name__}, expected a Draft with a Tree")
        tokens, q = draft.tokens, draft.q
        _check_tensor("tokens", tokens, torch.long, like)
        tree, sound = self._sound(draft.tree, rows, like)
        if tokens.shape != (rows, tree.size):
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected {(rows, tree.size)}")
        if tree.levels > depth:
            raise ValueError(f"levels: got {tree.levels}, expected at most {depth}")
        if not (self.trees or tree.chain):
            raise ValueError("tree: got a branching draft, expected a chain (target or rule takes no trees)")
        if tree.size == 1:
            return trees.undrafted(state.pending)
        inside = (tokens >= 0) & (tokens < self.vocab)
        wrong = ~(inside & sound) & (tokens != ABSENT)
        may = self.allowed[tokens.clamp(0, self.vocab - 1)]
        if state.request.fixed is not None:  # where grammar holds a place any id will do: `fill` puts the right one in
            may = may | (held(state, tree.depth) != ABSENT)
        tokens = torch.where(inside & sound & may, tokens, ABSENT)
        if q is not None:
            _check_tensor("q", q, None, like)
            if q.shape != (rows, tree.size, self.vocab):
                raise ValueError(f"q: got shape {tuple(q.shape)}, expected ({rows}, {tree.size}, {self.vocab})")
            q = q.float()
            lawful = _lawful(q, tokens)
            wrong |= ~lawful & (tokens != ABSENT)
            tokens, q = torch.where(lawful, tokens, ABSENT), torch.where(lawful[..., None], q, 0.0)
        state.refused += wrong[:, 1:].sum()
        # a row drafts no further than it would alone, so that coins fall the same in any batch
        room = [state.request.max_new_tokens - len(state.tokens[row]) - 1 for row in state.rows]
        if min(room) < tree.levels:
            tokens = torch.where(tree.depth > told(room, tokens.device)[:, None], ABSENT, tokens)
        tokens = torch.cat([state.pending[:, None], tokens[:, 1:]], dim=1)
        return fill(Draft(tokens, tree, q), state)

    def _sound(self, tree: Tree, rows: int, like: Tensor) -> tuple[Tree, Tensor | bool]:
        """The tree, on tensors of our own, with its impossible nodes hung below the root, and which nodes are not of
        that kind (1|B, N).

        A node is sound when it comes after its parent, its ancestors are its parent's and itself, all of them sound,
        and its depth is their number and within `levels`. Decided on the device, without a synchronisation.
        """
        if trees.is_static(tree):
            return _within(trees.sealed(tree)), True
        parent, depth, ancestor, levels = tree.parent, tree.depth, tree.ancestor, tree.levels
        for name, tensor in (("parent", parent), ("depth", depth), ("ancestor", ancestor)):
            _check_tensor(name, tensor, torch.bool if name == "ancestor" else torch.long, like)
        size = parent.shape[-1] if parent.dim() else 0
        shapes = parent.shape, depth.shape, ancestor.shape[:2], ancestor.shape[2:]
        if parent.shape not in ((1, size), (rows, size)) or shapes != (parent.shape, *[parent.shape] * 2, (size,)):
            raise ValueError(
                f"tree: got parent {tuple(parent.shape)}, depth {tuple(depth.shape)}, ancestor {tuple(ancestor.shape)},"
                f" expected 1 or {rows} rows of {size} nodes"
            )
        if type(levels) is not int or levels < 0:
            raise ValueError(f"levels: got {levels!r}, expected a whole number")
        _within(tree)
        index = torch.arange(size, device=parent.device)
        own = index[:, None] == index
        parent_BN1 = parent.clamp(0, size - 1)[..., None]
        above = ancestor.gather(1, parent_BN1.expand_as(ancestor)) & (index > 0)[:, None]
        sound = ((above | own) == ancestor).all(dim=-1) & (depth == ancestor.sum(dim=-1) - 1) & (depth <= levels)
        sound &= (parent < index) & ((parent >= 0) == (index > 0)) & ancestor.gather(2, parent_BN1)[..., 0]
        if tree.chain:
            sound &= parent == index - 1
        sound &= ~(ancestor & ~sound[:, None]).any(dim=-1)
        below = (index > 0).long()
        mended = Tree(
            torch.where(sound, parent, below - 1),
            torch.where(sound, depth, below),
            torch.where(sound[..., None], ancestor, own | (index == 0)),
            max(levels, 1) if size > 1 else 0,
            tree.chain is True and levels == size - 1,
        )
        return mended, sound


def _within(tree: Tree) -> Tree:
    """The tree, where its size is one that a draft may have; else ValueError."""
    if not 1 <= tree.size <= MAX_NODES:
        raise ValueError(f"tree: got {tree.size} nodes, expected the root and at most {MAX_NODES - 1} others")
    return tree


def _check_tensor(name: str, value: object, dtype: torch.dtype | None, like: Tensor) -> None:
    """Raises ValueError for anything but a plain tensor of this dtype (None: of floats) where `like` is."""
    if type(value) is not Tensor or value.layout != torch.strided or value.device != like.device:
        what = f"a tensor of {value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: got {what}, expected a plain tensor on {like.device}")
    if value.dtype != dtype if dtype else not value.is_floating_point():
        raise ValueError(f"{name}: got {value.dtype}, expected {dtype or 'floats'}")


def _said(error: Exception) -> str:
    """An exception in words; its text is the drafter's too, and may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _lawful(q: Tensor, tokens: Tensor) -> Tensor:
    """Which nodes carry a law that could have yielded them: finite, no negatives, sum one, positive at the token."""
    drawn = q.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    sums = (q.sum(dim=-1) - 1.0).abs() <= SUM_TOLERANCE
    return q.isfinite().all(dim=-1) & (q >= 0).all(dim=-1) & sums & (drawn > 0) & (tokens >= 0)
