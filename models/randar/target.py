"""Any-order image models in RandAR's form as targets of the loop: a node is a rank in the row's order.

A pass has a pair of inputs for each node of a draft: its code, and the query of the place that comes after it, whose
output is the distribution after the node. Both stay in the cache, because later codes attend to both. The order belongs
to the request (`Request.order`), and given codes (`Request.known`) come first in it, with the prompt.

With `ahead` A, every node has A more queries, for the places after the next one. They see what their node sees but not
each other, and nothing attends to them. They give distributions of later codes without those in between, from which a
drafter draws the next draft (`models.randar.ahead`) without another pass. One network drafts and verifies (any-subset
speculative decoding, Guo and Ermon), in one pass where the published form takes two.

Shapes: B requests, R = B or 2 B cache rows, P prefix, K maximum number of given codes over the rows, N nodes, A later
places, Q = 1 + A queries per node, S = 2 N + N A inputs of a pass, T places, V codes, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from visspec import tree as trees
from visspec.cache import SlotCache, to_device
from visspec.loop.output import TokenBuffer
from visspec.models.attention.slot_layers import SlotLayers
from visspec.models.image_codes.target import EncodedPrompt, ImageAR, _repeat_tree, _twice
from visspec.models.llamagen.model import RandARClassModel
from visspec.models.llamagen.randar import RandAR
from visspec.models.llamagen.target import LlamaGenImages
from visspec.models.randar.model import RandARImageModel, load
from visspec.sampling import warp
from visspec.types import FREE, Draft, DrafterTraits, Outcome, Request, Scores, State, Target, Tree


class RandARImages(LlamaGenImages):
    """Prompts are LlamaGen's. Images are generated in any order of their places, and from a part of their codes."""

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

    @property
    def prefix(self) -> int:
        """Number of position ids before those of places."""
        return self.model.config.prefix

    def pixel_size(self) -> tuple[int, int]:
        side = self.model.config.grid * self.factor
        return side, side

    def encode(self, pixels: Tensor) -> Tensor:
        if self.codec is None:
            raise ValueError(f"image: got pixels, expected codes: {self.no_pixels}")
        return self.codec.encode(pixels.permute(0, 2, 3, 1) * 2 - 1)


class PromptedRandARImages(RandARImages):
    """`RandARImageModel`, a folder with a RandAR and its VQ model, as a family with texts as prompts."""

    load = staticmethod(load)

    def __init__(self, model: RandARImageModel, processor: Any = None, *, settings: GenerationConfig | None = None):
        super().__init__(model, processor, settings=settings)
        self.image_model = model

    def _condition(self, texts: list[str], name: str) -> tuple[Tensor, Tensor | None]:
        batch = self.require_processor()(text=texts, generation_mode="image", padding=True, return_tensors="pt")
        ids, real = (batch[part].to(self.image_model.device) for part in ("input_ids", "attention_mask"))
        try:
            return self.image_model.features(ids, real.bool())
        except ValueError as error:
            raise ValueError(str(error).replace("prompt", name, 1)) from None


class RankBuffer(TokenBuffer):
    """Ids in the order of drawing; `values` are in raster order, FREE where none is drawn yet."""

    def __init__(self, request: Request, rows: int):
        super().__init__(request, rows)
        self.orders = [request.visits(row) for row in range(rows)]
        self.given = [0] * rows if request.known is None else (request.known != FREE).sum(dim=1).tolist()

    def in_generation_order(self, row: int, items: list[Any], given: str | int | None = None) -> list[Any]:
        order, drawn = self.orders[row], items[: len(self.orders[row]) - self.given[row]]
        placed = [given] * len(order)
        for place, item in zip(order[self.given[row] :], drawn):
            placed[place] = item
        return placed

    def values(self, row: int) -> Tensor:
        drawn_T = torch.tensor(self.in_generation_order(row, self.tokens[row], FREE), dtype=torch.long)
        known = self.request.known
        return drawn_T if known is None else torch.where(known[row] == FREE, drawn_T, known[row])


class RankLayers(SlotLayers):
    """The cache of a request, with its live rows' orders (B, T)."""

    order: Tensor


