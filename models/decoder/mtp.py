"""Multi-token prediction (MTP) layers of the target's own checkpoint, as transformers loads them (`use_mtp`), or as
`mtp_layer` does if transformers drops them.

Layer k in transformers predicts the token k + 2 places ahead from the hidden state of the layer before it (the target's
last one for k = 0) and the token k + 1 places ahead, with its own keys and values at every position. transformers runs
them at batch size 1; here keys and values are in slots, so that rows may be ragged. The last positions of a round are
read with drafted tokens ahead of them, so as many as there are layers after the first are read again in the next round.
A single layer for all levels reads accepted tokens once, and then its own states and drafts, one place per level. It
can therefore grow trees, too.

Shapes: B rows, C elements of a round, n layers, S slots, d hidden size, P axes of M-RoPE, W nodes of a tree's level, M
nodes of it and of the levels above, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from visspec.cache import additive, gather_rows, to_device, visibility
from visspec.io.checkpoint import check_whole
from visspec.models.attention.pass_inputs import SlotLayers
from visspec.models.decoder import mtp_layer
from visspec.models.decoder.target import LAST
from visspec.models.drafting.base import (
    Chain,
    PendingInputs,
    StructuredDrafter,
    accepted_nodes,
    next_tokens,
    prompt_first,
    ranking_logits,
    see_ancestors,
)
from visspec.models.drafting.static_tree import MOST_CHILDREN
from visspec.types import MAX_NODES, Draft, DrafterTraits, Outcome, Scores, State, Verdict

ATTENDING = {"full_attention", "sliding_attention"}
LEVELS, MOST = 3, 64  # default and maximum levels of a single layer


class MultiToken(StructuredDrafter):
    """Drafts chains of as many levels as the checkpoint has layers, or of `levels` (3) if one layer serves all.

    A single layer also grows trees of at most `nodes` nodes, with a `width` above 1 (EAGLE-2) or as set by `shaped`.
    Raises ValueError for a model without such layers.

    Args:
        heads: A loaded `MtpModel` or `MtpLayer`; None reads the model's checkpoint when a setup is built.
    """

    traits = DrafterTraits(levels=1, feature_layers=LAST, joins=True)

    def __init__(
        self,
        heads: MtpModel | mtp_layer.MtpLayer | None = None,
        levels: int | None = None,
        *,
        width: int = 1,
        nodes: int = 16,
    ):
        if levels is not None:
            check_whole("levels", levels, high=MOST)
        check_whole("width", width, high=MOST_CHILDREN)
        check_whole("nodes", nodes, high=MAX_NODES - 1)
        self.heads: Any = None
        self.window, self.asked, self.width, self.nodes = 0, levels, width, nodes
        if heads is not None:
            self._take(heads)

    def attach(self, target: PreTrainedModel) -> None:
        if self.heads is None:
            self._take(self._read(target))
        elif self.repeats:  # it is not part of the model, so it does not move with it
            self.heads.to(device=target.device, dtype=target.dtype)
        if self.width > 1 and not self.repeats:
            raise ValueError(f"width: got {self.width}, but a checkpoint with a layer for each level drafts chains.")

    def _read(self, target: PreTrainedModel) -> MtpModel | mtp_layer.MtpLayer:
        """Load the layers from a model's checkpoint."""
        config = target.config.get_text_config() if isinstance(target, nn.Module) else None
        if not getattr(config, "num_mtp_layers", None):
            if config is None or mtp_layer.folder_of(target) is None:
                raise ValueError(
                    f"drafter: got {type(target).__name__}, expected a model with MTP layers"
                    " (num_mtp_layers, or mtp.* in the files it was read from)."
                )
            return mtp_layer.load_layer(target)
        try:
            return MtpModel.from_pretrained(target, device_map={"": target.device}).eval()
        except (OSError, RuntimeError) as error:
            reason = str(error).split("\n")[0].replace(". ", ", ").rstrip(".")
            raise ValueError(f"drafter: no weights of such layers beside those of the model ({reason}).") from error

    def _take(self, heads: Any) -> None:
        kinds = getattr(heads.config, "layer_types", None) or ["full_attention"]
        if strange := set(kinds) - ATTENDING:
            raise ValueError(f"drafter: heads with {', '.join(sorted(strange))}, expected full or sliding attention.")
        slides = "sliding_attention" in kinds
        self.window = int(heads.config.sliding_window or 0) if slides else 0
        self.heads = copy.copy(heads)  # shares all weights, but takes masks unchanged
        self.heads.create_masks_for_mtp_layer = lambda *_, **__: {}  # transformers' masks are for one row
        self.repeats = getattr(heads, "repeats", False)
        count = self.asked or (len(self.paths[-1]) if self.paths else None)
        self.count = (count or LEVELS) if self.repeats else heads.num_mtp_layers
        if not self.repeats and self.asked not in (None, self.count):
            raise ValueError(f"levels: got {self.asked}, expected {self.count}, the layers of the checkpoint.")
        self.traits = DrafterTraits(self.count, LAST, embeddings=self.repeats, trees=self.width > 1, joins=True)

    def start(self, state: State, scores: Scores) -> None:
        assert scores.features is not None
        rows, length = scores.features.shape[:2]
        ids_BL = torch.cat([state.request.prompt[:, 1:], state.pending[:, None]], dim=1)
        if ids_BL.shape[1] != length:
            raise ValueError(f"input_ids: got {ids_BL.shape[1]} for {length} places, expected an id for each.")
        ahead_BLd, real_BL = self.heads.embed_tokens(ids_BL), scores.aux["attention"]
        if self.traits.embeddings and (seen_BLd := scores.aux.get("embeddings")) is not None:
            ahead_BLd = torch.cat([seen_BLd[:, 1:], ahead_BLd[:, -1:]], dim=1)
        elements = torch.cat([ahead_BLd.to(scores.features), scores.features], dim=-1)
        _, both, counts = prompt_first(ids_BL, elements, real_BL)
        state.memory = _Heads(rows, state.request.max_new_tokens)
        state.memory.pending_inputs.append((*both.split(ahead_BLd.shape[-1], dim=-1), counts))
        positions = scores.aux["positions"]
        if positions.dim() == 3:
            places = positions[-3:].expand(-1, rows, -1).permute(1, 2, 0)
            state.memory.turn(prompt_first(ids_BL, places, real_BL)[1], counts)

    def propose(self, state: State, depth: int) -> Draft:
        if self.structure(state).width > 1:
            return self._tree(state, self.levels(state, min(depth, self.traits.levels)))
        chain = Chain(state)
        self._round(state.memory, chain, min(depth, self.count) if self.repeats else self.count)
        state.calls["draft_pass"] += len(chain.tokens)
        return chain.finish(depth)

    def _round(self, memory: _Heads, chain: Chain | None, levels: int) -> None:
        """Read what was accepted since the last round, through all layers, and draft. With chain None, only read."""
        read_BCd, hidden_BCd, counts = memory.pop_pending()
        slots, width, lengths = memory.cache.slots, read_BCd.shape[1], memory.cache.slots.lengths
        last_B1 = to_device(counts, read_BCd.device)[:, None] - 1
        ahead_BTd, above_BCd = nn.functional.pad(read_BCd, (0, 0, 0, self.count)), hidden_BCd
        for level in range(levels):
            layer = 0 if self.repeats else level
            above_BCd = self._layer(memory, layer, ahead_BTd[:, layer : layer + width], above_BCd)
            if chain is None:
                continue
            newest_B1d = gather_rows(above_BCd, last_B1)
            token = chain.add(self.heads._project_to_logits(newest_B1d)[:, 0])
            next_B1d = self.heads.embed_tokens(token)[:, None].to(ahead_BTd)
            if self.repeats:
                slots.lengths = [n + count + level for n, count in zip(lengths, counts)]
                ahead_BTd, above_BCd, last_B1, width = next_B1d, newest_B1d, torch.zeros_like(last_B1), 1
            else:
                ahead_BTd = ahead_BTd.scatter(1, (last_B1 + level + 1)[..., None].expand_as(next_B1d), next_B1d)
        slots.lengths = lengths
        again = int(chain is None) if self.repeats else max(self.count - 1, int(chain is None))
        memory.keep(read_BCd, hidden_BCd, counts, again)

    def _tree(self, state: State, depth: int) -> Draft:
        """Read what was accepted since the last round, and grow a tree. Its levels are written after all accepted
        elements, and are overwritten in the next round.
        """
        memory: _Heads = state.memory
        read_BCd, hidden_BCd, counts = memory.pop_pending()
        last_B1 = to_device(counts, read_BCd.device)[:, None] - 1
        above_BWd = gather_rows(self._layer(memory, 0, read_BCd, hidden_BCd), last_B1)
        memory.keep(read_BCd, hidden_BCd, counts, 0)
        tree_builder = self.tree_builder(state, depth)
        seen_BWM: Tensor | None = None
        for level in range(depth):
            logits_BWV = self.heads._project_to_logits(above_BWd)
            token_BW, parent_BW = tree_builder.grow(ranking_logits(logits_BWV, state, level))
            if level + 1 == depth:
                break
            seen_BWM = see_ancestors(seen_BWM, parent_BW)
            ahead_BWd = self.heads.embed_tokens(token_BW).to(above_BWd)
            above_BWd = self._level(memory, level, ahead_BWd, gather_rows(above_BWd, parent_BW), seen_BWM)
        state.calls["draft_pass"] += depth
        return tree_builder.finish(self.structure(state).nodes)

    def _level(self, memory: _Heads, level: int, ahead_BWd: Tensor, above_BWd: Tensor, seen_BWM: Tensor) -> Tensor:
        """Run the single layer over a level of a tree, whose nodes share one position and see their ancestors."""
        slots, lengths, device = memory.cache.slots, memory.cache.slots.lengths, seen_BWM.device
        width, drafted = seen_BWM.shape[1:]
        slots.lengths = [n + drafted - width for n in lengths]
        extent = slots.open(width, device)
        slots.lengths = lengths
        mask_BWS = visibility(seen_BWM, lengths, None, extent)
        if self.window:  # the window is longer than any draft
            first_B11 = to_device(lengths, device)[:, None, None] + level - self.window
            mask_BWS &= torch.arange(extent, device=device) > first_B11
        places = memory.positions(1, device, [n + level for n in lengths]) + 1
        return self.heads.forward_layer(
            0,
            above_BWd,
            places.expand(*places.shape[:-1], width),
            memory.cache,
            inputs_embeds=ahead_BWd,
            attention_mask=additive(mask_BWS, above_BWd.dtype)[:, None],
        )

    def _layer(self, memory: _Heads, layer: int, ahead_BCd: Tensor, above_BCd: Tensor) -> Tensor:
        """Run a layer over the next elements, written after the accepted ones."""
        slots, width = memory.cache.slots, above_BCd.shape[1]
        return self.heads.forward_layer(
            layer,
            above_BCd,
            memory.positions(width, above_BCd.device) + 1 + layer,
            memory.cache,
            inputs_embeds=ahead_BCd,
            attention_mask=self._mask(layer, slots.lengths, width, slots.open(width, above_BCd.device), above_BCd),
        )

    def _mask(self, layer: int, lengths: list[int], width: int, extent: int, like: Tensor) -> Tensor | None:
        """Return a layer's mask (B, 1, C, S): an element sees earlier ones and itself; None if there are no others."""
        kinds = getattr(self.heads.config, "layer_types", None)
        window = self.window if kinds and kinds[layer] == "sliding_attention" else 0
        if width == 1 and min(lengths) == max(lengths) and (not window or extent <= window):
            return None
        slot = torch.arange(extent, device=like.device)
        own_BC1 = to_device(lengths, like.device)[:, None, None] + torch.arange(width, device=like.device)[:, None]
        seen_BCS = slot <= own_BC1
        if window:
            seen_BCS &= slot > own_BC1 - window
        return additive(seen_BCS, like.dtype)[:, None]

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Keep the target's hidden states of the accepted nodes, each with the token after it, for the next round."""
        path_BD, features, counts = accepted_nodes(scores, verdict, outcome)
        ids_BD = next_tokens(draft, path_BD, verdict)
        state.memory.pending_inputs.append((self.heads.embed_tokens(ids_BD).to(features), features, counts))

    def select(self, state: State, keep: list[int]) -> None:
        memory: _Heads = state.memory
        memory.cache.select(keep)
        memory.places_BLP = None if memory.places_BLP is None else memory.places_BLP[keep]
        memory.select_pending(keep)

    def join(self, state: State, other: State, take: list[int]) -> None:
        mine: _Heads = state.memory
        theirs: _Heads = other.memory
        for memory in (mine, theirs):  # process queued elements, up to one short block
            self._round(memory, None, 1 if self.repeats else self.count)
        mine.join_places(theirs, take)
        mine.cache.join(theirs.cache, take)
        mine.join_pending(theirs, take)


