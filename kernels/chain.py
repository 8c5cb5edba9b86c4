"""Acceptance of a chain of drafts: the tree in which node n hangs from node n - 1, through the operator of `accept.py`.

Draft x_n ~ q_n is accepted with probability min(1, p_{n-1}(x_n)/q_n(x_n)), p_{n-1} being the law after node n-1; a
point mass with probability p_{n-1}(x_n). The chain ends at the first rejection, where `next` is drawn from
[p - q]+ (or p without x), or from p after the last node (Leviathan et al. 2023, Chen et al. 2023; with q the row of an
earlier pass it is the test of speculative Jacobi decoding).
B rows, N nodes (node 0 pending), V vocabulary.
"""

import torch

from visspec.kernels.accept import accept_tree, check_draft, random_case
from visspec.kernels.accept import reference as tree_reference
from visspec.kernels.common import INTS, check_tensor


def reference(
    tokens: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor | None,
    coins: torch.Tensor,
    draw: torch.Tensor | float,
    mass: torch.Tensor | None = None,
    count: torch.Tensor | int | None = None,
) -> tuple[list[int], int, float, list[float]]:
    """The definition, one row: a chain is the tree in which node n hangs from node n - 1."""
    parent = torch.arange(-1, len(tokens) - 1)
    if count is not None:
        parent[int(count) :] = -1
    return tree_reference(tokens, parent, p, q, coins, draw, mass)


def parents(nodes: int, count: torch.Tensor | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
    """Parents of a chain of so many nodes, (N,); with count (B,), nodes beyond each row's count are padding: (B, N)."""
    parent = torch.arange(-1, nodes - 1, device=device)
    return parent if count is None else torch.where(parent + 1 < count.unsqueeze(1), parent, -1)


def accept_chain(
    tokens: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor | None = None,
    coins: torch.Tensor | None = None,
    draw: torch.Tensor | None = None,
    *,
    mass: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    check: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Accepts a prefix of the chain and draws the token after it; shapes, results and errors as in `accept_tree`.

    count (B,) int: real nodes of each row, node 0 included (None, or more than N: all N).
    """
    check_draft("chain", tokens, p, q, coins, draw, mass)
    if count is not None:
        check_tensor("count", count, (p.shape[0],), INTS, p.device)
    parent = parents(p.shape[1], count, p.device)
    return accept_tree(tokens, parent, p, q, coins, draw, mass=mass, branch=1, check=check)


def random_chain(seed, ragged=False, **kwargs):
    """Arguments of `accept_chain` for the tests."""
    case = random_case(seed, **kwargs)
    case.pop("parent")
    if ragged:
        rows, nodes = case["tokens"].shape
        case["count"] = torch.randint(1, nodes + 1, (rows,), generator=torch.Generator().manual_seed(seed))
    return case


CASES = [
    {"nodes": 1, "vocabulary": 5},
    {"nodes": 6, "vocabulary": 11, "drawn": True},
    {"nodes": 6, "vocabulary": 11, "drawn": True, "ragged": True},
    {"nodes": 6, "vocabulary": 11, "relaxed": True, "ragged": True},
    {"nodes": 6, "vocabulary": 9, "drawn": True, "relaxed": True},
    {"nodes": 9, "vocabulary": 33, "drawn": True, "dtype": torch.bfloat16},
]
