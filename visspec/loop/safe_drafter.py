"""Validation of drafters: faults of a drafter affect speed, never the output.

Exceptions (out of memory included) and malformed drafts end drafting for the request; single invalid nodes (ids out of
range or placeholders of image content, an invalid distribution q, or q = 0 at the drafted value) are marked as not
real. Faults are counted in the trace, and the first one warns. A drafter can't modify the decoder's data: it gets a
`ReadOnlyState` of the state, copies of tensors that are still in use, and other tensors directly. The target is not
guarded: its exceptions are raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import check_tensor
from visspec.grammar import fill, fixed_ids
from visspec.loop.read_only import ReadOnlyState, copy_tensors
from visspec.types import FREE, MAX_NODES, Capabilities, Draft, Drafter, Outcome, Scores, State, Target, Tree, Verdict

LEAD = 16  # plain rounds before drafts are made again that a drafter of `observes="drafted"` is told of


class SafeDrafter(Drafter):
    """Wraps a drafter for one target. chains: the rule judges no trees. target_access: the target, if the drafter runs
    it.
    """

    def __init__(
        self,
        drafter: Drafter,
        capabilities: Capabilities,
        device: torch.device | str = "cpu",
        chains: bool = False,
        target_access: Target | None = None,
    ):
        self.inner, self.traits, self.target_access = drafter, drafter.traits, target_access
        self.distribution = capabilities.distribution
        self.trees = capabilities.trees and not chains
        self.limits = self.distribution.limits(capabilities, device)
        self.vocab, self.prompt_ids = capabilities.vocab, capabilities.prompt_ids
        self.warned = False

    def start(self, state: State, scores: Scores) -> None:
        state.refused = torch.zeros((), dtype=torch.long, device=self.limits.device)
        self._try(state, self.inner.start, replace(scores, aux=copy_tensors(scores.aux)))

    def propose(self, state: State, depth: int) -> Draft:
        draft = self._try(state, self._propose_checked, state, depth, target=self.target_access)
        return trees.empty_draft(state.pending, own=True) if draft is None else draft

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Only the tree and the next token are still in use and need copies."""
        kind = self.traits.observes
        resting = draft.tree.size == 1 and state.trace.cooldown > LEAD
        if state.drafting and kind != "none" and not (kind == "drafted" and resting):
            draft = Draft(draft.value, trees.lent_copy(draft.tree), draft.q, draft.real)
            verdict = replace(verdict, next=verdict.next.clone())
            self._try(state, self.inner.observe, draft, scores, verdict, outcome)

    def sketch(self, state: State) -> Tensor:
        """The drafter's image; codes of -1 if it failed or returned something else."""
        assert state.request.grid is not None
        rows, columns = state.request.grid
        shape = len(state.rows), rows * columns
        codes = self._try(state, self._sketch, shape)
        return torch.full(shape, -1, device=self.limits.device) if codes is None else codes

    def _sketch(self, lent: State, shape: tuple[int, int]) -> Tensor:
        codes = self.inner.sketch(lent)
        if codes.shape != shape or codes.dtype != torch.long:
            raise ValueError(f"codes: got shape {tuple(codes.shape)} of {codes.dtype}, expected {shape} of torch.int64")
        return codes.to(self.limits.device)

    def select(self, state: State, keep: list[int]) -> None:
        self._try(state, self.inner.select, keep)

    def join(self, state: State, other: State, take: list[int]) -> None:
        self._try(state, self.inner.join, ReadOnlyState(other), take)

    def finish(self, state: State) -> None:
        """After the request: count the invalid nodes, and warn once."""
        self._try(state, self.inner.finish)
        refused = 0 if state.refused is None else int(state.refused)
        state.trace.faults += refused
        if refused:
            self._warn(f"{refused} drafted nodes had an invalid id or law")

    def _warn(self, what: str) -> None:
        if not self.warned:
            self.warned = True
            name = type(self.inner).__name__
            warnings.warn(f"drafter {name}: {what}; decoding goes on without it", RuntimeWarning, stacklevel=3)

    def _try(self, state: State, call: Callable[..., Any], *more: object, target: Target | None = None) -> Any:
        """What a call of the drafter returns, with what it may read of the state; None if it fails, or has failed
        earlier in this request.
        """
        if not state.drafting:
            return None
        lent = state.lent
        if lent is None or target is not None or not lent.of(state):
            lent = state.lent = ReadOnlyState(state, target)
        if lent.memory is not state.memory:
            lent.memory = state.memory
        try:
            found = call(lent, *more)
            state.memory = lent.memory
            return found
        except Exception as error:
            state.drafting, state.memory, state.lent = False, None, None  # frees what an out-of-memory drafter holds
            state.trace.faults += 1
            self._warn(_error_text(error))
            return None

    def _propose_checked(self, lent: State, state: State, depth: int) -> Draft:
        """The drafter's draft, validated and copied."""
        draft = self.inner.propose(lent, depth)
        rows, like = len(state.rows), state.pending
        if type(draft) is not Draft or type(draft.tree) is not Tree:
            raise TypeError(f"propose: got {type(draft).__name__}, expected a Draft with a Tree")
        if draft.tree.size == 1:
            return trees.empty_draft(like, own=True)
        if not 1 <= draft.tree.size <= MAX_NODES:
            raise ValueError(f"tree: got {draft.tree.size} nodes, expected the root and at most {MAX_NODES - 1} others")
        sound: Tensor | bool = True
        tree = trees.own_copy(draft.tree)
        if tree is None:
            tree, sound = self._sound(draft.tree, rows, like)
        value, possible, allowed = self.distribution.drafted(draft.value, (rows, tree.size), self.limits)
        if tree.levels > depth:
            raise ValueError(f"levels: got {tree.levels}, expected at most {depth}")
        if not (self.trees or tree.chain):
            raise ValueError("tree: got a branching draft, expected a chain (target or rule takes no trees)")
        real = possible & sound
        wrong = ~real
        if self.prompt_ids > self.vocab:  # a drafter may copy them from the prompt, which is no fault
            wrong &= ~(sound & (draft.value >= self.vocab) & (draft.value < self.prompt_ids))
        if draft.real is not None:
            check_tensor("real", draft.real, torch.bool, like)
            if draft.real.shape != (rows, tree.size):
                raise ValueError(f"real: got shape {tuple(draft.real.shape)}, expected {(rows, tree.size)}")
            wrong, real = wrong & draft.real, real & draft.real
        if state.request.fixed is not None:  # positions fixed by grammar are valid with any id: `fill` overwrites it
            allowed = allowed | (fixed_ids(state, tree.depth) != FREE)
        real, q = real & allowed, draft.q
        if q is not None:
            if type(q) is not self.distribution.drafts:
                raise TypeError(f"q: got {type(q).__name__}, expected {self.distribution.drafts.__name__} or None")
            q, lawful = q.sanitize(value, self.limits)
            wrong, real = wrong | ~lawful & real, real & lawful
        assert state.refused is not None  # since `start`
        state.refused += wrong[:, 1:].sum()
        # truncate rows as in a batch of one, so that random numbers don't depend on the batch
        room = [state.room(row) - 1 for row in state.rows]
        if min(room) < tree.levels:
            real = real & (tree.depth <= to_device(room, value.device)[:, None])
        value = value.masked_fill(~real.view(*real.shape, *[1] * (value.dim() - 2)), 0)  # ids that a target can't read
        value = torch.cat([state.pending[:, None], value[:, 1:]], dim=1)
        checked = Draft(value, tree, q, real)
        return checked if state.request.fixed is None else fill(checked, state)

    def _sound(self, tree: Tree, rows: int, like: Tensor) -> tuple[Tree, Tensor]:
        """A copy of the tree with invalid nodes attached to the root, and which nodes are valid (1|B, N).

        A node is valid if it comes after its parent, its ancestors are its parent's and itself, all of them valid, and
        its depth is their number and at most `levels`. Computed on the device, without synchronisation.
        """
        parent, depth, ancestor, levels = tree.parent, tree.depth, tree.ancestor, tree.levels
        for name, tensor in (("parent", parent), ("depth", depth), ("ancestor", ancestor)):
            check_tensor(name, tensor, torch.bool if name == "ancestor" else torch.long, like)
        size = parent.shape[-1] if parent.dim() else 0
        shapes = parent.shape, depth.shape, ancestor.shape[:2], ancestor.shape[2:]
        if parent.shape not in ((1, size), (rows, size)) or shapes != (parent.shape, *[parent.shape] * 2, (size,)):
            raise ValueError(
                f"tree: got parent {tuple(parent.shape)}, depth {tuple(depth.shape)}, ancestor {tuple(ancestor.shape)},"
                f" expected 1 or {rows} rows of {size} nodes"
            )
        if type(levels) is not int or levels < 0:
            raise ValueError(f"levels: got {levels!r}, expected a whole number")
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


def _error_text(error: Exception) -> str:
    """An exception as text; its `__str__` may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
