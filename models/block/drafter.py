"""Block drafters that transformers loads as plain models (DFlash, arXiv 2602.06036), such as `muse_glimmer_assistant`.

One pass of the drafter denoises a whole block: the pending token and mask tokens, which see one another and the
target's hidden states of everything accepted before. transformers runs such a model at batch size 1; here a request's
keys and values are in slots, so that rows may be ragged.

Shapes: B rows, C context elements of a pass, K block, S slots, F features, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from visspec.cache import additive, to_device
from visspec.io import hub
from visspec.models.attention.draft_attention import STOCK, implementation
from visspec.models.attention.pass_inputs import CACHE, SlotLayers, cache_argument
from visspec.models.block import export
from visspec.models.block.graphed import GraphedBlocks
from visspec.models.block.sequential import Sequential
from visspec.models.decoder.target import describe
from visspec.models.drafting import published_config
from visspec.models.drafting.base import Chain, PendingInputs, StructuredDrafter, accepted_nodes, prompt_first
from visspec.models.drafting.checkpoint import write_provenance
from visspec.models.layers import depth, over_vocabulary
from visspec.models.runner.graphs import unfit
from visspec.types import MAX_NODES, Draft, DrafterTraits, Outcome, Scores, State, Verdict


@dataclass(frozen=True)
class DFlashVariant:
    """Differences between the published forms of DFlash. The defaults are transformers' own."""

    anchor: bool = False  # the pending token's place also predicts (`sample_from_anchor`)
    causal: bool = False  # windows hide later places of the block
    reach: int | None = None  # how far back a place sees through a window, by default the window
    from_anchor: bool = False  # the reach is counted from the pending token and only limits the context
    index: bool = False  # positions are slot numbers, also for targets with M-RoPE
    raw: bool = False  # use the embedding weights without the module's scaling
    scale: float = 1.0  # factor on embeddings
    multiplier: float = 1.0  # factor on logits
    softcap: float = 0.0  # soft cap of logits; 0: none
    head: nn.Linear | None = None  # LM head of the drafter's own vocabulary
    ids: Tensor | None = None  # target ids of that vocabulary
    embed: nn.Embedding | None = None  # the drafter's own embeddings
    sequential: Sequential | None = None  # a head that makes a place's distribution depend on earlier tokens


UNMASKED: dict[str, Tensor | None] = dict.fromkeys(("full_attention", "sliding_attention"))  # everything is visible
NEEDED = ("block_size", "mask_token_id", "target_layer_ids")  # configuration entries of a block drafter


