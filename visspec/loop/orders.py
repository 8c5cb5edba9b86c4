"""Orders of generation: raster, and the rejected islands of a drafted image (MuLo-SD)."""

from __future__ import annotations

import torch
from torch import Tensor

from visspec.accept.local import Local
from visspec.loop.decode import decode, stage
from visspec.loop.draft_length import DraftLengthPolicy
from visspec.loop.out_of_order import OutOfOrderDecoder, Places, decode_wavefront
from visspec.types import Acceptance, Drafter, Order, Request, State, Target


class Raster(Order):
    """Sequential decoding in the loop, for all text and by default for images."""

    name = "raster"
    raster = True

    decode = staticmethod(decode)


class RejectedRegions(Order):
    """Verifies a drafted image code by code with a `Local` rule and generates the rejected codes again.

    The rejected positions form 8-connected islands. All islands are generated in parallel, each in raster order, and a
    position waits until the previous one is final. With the rule's `window`, a row of an island starts when the row
    above is that many codes ahead (ZipAR, He et al., ICML 2025). Accepted codes keep their keys and values, except
    before a position that is generated again. Without a valid draft the whole image is generated.
    """

    name = "islands"

    def __init__(self, rule: Local | None = None, drafter: Drafter | None = None):
        self.rule, self.drafter = rule, drafter

    def bind(self, rule: Acceptance, drafter: Drafter | None) -> Order:
        if drafter is None or not drafter.traits.whole_images:
            raise ValueError("drafter: The order 'islands' needs a drafter of whole images. Use lowres.")
        inner = rule.inner
        if not isinstance(inner, Local):
            raise ValueError(f"acceptance: got {type(inner).__name__}, expected local for the order islands.")
        return RejectedRegions(inner, drafter)

    def decode(
        self,
        target: Target,
        drafter: Drafter | None,
        rule: Acceptance,
        request: Request,
        length_policy: DraftLengthPolicy,
    ) -> State:
        return decode_wavefront(target, request, self.schedule)

    def schedule(self, decoder: OutOfOrderDecoder) -> None:
        assert self.rule is not None
        trace, places = decoder.state.trace, decoder.free
        with stage(trace, "draft"):
            drafted_BN, real_BN = self._draft_codes(decoder)
        logits_BNV = decoder.score_draft(drafted_BN)
        with stage(trace, "accept"):
            again_BN = self.rule.again(logits_BNV.softmax(-1), drafted_BN, real_BN, decoder.columns)
            decoder.accepted_mask[:, places] = ~again_BN
            todo = [[u for u, a in zip(places, row) if a] for row in again_BN.tolist()]
        decoder.reject(todo)
        # everything before a row's first rejected position is final, so its distribution is valid
        first = [(b, row[0]) for b, row in enumerate(todo) if row]
        laws_FV = logits_BNV[[b for b, _ in first], [decoder.number[u] for _, u in first]]
        decoder.decide(first, laws_FV, decoder.pass_number())
        for b, u in first:
            decoder.fresh[b] = [u]
        decoder.record([len(places) - max(len(row) - 1, 0) for row in todo], [True] * decoder.rows)
        where = {u: divmod(decoder.number[u], decoder.columns) for u in places}
        queues = [islands(row, where) for row in todo]
        for row in queues:
            if row:
                row[0].pop(0)  # the row's first position is final
        while any(island for row in queues for island in row):
            ready = [[self._ready(decoder, b, island) for island in row] for b, row in enumerate(queues)]
            decoder.step([[u for island in row for u in island] for row in ready])
            queues = [
                [[u for u in island if u not in now] for island, now in zip(row, nows)]
                for row, nows in zip(queues, ready)
            ]

    def _draft_codes(self, decoder: OutOfOrderDecoder) -> tuple[Tensor, Tensor]:
        assert self.drafter is not None
        drafted_BN = self.drafter.sketch(decoder.state)
        codebook = decoder.target.capabilities.codebook
        assert codebook is not None  # the rule is bound to it
        real_BN = (drafted_BN >= 0) & (drafted_BN < len(codebook))
        return torch.where(real_BN, drafted_BN, 0), real_BN

    def _ready(self, decoder: OutOfOrderDecoder, b: int, island: Places) -> Places:
        """Return the positions of an island that can be generated now: one, or with a window one per image row."""
        assert self.rule is not None
        has_code, window = decoder.known[b], self.rule.window
        if window is None:
            return [u for u in island[:1] if has_code[decoder.free[decoder.number[u] - 1]]]
        first: dict[int, int] = {}
        for u in island:
            first.setdefault(decoder.number[u] // decoder.columns, u)
        return [u for u in first.values() if all(has_code[t] for t in decoder.row_above(u, window))]


def islands(places: Places, where: dict[int, tuple[int, int]]) -> list[Places]:
    """Return the sorted 8-connected components of the places, by first place. `where` has rows and columns."""
    remaining, components = {where[u]: u for u in places}, []
    while remaining:
        edge, island = [next(iter(remaining))], []
        while edge:
            row, column = edge.pop()
            u = remaining.pop((row, column), None)
            if u is None:
                continue
            island.append(u)
            edge += [(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        components.append(sorted(island))
    return sorted(components)
