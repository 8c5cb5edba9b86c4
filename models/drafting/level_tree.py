"""Trees over the distributions of a block, which are those of their depth whatever stands above (DDTree, arXiv
2604.12989).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from visspec.models.drafting.static_tree import StaticTreeBuilder
from visspec.sampling import warp
from visspec.tree import TreeBuilder
from visspec.types import Draft, State


def over(
    state: State,
    logits_BKV: Tensor,
    tree_builder: TreeBuilder | StaticTreeBuilder,
    nodes: int,
    below: Callable[[int, Tensor], Tensor] | None = None,
) -> Draft:
    """A tree over the distributions of a block by its builder, `tree.TreeBuilder` (the `nodes` most likely nodes of its
    width a level, best first) or one with its methods. below: the logits (B, W, V) of a level below the tokens above
    (B, W), if these change them. Raises ValueError for rules that judge draws.
    """
    if state.noise is not None and state.noise.samples:
        raise ValueError("acceptance: got a rule that judges draws, expected point masses for a block's tree")
    token_BW = state.pending[:, None]
    for level in range(logits_BKV.shape[1]):
        logits_BWV = logits_BKV[:, level : level + 1] if below is None else below(level, token_BW)
        logits_BWV = warp(logits_BWV, state.request.sampling)
        if state.noise is not None:
            logits_BWV = state.noise.perturb(logits_BWV, level)
        token_BW, _ = tree_builder.grow(logits_BWV.log_softmax(dim=-1).expand(-1, token_BW.shape[1], -1))
    return tree_builder.finish(nodes)