class _Heads(PendingInputs):
    """Keys and values of the layers, and queued elements: (embedding of the token ahead and hidden state, both
    (B, C, d), counts). With M-RoPE, `places_BLP` has the positions of the first slots; later ones increase by one.
    """

    def __init__(self, rows: int, answer: int):
        super().__init__()
        self.cache = SlotLayers(rows, answer)
        self.places_BLP: Tensor | None = None

    def turn(self, places_BLP: Tensor, counts: list[int]) -> None:
        """Store a prompt's positions, which end with those of text."""
        last_B1 = to_device(counts, places_BLP.device)[:, None] - 1
        after_BL = torch.arange(places_BLP.shape[1], device=places_BLP.device) - last_B1
        end_B1P = gather_rows(places_BLP, last_B1)
        self.places_BLP = torch.where(after_BL[..., None] > 0, end_B1P + after_BL[..., None], places_BLP)

    def positions(self, width: int, device: torch.device, lengths: list[int] | None = None) -> Tensor:
        """Return the positions of the next `width` elements, (B, C), or (P, B, C) with M-RoPE."""
        first_B1 = to_device(self.cache.slots.lengths if lengths is None else lengths, device)[:, None]
        slot_BC = first_B1 + torch.arange(width, device=device)
        if self.places_BLP is None:
            return slot_BC
        end = self.places_BLP.shape[1] - 1
        known_BCP = gather_rows(self.places_BLP, slot_BC.clamp(max=end))
        return (known_BCP + (slot_BC - end).clamp(min=0)[..., None]).permute(2, 0, 1)

    def join_places(self, other: _Heads, take: list[int]) -> None:
        """Join the stored positions of both requests, if either has any."""
        tables = [memory.places_BLP for memory in (self, other)]
        widths = [table.shape[1] for table in tables if table is not None]
        if not widths:
            return
        device = next(table.device for table in tables if table is not None)
        parts = []
        for memory in (self, other):
            positions = memory.positions(max(widths), device, [0] * len(memory.cache.slots.lengths))
            parts.append(positions.expand(3, *positions.shape[-2:]).permute(1, 2, 0))
        self.places_BLP = torch.cat([parts[0], parts[1][take]])

    def keep(self, ahead_BCd: Tensor, hidden_BCd: Tensor, counts: list[int], again: int) -> None:
        """Accept all but each row's last `again` elements, which are queued to be read once more."""
        slots = self.cache.slots
        overlaps = [min(again, count) for count in counts]
        slots.lengths = [n + count - overlap for n, count, overlap in zip(slots.lengths, counts, overlaps)]
        if again:
            first = [count - overlap for count, overlap in zip(counts, overlaps)]
            first_B1 = to_device(first, ahead_BCd.device)[:, None]
            at_BA = (first_B1 + torch.arange(again, device=ahead_BCd.device)).clamp(max=ahead_BCd.shape[1] - 1)
            self.pending_inputs = [(gather_rows(ahead_BCd, at_BA), gather_rows(hidden_BCd, at_BA), overlaps)]
