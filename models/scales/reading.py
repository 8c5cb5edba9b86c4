"""The state of a next-scale model on a batch of images: keys and values, and the features of the maps so far.

Shapes: B images, R = B or 2 B rows (conditional ones first), N nodes, S codes of the largest map, Q positions of a
pass, C width, c channels of codes, V codes, (H, W) the finest grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec.cache import to_device
from visspec.models.scales.blocks import NextScale
from visspec.models.scales.cache import ScaleCache
from visspec.models.scales.multiscale import ScaleQuantizer

Mark = tuple[list[int], Tensor]  # a saved point: maps read per image, and features


class DistanceGroup(NamedTuple):
    """Images that have read equally many maps, and the logits of their next scales."""

    images: list[int] | None  # None: all
    first: int  # the scale of the first logits
    logits: list[Tensor]  # per scale: (R of these images, codes, V)


class ConditionState:
    """State of a next-scale model for some images.

    Args:
        condition: Conditions of R rows, as the network takes them (`given`): class numbers for VAR, texts for
            Infinity.
        cache: An empty one; by default with room for all scales.
    """

    def __init__(self, net: NextScale, quantizer: ScaleQuantizer, condition: Any, images: int, cache: Any = None):
        self.net = net
        self.quantizer, self.scales = quantizer, net.config.scales
        self.given = self.net.embed_condition(condition)
        self.cache = ScaleCache(self.scales, net.config.depth) if cache is None else cache
        self.count = [0] * images  # maps read per image
        self.features = quantizer.blank(images, self.scales, net.device)
        self.logits_function = False
        self.after: list[Tensor] = []  # features after each node of the latest pass

    @property
    def copies(self) -> int:
        return len(self.given) // len(self.count)

    def read(self, value_BNS: Tensor | None = None, last: bool = False) -> list[DistanceGroup]:
        """Run one pass over the next N maps of each image (after the condition in the first pass). Returns the logits
        of the scale after each map, and of the first scale in the first pass.

        Maps after an image's last one are not read. Nothing is final until `keep`.

        Args:
            last: Whether to return only those of the last scale.
        """
        nodes = 0 if value_BNS is None else value_BNS.shape[1]
        groups = self._groups()
        features = [torch.empty_like(self.features) for _ in range(nodes)]
        inputs: list[tuple[int, list[int] | None, Tensor, int]] = []  # first scale, images, (R, Q, C), scales
        for count, images in groups:
            x_RQC, number = self._inputs(count, images, value_BNS, features)
            inputs.append((count + 1 if self.logits_function else 0, images, x_RQC, number))
        self.after = features
        x_RQC, places = self._open(inputs)
        hidden = self.net(x_RQC, self.given, self.cache.attend, places)
        out = []
        for first, images, x, number in inputs:
            own, condition = hidden, self.given
            if images is not None:
                rows = to_device(self._rows(images), hidden.device)
                own, condition = hidden[rows, : x.shape[1]], condition[rows]
            sizes = self.scales.sizes[first : first + number]
            if last and number:
                first, sizes, own = first + number - 1, sizes[-1:], own[:, -sizes[-1] :]
            logits = self.net.logits(own, condition).split(sizes, dim=1) if number else ()
            codes = self.net.config.codes  # a position's codes are adjacent
            out.append(DistanceGroup(images, first, [part.unflatten(2, (-1, codes)).flatten(1, 2) for part in logits]))
        self.logits_function = True
        return out

    def keep(self, counts: list[int]) -> None:
        """Make the first counts[b] maps of the latest pass final."""
        if len(set(counts)) == 1:
            self.features = self.after[counts[0] - 1] if counts[0] else self.features
        else:
            every = torch.stack([self.features, *self.after], dim=1)
            self.features = every[torch.arange(len(counts), device=every.device), to_device(counts, every.device)]
        self.count = [had + more for had, more in zip(self.count, counts)]

    def pass_over(self, nodes: int) -> None:
        """Make the first `nodes` maps of the latest pass final, and treat the others as a pass of their own."""
        self.count, self.after = [had + nodes for had in self.count], self.after[nodes:]

    def mark(self) -> Mark:
        return list(self.count), self.features

    def back(self, marks: list[Mark]) -> None:
        """Return to each image's mark, and discard what was read since."""
        self.count = [counts[b] for b, (counts, _) in enumerate(marks)]
        self.features = torch.stack([features[b] for b, (_, features) in enumerate(marks)])

    def select(self, images: list[int]) -> None:
        rows, device = self._rows(images), self.features.device
        self.given, self.features = self.given[to_device(rows, device)], self.features[to_device(images, device)]
        self.count = [self.count[b] for b in images]
        self.cache.select(rows)
        self.after = []

    def _groups(self) -> list[tuple[int, list[int] | None]]:
        """Group images by the number of maps read; None stands for all images."""
        if len(set(self.count)) == 1:
            return [(self.count[0], None)]
        return [(n, [b for b, count in enumerate(self.count) if count == n]) for n in sorted(set(self.count))]

    def _rows(self, images: list[int]) -> list[int]:
        return [copy * len(self.count) + b for copy in range(self.copies) for b in images]

    def _inputs(
        self, count: int, images: list[int] | None, value_BNS: Tensor | None, outputs: list[Tensor]
    ) -> tuple[Tensor, int]:
        """Return inputs (R, Q, C) of a group's next scales and the number of scales; fill its rows of `outputs`."""
        features, value, at = self.features, value_BNS, None
        if images is not None:
            at = to_device(images, features.device)
            features, value = features[at], None if value_BNS is None else value_BNS[at]
        parts: list[Tensor] = []
        for n, full in enumerate(outputs):
            assert value is not None
            scale = count + n
            if scale < len(self.scales):
                codes = value[:, n, : self.scales.sizes[scale] * self.quantizer.each]
                features = features + self.quantizer.part(scale, self.scales, codes)
            full[slice(None) if at is None else at] = features
            if scale + 1 < len(self.scales):
                parts.append(self.quantizer.shrink(features, scale + 1, self.scales))
        begin, copies = self.scales.begins[min(count + 1, len(self.scales))], self.copies
        inputs = [] if self.logits_function else [self.net.first(self.given)]
        if parts:
            inputs.append(self.net.embed(torch.cat(parts, dim=1), begin).repeat(copies, 1, 1))
        if not inputs:
            inputs = [self.net.pos_start.new_zeros(copies * len(features), 0, self.net.config.width)]
        return torch.cat(inputs, dim=1), len(parts) + (not self.logits_function)

    def _open(self, inputs: list[tuple[int, list[int] | None, Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Combine inputs (R, Q, C) of all images, return them with their places (R|1, Q), and open the cache."""
        if len(inputs) == 1:
            first, _, x_RQC, number = inputs[0]
            self.cache.open(first, number)
            begin = self.scales.begins[first]
            return x_RQC, torch.arange(begin, begin + x_RQC.shape[1], device=x_RQC.device)[None]
        begins, most = self.scales.begins, max(x.shape[1] for _, _, x, _ in inputs)
        x_RQC = inputs[0][2].new_zeros(len(self.given), most, self.net.config.width)
        slots = [[self.cache.room] * most for _ in range(len(self.given))]
        for first, images, x, number in inputs:
            assert images is not None
            rows, length = self._rows(images), x.shape[1]
            x_RQC[to_device(rows, x.device), :length] = x
            for row in rows:
                slots[row][:length] = range(begins[first], begins[first] + length) if number else ()
        end = max(begins[first + number] for first, _, _, number in inputs if number)
        places = to_device(slots, x_RQC.device)
        self.cache.open_at(places, end)
        return x_RQC, places


def stack_groups(
    groups: list[DistanceGroup], images: int, nodes: int, warped: Callable[[Tensor, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Combine logits (B, N, S, V) of all images, and count the codes of each node (B, N).

    Args:
        warped: Function from logits (R, codes, V) of some images and a scale to (images, codes, V). Nodes after
            the last scale have none.
    """
    warped_groups = [[warped(logits, group.first + n) for n, logits in enumerate(group.logits)] for group in groups]
    counts = [[part.shape[1] for part in parts] for parts in warped_groups]
    most = max(size for sizes in counts for size in sizes)
    some = next(part for parts in warped_groups for part in parts)
    if len(groups) == 1 and nodes == 1:
        return some[:, None], torch.full((images, 1), most, device=some.device)
    logits = some.new_zeros(images, nodes, most, some.shape[-1])
    sizes_BN = [[0] * nodes for _ in range(images)]
    for group, parts in zip(groups, warped_groups):
        own = list(range(images)) if group.images is None else group.images
        at = to_device(own, some.device)
        for n, part in enumerate(parts):
            logits[at, n] = F.pad(part, (0, 0, 0, most - part.shape[1]))
            for b in own:
                sizes_BN[b][n] = part.shape[1]
    return logits, to_device(sizes_BN, some.device)
