"""ScaleKV limits a next-scale model's cache to a budget per layer and scale (Li et al., arXiv 2505.19602); approximate.

A layer that attends to its own scale, or to few tokens of earlier ones (a *refiner*), needs less of the cache than one
that attends broadly (a *drafter*). `selectivity` measures this, which the published code leaves out, and
`CacheBudget.allot` distributes the tokens. After each scale a layer keeps a window of its tokens, at the centers of
patches, and the tokens that the window attends to most: by the softmax of the layer's own queries and keys, averaged
over neighbors of the same scale.

Shapes: R rows, H heads, Q positions of a pass, M tokens in a layer's cache, E head size, D layers, K scales, W window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.cache import to_device
from visspec.models.scales.blocks import NextScale
from visspec.models.scales.cache import ScaleCache
from visspec.models.scales.multiscale import ScaleQuantizer, ScaleSizes
from visspec.models.scales.reading import ConditionState

WINDOW = 16  # published value
POOL = 3  # side of the neighborhood over which attention is averaged


@dataclass(frozen=True)
class CacheBudget:
    """tokens[layer][k]: number of tokens that a layer keeps after scale k. Nothing is kept after the last scale."""

    tokens: tuple[tuple[int, ...], ...]
    window: int = WINDOW

    def check(self, scales: ScaleSizes, depth: int) -> None:
        """Raise ValueError unless the budget has a number for every layer and every scale but the last."""
        shape = len(self.tokens), {len(row) for row in self.tokens}
        if shape != (depth, {len(scales) - 1}):
            actual = f"{shape[0]} layers of {sorted(shape[1])} scales"
            raise ValueError(f"budget: got {actual}, expected {depth} layers of {len(scales) - 1}, all but the last.")

    def whole(self, scales: ScaleSizes) -> bool:
        """Return whether no token is ever dropped."""
        return all(row == scales.begins[1:-1] for row in self.tokens)

    @classmethod
    def allot(
        cls,
        selectivity_DK: Tensor,
        scales: ScaleSizes,
        share: float = 0.1,
        window: int = WINDOW,
        drafters: float = 0.1,
        decay: float = 0.5,
    ) -> CacheBudget:
        """Allot an average `share` of the largest cache per layer, at every scale whose cache is larger than that.

        Args:
            drafters: Share of (layer, scale) pairs that are drafters, those with the lowest selectivity within their
                scale. Refiners get the average minus up to `decay` of it, more at later scales; drafters share what
                this saves.
        """
        for name, value in (("share", share), ("drafters", drafters), ("decay", decay)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: got {value}, expected a share in [0, 1].")
        depth, average = len(selectivity_DK), round(share * scales.begins[-2])
        if average < window:
            raise ValueError(f"share: got {share}, {average} tokens, expected at least the window of {window}.")
        short = [k for k in range(len(scales) - 1) if scales.begins[k + 1] > average]
        rows = [list(scales.begins[1:-1]) for _ in range(depth)]
        lowest = _lowest(selectivity_DK[:, short], max(1, round(drafters * depth * len(short)))) if short else []
        for i, k in enumerate(short):
            loose = [layer for layer, j in lowest if j == i]
            tight = depth - len(loose)
            least = min(window, scales.sizes[k])
            refined = average if not loose else max(least, round(average * (1 - decay * (i + 1) / len(short))))
            extra = (average * depth - refined * tight) // len(loose) if loose else 0
            for layer in range(depth):
                rows[layer][k] = min(scales.begins[k + 1], extra) if layer in loose else refined
        return cls(tuple(map(tuple, rows)), window)


def _lowest(selectivity_DJ: Tensor, count: int) -> list[tuple[int, int]]:
    """Return (layer, column) of the lowest values after standardizing each column."""
    z = selectivity_DJ.double()
    z = (z - z.mean(dim=0)) / z.std(dim=0, correction=0).clamp(min=torch.finfo(z.dtype).tiny)
    order = z.flatten().sort(stable=True).indices[:count].tolist()
    return [divmod(place, z.shape[1]) for place in order]


class BudgetedCache(ScaleCache):
    """KV cache with a budget. Each pass covers one scale of all rows."""

    def __init__(self, scales: ScaleSizes, budget: CacheBudget):
        super().__init__(scales, len(budget.tokens))
        self.budget = budget
        self.places: list[Tensor | None] = [None] * len(budget.tokens)  # (R, H, M) positions; None: all from 0 on

    def open_at(self, slots_RQ: Tensor, end: int) -> None:
        raise ValueError("scales: got rows at different scales, expected one scale for all.")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store, size = self.stores[layer], self.bytes
        keys, values = k.contiguous(), v.contiguous()  # a view would keep the layer's other projections alive
        if store is not None:
            keys, values = torch.cat([store[0], k], dim=2), torch.cat([store[1], v], dim=2)
        self.peak = max(self.peak, size + k.nbytes + v.nbytes)
        out = F.scaled_dot_product_attention(q, keys, values, scale=1.0)
        if self.scale == len(self.scales) - 1:
            self.stores[layer] = self.places[layer] = None  # nothing follows
            return out
        self.stores[layer] = keys, values
        budget = self.budget.tokens[layer][self.scale]
        if keys.shape[2] > budget:
            self._drop(layer, budget, q)
        elif self.places[layer] is not None:
            self.places[layer] = self._places(layer, q)
        return out

    def _places(self, layer: int, q: Tensor) -> Tensor:
        """Return the positions (R, H, M) in the cache, with the latest scale's at the end."""
        begin, end = self.scales.begins[self.scale], self.scales.begins[self.scale + 1]
        fresh = torch.arange(begin, end, device=q.device).expand(*q.shape[:2], -1)
        places = self.places[layer]
        if places is None:
            return torch.arange(end, device=q.device).expand(*q.shape[:2], -1)
        return torch.cat([places, fresh], dim=2)

    def _drop(self, layer: int, budget: int, q: Tensor) -> None:
        store = self.stores[layer]
        assert store is not None
        places = self._places(layer, q)
        window = to_device(centres(self.scales.grids[self.scale], self.budget.window), q.device)
        score = attention(q[:, :, window], store[0]).mean(dim=2)
        score = pool_scores(score, places, self.scales, self.scale)
        score[:, :, window - q.shape[2]] = math.inf
        index = score.topk(budget, dim=2).indices.sort(dim=2).values
        at = index[..., None].expand(-1, -1, -1, q.shape[-1])
        self.stores[layer] = store[0].gather(2, at), store[1].gather(2, at)
        self.places[layer] = places.gather(2, index)

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.places = [None if places is None else places[to_device(rows, places.device)] for places in self.places]


