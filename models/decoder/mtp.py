"""Multi-token-prediction heads of the target's own checkpoint, as transformers reads them (`use_mtp`).

Layer k predicts the token k + 2 places ahead from the hidden state of the layer before it (the target's last one for
k = 0) and the token k + 1 places ahead, with keys and values of its own at every position. transformers drives them at
batch size 1; here these are slots, so that rows may be ragged. The last positions of a round are read with drafted
tokens ahead of them, so as many as there are layers behind the first are read again in the next one.

Shapes: B rows, C elements of a round, n layers, S slots, d hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from visspec import tree as trees
from visspec.cache import additive, gathered, to_device
from visspec.distributions import Categorical
from visspec.models.attention.slot_layers import SlotLayers
from visspec.models.decoder.target import LAST
from visspec.models.drafting.memory import accepted, packed, prompt_first
from visspec.sampling import propose
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

ATTENDING = {"full_attention", "sliding_attention"}


class MultiToken(Drafter):
    """Chains of as many levels as the checkpoint has layers. heads: a loaded `MtpModel`; None reads the checkpoint of
    the model when a setup is built. Raises ValueError for a model without them.
    """

    traits = DrafterTraits(levels=1, feature_layers=LAST, joins=True)

    def __init__(self, heads: nn.Module | None = None):
        self.heads: Any = None
        self.window = 0
        if heads is not None:
            self._take(heads)

    def attach(self, target: Any) -> None:
        if self.heads is not None:
            return
        config = target.config.get_text_config() if isinstance(target, nn.Module) else None  # type: ignore[union-attr, operator]
        if not getattr(config, "num_mtp_layers", None):
            raise ValueError(
                f"drafter: got {type(target).__name__}, expected a model with layers that predict several tokens"
                " (num_mtp_layers)"
            )
        try:
            self._take(MtpModel.from_pretrained(target, device_map={"": target.device}).eval())
        except (OSError, RuntimeError) as error:
            said = str(error).split("\n")[0].replace(". ", ", ").rstrip(".")
            raise ValueError(f"drafter: no weights of such layers beside those of the model ({said})") from error

    def _take(self, heads: Any) -> None:
        kinds = getattr(heads.config, "layer_types", None) or ["full_attention"]
        if strange := set(kinds) - ATTENDING:
            raise ValueError(f"drafter: heads with {', '.join(sorted(strange))}, expected full or sliding attention")
        slides = "sliding_attention" in kinds
        self.window = int(heads.config.sliding_window or 0) if slides else 0
        self.heads = copy.copy(heads)  # shares all weights; takes masks as they are
        self.heads.create_masks_for_mtp_layer = _given
        self.count = heads.num_mtp_layers
        self.traits = DrafterTraits(levels=self.count, feature_layers=LAST, joins=True)

    def start(self, state: State, scores: Scores) -> None:
        assert scores.features is not None
        rows, length = scores.features.shape[:2]
        ids_BL = torch.cat([state.request.prompt[:, 1:], state.pending[:, None]], dim=1)
        if ids_BL.shape[1] != length:
            raise ValueError(f"input_ids: got {ids_BL.shape[1]} for {length} places, expected an id for each")
        state.memory = _Heads(rows, state.request.max_new_tokens)
        state.memory.pending_inputs.append(prompt_first(ids_BL, scores.features, scores.aux["attention"]))

    def propose(self, state: State, depth: int) -> Draft:
        tokens, distributions = self._round(state.memory, state)
        state.calls["draft_pass"] += self.count
        q = Categorical.chain(distributions[:depth]) if distributions else None
        return trees.chain_draft(state.pending, torch.stack(tokens[:depth], dim=1), q)

    def _round(self, memory: _Heads, state: State | None) -> tuple[list[Tensor], list[Categorical]]:
        """Reads what was accepted since the last round, through all layers, and drafts. state None: reads only."""
        ids_BC, above_BCd, counts = packed(memory.pending_inputs)
        slots, device, width = memory.cache.slots, ids_BC.device, ids_BC.shape[1]
        masks = self._masks(slots.lengths, width, slots.open(width, device), above_BCd)
        position_BC = to_device(slots.lengths, device)[:, None] + torch.arange(1, width + 1, device=device)
        last_B1 = to_device(counts, device)[:, None] - 1
        ahead_BT = torch.cat([ids_BC, ids_BC.new_zeros(len(counts), self.count)], dim=1)
        memory.keep(ids_BC, above_BCd, counts, max(self.count - 1, int(state is None)))
        tokens: list[Tensor] = []
        distributions: list[Categorical] = []
        for level in range(self.count):
            above_BCd = self.heads.forward_layer(
                level,
                above_BCd,
                position_BC + level,
                memory.cache,
                input_ids=ahead_BT[:, level : level + width],
                attention_mask=masks[level],
            )
            if state is None:
                continue
            newest_B1d = gathered(above_BCd, last_B1)
            token, distribution = propose(self.heads._project_to_logits(newest_B1d)[:, 0], state, level)
            tokens.append(token)
            if distribution is not None:
                distributions.append(distribution)
            ahead_BT = ahead_BT.scatter(1, last_B1 + level + 1, token[:, None])
        return tokens, distributions

    def _masks(self, lengths: list[int], width: int, extent: int, like: Tensor) -> list[Tensor | None]:
        """Of every layer, (B, 1, C, S): an element sees those before it and itself; None where that is all there is."""
        kinds = getattr(self.heads.config, "layer_types", None) or ["full_attention"] * self.count
        if width == 1 and min(lengths) == max(lengths) and (not self.window or extent <= self.window):
            return [None] * self.count
        slot = torch.arange(extent, device=like.device)
        own_BC1 = to_device(lengths, like.device)[:, None, None] + torch.arange(width, device=like.device)[:, None]
        seen_BCS = slot <= own_BC1
        near_BCS = seen_BCS & (slot > own_BC1 - self.window)
        made = {kind: additive(seen_BCS if kind == "full_attention" else near_BCS, like.dtype) for kind in set(kinds)}
        return [made[kind][:, None] for kind in kinds]

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Keep the target's hidden states of the accepted nodes, each with the token after it, for the next round."""
        path_BD, features, counts = accepted(scores, verdict, outcome)
        shifted_BD = torch.cat([path_BD[:, 1:], path_BD[:, -1:]], dim=1)
        ids_BD = draft.value.gather(1, shifted_BD).scatter(1, verdict.length[:, None] - 1, verdict.next[:, None])
        state.memory.pending_inputs.append((ids_BD, features, counts))

    def select(self, state: State, keep: list[int]) -> None:
        memory: _Heads = state.memory
        memory.cache.select(keep)
        memory.pending_inputs = [
            (ids[keep], hidden[keep], [c[b] for b in keep]) for ids, hidden, c in memory.pending_inputs
        ]

    def join(self, state: State, other: State, take: list[int]) -> None:
        mine: _Heads = state.memory
        theirs: _Heads = other.memory
        for memory in (mine, theirs):  # keys and values of all rows are there, and one block of few waits
            self._round(memory, None)
        mine.cache.join(theirs.cache, take)
        (ids, hidden, counts), (new_ids, new_hidden, new_counts) = mine.pending_inputs[0], theirs.pending_inputs[0]
        ids, hidden = torch.cat([ids, new_ids[take]]), torch.cat([hidden, new_hidden[take]])
        mine.pending_inputs = [(ids, hidden, counts + [new_counts[b] for b in take])]


class _Heads:
    """Keys and values of the layers, and elements to be read: (ids (B, C), hidden (B, C, d), counts)."""

    def __init__(self, rows: int, answer: int):
        self.cache = SlotLayers(rows, answer)
        self.pending_inputs: list[tuple[Tensor, Tensor, list[int]]] = []

    def keep(self, ids_BC: Tensor, hidden_BCd: Tensor, counts: list[int], again: int) -> None:
        """All but each row's last `again` elements are read for good; these wait to be read once more."""
        slots = self.cache.slots
        left = [min(again, count) for count in counts]
        slots.lengths = [n + count - kept for n, count, kept in zip(slots.lengths, counts, left)]
        self.pending_inputs = []
        if again:
            first_B1 = to_device([count - kept for count, kept in zip(counts, left)], ids_BC.device)[:, None]
            at_BA = (first_B1 + torch.arange(again, device=ids_BC.device)).clamp(max=ids_BC.shape[1] - 1)
            self.pending_inputs = [(ids_BC.gather(1, at_BA), gathered(hidden_BCd, at_BA), left)]


def _given(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """In place of the heads' own masks, which are for one row: they are an argument."""
    return {}
