"""Wrapper that keeps faults of a drafter from affecting the output.

An exception (even out of memory) or a draft of wrong types or shapes stops drafting for the request. Single invalid
nodes are masked: ids out of range, placeholders of image content, values that are not finite, and an invalid
distribution q. Faults are counted in the trace, and the first one of a drafter warns. `debug` (or VISSPEC_DEBUG=1)
raises them instead, for authors of drafters. A drafter is trusted not to write to its arguments. Exceptions of the
target are always raised.
"""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import check_tensor
from visspec.grammar import fill, fixed_ids
from visspec.types import FREE, MAX_NODES, Capabilities, Draft, Drafter, Outcome, Scores, State, Verdict

T = TypeVar("T")


class SafeDrafter(Drafter):
    """A drafter wrapped for one target.

    Args:
        chains: Whether the rule only supports chains.
    """

    def __init__(
        self,
        drafter: Drafter,
        capabilities: Capabilities,
        device: torch.device | str = "cpu",
        chains: bool = False,
        debug: bool = False,
    ):
        self.inner, self.traits = drafter, drafter.traits
        self.distribution = capabilities.distribution
        self.trees = capabilities.trees and not chains
        self.limits = self.distribution.limits(capabilities, device)
        self.vocab, self.prompt_ids = capabilities.vocab, capabilities.prompt_ids
        self.debug = debug or os.environ.get("VISSPEC_DEBUG", "0") not in ("", "0")
        self.warned = False

    def start(self, state: State, scores: Scores) -> None:
        state.refused = torch.zeros((), dtype=torch.long, device=self.limits.device)
        self._try(state, self.inner.start, scores)

    def propose(self, state: State, depth: int) -> Draft:
        draft = self._try(state, self.inner.propose, depth, check=self._check_draft)
        return trees.empty_draft(state.pending) if draft is None else draft

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        self._try(state, self.inner.observe, draft, scores, verdict, outcome)

    def sketch(self, state: State) -> Tensor:
        """Return the drafter's image; codes are -1 if it failed."""
        assert state.request.grid is not None
        rows, columns = state.request.grid
        shape, device = (len(state.rows), rows * columns), self.limits.device

        def check(codes: Tensor, state: State) -> Tensor:
            check_tensor("codes", codes, shape, torch.long, codes.device)
            return codes.to(device)

        codes = self._try(state, self.inner.sketch, check=check)
        return torch.full(shape, -1, device=device) if codes is None else codes

    def select(self, state: State, keep: list[int]) -> None:
        self._try(state, self.inner.select, keep)

    def join(self, state: State, other: State, take: list[int]) -> None:
        self._try(state, self.inner.join, other, take)

    def finish(self, state: State) -> None:
        """Count the invalid nodes of the request, and warn once."""
        self._try(state, self.inner.finish)
        refused = 0 if state.refused is None else int(state.refused)
        state.trace.faults += refused
        if refused:
            self._warn(self.inner.propose, f"{refused} drafted nodes had an invalid value or distribution", None)

    def _try(
        self, state: State, method: Callable[..., T], *arguments: object, check: Callable[..., T] | None = None
    ) -> T | None:
        """Call a method of the drafter and check the result. Returns None once it has failed in this request."""
        if not state.drafting:
            return None
        try:
            result = method(state, *arguments)
            return result if check is None else check(result, state, *arguments)
        except Exception as error:
            if self.debug:
                raise
            state.drafting, state.memory = False, None  # frees the memory of a drafter that ran out of it
            state.trace.faults += 1
            self._warn(method, f"{type(error).__name__}: {error}", error)
            return None

    def _warn(self, method: Callable, what: str, error: Exception | None) -> None:
        """Warn once, with the line of the drafter that raised the error, or else the first line of the method."""
        if self.warned:
            return
        self.warned = True
        code = inspect.unwrap(method).__code__
        frames = traceback.extract_tb(error.__traceback__) if error else []
        lines = [code.co_firstlineno, *(frame.lineno for frame in frames if frame.filename == code.co_filename)]
        warnings.warn(
            f"drafter {type(self.inner).__name__}: {what}; decoding goes on without it"
            f" ({code.co_filename}:{lines[-1]}; debug=True raises the error)",
            RuntimeWarning,
            stacklevel=3,
        )

    def _check_draft(self, draft: Draft, state: State, depth: int) -> Draft:
        if not isinstance(draft, Draft):
            raise TypeError(f"propose: got {type(draft).__name__}, expected a Draft.")
        tree, rows, like = draft.tree, len(state.rows), self.limits
        size = tree.size
        if size == 1:
            return trees.empty_draft(state.pending)
        if not 1 <= size <= MAX_NODES:
            raise ValueError(f"tree: got {size} nodes, expected the root and at most {MAX_NODES - 1} others.")
        if tree.levels > depth:
            raise ValueError(f"levels: got {tree.levels}, expected at most {depth}.")
        if not (self.trees or tree.chain):
            raise ValueError(
                "tree: got a branching draft, expected a chain, because target or rule do not support trees."
            )
        shape = (1 if len(tree.parent) == 1 else rows, size)
        check_tensor("tree.parent", tree.parent, shape, torch.long, like.device)
        check_tensor("tree.depth", tree.depth, shape, torch.long, like.device)
        check_tensor("tree.ancestor", tree.ancestor, (*shape, size), torch.bool, like.device)
        value, possible, allowed = self.distribution.check_drafted(draft.value, (rows, size), like)
        wrong, real = ~possible, possible
        if self.prompt_ids > self.vocab:  # a drafter may copy such ids from the prompt
            wrong = wrong & ((draft.value < 0) | (draft.value >= self.prompt_ids))
        if draft.real is not None:
            check_tensor("real", draft.real, (rows, size), torch.bool, like.device)
            wrong, real = wrong & draft.real, real & draft.real
        if state.request.fixed is not None:  # any id is valid where the layout fixes it, because `fill` overwrites it
            allowed = allowed | (fixed_ids(state, tree.depth) != FREE)
        real, q = real & allowed, draft.q
        if q is not None:
            q, lawful = q.sanitize(value, like)
            wrong, real = wrong | ~lawful & real, real & lawful
        if self.debug:
            trees.check(tree)
            if bool(wrong[:, 1:].any()):
                raise ValueError(f"propose: nodes {wrong.nonzero().tolist()} have an invalid value or distribution.")
        assert state.refused is not None  # since `start`
        state.refused += wrong[:, 1:].sum()
        # truncate rows as in a batch of one, so that random numbers don't depend on the batch
        room = [state.room(row) - 1 for row in state.rows]
        if min(room) < tree.levels:
            real = real & (tree.depth <= to_device(room, value.device)[:, None])
        hidden = ~real.view(*real.shape, *[1] * (value.dim() - 2))
        value = value.masked_fill(hidden, 0)  # removes ids that a target can't embed
        value = torch.cat([state.pending[:, None], value[:, 1:]], dim=1)
        draft = Draft(value, tree, q, real)
        return draft if state.request.fixed is None else fill(draft, state)
