"""Layers that keep a state instead of keys and values (linear attention, short convolutions), under drafts.

Rejected tokens can't be taken out of a state. So the states are set aside before a pass over a draft, and stay those
before it wherever a row did not take all of the pass; the tokens that it took are then *replayed* at the front of its
next pass, before that one's own nodes. A rejection costs no pass of its own. Replays end with a pass that a row takes
whole, or, should they grow to `MOST` tokens, with a pass over as many of them as brings the rows together most.

Full attention is as ever: replayed tokens are written to the slots where they already stand. Drafts are chains.
Shapes: B rows, R replayed tokens, N nodes, T = R + N nodes of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from visspec import tree as trees
from visspec.cache import SlotCache, to_device
from visspec.types import Draft, Outcome, State

MOST = 32  # replayed tokens of a row


def state_layers(config: PretrainedConfig) -> dict[int, Any]:
    """Fresh layers of transformers' own cache that hold a state and nothing else, by number."""
    found = enumerate(DynamicCache(config=config).layers)
    return {
        i: layer
        for i, layer in found
        if isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)
    }


class RecurrentStateCheckpoints:
    """The states of a request, and the tokens of each row that they do not hold yet: ids (B, R), at the left."""

    def __init__(self, layers: dict[int, Any], rows: int):
        self.layers = layers
        self.replayed = [0] * rows
        self.ids: Tensor | None = None
        self._kept: list[tuple[dict, int, Tensor]] = []
        self._before: list[int] = []

    def check_written(self, model: PreTrainedModel) -> None:
        """Raises ValueError unless the model keeps the states of all these layers here."""
        for index, layer in self.layers.items():
            if not any(layer.has_previous_state.values()):
                raise ValueError(
                    f"model: {type(model).__name__} keeps the state of its layer {index} elsewhere, expected it in the"
                    " cache it was given (rejected tokens could not be undone)"
                )

    def _states(self) -> list[tuple[dict, int]]:
        """Where the tensors are: a dictionary of a layer, and a key."""
        held = (states for layer in self.layers.values() for states in (layer.conv_states, layer.recurrent_states))
        return [(states, i) for states in held for i, state in states.items() if state is not None]

    def run(self, passing: Callable[[State, Draft], Any], state: State, draft: Draft) -> tuple[Any, Tensor | None]:
        """A pass over the replayed tokens and the draft. passing: runs a pass and returns its output.

        Returns the output, and where in it each row's own nodes are, (B, N); None where they are all there is.
        """
        nodes = draft.tree.size
        while max(self.replayed) > MOST or (nodes == 1 and len(set(self.replayed)) > 1):
            self._settle(passing, state)
        longest = max(self.replayed)
        if longest == 0:
            self._before, self.ids = self.replayed, draft.value
            return self._pass(passing, state, draft, nodes > 1), None
        assert self.ids is not None
        device = draft.value.device
        replayed_B1 = to_device(self.replayed, device)[:, None]
        at_BT = torch.arange(longest + nodes, device=device) - replayed_B1
        source_BT = torch.where(at_BT < 0, at_BT + replayed_B1, longest + at_BT.clamp(0, nodes - 1))
        self._before, self.ids = self.replayed, torch.cat([self.ids[:, :longest], draft.value], 1).gather(1, source_BT)
        chain = trees.chain(longest + nodes - 1, str(device))
        output = self._pass(passing, state, Draft(self.ids, chain), True)
        return output, replayed_B1 + torch.arange(nodes, device=device)

    def _pass(self, passing: Callable[[State, Draft], Any], state: State, draft: Draft, keep: bool) -> Any:
        """A pass from where the states stand; `keep`: set them aside."""
        slots: SlotCache = state.cache.slots
        self._kept = [(states, i, states[i].clone()) for states, i in self._states()] if keep else []
        lengths = slots.lengths
        if not any(self.replayed):
            return passing(state, draft)
        back = to_device(self.replayed, state.position.device)
        try:
            slots.lengths = [n - gone for n, gone in zip(lengths, self.replayed)]
            return passing(replace(state, position=state.position - back), draft)
        finally:
            slots.lengths = lengths

    def commit(self, outcome: Outcome, nodes: int) -> None:
        """Rows that took all of the pass hold it in their states; the others replay what they took."""
        if not self._kept:
            self.replayed = [0] * len(self.replayed)
            return
        taken = [before + len(path) for before, path in zip(self._before, outcome.path)]
        width = max(self._before) + nodes
        self._restore([count == width for count in taken])
        self.replayed = [0 if count == width else count for count in taken]

    def _restore(self, whole: list[bool]) -> None:
        """Put back what was set aside, but for these rows."""
        if all(whole):
            return
        for states, i, before in self._kept:
            if any(whole):
                new = to_device(whole, before.device).view(-1, *[1] * (before.dim() - 1))
                before = torch.where(new, states[i], before)
            states[i] = before
        self._kept = []

    def _settle(self, passing: Callable[[State, Draft], Any], state: State) -> None:
        """One pass over the first replayed tokens alone: as many as shorten the replays most over all rows."""
        assert self.ids is not None
        count = max(set(self.replayed) - {0}, key=lambda n: n * sum(r >= n for r in self.replayed))
        device = self.ids.device
        chain = trees.chain(count - 1, str(device))
        self._pass(passing, state, Draft(self.ids[:, :count].contiguous(), chain), True)
        whole = [r >= count for r in self.replayed]
        self._restore(whole)
        gone = [count if done else 0 for done in whole]
        at_BT = torch.arange(self.ids.shape[1], device=device) + to_device(gone, device)[:, None]
        self.ids = self.ids.gather(1, at_BT.clamp(max=self.ids.shape[1] - 1))
        self.replayed = [r - n for r, n in zip(self.replayed, gone)]

    def select(self, keep: list[int]) -> None:
        """Keep only these rows."""
        for states, i in self._states():
            states[i] = states[i][to_device(keep, states[i].device)]
        self.replayed = [self.replayed[b] for b in keep]
        if self.ids is not None:
            self.ids = self.ids[to_device(keep, self.ids.device)]

    def join(self, other: RecurrentStateCheckpoints, take: list[int]) -> None:
        """Add rows of another request."""
        for (states, i), (theirs, j) in zip(self._states(), other._states()):
            states[i] = torch.cat([states[i], theirs[j][to_device(take, states[i].device)]])
        if self.ids is not None:
            width = max(self.replayed)
            ids = self.ids.new_zeros(len(self.replayed) + len(take), max(width, max(other.replayed), 1))
            ids[: len(self.replayed), :width] = self.ids[:, :width]
            if other.ids is not None and (held := max(other.replayed)):
                ids[len(self.replayed) :, :held] = other.ids[take, :held]
            self.ids = ids
        self.replayed = self.replayed + [other.replayed[b] for b in take]