def attention(q: Tensor, k: Tensor) -> Tensor:
    """Return attention weights (R, H, Q, M) of queries that are already scaled."""
    return (q.float() @ k.float().transpose(2, 3)).softmax(dim=-1)


@lru_cache(maxsize=256)
def centres(grid: tuple[int, int], window: int) -> tuple[int, ...]:
    """Return the tokens at the centers of at most `window` patches of a map, or all tokens of a small map."""
    rows, columns = grid
    if rows * columns <= window:
        return tuple(range(rows * columns))
    high = min(rows, math.isqrt(window))
    wide = min(columns, window // high)
    sides = (rows, high), (columns, wide)
    down, right = ([int((i + 0.5) * side / parts) for i in range(parts)] for side, parts in sides)
    return tuple(i * columns + j for i in down for j in right)


def pool_scores(score_RHM: Tensor, places_RHM: Tensor, scales: ScaleSizes, scale: int) -> Tensor:
    """Average scores over the kept neighbors on the grid of their own scale."""
    size = (*score_RHM.shape[:2], scales.begins[scale + 1])
    dense = score_RHM.new_zeros(size).scatter(2, places_RHM, score_RHM)
    present = score_RHM.new_zeros(size).scatter(2, places_RHM, 1.0)
    parts = []
    sizes = scales.sizes[: scale + 1]
    for grid, values, mask in zip(scales.grids, dense.split(sizes, dim=2), present.split(sizes, dim=2)):
        total, count = (F.avg_pool2d(x.unflatten(2, grid), POOL, 1, POOL // 2) for x in (values, mask))
        parts.append((total / count.clamp(min=torch.finfo(count.dtype).tiny)).flatten(2))
    return torch.cat(parts, dim=2).gather(2, places_RHM)


class AttentionMeter(ScaleCache):
    """A full cache that measures attention: at each layer and scale, the weight of the scale's own tokens, and that of
    the `share` of earlier tokens that a query attends to most.
    """

    def __init__(self, scales: ScaleSizes, layers: int, share: float):
        super().__init__(scales, layers)
        self.share = share
        self.own, self.picked = torch.zeros(layers, len(scales)), torch.zeros(layers, len(scales))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        store, (begin, end) = self.stores[layer], self.span
        assert store is not None
        weight = attention(q, store[0][:, :, :end])
        self.own[layer, self.scale] = weight[..., begin:].sum(dim=-1).mean()
        if begin:
            top = weight[..., :begin].topk(math.ceil(self.share * begin), dim=-1).values
            self.picked[layer, self.scale] = top.sum(dim=-1).mean()
        return out


@torch.inference_mode()
def selectivity(
    model: NextScale,
    quantizer: ScaleQuantizer,
    condition: Any,
    generator: torch.Generator,
    share: float = 0.1,
) -> Tensor:
    """Measure attention selectivity (D, K) on images of a few classes (numbers (R,)) or texts (`Texts`), drawn without
    guidance: the mean weight of a scale's own tokens, times that of the `share` of earlier tokens that each query
    attends to most. It is 0 at the first scale.
    """
    scales, rows = model.config.scales, len(condition)
    watched = AttentionMeter(scales, model.config.depth, share)
    reading = ConditionState(model, quantizer, condition, rows, watched)
    codes = None
    for _ in scales.sizes:
        (group,) = reading.read(codes)
        if codes is not None:
            reading.keep([1] * rows)
        p_MV = group.logits[0].float().softmax(dim=-1).flatten(0, 1)
        codes = torch.multinomial(p_MV, 1, generator=generator).view(rows, 1, -1)
    return watched.own * watched.picked
