"""Exact acceptance of point-mass drafts: sample the target's token at every node and accept the child that equals it.

With distribution p at a node and fixed children x_1..x_m, the target's draw y ~ p selects the child y if there is one;
otherwise y is the corrected token. So each child is accepted with probability p(x), and the token after a rejection has
the distribution p without the children, renormalised. This is the sequential scheme for point masses, with one draw.
The draw uses the noise of the position (`sampling.Gumbel`), so the output equals that of plain sampling with the same
seed, token for token, whatever is drafted. Greedy decoding is the case without noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visspec import sampling
from visspec.distributions import categorical
from visspec.sampling import Gumbel
from visspec.tree import parents_of, paths, roots
from visspec.types import Acceptance, Draft, RuleTraits, Scores, Tree, Verdict


class Exact(Acceptance):
    """The default rule: exact for greedy decoding and sampling, for chains and trees of point masses."""

    traits = RuleTraits("exact")

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> Gumbel:
        return Gumbel(generators, width)

    def __call__(self, draft: Draft, scores: Scores, noise: Gumbel | None) -> Verdict:
        return follow(
            draft, sampling.choose(categorical(scores.distribution), draft.tree.depth, noise, draft.tree.levels)
        )


def follow(draft: Draft, chosen_BN: Tensor) -> Verdict:
    """Return the path of nodes that equal the target's tokens, and the first token without a node.

    Args:
        draft: The draft.
        chosen_BN: The target's token after every node.
    """
    tree = draft.tree
    if tree.size == 1:  # fast path for plain decoding
        return Verdict(torch.zeros_like(chosen_BN), torch.ones_like(chosen_BN[:, 0]), chosen_BN[:, 0])
    if tree.chain:
        agreed = draft.value[:, 1:] == chosen_BN[:, :-1]
        if draft.real is not None:
            agreed &= draft.real[:, 1:]
        length_B = agreed.long().cumprod(dim=1).sum(dim=1) + 1
        index = torch.arange(tree.size, device=chosen_BN.device)
        path_BD = torch.where(index < length_B[:, None], index, -1)
        return Verdict(path_BD, length_B, chosen_BN.gather(1, length_B[:, None] - 1)[:, 0])
    agreed = draft.value == chosen_BN.gather(1, parents_of(tree).expand_as(draft.value))
    if draft.real is not None:
        agreed &= draft.real
    return deepest(tree, agreed | roots(tree), chosen_BN)


def deepest(tree: Tree, kept_BN: Tensor, next_BN: Tensor) -> Verdict:
    """Return the path to the deepest node whose ancestors are all kept. next_BN holds the token that follows each node.
    The rule must keep at most one child of a kept node. Of several equal children the first is used.
    """
    alive_BN = ~(tree.ancestor & ~kept_BN[:, None, :]).any(dim=-1)
    depth_BN = torch.where(alive_BN, tree.depth, -1)
    last_B1 = depth_BN.argmax(dim=1, keepdim=True)
    path = paths(tree)
    path_BD = path.expand(last_B1.shape[0], -1, -1).gather(1, last_B1[..., None].expand(-1, 1, path.shape[-1]))[:, 0]
    return Verdict(path_BD, depth_BN.gather(1, last_B1)[:, 0] + 1, next_BN.gather(1, last_B1)[:, 0])