class RandARTarget(ImageAR):
    """`RandARImages` as a target. Drafts may be trees. ahead: queries of later places per node."""

    family: RandARImages

    def __init__(self, family: RandARImages, ahead: int = 0):
        super().__init__(family)
        self.ahead = ahead
        self.capabilities = replace(self.capabilities, any_order=True)

    def record(self, asked: bool | None) -> None:
        Target.record(self, asked)

    def revise(self, state: State, tokens: Tensor, places: Tensor, seen: Tensor) -> Scores:
        return Target.revise(self, state, tokens, places, seen)

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Run the prompts (`request.inputs` is an `EncodedPrompt`) and the given codes. Scores: distributions (B, 1) of
        the first codes to be drawn. Raises ValueError, before any pass, for an order or given codes that do not fit the
        image.
        """
        prompt: EncodedPrompt = request.inputs
        rows, copies = len(prompt.ids), len(prompt.embeds) // len(prompt.ids)
        output = RankBuffer(request, rows)
        cache = RankLayers(len(prompt.embeds), 2 * request.max_new_tokens)
        cache.order = torch.tensor(output.orders, device=self.device)
        given_B = torch.tensor(output.given, device=self.device)
        state = State(request, torch.zeros_like(given_B), given_B - 1, cache, list(range(rows)), output)

        codes_BK, places_BK, real_BK = self._given_codes(request, output, cache.order)
        queries_BQ = self._places(cache.order, state.position[:, None], 1)[:, 0]
        image = torch.cat([self.family.model.paired(codes_BK, places_BK), self.family.model.query(queries_BQ)], dim=1)
        at_BS = self.family.prefix + torch.cat([places_BK.repeat_interleave(2, dim=1), queries_BQ], dim=1)
        embeds = torch.cat([prompt.embeds, image.repeat(copies, 1, 1)], dim=1)
        first_RP = torch.arange(prompt.ids.shape[1], device=self.device).expand(len(embeds), -1)
        index = torch.cat([first_RP, at_BS.repeat(copies, 1)], dim=1)
        real = [prompt.attention, real_BK.repeat_interleave(2, dim=1).repeat(copies, 1)]
        real_RS = torch.cat([*real, prompt.attention.new_ones(len(embeds), 1)], dim=1)

        length, padded = real_RS.shape[1], not bool(real_RS.all())
        cache.slots.open(embeds.shape[1], self.device)
        mask = self.masks.additive(prefill_mask(real_RS, self.ahead)) if padded or self.ahead else None
        hidden = self._run(embeds, {"attention_mask": mask}, index, cache)
        cache.slots.commit([list(range(length))] * len(embeds))
        if padded:
            cache.slots.padding = real_RS
        return state, self._read(state, trees.empty_draft(state.pending), hidden[:, length - 1 :], 1)

    def _given_codes(self, request: Request, output: RankBuffer, order_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return given codes (B, K) in order, their places, and a mask of real ones; shorter rows are left-padded."""
        most = max(output.given)
        real_BK = to_device([[False] * (most - n) + [True] * n for n in output.given], self.device).bool()
        if request.known is None or most == 0:
            none_B0 = order_BT[:, :0]
            return none_B0, none_B0, real_BK
        places = [[0] * (most - n) + order[:n] for n, order in zip(output.given, output.orders)]
        places_BK = torch.tensor(places)
        codes_BK = request.known.gather(1, places_BK).clamp(min=0)
        return codes_BK.to(self.device), places_BK.to(self.device), real_BK

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
        tree: Tree = trees.tree_cache(draft.tree, asking(self.ahead))
        if tree.parent.shape[0] > 1:
            tree = _repeat_tree(tree, copies)
        extent = slots.open(tree.size, self.device)
        attention = self.masks(slots, tree, extent)
        hidden = self._run(embeds, attention, (self.family.prefix + at_BS).repeat(copies, 1), cache)
        return self._read(state, draft, hidden[:, 1:], draft.tree.size)

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        paths = [[slot for node in path for slot in (2 * node, 2 * node + 1)] for path in outcome.path]
        state.cache.slots.commit(paths * _twice(state))

    def select(self, state: State, keep: list[int]) -> None:
        super().select(state, keep)
        state.cache.order = state.cache.order[to_device(keep, self.device)]

    def _places(self, order_BT: Tensor, rank_BN: Tensor, first: int) -> Tensor:
        """Return places (B, N, Q) of the Q ranks from `first` after these on; beyond the end, the last place."""
        rank_BNQ = rank_BN[..., None] + torch.arange(first, first + 1 + self.ahead, device=rank_BN.device)
        rank_BNQ = rank_BNQ.clamp(0, order_BT.shape[1] - 1).expand(len(order_BT), -1, -1)
        return order_BT.gather(1, rank_BNQ.flatten(1)).view(rank_BNQ.shape)

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
    seen = torch.zeros(rows, length + ahead, length + ahead, dtype=torch.bool, device=real_RS.device)
    seen[:, :length, :length] = torch.ones(length, length, dtype=torch.bool, device=real_RS.device).tril()
    seen[:, :length, :length] &= real_RS[:, None]
    seen[:, length:, : length - 1] = real_RS[:, None, :-1]
    seen[:, length:, length:] = torch.eye(ahead, dtype=torch.bool, device=real_RS.device)
    return seen


@lru_cache(maxsize=64)
def asking(ahead: int) -> Callable[[Tree], Tree]:
    """Return a function from a draft's tree to the pass's: code and query of each node, then the later queries."""

    def derive(tree: Tree) -> Tree:
        nodes, device = tree.size, tree.parent.device
        seen = tree.ancestor.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        own = torch.arange(nodes, device=device)
        seen[:, 2 * own, 2 * own + 1] = False  # a code does not see the query after it
        later = seen[:, ::2].repeat_interleave(ahead, dim=1)
        alone = torch.eye(nodes * ahead, dtype=torch.bool, device=device).expand(len(seen), -1, -1)
        before = torch.cat([seen, seen.new_zeros(len(seen), 2 * nodes, nodes * ahead)], dim=2)
        seen = torch.cat([before, torch.cat([later, alone], dim=2)], dim=1)
        above = torch.where(tree.parent < 0, -1, 2 * tree.parent + 1)
        code = (2 * own).expand_as(above)
        parent = torch.stack([above, code], dim=2).flatten(1)
        parent = torch.cat([parent, code.repeat_interleave(ahead, dim=1)], dim=1)
        depth = seen.sum(dim=-1) - 1
        return Tree(parent, depth, seen, 2 * tree.levels + 1, chain=False)

    return derive


RandARImages.target = RandARTarget
