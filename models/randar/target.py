"""Any-order image models in RandAR's form as targets of the loop: a node is a rank in the row's order.

A pass has a pair of inputs for each node of a draft: its code, and the query of the place that comes after it, whose
output is the distribution after the node. Both stay in the cache, because later codes attend to both. The order belongs
to the request (`Request.order`).

With `ahead` A, every node has A more queries, for the places after the next one. They see what their node sees but not
each other, and nothing attends to them. They give distributions of later codes without those in between, from which a
drafter draws the next draft (`models.randar.ahead`) without another pass. One network drafts and verifies (any-subset
speculative decoding, Guo and Ermon), in one pass where the published form takes two.

Shapes: B requests, R = B or 2 B cache rows, P prefix, N nodes, A later places, Q = 1 + A queries per node,
S = 2 N + N A inputs of a pass, T places, V codes, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.cache import SlotCache
from visspec.loop.decode import TokenBuffer
from visspec.models.attention.pass_inputs import SlotLayers
from visspec.models.image_codes.family import EncodedPrompt
from visspec.models.image_codes.target import ImageAR, _repeat_tree, _twice
from visspec.models.llamagen.layout import RandARClassModel
from visspec.models.llamagen.network import RandAR
from visspec.models.llamagen.target import LlamaGenImages
from visspec.models.randar.layout import RandARImageModel
from visspec.sampling import warp
from visspec.types import FREE, Draft, DrafterTraits, Outcome, Request, Scores, State, Target, Tree


class RandARImages(LlamaGenImages):
    """Prompts are LlamaGen's. Images are generated in any order of their places."""

    name = "randar"
    draws = "any order"
    default_drafter, default_order = "ahead", "halton"
    running = False
    load: Any = staticmethod(RandARClassModel.read)
    model: RandAR

    def make_target(self, traits: DrafterTraits, compile: bool) -> Target:
        target: Any = super().make_target(traits, compile)
        target.ahead = traits.ahead
        return target


class PromptedRandARImages(RandARImages):
    """`RandARImageModel`, a folder with a RandAR and its VQ model, as a family with texts as prompts."""

    load = staticmethod(RandARImageModel.read)

    def __init__(self, model: RandARImageModel, processor: Any = None):
        super().__init__(model, processor)
        self.image_model = model

    def _condition(self, texts: list[str], name: str) -> tuple[Tensor, Tensor | None]:
        batch = self.require_processor()(text=texts, generation_mode="image", padding=True, return_tensors="pt")
        ids, real = (batch[part].to(self.image_model.device) for part in ("input_ids", "attention_mask"))
        return self.image_model.features(ids, real.bool(), name)


class RankBuffer(TokenBuffer):
    """Ids in the order of drawing; `values` are in raster order, FREE where none is drawn yet."""

    def in_raster_order(self, row: int, items: list[Any]) -> list[Any]:
        by_place = dict(zip(self.request.visits, items))
        return [by_place.get(place, FREE) for place in range(len(self.request.visits))]

    def values(self, row: int) -> Tensor:
        return torch.tensor(self.in_raster_order(row, self.tokens[row]), dtype=torch.long)


class RankLayers(SlotLayers):
    """The cache of a request, with its order (T,)."""

    order: Tensor