class BlockModel(StructuredDrafter):
    """Drafts from `assistant`, a loaded block drafter made for `model`. width > 1: trees of at most `nodes` nodes over
    the block's distributions instead of chains; `shaped` changes this. Raises ValueError if the drafter does not fit
    the target.

    Args:
        form: Variant of a published checkpoint.
    """

    saved_as = "network"
    recorder: GraphedBlocks | None = None
    confidence = 0.0  # a chain ends where the product of predicted acceptance rates is lower; 0 disables it

    def __init__(
        self,
        assistant: PreTrainedModel,
        model: PreTrainedModel,
        width: int = 1,
        nodes: int = 24,
        form: DFlashVariant | None = None,
    ):
        config = assistant.config
        theirs, text = describe(model), model.config.get_text_config()
        if config.hidden_size != text.hidden_size:
            raise ValueError(f"drafter: hidden size of {config.hidden_size}, expected the target's {text.hidden_size}.")
        for layer in config.target_layer_ids:
            if not 0 <= layer < depth(model):
                raise ValueError(f"drafter: target_layer_ids contains layer {layer}, expected 0..{depth(model) - 1}.")
        if not 0 <= config.mask_token_id < text.vocab_size:
            raise ValueError(f"drafter: mask_token_id {config.mask_token_id}, expected an id below {text.vocab_size}.")
        self.assistant, self.vocab, self.width, self.nodes = assistant, theirs.vocab, width, nodes
        self.model, self.form = model, form or DFlashVariant()
        self.cache_name = cache_argument(assistant.forward) or CACHE
        self._check_width()
        self.block, self.mask = config.block_size, config.mask_token_id
        self.kinds, self.window = frozenset(config.layer_types), int(config.sliding_window or 0)
        self.reach = self.window if self.form.reach is None else self.form.reach
        self.first = 0 if self.form.anchor else 1  # place of the block that predicts the first token
        layers = tuple(layer + 1 for layer in config.target_layer_ids)
        self.traits = DrafterTraits(levels=self.block - self.first, feature_layers=layers, trees=width > 1, joins=True)
        self.lm_head: nn.Linear = self.form.head or model.get_output_embeddings()
        self.embed = self.form.embed or bare(model.get_input_embeddings())

    def _check_width(self) -> None:
        head = self.form.sequential
        most = [] if self.form.ids is None else [(len(self.form.ids), "ids that the head predicts")]
        most += [(head.candidates, "candidates of a place")] if head is not None and head.candidates else []
        for count, what in most:
            if self.width > count:
                raise ValueError(f"width: got {self.width}, expected at most the {count} {what}.")
        if self.width > 1 and head is not None and head.remembers:
            raise ValueError(f"width: got {self.width} for a head that depends on the whole chain, expected 1.")

    def shaped(self, tree: str | int = "", confidence: float = 0.0) -> Self:
        """Set the structure and length of drafts, see `StructuredDrafter.shaped`.

        Args:
            confidence: For chains of a drafter whose head predicts acceptance rates (DSpark): a row's chain ends, from
                the second level on, where the product of the rates is lower. The next round drafts at most one level
                more than the longest row kept, or twice as many if all drafted levels were kept.
        """
        super().shaped(tree)
        if confidence:
            if self.traits.trees or getattr(self.form.sequential, "confidence", None) is None:
                what = "trees" if self.traits.trees else "a drafter without a head that predicts acceptance rates"
                raise ValueError(f"confidence: got {confidence} for {what}, expected chains of a drafter that has one.")
            if not 0 <= confidence < 1:
                raise ValueError(f"confidence: got {confidence}, expected a probability below 1.")
            self.confidence = confidence
        return self

    def levels(self, state: State, depth: int) -> int:
        return min(super().levels(state, depth), state.memory.limit)

    def _grow(self, tree: str) -> None:
        super()._grow(tree)
        self._check_width()

    def export(self, folder: str | Path, form: str, verifier: str | None = None) -> None:
        """Write the drafter for other engines: "dflash" or "dflash2" (z-lab, SpecForge), "speculators" (vLLM), for
        which `verifier` names the target, "dspark" (likewise, for a drafter with DSpark's heads), "domino" (SpecForge)
        or "transformers". Raises ValueError if the form cannot represent this drafter.
        """
        published_config.check_verifier_named(self.model, form, verifier)
        export.write(self, folder, form, verifier)

    def save_pretrained(self, folder: str | Path, provenance: dict[str, Any]) -> None:
        """Write the drafter in a published form that can represent it, with provenance.json."""
        export.write(self, folder, export.form_for(self))
        write_provenance(folder, provenance)

    def push_to_hub(self, repo_id: str, provenance: dict[str, Any] | None = None, private: bool | None = None) -> str:
        """Upload what `save_pretrained` writes and return the URL."""
        return hub.push(repo_id, lambda folder: self.save_pretrained(folder, provenance or {}), private)

    def record(self) -> None:
        attention = implementation(self.assistant.config) or STOCK
        fits = unfit(self.assistant, self.assistant, attention) is None and self.lm_head.weight.is_floating_point()
        if self.recorder is None and fits:
            self.recorder = GraphedBlocks(self)

    def start(self, state: State, scores: Scores) -> None:
        assert scores.features is not None
        positions, rows = scores.aux["positions"], len(scores.features)
        position_BL = (positions if positions.dim() == 2 else positions[-3]).expand(rows, -1)
        position_BL, features, counts = prompt_first(position_BL, scores.features, scores.aux["attention"])
        if self.recorder is not None:
            self.recorder.open()
        state.memory = _Context(rows, state.request.max_new_tokens)
        if self.form.index:
            position_BL = torch.arange(position_BL.shape[1], device=position_BL.device).expand(rows, -1)
            state.memory.offset = state.position - to_device(counts, state.position.device)
        state.memory.pending_inputs.append((position_BL, features, counts))

    def propose(self, state: State, depth: int) -> Draft:
        chain, depth, head = Chain(state, self.confidence), self.levels(state, depth), self.form.sequential
        grows = self.structure(state).width > 1
        greedy = chain.greedy and not grows
        recorded = None if self.recorder is None else self.recorder.run(state, greedy)
        if recorded is None:
            hidden_BKd = self._hidden(state)[:, :depth]
            logits_BKV = self._laws(hidden_BKd)
        elif greedy:
            tokens_BK, _, *rates = recorded
            chain.tokens += tokens_BK[:, :depth].unbind(1)
            for rates_BK in rates:
                chain.rates += rates_BK[:, :depth].unbind(1)
            return chain.finish()
        else:
            hidden_BKd, logits_BKV = (x[:, :depth] for x in recorded)
        if grows:
            logits_below = None if head is None else head.logits_function(logits_BKV, hidden_BKd)
            return self.block_tree(state, logits_BKV, logits_below)
        self.extend(chain, logits_BKV, hidden_BKd)
        return chain.finish()

    def extend(self, chain: Chain, logits_BKV: Tensor, hidden_BKd: Tensor) -> None:
        """Add a block's levels to a chain."""
        head = self.form.sequential
        if head is None:
            chain.extend(logits_BKV)
        elif chain.greedy and (tokens_BK := head.likeliest(logits_BKV, hidden_BKd, chain.pending)) is not None:
            chain.tokens += tokens_BK.unbind(1)
        else:
            self._walk(chain, head, logits_BKV, hidden_BKd)

    def _walk(self, chain: Chain, head: Sequential, logits_BKV: Tensor, hidden_BKd: Tensor) -> None:
        logits_below, token_B = head.logits_function(logits_BKV, hidden_BKd), chain.pending
        for place, hidden_Bd in enumerate(hidden_BKd.unbind(1)):
            logit_B = head.expected(hidden_Bd, token_B) if self.confidence else None
            rate_B = None if logit_B is None else logit_B.sigmoid().float()
            token_B = chain.add(logits_below(place, token_B[:, None])[:, 0], rate_B)

    def _hidden(self, state: State) -> Tensor:
        """Run one pass and return the block's hidden states after the pending tokens, (B, K - 1, d), or (B, K, d) if
        the pending token's place also predicts.
        """
        memory: _Context = state.memory
        hidden_BKd = self._pass(memory, state.pending, memory.placed(state.position))
        state.calls["draft_pass"] += 1
        return hidden_BKd[:, self.first :]

    def _laws(self, hidden_BKd: Tensor) -> Tensor:
        """Return logits (B, K, V) over the target's ids."""
        form = self.form
        logits = self.lm_head(hidden_BKd.to(self.lm_head.weight.dtype))[..., : self.vocab]
        if form.multiplier != 1.0:
            logits = logits * form.multiplier
        if form.softcap:
            logits = torch.tanh(logits / form.softcap) * form.softcap
        return over_vocabulary(logits, form.ids, self.vocab)

    def _pass(self, memory: _Context, pending: Tensor, position_B: Tensor) -> Tensor:
        """Read what the target has accepted since the last pass, and return the block's hidden states (B, K, d)."""
        position_BC, context_BCF, counts = self.queued(memory, position_B)
        slots, width, masks = memory.cache.slots, context_BCF.shape[1], UNMASKED
        extent = slots.open(width + self.block, pending.device)
        in_reach = "sliding_attention" not in self.kinds or (extent <= self.reach and not self.form.causal)
        if not (in_reach and slots.uniform and min(counts) == width):
            length_B1, count_B1 = (to_device(n, pending.device)[:, None] for n in (slots.lengths, counts))
            masks = self.masks(length_B1, count_B1, width, extent)
        hidden_BKd = self.network(memory.cache, masks, pending, position_B, position_BC, context_BCF)
        memory.advance(counts)
        return hidden_BKd

    def queued(self, memory: _Context, position_B: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Remove and return the queued context: positions (B, C), features (B, C, F) and each row's count."""
        if memory.pending_inputs:
            return memory.pop_pending()
        rows, size = len(position_B), len(self.traits.feature_layers) * self.assistant.config.hidden_size
        return position_B[:, None][:, :0], next(self.assistant.parameters()).new_empty(rows, 0, size), [0] * rows

    def network(
        self,
        cache: SlotLayers,
        masks: dict[str, Tensor | None],
        pending: Tensor,
        position_B: Tensor,
        position_BC: Tensor,
        context_BCF: Tensor,
    ) -> Tensor:
        """Run the network over opened slots and return the block's hidden states (B, K, d)."""
        like = next(self.assistant.parameters())
        ids_BK = torch.full((len(pending), self.block), self.mask, dtype=pending.dtype, device=pending.device)
        ids_BK[:, :1] = pending[:, None]
        ahead_BK = position_B[:, None] + torch.arange(self.block, device=pending.device)
        inputs: dict[str, Any] = {
            "noise_embeds": self._embed_ids(ids_BK).to(like),
            "context_hidden_states": context_BCF.to(like),
            "attention_mask": masks,
            "position_ids": torch.cat([position_BC, ahead_BK], dim=1),
        }
        return self.assistant(**inputs, **{self.cache_name: cache}).last_hidden_state

    def _embed_ids(self, ids: Tensor) -> Tensor:
        if not self.form.raw:
            return self.embed(ids)
        return nn.functional.embedding(ids, self.embed.weight) * self.form.scale

    def masks(self, length_B1: Tensor, count_B1: Tensor, width: int, extent: int) -> dict[str, Tensor | None]:
        """Return masks (B, 1, K, S) by layer type: each row's context, and the block.

        Args:
            length_B1: Slots of each row that were read before.
            count_B1: Elements of the context that follow there, of `width` slots before the block's.
        """
        like = next(self.assistant.parameters())
        slot = torch.arange(extent, device=like.device)
        own = (slot >= length_B1 + width) & (slot < length_B1 + width + self.block)
        seen_BS = (slot < length_B1 + count_B1) | own
        index_BS = torch.where(slot < length_B1 + count_B1, slot, slot - width + count_B1)
        query_BK = length_B1 + count_B1 + torch.arange(self.block, device=like.device)
        distance_BKS = query_BK[..., None] - index_BS[:, None]
        near_BKS = distance_BKS <= self.reach
        if self.form.from_anchor:  # the whole block is within the window
            near_BKS = distance_BKS[:, :1] <= self.reach
        ahead = 0 if self.form.causal else self.block if self.form.from_anchor else self.reach
        near_BKS = near_BKS & (distance_BKS >= -ahead)
        full = additive(seen_BS, like.dtype)[:, None, None].expand(-1, -1, self.block, -1)
        sliding = full.masked_fill(~near_BKS[:, None], torch.finfo(like.dtype).min)
        return {"full_attention": full, "sliding_attention": sliding}

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Keep the target's features of the accepted nodes for the next pass."""
        # not for draws: their numbers are reused until they are judged, so no length may depend on the last one
        if self.confidence and draft.levels and not (state.noise is not None and state.noise.samples):
            accepted = max(outcome.draft_lengths)
            state.memory.limit = accepted + 1 if accepted < draft.levels else 2 * accepted
        path_BD, features, counts = accepted_nodes(scores, verdict, outcome)
        first_B = state.memory.placed(state.position) - verdict.length
        position_BD = first_B[:, None] + torch.arange(path_BD.shape[1], device=first_B.device)
        state.memory.pending_inputs.append((position_BD, features, counts))

    def finish(self, state: State) -> None:
        if self.recorder is not None and state.memory is not None:
            self.recorder.finish(state.memory.cache.slots)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "recorder"}

    def select(self, state: State, keep: list[int]) -> None:
        memory: _Context = state.memory
        memory.cache.select(keep)
        memory.select_pending(keep)
        memory.offset = None if memory.offset is None else memory.offset[keep]

    def join(self, state: State, other: State, take: list[int]) -> None:
        mine: _Context = state.memory
        theirs: _Context = other.memory
        for memory in (mine, theirs):  # process all queued elements, so that only keys and values are joined
            if memory.pending_inputs:
                some = state.pending.new_zeros(len(memory.cache.slots.lengths))
                self._pass(memory, some, some)
        mine.cache.join(theirs.cache, take)
        if mine.offset is not None and theirs.offset is not None:
            mine.offset = torch.cat([mine.offset, theirs.offset[take]])


class _Context(PendingInputs):
    """The drafter's cache, and queued target features that it has not read: (positions, features, counts)."""

    def __init__(self, rows: int, answer: int):
        super().__init__()
        self.cache = SlotLayers(rows, answer)
        self.offset: Tensor | None = None  # (B,) the target's positions minus the drafter's
        self.limit = MAX_NODES  # levels of the next draft

    def placed(self, position_B: Tensor) -> Tensor:
        """Convert the target's positions to the drafter's."""
        return position_B if self.offset is None else position_B - self.offset

    def advance(self, counts: list[int]) -> None:
        """Mark the first counts[b] elements of the context just written as read."""
        self.cache.slots.lengths = [n + c for n, c in zip(self.cache.slots.lengths, counts)]


def bare(embed: nn.Module) -> nn.Embedding:
    """Return an embedding without the norm that some models attach to it: drafters read the stored weights."""
    if getattr(embed, "embed_norm", None) is None:
        return cast(nn.Embedding, embed)
    new = copy.copy(cast(nn.Embedding, embed))
    new._modules = {**embed._modules, "embed_norm": nn.Identity()}
    return new
