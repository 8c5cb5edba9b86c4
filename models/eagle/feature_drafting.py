"""Base class of feature drafters (EAGLE-type): one decoder layer drafts level by level from the target's features.

Because the network has one layer, attention and MLP are only needed for the *last* new element; the others only need
keys and values. One pass reads the features of all tokens accepted in the last round and gives the distribution of
the first level; each further level adds one element per row.

Shapes: B rows, T elements, N elements of all rows, d hidden size, F features, V vocabulary, W width of a tree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec import tree as trees
from visspec.cache import gather_rows, to_device
from visspec.io.checkpoint import check_whole
from visspec.models.drafting import checkpoint
from visspec.models.drafting.base import (
    Chain,
    StructuredDrafter,
    accepted_nodes,
    next_tokens,
    ranking_logits,
    see_ancestors,
)
from visspec.models.drafting.checkpoint import TargetT
from visspec.models.drafting.static_tree import MOST_CHILDREN, StaticTreeBuilder
from visspec.models.eagle import sequence as layouts
from visspec.models.eagle.config import EagleConfig
from visspec.models.eagle.head import EagleHead, turns, turns_at
from visspec.models.eagle.layer import DraftLayer, FeatureMemory, FoldedLayer
from visspec.train.batches import Prediction, TrainingBatch
from visspec.types import MAX_NODES, Draft, DrafterTraits, Outcome, Scores, State, Verdict

GROWING = threading.Lock()  # a shorter table must never replace a longer one


class FeatureDrafting(checkpoint.NetworkDrafter[TargetT], StructuredDrafter):
    """A drafter with an `EagleHead`; subclasses read the prompts. width 1 drafts chains, larger widths dynamic trees
    of at most `nodes` nodes; `shaped` changes both.

    Subclasses define `start` (with `_read_prompt`) and the three hooks below, and may override the others.
    """

    _like: Callable[..., Tensor]  # (target): any tensor with its device and dtype
    # (layout, embeddings (B, L, d), features (B, L, F)): latents and context vectors for `layouts.layer_inputs`
    _context: Callable[..., tuple[Tensor, Tensor]]
    _batch_embeddings: Callable[[TrainingBatch], Tensor]  # embeddings of all tokens but the first, (B, L + M - 1, d)

    head: EagleHead
    config: EagleConfig
    embed: nn.Embedding
    lm_head: nn.Linear  # or the quantized module that replaced it
    borrowed: tuple[nn.Module, ...] = ()  # modules of the target, frozen in training

    def __init__(self, head: EagleHead, embed: nn.Module, lm_head: nn.Module, like: Tensor, width: int, nodes: int):
        """embed: embedding of drafted ids. like: a weight of the target, for device and dtype."""
        check_whole("width", width, 1, MOST_CHILDREN)
        check_whole("nodes", nodes, 1, MAX_NODES - 1)
        config = head.config
        self.head, self.config = head.to(like.device).eval(), config
        self.embed, self.lm_head = cast(nn.Embedding, embed), cast(nn.Linear, lm_head)
        self.width, self.nodes, self.dtype = width, nodes, like.dtype
        self.traits = DrafterTraits(config.levels, config.feature_layers, trees=width > 1)
        self._turns = self._rotations(256, like.device)
        self._layer: DraftLayer | None = self._draft_layer()

    @property
    def trained(self) -> Tensor:
        """Any weight of the network, for device and dtype."""
        return next(self.head.parameters())

    @property
    def layer(self) -> DraftLayer:
        """The layer used for drafting, with the weights as of the last `refresh`."""
        layer = self._layer
        if layer is None:
            with torch.inference_mode(False), torch.no_grad():
                layer = self._layer = self._draft_layer()
        return layer

    def refresh(self) -> None:
        """Use the network's current weights from the next draft on; free the folded ones. Call it after updates."""
        self.head.eval()
        self._layer = None

    def _draft_layer(self) -> DraftLayer:
        if self.config.foldable:
            return FoldedLayer(self.head, self.embed, self.lm_head, self.dtype)
        return DraftLayer(self.head_in(self.dtype), self.embed, self.lm_head, self.dtype)

    def attach(self, target: TargetT) -> None:
        """Move to the device and dtype of a target (a model or a family)."""
        like = self._like(target)
        if (like.device, like.dtype) == (self._turns.device, self.dtype):
            return
        self.head, self._turns, self.dtype = self.head.to(like.device), self._turns.to(like.device), like.dtype
        self._embed_again(target)
        self.refresh()

    def _embed_again(self, target: TargetT) -> None:
        """Rebuild the embedding of drafted ids from the target's weights, if it is not a module of the target."""

    def _rotations(self, length: int, device: torch.device) -> Tensor:
        """Return exp(i * angle) of the rotary channels at positions [0, length), complex64 (length, C)."""
        return turns(self.config, length, device)

    def _turns_to(self, length: int) -> Tensor:
        """Return rotations for at least `length` positions. Threads share the cached table: use the returned one."""
        table = self._turns
        if table.shape[0] >= length:
            return table
        with torch.inference_mode(False):  # training may use the table, too
            table = self._rotations(2 * length, table.device)
        with GROWING:
            if self._turns.shape[0] < table.shape[0]:
                self._turns = table
        return table

    def elements(
        self,
        layout: layouts.PromptLayout,
        following_BLd: Tensor,
        features_BLF: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        known: tuple[Tensor, Tensor] | None = None,
        reach: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the layer inputs (B, T, d), rotations (B, T, C) and context vectors of a layout's elements.

        Args:
            following: Embedding of the token after each.
            embeddings: Input embeddings of the target, (B, L, d).
            known: The `_context` of the whole layout, if `layout` is a part of it.
            reach: An upper bound on all positions, if known.
        """
        head, dtype = self.head, self.trained.dtype
        embed = self._next_embeddings(layout, following_BLd)
        feature = head.reduced(gather_rows(features_BLF, layout.token.to(features_BLF.device))).to(dtype)
        latents, context = known or self._context(layout, embeddings.to(dtype), features_BLF.to(dtype))
        x_BTd = layouts.layer_inputs(head, layout, embed, feature, latents, context)
        section = self.config.mrope_section
        position = layouts.positions_at(positions, layout, following_BLd.shape[0], section)
        reach = int(position.max()) + 1 if reach is None and position.numel() else reach
        table = self._turns_to(reach or 1)
        return x_BTd, turns_at(table, position, section, self.config.mrope_interleaved), context

    def _next_embeddings(self, layout: layouts.PromptLayout, following_BLd: Tensor) -> Tensor:
        index = layout.token.clamp(max=following_BLd.shape[1] - 1)
        return gather_rows(following_BLd, index.to(following_BLd.device)).to(self.trained.dtype)

    def _read_prompt(
        self,
        state: State,
        memory: FeatureMemory,
        lengths: list[int],
        parts: Iterable[tuple[Tensor, Tensor]],
        last: Tensor,
    ) -> None:
        """Compute keys and values of a prompt's elements except the last, which is queued with its feature (B, 1, F).

        Args:
            parts: Layer inputs and rotations of consecutive elements.
        """
        start = 0
        for x_BTd, turn_BTC in parts:
            rows, width = x_BTd.shape[:2]
            qkv = self.layer.project(x_BTd.to(self.dtype).flatten(0, 1), rows, width, turn_BTC)
            kv = qkv[:, :, self.layer.heads :]
            memory.write_prompt(kv, lengths, start)
            start += kv.shape[1]
        memory.add(state.pending[:, None], last, [1] * len(last))
        state.memory = memory

    def propose(self, state: State, depth: int) -> Draft:
        """Draft a chain of `depth` levels or a tree, coupled to the noise or sampled with its distributions."""
        memory: FeatureMemory = state.memory
        if self.config.block > 1:
            return self._propose_blocks(state, depth)
        calls = self.passes or self.recorder
        if calls is not None and calls.prepare(state, depth, self._turns_to):
            if self.structure(state).width == 1:
                return trees.chain_draft(state.pending, calls.draft(state, depth))
            if (draft := calls.tree(state, self.levels(state, depth))) is not None:
                return draft
        whole, depth = depth, self.levels(state, depth)
        feature_Bd = self._catch_up(memory, depth)
        if self.structure(state).width > 1:
            return self._tree(state, memory, feature_Bd, depth)
        chain = self.chain(state, whole)
        rope_BTC, bias_BTd = memory.rope(memory.table, max(depth - 1, 1)), memory.context_bias(max(depth - 1, 1))
        for level in range(depth):
            token_B = chain.add(self._logits(self._mix_features(feature_Bd, state)))
            if level + 1 < depth:
                entered_B = memory.each(self._level_inputs(token_B, state, level))
                bias_B1d = bias_BTd if bias_BTd is None or bias_BTd.shape[1] == 1 else bias_BTd[:, level : level + 1]
                turn_B1C = rope_BTC[:, level : level + 1]
                feature_Bd = self.layer.step(memory, entered_B, feature_Bd, bias_B1d, turn_B1C, level)
        return chain.finish()

    def chain(self, state: State, depth: int) -> Any:
        """Return a chain builder: `Chain`, or an object with its methods."""
        return Chain(state)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Store the target's features of the accepted nodes for the next proposal."""
        assert scores.features is not None
        if draft.tree.chain and len(outcome.path) == 1:
            width = len(outcome.path[0])
            counts, features = [width], scores.features[:, :width]
            tokens = torch.cat([draft.value[:, 1:width], verdict.next[:, None]], dim=1)
        else:
            path_BD, features, counts = accepted_nodes(scores, verdict, outcome)
            tokens = next_tokens(draft, path_BD, verdict)
        state.memory.add(tokens, features, counts)

    def select(self, state: State, keep: list[int]) -> None:
        state.memory.select(keep)

    def _level_inputs(self, token: Tensor, state: State, level: int) -> Tensor:
        """Return the input ids of the next level for the drafted ids (B,) or (B, W) of this one."""
        return token

    def _mix_features(self, feature: Tensor, state: State) -> Tensor:
        """Combine the predicted features of the memory's rows into what the LM head reads, (B, ...)."""
        return feature

    def _logits(self, feature: Tensor) -> Tensor:
        return self.layer.logits(feature)

    def _catch_up(self, memory: FeatureMemory, depth: int) -> Tensor:
        """Process the queued elements and predict the feature after each row's pending token, (B, d)."""
        token_BT, feature_BTF, counts = memory.pop_pending()
        width = token_BT.shape[1]
        memory.reserve(memory.end + width + depth * self.width)
        memory.table = self._turns_to(max(memory.positions) + width + depth)
        return self.read_block(memory, token_BT, self.head.reduced(feature_BTF).to(self.dtype), counts)

    def read_block(
        self, memory: FeatureMemory, token_BT: Tensor, feature_BTd: Tensor, counts: list[int] | Tensor
    ) -> Tensor:
        """Process elements, counts[b] in row b, and predict the feature after each row's last one, (B, d)."""
        rows, width = token_BT.shape
        bias, rope = memory.context_bias(width), memory.rope(memory.table, width)
        x_Nd, query_BTHE = self.layer.read(memory, token_BT, feature_BTd, bias, rope)
        memory.advance(counts)
        if isinstance(counts, list) and min(counts) == width:
            x_Bd, query = x_Nd.view(rows, width, -1)[:, -1], query_BTHE[:, -1]
        else:
            row, last = torch.arange(rows, device=x_Nd.device), to_device(counts, x_Nd.device) - 1
            x_Bd, query = x_Nd.view(rows, width, -1)[row, last], query_BTHE[row, last]
        return self.layer.after_attention(x_Bd, query, memory.attend)

    def _tree(self, state: State, memory: FeatureMemory, feature_Bd: Tensor, depth: int) -> Draft:
        return self.grow_tree(state, memory, feature_Bd, depth)[0].finish(self.structure(state).nodes)

    def grow_tree(
        self, state: State, memory: FeatureMemory, feature_Bd: Tensor, depth: int
    ) -> tuple[trees.TreeBuilder | StaticTreeBuilder, Tensor]:
        """Grow a tree from the features after the pending tokens. Returns its builder and the last level's features."""
        tree_builder, rows = self.tree_builder(state, depth), feature_Bd.shape[0]
        feature_BWd, ancestors = feature_Bd[:, None], None
        for level in range(depth):
            logits_BWV = self._logits(self._mix_features(feature_BWd, state))
            token_BW, parent_BW = tree_builder.grow(ranking_logits(logits_BWV, state, level))
            if level + 1 == depth:
                break
            width, parent_BW = token_BW.shape[1], memory.each(parent_BW)
            carried = gather_rows(feature_BWd, parent_BW.to(feature_BWd.device))
            entered_BW = memory.each(self._level_inputs(token_BW, state, level))
            bias, rope = memory.context_bias(1, level), memory.rope(memory.table, 1, level)
            ancestors = see_ancestors(ancestors, parent_BW.to(carried.device))
            x_Nd, query_BWHE = self.layer.read(memory, entered_BW, carried, bias, rope, ancestors.shape[2] - width)
            attend = partial(memory.attend, drafted=ancestors.shape[2], seen_BWM=ancestors)
            feature_BWd = self.layer.after_attention(x_Nd, query_BWHE.flatten(0, 1), attend).view(rows, width, -1)
        return tree_builder, feature_BWd

    def _propose_blocks(self, state: State, depth: int) -> Draft:
        memory: FeatureMemory = state.memory
        depth = self.levels(state, depth)
        spread = self.layer.head.spread
        ahead_BKd = spread(self._catch_up(memory, depth))
        if self.structure(state).width > 1:
            return self.block_tree(state, self._logits(ahead_BKd[:, :depth]))
        chain = Chain(state)
        while True:
            chain.extend(self._logits(ahead_BKd[:, : depth - len(chain.tokens)]))
            if len(chain.tokens) == depth:
                return chain.finish()
            ahead_BKd = spread(self._again(memory, torch.stack(chain.tokens, dim=1), ahead_BKd))

    def _again(self, memory: FeatureMemory, token_BT: Tensor, feature_BKd: Tensor) -> Tensor:
        """Read the last K drafted ids, stored after the earlier ones, and predict the next feature (B, d)."""
        rows, width = feature_BKd.shape[:2]
        start = token_BT.shape[1] - width
        bias, rope = memory.context_bias(width), memory.rope(memory.table, width, start)
        x_Nd, query_BKHE = self.layer.read(memory, token_BT[:, start:], feature_BKd, bias, rope, start)
        attend = partial(memory.attend, drafted=start + width)
        return self.layer.after_attention(x_Nd.view(rows, width, -1)[:, -1], query_BKHE[:, -1], attend)

    def _training_layout(self, batch: TrainingBatch) -> layouts.PromptLayout:
        """Return the elements of a training batch: prompts and answers."""
        plan = layouts.plan(self.config, batch.host_ids[:, : batch.prompt_length], batch.host_attention)
        return layouts.extend(plan, batch.prompt_length, batch.lengths)

    def _places(self, positions: Tensor, attention_BL: Tensor | None) -> Tensor:
        """Convert the target's positions to the drafter's, (1|B, L) or (3|4, 1|B, L)."""
        return positions

    def rollout(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Run self-fed training steps over whole answers (`visspec.train.capture.TrainingBatch`).

        Step k sees true features up to k tokens back, and its own predictions after that. Returns, per step and per
        token of a pass, the predicted features (B, T, d) and a bool mask (B, T) of the elements that count. Element t
        of a row's answer predicts the distribution after answer token t.
        """
        ids, features = batch.ids, batch.features
        layout, following = self._training_layout(batch), self._batch_embeddings(batch)
        embeddings = batch.embeddings if batch.embeddings is not None else features[..., : self.config.hidden]
        arguments = layout, following, features, embeddings, self._places(batch.positions, batch.attention)
        x, turn, context = self.elements(*arguments, reach=batch.reach)
        first = to_device([whole - own + 1 for whole, own in zip(layout.lengths, batch.lengths)], ids.device)
        answer = first[:, None] + torch.arange(max(batch.lengths) - 1, device=ids.device)
        count = to_device([n - 1 for n in batch.lengths], ids.device)[:, None]
        answer = answer.clamp(max=x.shape[1] - 1)
        index = torch.arange(answer.shape[1], device=ids.device)
        embed = self._next_embeddings(layout, following)
        image = context[layout.image.to(context.device)]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        out = []
        for step in range(steps):
            query, key, value = self.head.project(x, turn)
            keys.append(key)
            values.append(value)
            feature = self.head.after_attention(x, query, partial(staggered_attention, keys=keys, values=values))
            for more, ahead in enumerate(self.head.spread(feature).unbind(-2)):
                predicted = gather_rows(ahead, (answer - more).clamp(min=0))
                out.append(Prediction(predicted, (index >= step + more) & (index < count)))
            if step + 1 < steps:
                shifted = torch.cat([torch.zeros_like(feature[:, :1]), feature[:, :-1]], dim=1)
                x = self.head.join(embed, shifted, image)
        return out


def staggered_attention(query: Tensor, part: int | None = None, *, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Compute the attention of self-fed step k = len(keys) - 1: (B, T, H, E) -> (B, T, H * E).

    Element t attends to step 0 up to t - k (true features) and to one element of each later step i: t - k + i, the
    chain that drafting would leave in the cache (EAGLE-3's training-time test, arXiv 2503.01840). Cost is linear in
    k.

    Args:
        part: Which half of the keys and values to use, if there are twice as many as queries.
    """
    if part is not None:
        keys, values = ([x.chunk(2, dim=2)[part] for x in both] for both in (keys, values))
    size, step = query.shape[1], len(keys) - 1
    scale = query.shape[-1] ** -0.5
    score = torch.einsum("bthe,bshe->bhts", query, keys[0]) * scale
    index = torch.arange(size, device=query.device)
    past = index[None, :] <= index[:, None] - step
    score = score.masked_fill(~past, torch.finfo(score.dtype).min)
    ahead_key, ahead_value = (
        [F.pad(x, (0, 0, 0, 0, step - i, 0))[:, :size] for i, x in enumerate(steps) if i] for steps in (keys, values)
    )
    own = [(query * k).sum(-1).transpose(1, 2)[..., None] * scale for k in ahead_key]
    weight = torch.cat([score, *own], dim=-1).float().softmax(dim=-1).to(query.dtype)
    mixed = torch.einsum("bhts,bshe->bthe", weight[..., :size], values[0])
    for i, value in enumerate(ahead_value):
        mixed = mixed + weight[..., size + i].transpose(1, 2)[..., None] * value
    return mixed.flatten(2)