class RandARTarget(ImageAR):
    """`RandARImages` as a target. Drafts may be trees.

    Args:
        ahead: Queries of later places per node.
    """

    family: RandARImages

    def __init__(self, family: RandARImages, ahead: int = 0):
        super().__init__(family)
        self.ahead = ahead
        self.capabilities = replace(self.capabilities, any_order=True)

    def record(self, asked: bool | None, compile: bool = False) -> None:
        Target.record(self, asked, compile)

    def revise(self, state: State, tokens: Tensor, places: Tensor, seen: Tensor) -> Scores:
        return Target.revise(self, state, tokens, places, seen)

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Run the prompts (`request.inputs` is an `EncodedPrompt`). Scores: distributions (B, 1) of the first codes."""
        prompt: EncodedPrompt = request.inputs
        rows, count = len(prompt.ids), len(prompt.embeds)
        cache = RankLayers(count, 2 * request.max_new_tokens)
        cache.order = torch.tensor(request.visits, device=self.device)
        pending_B = torch.zeros(rows, dtype=torch.long, device=self.device)
        state = State(request, pending_B, pending_B - 1, cache, list(range(rows)), RankBuffer(request, rows))

        queries_RQ = self._places(cache.order, state.position[:1, None], 1)[:, 0].expand(count, -1)
        embeds = torch.cat([prompt.embeds, self.family.model.query(queries_RQ)], dim=1)
        first_RP = torch.arange(prompt.ids.shape[1], device=self.device).expand(count, -1)
        index = torch.cat([first_RP, self.family.model.config.prefix + queries_RQ], dim=1)
        real_RS = torch.cat([prompt.attention, prompt.attention.new_ones(count, 1)], dim=1)

        length, padded = real_RS.shape[1], not bool(real_RS.all())
        cache.slots.open(embeds.shape[1], self.device)
        mask = self.masks.additive(prefill_mask(real_RS, self.ahead)) if padded or self.ahead else None
        hidden = self._run(embeds, {"attention_mask": mask}, index, cache)
        cache.slots.commit([list(range(length))] * count)
        if padded:
            cache.slots.padding = real_RS
        return state, self._read(state, trees.empty_draft(state.pending), hidden[:, length - 1 :], 1)

    def verify(self, state: State, draft: Draft) -> Scores:
        """Run one pass over all nodes and their queries, and over both guidance rows. Returns scores for (B, N)."""
        cache: RankLayers = state.cache
        slots: SlotCache = cache.slots
        model, copies = self.family.model, _twice(state)
        rank_BN = state.position[:, None] + draft.tree.depth
        own_BN1, queries_BNQ = self._places(cache.order, rank_BN, 0)[..., :1], self._places(cache.order, rank_BN, 1)
        next_BN1, later_BA = queries_BNQ[..., :1], queries_BNQ[..., 1:].flatten(1)
        pairs = torch.stack([model.embed(draft.value), model.query(next_BN1[..., 0])], dim=2).flatten(1, 2)
        embeds = torch.cat([pairs, model.query(later_BA)], dim=1).repeat(copies, 1, 1)
        at_BS = torch.cat([torch.cat([own_BN1, next_BN1], dim=2).flatten(1), later_BA], dim=1)
        tree: Tree = trees.tree_cache(draft.tree, query_tree(self.ahead))
        if tree.parent.shape[0] > 1:
            tree = _repeat_tree(tree, copies)
        extent = slots.open(tree.size, self.device)
        attention = self.masks(slots, tree, extent)
        hidden = self._run(embeds, attention, (self.family.model.config.prefix + at_BS).repeat(copies, 1), cache)
        return self._read(state, draft, hidden[:, 1:], draft.tree.size)

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        paths = [[slot for node in path for slot in (2 * node, 2 * node + 1)] for path in outcome.path]
        state.cache.slots.commit(paths * _twice(state))

    def _places(self, order_T: Tensor, rank_BN: Tensor, first: int) -> Tensor:
        """Return places (B, N, Q) of the Q ranks from `first` after these on; beyond the end, the last place."""
        rank_BNQ = rank_BN[..., None] + torch.arange(first, first + 1 + self.ahead, device=rank_BN.device)
        return order_T[rank_BNQ.clamp(0, len(order_T) - 1)]

    def _read(self, state: State, draft: Draft, hidden: Tensor, nodes: int) -> Scores:
        """Return scores of nodes from hidden states (R, 2 N - 1 + N A, d): those of the queries, interleaved with
        codes, then the later queries.
        """
        scores = self._scores(state, draft, hidden[:, : 2 * nodes : 2][:, :nodes], hidden)
        if not self.ahead:
            return scores
        logits = self.family.head(hidden[:, 2 * nodes - 1 :]).unflatten(1, (nodes, self.ahead))
        rows = len(state.rows)
        uncond = logits[rows:] if len(logits) > rows else None
        return replace(scores, aux={"ahead": warp(logits[:rows].contiguous(), state.request.sampling, uncond)})


def prefill_mask(real_RS: Tensor, ahead: int) -> Tensor:
    """Return a prefill's mask (R, S + A, S + A) bool, for S inputs that end with a query and A more queries."""
    rows, length = real_RS.shape
    mask = torch.zeros(rows, length + ahead, length + ahead, dtype=torch.bool, device=real_RS.device)
    mask[:, :length, :length] = torch.ones(length, length, dtype=torch.bool, device=real_RS.device).tril()
    mask[:, :length, :length] &= real_RS[:, None]
    mask[:, length:, : length - 1] = real_RS[:, None, :-1]
    mask[:, length:, length:] = torch.eye(ahead, dtype=torch.bool, device=real_RS.device)
    return mask


@lru_cache(maxsize=64)
def query_tree(ahead: int) -> Callable[[Tree], Tree]:
    """Return a function from a draft's tree to the pass's: code and query of each node, then the later queries."""

    def derive(tree: Tree) -> Tree:
        nodes, device = tree.size, tree.parent.device
        ancestors = tree.ancestor.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        own = torch.arange(nodes, device=device)
        ancestors[:, 2 * own, 2 * own + 1] = False  # a code does not see the query after it
        later = ancestors[:, ::2].repeat_interleave(ahead, dim=1)
        alone = torch.eye(nodes * ahead, dtype=torch.bool, device=device).expand(len(ancestors), -1, -1)
        code_rows = torch.cat([ancestors, ancestors.new_zeros(len(ancestors), 2 * nodes, nodes * ahead)], dim=2)
        ancestors = torch.cat([code_rows, torch.cat([later, alone], dim=2)], dim=1)
        parent_query = torch.where(tree.parent < 0, -1, 2 * tree.parent + 1)
        code = (2 * own).expand_as(parent_query)
        parent = torch.stack([parent_query, code], dim=2).flatten(1)
        parent = torch.cat([parent, code.repeat_interleave(ahead, dim=1)], dim=1)
        depth = ancestors.sum(dim=-1) - 1
        return Tree(parent, depth, ancestors, 2 * tree.levels + 1, chain=False)

    return derive


RandARImages.target = RandARTarget
