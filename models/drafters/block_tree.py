"""Trees over the laws of a block, which are those of their depth whatever stands above (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

from torch import Tensor

from visspec import tree as trees
from visspec.sampling import warp
from visspec.types import Draft, State


def over(state: State, logits_BKV: Tensor, width: int, nodes: int) -> Draft:
    """The `nodes` most likely nodes of `width` a level, best first. Raises ValueError for rules that judge draws."""
    if state.noise is not None and state.noise.samples:
        raise ValueError("acceptance: got a rule that judges draws, expected point masses for a block's tree")
    growing, frontier = trees.Growing(state.pending, width), 1
    for level in range(logits_BKV.shape[1]):
        logits_BWV = warp(logits_BKV[:, level : level + 1], state.request.sampling)
        if state.noise is not None:
            logits_BWV = state.noise.perturbed(logits_BWV, level)
        token, _ = growing.grow(logits_BWV.log_softmax(dim=-1).expand(-1, frontier, -1))
        frontier = token.shape[1]
    return growing.finish(nodes)
